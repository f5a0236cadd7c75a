// A whole step of a dense Qwen3 model in bf16 on the CPU's matrix unit, with weights in bf16 or in
// int8. What it computes is written down, readably, in kernels.py and int8.py; how weights and pages
// are laid out, in layout.py.
//
// Matrices that a product reads lie in tiles, one kilobyte each (tiles.h): activations as
// [rows / 16][depth / 32] A tiles, weights as [columns / 16][depth / 32] B tiles (64 deep in int8);
// the B tiles of 16 columns are a strip. The residual stream, sums, norms and the softmax are
// float32.
//
// Every sum is taken in one order that depends on neither the other rows nor their number, nor on
// how a prompt was cut into chunks: a token's results are the same bits in any batch.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>
#if defined(__linux__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "operands.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace {

struct Model {
    std::int32_t layers, hidden, q_heads, kv_heads, head_dim, inner, vocabulary, page_size, pages,
        places;
    float eps;
    const bf16 *embed, *input_norm, *q_norm, *k_norm, *post_norm, *final_norm;
    const float *rope_cos, *rope_sin;  // [places, head_dim]
    bf16 *k_cache, *v_cache;
    const void *wqkv, *wo, *w_gate_up, *w_down, *lm_head;  // bf16, or int8 where there are scales
    const float *wqkv_scale, *wo_scale, *w_gate_up_scale, *w_down_scale, *lm_head_scale;

    bool quantised() const { return lm_head_scale != nullptr; }
};

struct Batch {
    std::int32_t tokens, rows, table_width, outputs;
    const std::int32_t *ids, *slots;              // of each packed token
    const std::int32_t *seq_lens, *lens, *offsets;  // of each row
    const std::int32_t *table;                    // [rows, table_width]
    const std::int32_t *output_tokens;            // packed tokens whose logits are wanted
    float* logits;                                // [outputs, vocabulary]
};

constexpr int KEPT_BYTES = 1 << 20;  // of activations that stay in a core's L2 during a product
constexpr int DEPTH_STEPS = 32;      // of a strip pair that stay in its L2 while rows go by
constexpr int AHEAD = 4;             // tiles that a strip is fetched ahead of its use
constexpr int SPAN = 64;             // tokens of a chunk that attend in one piece of work
constexpr int UNIT_STRIPS = 4;       // strips of a product in one piece of work

template <typename T>
void fetch(const T* tile) {
    for (int line = 0; line < tile::ROWS; ++line)
        __builtin_prefetch(tile + line * tile::DEPTH_OF<T>, 0, 3);
}

// Weights that are needed soon, brought into the L2 a few lines at each step of a product.
template <typename T>
struct Coming {
    const T* strips[2] = {nullptr, nullptr};
    int lines = 0;  // of each strip at each step

    void fetch(int step) const {
        for (int i = 0; i < lines; ++i)
            for (const T* strip : strips)
                __builtin_prefetch(strip + (step * lines + i) * tile::DEPTH_OF<T>, 0, 2);
    }
};

// R·S tiles of C, [16·R, 16·S] with `ld` sums from row to row, over `steps` tiles of depth; added to
// what stands there where `add`. `Stream` where B comes from memory. Sums of int8 are int32 in the
// place of floats.
template <int R, int S, bool Stream = true, typename T>
void block(const T* a, std::int64_t a_next, const T* b, std::int64_t b_next, int steps, float* c,
           std::int64_t ld, bool add, Coming<T> coming = {}) {
    constexpr int SIZE = tile::SIZE_OF<T>;
    auto each = [&]<int... I>(std::integer_sequence<int, I...>, auto work) {
        (work(std::integral_constant<int, I>{}), ...);
    };
    auto rows = std::make_integer_sequence<int, R>{};
    auto strips = std::make_integer_sequence<int, S>{};
    auto all = std::make_integer_sequence<int, R * S>{};
    auto at = [&](int i) { return c + (i / S) * tile::ROWS * ld + (i % S) * tile::ROWS; };
    each(all, [&](auto i) {
        if (add)
            tile::load<i>(at(i), ld * 4);
        else
            tile::zero<i>();
    });
    for (int k = 0; k < steps; ++k) {
        if (!Stream) coming.fetch(k);
        each(rows, [&](auto r) { tile::load<4 + r>(a + r * a_next + k * SIZE, 64); });
        each(strips, [&](auto s) {
            constexpr int B = R == 1 ? 5 + s % 3 : 6 + s % 2;
            const T* from = b + s * b_next + k * SIZE;
            if (Stream) fetch(from + AHEAD * SIZE);
            tile::load<B>(from, 64);
            each(rows, [&](auto r) { tile::multiply<r * S + s, 4 + r, B, T>(); });
        });
    }
    each(all, [&](auto i) { tile::store<i>(at(i), ld * 4); });
}

// c[rows, 16·strips] = a · b, `c` having whole tiles of rows.
template <typename T>
void product(const T* a, int rows, int depth, const T* b, int strips, float* c, int ld) {
    constexpr int SIZE = tile::SIZE_OF<T>, LINE = tile::DEPTH_OF<T>;
    const int steps = depth / LINE, tiles = tile::count(rows);
    const std::int64_t next = std::int64_t(steps) * SIZE;
    if (tiles == 1) {
        int s = 0;
        for (; s + 4 <= strips; s += 4)
            block<1, 4>(a, 0, b + s * next, next, steps, c + s * tile::ROWS, ld, false);
        for (; s < strips; ++s)
            block<1, 1>(a, 0, b + s * next, next, steps, c + s * tile::ROWS, ld, false);
        return;
    }
    const int most = tiles == 2 ? steps : DEPTH_STEPS;
    for (int s = 0; s < strips; s += 2)
        for (int k = 0; k < steps; k += most) {
            const bool two_strips = s + 1 < strips;
            const T* from = b + s * next + k * SIZE;
            // While these are multiplied, the next ones are on their way: deeper, or of the strips
            // that follow in memory, whoever takes them.
            const T* soon = k + most < steps ? from + most * SIZE : b + (s + 2) * next;
            const int lines = (2 * tile::ROWS + tiles - 1) / tiles;
            for (int m = 0; m < tiles; m += 2) {
                const std::int64_t part = m / 2 * most * lines * LINE;
                const Coming<T> coming{{soon + part, soon + next + part}, lines};
                auto run = [&](auto kernel) {
                    kernel(a + m * next + k * SIZE, next, from, next,
                           std::min(most, steps - k),
                           c + std::int64_t(m) * tile::ROWS * ld + s * tile::ROWS, ld, k > 0,
                           coming);
                };
                const bool two_rows = m + 1 < tiles;
                if (two_strips && two_rows)
                    tiles == 2 ? run(block<2, 2, true, T>) : run(block<2, 2, false, T>);
                else if (two_strips)
                    run(block<1, 2, true, T>);
                else
                    two_rows ? run(block<2, 1, true, T>) : run(block<1, 1, true, T>);
            }
        }
}

// Root mean square norm (arXiv 1910.07467) of `size` floats into 32 values a call of `put(k, …)`.
template <typename Put>
void norm(const float* x, const bf16* weight, int size, float eps, const Put& put) {
    floats squares{};
    for (int i = 0; i < size; i += WIDTH) squares += load(x + i) * load(x + i);
    float scale = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (int i = 0; i < size; i += 2 * WIDTH)
        put(i, load(x + i) * scale * load(weight + i),
            load(x + i + WIDTH) * scale * load(weight + i + WIDTH));
}

// Whether everything that a batch points at exists.
bool within(const Model& m, const Batch& batch) {
    auto all = [](const std::int32_t* values, int count, int from, int below) {
        return std::all_of(values, values + count,
                           [=](std::int32_t value) { return from <= value && value < below; });
    };
    for (int row = 0; row < batch.rows; ++row) {
        const int length = batch.lens[row], end = batch.seq_lens[row], first = batch.offsets[row];
        const int pages = (end + m.page_size - 1) / m.page_size;
        if (length < 1 || end < length || end > m.places || first < 0 ||
            first > batch.tokens - length || pages > batch.table_width ||
            !all(batch.table + std::int64_t(row) * batch.table_width, pages, 0, m.pages))
            return false;
    }
    return all(batch.ids, batch.tokens, 0, m.vocabulary) &&
           all(batch.output_tokens, batch.outputs, 0, batch.tokens) &&
           std::all_of(batch.slots, batch.slots + batch.tokens,
                       [&](std::int64_t slot) { return slot < std::int64_t(m.pages) * m.page_size; });
}

// A thread's own memory, reused from step to step.
struct Scratch {
    std::vector<float> c, line, scores, head;
    std::vector<bf16> queries, weights, tail;
};

// A piece of a row's chunk: tokens [first, first + count) of it.
struct Span {
    int row, first, count;
};

class Engine {
  public:
    explicit Engine(int threads) : team_(threads), scratch_(threads) {}

    void run(const Model& model, const Batch& batch) {
        model.quantised() ? run<int8>(model, batch) : run<bf16>(model, batch);
    }

  private:
    // What products take, by the type of their weights.
    template <typename T>
    struct Activations {
        Inputs<T> normed, attended, inner;
    };

    template <typename T>
    void run(const Model& model, const Batch& batch) {
        auto& in = std::get<Activations<T>>(activations_);
        const int rows = std::max(batch.tokens, batch.outputs);
        in.normed.resize(rows, model.hidden);
        in.attended.resize(rows, model.q_heads * model.head_dim);
        in.inner.resize(rows, model.inner);
        prepare(model, batch);
        const int phases = 3 + model.layers * (Inputs<T>::SETTLES ? 9 : 7);
        team_.run(phases, [&](int thread) {
            tile::configure();
            Walk walk(team_);
            step(walk, model, batch, in, scratch_[thread]);
            tile::release();
        });
    }

    // Other buffers of the step, and where each token stands.
    void prepare(const Model& model, const Batch& batch) {
        grown(hidden_, std::size_t(batch.tokens) * model.hidden);
        grown(queries_, std::size_t(batch.tokens) * model.q_heads * model.head_dim);
        places_.resize(batch.tokens);
        spans_.clear();
        for (int row = 0; row < batch.rows; ++row) {
            int length = batch.lens[row];
            for (int i = 0; i < length; ++i)
                places_[batch.offsets[row] + i] = batch.seq_lens[row] - length + i;
            for (int first = 0; first < length; first += SPAN)
                spans_.push_back({row, first, std::min(SPAN, length - first)});
        }
    }

    template <typename T>
    void step(Walk& walk, const Model& m, const Batch& batch, Activations<T>& in, Scratch& own) {
        const int hidden = m.hidden, head = m.head_dim, q_size = m.q_heads * head;
        const int heads = m.q_heads + 2 * m.kv_heads;
        const std::int64_t page = std::int64_t(m.page_size) * m.kv_heads * head;
        walk.share(batch.tokens, [&](int token) { embed(m, batch.ids[token], token); });
        for (int layer = 0; layer < m.layers; ++layer) {
            bf16* k_cache = m.k_cache + layer * m.pages * page;
            bf16* v_cache = m.v_cache + layer * m.pages * page;
            norm_all(walk, m, m.input_norm + layer * hidden, batch.tokens, nullptr, in.normed);

            const Weights<T> wqkv(m.wqkv, m.wqkv_scale, layer, heads * head, hidden);
            multiply(walk, own, in.normed, batch.tokens, wqkv, head / 16,
                     [&](int first, int rows, int unit, const Sums<T>& sums) {
                         for (int i = 0; i < rows; ++i)
                             place(m, batch, layer, first + i, unit, sums.row(i), k_cache, v_cache,
                                   own);
                     });
            const int pieces = int(spans_.size()) * m.kv_heads;
            walk.share(pieces, [&](int piece) {
                // The one that this thread will most likely take next.
                const int then = std::min(piece + team_.size(), pieces - 1);
                attend(m, batch, spans_[piece / m.kv_heads], piece % m.kv_heads, k_cache, v_cache,
                       chunk_of(m, batch, spans_[then / m.kv_heads].row, then % m.kv_heads, k_cache,
                                0),
                       in.attended, own);
            });
            settle_all(walk, in.attended, batch.tokens);
            const Weights<T> wo(m.wo, m.wo_scale, layer, hidden, q_size);
            accumulate(walk, own, in.attended, batch.tokens, wo);

            norm_all(walk, m, m.post_norm + layer * hidden, batch.tokens, nullptr, in.normed);
            const Weights<T> w_gate_up(m.w_gate_up, m.w_gate_up_scale, layer, 2 * m.inner, hidden);
            multiply(walk, own, in.normed, batch.tokens, w_gate_up, 4,
                     [&](int first, int rows, int unit, const Sums<T>& sums) {
                         for (int i = 0; i < rows; ++i)
                             gate(sums.row(i), in.inner, first + i, unit * 32);
                     });
            settle_all(walk, in.inner, batch.tokens);
            const Weights<T> w_down(m.w_down, m.w_down_scale, layer, hidden, m.inner);
            accumulate(walk, own, in.inner, batch.tokens, w_down);
        }
        norm_all(walk, m, m.final_norm, batch.outputs, batch.output_tokens, in.normed);
        const Weights<T> lm_head(m.lm_head, m.lm_head_scale, 0, m.vocabulary, hidden);
        multiply(walk, own, in.normed, batch.outputs, lm_head, UNIT_STRIPS,
                 [&](int first, int rows, int unit, const Sums<T>& sums) {
                     int column = unit * UNIT_STRIPS * 16;
                     int columns = std::min(UNIT_STRIPS * 16, m.vocabulary - column);
                     for (int i = 0; i < rows; ++i)
                         std::memcpy(batch.logits + std::int64_t(first + i) * m.vocabulary + column,
                                     sums.row(i), columns * sizeof(float));
                 });
    }

    // The product of `rows` rows with weights, `unit` strips of them in one piece of work;
    // `use(first row, rows, unit, sums)` gets each piece's.
    template <typename T, typename Use>
    void multiply(Walk& walk, Scratch& own, const Inputs<T>& a, int rows, const Weights<T>& b,
                  int unit, const Use& use) {
        const int depth = b.depth, strips = b.columns / 16;
        int most = std::max(32, KEPT_BYTES / int(sizeof(T)) / depth / 32 * 32);
        int units = (strips + unit - 1) / unit, ld = unit * tile::ROWS;
        walk.share(units * ((rows + most - 1) / most), [&](int piece) {
            int first = piece / units * most, column = piece % units;
            int here = std::min(most, rows - first), first_strip = column * unit;
            int strips_here = std::min(unit, strips - first_strip);
            float* c = grown(own.c, std::size_t(tile::count(here)) * tile::ROWS * ld);
            product(a.tiles(first), here, depth, b.strips + std::int64_t(first_strip) * 16 * depth,
                    strips_here, c, ld);
            if constexpr (std::is_same_v<T, int8>)
                use(first, here, column,
                    Sums<T>{c, ld, strips_here * 16, a, first, b.scales + first_strip * 16,
                            grown(own.line, ld)});
            else
                use(first, here, column, Sums<T>{c, ld});
        });
    }

    // Adds a product to the residual stream.
    template <typename T>
    void accumulate(Walk& walk, Scratch& own, const Inputs<T>& a, int rows, const Weights<T>& b) {
        multiply(walk, own, a, rows, b, UNIT_STRIPS,
                 [&](int first, int rows, int unit, const Sums<T>& sums) {
                     int column = unit * UNIT_STRIPS * 16;
                     int columns = std::min(UNIT_STRIPS * 16, b.columns - column);
                     for (int i = 0; i < rows; ++i) {
                         float* x = hidden_.data() + std::int64_t(first + i) * b.columns + column;
                         const float* c = sums.row(i);
                         for (int j = 0; j < columns; j += WIDTH)
                             store(x + j, load(x + j) + load(c + j));
                     }
                 });
    }

    // A token's line of the embedding, which is packed as the head is where that is bf16.
    void embed(const Model& m, int id, int token) {
        float* x = hidden_.data() + std::int64_t(token) * m.hidden;
        if (m.quantised()) {
            const bf16* line = m.embed + std::int64_t(id) * m.hidden;
            for (int i = 0; i < m.hidden; i += WIDTH) store(x + i, load(line + i));
            return;
        }
        const bf16* strip = m.embed + std::int64_t(id / 16) * 16 * m.hidden + id % 16 * 2;
        for (int pair = 0; pair < m.hidden / 2; ++pair)
            for (int i = 0; i < 2; ++i) {
                std::uint32_t bits = std::uint32_t(strip[pair * 32 + i]) << 16;
                std::memcpy(x + 2 * pair + i, &bits, 4);
            }
    }

    // Norms the residual stream of `rows` tokens, or of those that `tokens` names.
    template <typename T>
    void norm_all(Walk& walk, const Model& m, const bf16* weight, int rows,
                  const std::int32_t* tokens, Inputs<T>& normed) {
        walk.share(rows, [&](int row) {
            const float* x =
                hidden_.data() + std::int64_t(tokens == nullptr ? row : tokens[row]) * m.hidden;
            norm(x, weight, m.hidden, m.eps, [&](int i, floats low, floats high) {
                normed.put(row, i, low);
                normed.put(row, i + WIDTH, high);
            });
            normed.settle(row);
        });
    }

    // Settles rows that several pieces of work have written.
    template <typename T>
    static void settle_all(Walk& walk, Inputs<T>& inputs, int rows) {
        if constexpr (Inputs<T>::SETTLES) walk.share(rows, [&](int row) { inputs.settle(row); });
    }

    // One head of a token, fresh from the projection: a query is normed, turned and kept for this
    // step; K the same, and V as it is, go to the cache.
    void place(const Model& m, const Batch& batch, int layer, int token, int unit, const float* x,
               bf16* k_cache, bf16* v_cache, Scratch& own) {
        const int head = m.head_dim, half = head / 2;
        const int slot = batch.slots[token];
        const bool is_query = unit < m.q_heads, is_value = unit >= m.q_heads + m.kv_heads;
        if (!is_query && slot < 0) return;
        const int kv_head = (unit - m.q_heads) % m.kv_heads;
        auto pages_head = [&](bf16* cache) {
            return cache + (std::int64_t(slot / m.page_size) * m.kv_heads + kv_head) *
                               m.page_size * head;
        };
        const int offset = slot % m.page_size;
        if (is_value) {
            // B tiles of 32 tokens by 16 columns of V.
            bf16* to = pages_head(v_cache) + offset / 32 * 32 * head + offset % 32 / 2 * 32 +
                       offset % 2;
            bf16 line[WIDTH];
            for (int i = 0; i < head; i += WIDTH, to += tile::A_SIZE) {
                store(line, load(x + i));
                for (int j = 0; j < WIDTH; ++j) to[2 * j] = line[j];
            }
            return;
        }
        float* turned = grown(own.head, 2 * head);
        float* normed = turned + head;
        const bf16* weight = (is_query ? m.q_norm : m.k_norm) + layer * head;
        norm(x, weight, head, m.eps, [&](int i, floats low, floats high) {
            store(normed + i, low);
            store(normed + i + WIDTH, high);
        });
        const float* cos = m.rope_cos + std::int64_t(places_[token]) * head;
        const float* sin = m.rope_sin + std::int64_t(places_[token]) * head;
        for (int i = 0; i < half; i += WIDTH) {
            floats first = load(normed + i), second = load(normed + half + i);
            store(turned + i, first * load(cos + i) - second * load(sin + i));
            store(turned + half + i, second * load(cos + half + i) + first * load(sin + half + i));
        }
        if (is_query) {
            bf16* to = queries_.data() + (std::int64_t(token) * m.q_heads + unit) * head;
            for (int i = 0; i < head; i += WIDTH) store(to + i, load(turned + i));
            return;
        }
        // B tiles of 32 columns of K by 16 tokens.
        bf16* to = pages_head(k_cache) + offset / 16 * 16 * head + offset % 16 * 2;
        bf16 line[WIDTH];
        for (int i = 0; i < head; i += WIDTH) {
            store(line, load(turned + i));
            for (int j = 0; j < WIDTH; j += 2, to += 32) std::memcpy(to, line + j, 4);
        }
    }

    // 32 places of one head of a row, in K or in V: what one product over tokens takes.
    static const bf16* chunk_of(const Model& m, const Batch& batch, int row, int kv_head,
                                const bf16* cache, int index) {
        const int place = index * 32;
        const int page = batch.table[std::int64_t(row) * batch.table_width + place / m.page_size];
        return cache + ((std::int64_t(page) * m.kv_heads + kv_head) * m.page_size +
                        place % m.page_size) *
                           m.head_dim;
    }

    // Attention of a span's tokens over the places of their row, for the query heads that share
    // one head of K and V. A tile holds as many tokens as fit with all their heads. Each chunk is
    // fetched while the one before it is multiplied; `after` is what will be read next.
    template <typename T>
    void attend(const Model& m, const Batch& batch, Span span, int kv_head, const bf16* k_cache,
                const bf16* v_cache, const bf16* after, Inputs<T>& attended, Scratch& own) {
        const int head = m.head_dim, group = m.q_heads / m.kv_heads, most = tile::ROWS / group;
        const int length = batch.lens[span.row], end = batch.seq_lens[span.row];
        const int start = end - length, packed = batch.offsets[span.row];
        const int chunk = 32 * head;
        auto places = [&](const bf16* cache, int index) {
            return chunk_of(m, batch, span.row, kv_head, cache, index);
        };
        // Past the row's end lies what others left, perhaps NaN, which no zero would silence.
        const int last = end / 32, used = end % 32;
        bf16* tail = grown(own.tail, chunk);
        if (used > 0) {
            std::memcpy(tail, places(v_cache, last), chunk * sizeof(bf16));
            for (int i = 0; i < head / 16; ++i)
                for (int token = used; token < 32; ++token)
                    for (int j = 0; j < 16; ++j)
                        tail[i * tile::A_SIZE + token / 2 * 32 + 2 * j + token % 2] = 0;
        }
        bf16* queries = grown(own.queries, tile::ROWS * head);
        const float scale = 1.0f / std::sqrt(float(head));
        for (int first = span.first; first < span.first + span.count; first += most) {
            const int count = std::min(most, span.first + span.count - first);
            for (int i = 0; i < count; ++i)
                std::memcpy(queries + i * group * head,
                            queries_.data() + (std::int64_t(packed + first + i) * m.q_heads +
                                               kv_head * group) * head,
                            group * head * sizeof(bf16));
            const int chunks = (start + first + count + 31) / 32, columns = chunks * 32;
            const std::int64_t ld = columns + WIDTH;  // so that rows do not meet in one cache set
            float* scores = grown(own.scores, tile::ROWS * ld);
            for (int index = 0; index < chunks; ++index) {
                const bf16* k = places(k_cache, index);
                const bf16* next =
                    index + 1 < chunks ? places(k_cache, index + 1) : places(v_cache, 0);
                tile::zero<0>();
                tile::zero<1>();
                for (int i = 0; i < head / tile::DEPTH; ++i, k += tile::A_SIZE) {
                    fetch(next + i * tile::A_SIZE);
                    fetch(next + i * tile::A_SIZE + chunk / 2);
                    tile::load<4>(queries + i * tile::DEPTH, head * 2);
                    tile::load<6>(k, 64);
                    tile::load<7>(k + chunk / 2, 64);
                    tile::multiply<0, 4, 6>();
                    tile::multiply<1, 4, 7>();
                }
                tile::store<0>(scores + index * 32, ld * 4);
                tile::store<1>(scores + index * 32 + 16, ld * 4);
            }
            bf16* weights = grown(own.weights, tile::ROWS * columns);
            float shares[tile::ROWS];
            for (int row = 0; row < count * group; ++row)
                shares[row] = softmax(scores + row * ld, start + first + row / group + 1, columns,
                                      scale, weights + row * tile::DEPTH);
            float sums[tile::ROWS * 64];
            for (int i = 0; i < head / 16; i += 4) {
                auto value = [&](int index) {
                    return (used > 0 && index == last ? tail : places(v_cache, index)) +
                           i * tile::A_SIZE;
                };
                const bool four = i + 2 < head / 16;
                tile::zero<0>();
                tile::zero<1>();
                tile::zero<2>();
                tile::zero<3>();
                for (int index = 0; index < chunks; ++index) {
                    const bf16* v = value(index);
                    const bf16* next = index + 1 < chunks     ? value(index + 1)
                                       : i + 4 < head / 16 ? value(0) + 4 * tile::A_SIZE
                                                              : after;
                    tile::load<4>(weights + index * tile::A_SIZE, 64);
                    fetch(next);
                    fetch(next + tile::A_SIZE);
                    tile::load<5>(v, 64);
                    tile::load<6>(v + tile::A_SIZE, 64);
                    tile::multiply<0, 4, 5>();
                    tile::multiply<1, 4, 6>();
                    if (!four) continue;
                    fetch(next + 2 * tile::A_SIZE);
                    fetch(next + 3 * tile::A_SIZE);
                    tile::load<5>(v + 2 * tile::A_SIZE, 64);
                    tile::load<6>(v + 3 * tile::A_SIZE, 64);
                    tile::multiply<2, 4, 5>();
                    tile::multiply<3, 4, 6>();
                }
                tile::store<0>(sums, 256);
                tile::store<1>(sums + 16, 256);
                tile::store<2>(sums + 32, 256);
                tile::store<3>(sums + 48, 256);
                for (int row = 0; row < count * group; ++row) {
                    int column = (kv_head * group + row % group) * head + i * 16;
                    for (int j = 0; j < (four ? 4 : 2); ++j)
                        attended.put(packed + first + row / group, column + j * 16,
                                     load(sums + row * 64 + j * 16) * shares[row]);
                }
            }
        }
    }

    // e^(scale · (score − largest)) of the first `limit` scores, 0 for the others, as one row of A
    // tiles; returns 1 over their sum.
    static float softmax(float* scores, int limit, int columns, float scale, bf16* weights) {
        for (int i = limit; i < columns; ++i) scores[i] = -INFINITY;
        floats top = load(scores);
        for (int i = WIDTH; i < columns; i += WIDTH) top = max(load(scores + i), top);
        float most = largest(top);
        floats total{};
        for (int i = 0; i < columns; i += WIDTH) {
            floats value = exp((load(scores + i) - most) * scale);
            total += value;
            store(weights + i / tile::DEPTH * tile::A_SIZE + i % tile::DEPTH, value);
        }
        return 1.0f / sum(total);
    }

    // silu(gate) · up of 32 columns.
    template <typename T>
    static void gate(const float* c, Inputs<T>& inner, int row, int column) {
        for (int i = 0; i < 32; i += WIDTH) {
            floats x = load(c + i);
            inner.put(row, column + i, x / (1.0f + exp(-x)) * load(c + 32 + i));
        }
    }

    Team team_;
    std::vector<Scratch> scratch_;
    std::tuple<Activations<bf16>, Activations<int8>> activations_;
    std::vector<float> hidden_;  // [tokens, hidden]
    std::vector<bf16> queries_;  // [tokens, q heads, head_dim]
    std::vector<int> places_;
    std::vector<Span> spans_;
};

// [16, depth] into a strip of B tiles: four bytes of each column beside those of the others.
template <typename T>
void pack(const T* from, T* strip, std::int64_t depth) {
    constexpr int TOGETHER = 4 / sizeof(T), DEPTH = tile::DEPTH_OF<T>;
    for (std::int64_t k = 0; k < depth; k += DEPTH, strip += tile::SIZE_OF<T>)
        for (int column = 0; column < 16; ++column)
            for (int line = 0; line < 16; ++line)
                std::memcpy(strip + line * DEPTH + column * TOGETHER,
                            from + column * depth + k + line * TOGETHER, 4);
}

// Where a strip goes, of which `group` stay beside each other.
std::int64_t place(std::int64_t strip, std::int64_t group, std::int64_t stride) {
    return strip / group * stride + strip % group;
}

}  // namespace

extern "C" {

// Threads and memory for one model; null where the system grants no matrix unit.
Engine* tidemill_open(int threads) {
#if defined(__linux__) && defined(__AMX_BF16__)
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // Linux, arch/x86/xstate.rst
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0) return nullptr;
#endif
    return new Engine(threads);
}

void tidemill_close(Engine* engine) { delete engine; }

// 0, or 1 where the batch names a token, a page or a place that the model does not have: then
// nothing has been run.
int tidemill_step(Engine* engine, const Model* model, const Batch* batch) {
    if (!within(*model, *batch)) return 1;
    engine->run(*model, *batch);
    return 0;
}

// Weights [columns, depth] into strips of B tiles, `group` strips beside each other and the next
// ones `stride` strips on; see layout.py.
void tidemill_pack(const bf16* from, bf16* to, std::int64_t columns, std::int64_t depth,
                   std::int64_t group, std::int64_t stride) {
    for (std::int64_t strip = 0; strip < columns / 16; ++strip)
        pack(from + strip * 16 * depth, to + place(strip, group, stride) * 16 * depth, depth);
}

// The same as int8; the scale of each column goes to `scales`, in the order of the strips.
void tidemill_quantize(const bf16* from, int8* to, float* scales, std::int64_t columns,
                       std::int64_t depth, std::int64_t group, std::int64_t stride) {
    std::vector<int8> rounded(16 * depth);
    for (std::int64_t strip = 0; strip < columns / 16; ++strip) {
        const std::int64_t target = place(strip, group, stride);
        for (int column = 0; column < 16; ++column)
            scales[target * 16 + column] =
                quantised(from + (strip * 16 + column) * depth, depth, [&](int i, bytes value) {
                    std::memcpy(rounded.data() + column * depth + i, &value, sizeof value);
                });
        pack(rounded.data(), to + target * 16 * depth, depth);
    }
}

}
