// The next tokens of a step's rows, and what is told of their log probabilities. The same in
// readable torch is the worker's own sampler, which runs where this library does not.
//
// A row is one thread's work from beginning to end, and every sum over it is taken in one order:
// its token depends on neither the other rows nor their number nor the threads. It is copied once
// into memory that fits a core's L2, so that further passes over it cost little.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

constexpr int BLOCK = 32;   // neighbouring tokens whose largest logit is kept
constexpr int CHUNK = 256;  // neighbouring tokens whose weights are summed in float32
constexpr int CHUNK_BLOCKS = CHUNK / BLOCK;
constexpr int GRADES = 4;  // weights 1/8, 1/64, … that top-p's last token is looked for between
typedef double doubles __attribute__((vector_size(128)));

constexpr float BARRED = -std::numeric_limits<float>::infinity();

enum : std::int32_t { NO_TOKEN = -1, NOT_FINITE = -2, OUTSIDE = -3 };

struct Draw {
    const std::int32_t *token_ids;  // prompt, then output
    const std::int32_t *biased, *allowed, *barred;
    const double* biases;
    const std::uint32_t* mask;  // a bit for each token, the lowest first; null where all may come
    double top_p, presence_penalty, frequency_penalty, uniform;
    std::int32_t known, prompt_len, biases_count, allowed_count, barred_count, top_k;
    float temperature, min_p, repetition_penalty;
};

struct Tell {
    const std::int32_t* listed;
    float* logprob;
    float *top_logprobs, *listed_logprobs;
    std::int32_t* top_ids;
    std::int32_t line, token_id, top, listed_count;
};

// One thread's memory, and what it does with a row.
class Bench {
  public:
    std::int32_t draw(const float* logits, int vocabulary, const Draw& asked) {
        if (!within(asked, vocabulary)) return OUTSIDE;
        if (!take(logits, vocabulary)) return NOT_FINITE;
        penalise(asked);
        bar(asked);
        bound();
        if (top_ == BARRED) return NO_TOKEN;
        if (asked.temperature == 0.0f) return first();
        temperature_ = std::min(asked.temperature, std::numeric_limits<float>::max());
        int top_k = asked.top_k > 0 && asked.top_k < vocabulary ? asked.top_k : 0;
        if (!top_k && asked.top_p >= 1 && asked.min_p <= 0) return any(asked.uniform);
        return filtered(asked, top_k);
    }

    std::int32_t tell(const float* logits, int vocabulary, const Tell& asked) {
        auto inside = [=](std::int32_t id) { return id >= 0 && id < vocabulary; };
        if (!inside(asked.token_id) || asked.top > vocabulary ||
            !std::all_of(asked.listed, asked.listed + asked.listed_count, inside))
            return OUTSIDE;
        if (!take(logits, vocabulary)) return NOT_FINITE;
        bound();
        temperature_ = 1.0f;
        double all = top_ + std::log(mass<false>(0.0f).all);
        auto logprob = [&](int id) { return float(logits_[id] - all); };
        *asked.logprob = logprob(asked.token_id);
        for (int i = 0; i < asked.listed_count; ++i)
            asked.listed_logprobs[i] = logprob(asked.listed[i]);
        likeliest(asked.top);
        for (int i = 0; i < asked.top; ++i) {
            asked.top_ids[i] = ids_[i];
            asked.top_logprobs[i] = logprob(ids_[i]);
        }
        return 0;
    }

  private:
    static bool within(const Draw& asked, int vocabulary) {
        auto inside = [=](const std::int32_t* ids, int count) {
            return std::all_of(ids, ids + count,
                               [=](std::int32_t id) { return id >= 0 && id < vocabulary; });
        };
        return inside(asked.token_ids, asked.known) && inside(asked.biased, asked.biases_count) &&
               inside(asked.allowed, asked.allowed_count) &&
               inside(asked.barred, asked.barred_count);
    }

    // Copies a row; what fills the last chunk is barred. False where a logit is not finite.
    bool take(const float* from, int vocabulary) {
        if (vocabulary != vocabulary_) {
            vocabulary_ = vocabulary;
            chunks_ = (vocabulary + CHUNK - 1) / CHUNK;
            blocks_ = chunks_ * CHUNK_BLOCKS;
            logits_.assign(chunks_ * CHUNK, BARRED);
            weights_.resize(chunks_ * CHUNK + 1);  // one is written before it is found wanting
            ids_.resize(chunks_ * CHUNK + 1);
            largest_.resize(blocks_);
            chunk_largest_.resize(chunks_);
            ordered_.resize(blocks_);
            words_.resize(blocks_);
            sums_.resize(blocks_);
            counts_.assign(vocabulary, 0);
        }
        floats spoilt{};  // 0 · x is NaN where x is not finite
        int whole = vocabulary / WIDTH * WIDTH;
        for (int i = 0; i < whole; i += WIDTH) {
            floats x = load(from + i);
            spoilt += x * 0.0f;
            store(&logits_[i], x);
        }
        bool finite = sum(spoilt) == 0.0f;
        for (int i = whole; i < vocabulary; ++i) {
            finite = finite && std::isfinite(from[i]);
            logits_[i] = from[i];
        }
        return finite;
    }

    void penalise(const Draw& asked) {
        if (asked.repetition_penalty != 1.0f) {
            for (int i = 0; i < asked.known; ++i) {
                int id = asked.token_ids[i];
                if (counts_[id]++) continue;
                float& x = logits_[id];
                x = x > 0 ? x / asked.repetition_penalty : x * asked.repetition_penalty;
                // A small penalty may make a logit infinite, and then no other has a distance
                // from it.
                x = std::min(x, std::numeric_limits<float>::max());
            }
            for (int i = 0; i < asked.known; ++i) counts_[asked.token_ids[i]] = 0;
        }
        if (asked.presence_penalty != 0 || asked.frequency_penalty != 0) {
            for (int i = asked.prompt_len; i < asked.known; ++i) ++counts_[asked.token_ids[i]];
            for (int i = asked.prompt_len; i < asked.known; ++i) {
                int& count = counts_[asked.token_ids[i]];
                if (!count) continue;
                logits_[asked.token_ids[i]] +=
                    float(-asked.presence_penalty - asked.frequency_penalty * count);
                count = 0;
            }
        }
        for (int i = 0; i < asked.biases_count; ++i)
            logits_[asked.biased[i]] += float(asked.biases[i]);
    }

    void bar(const Draw& asked) {
        if (asked.allowed_count) {
            std::fill(words_.begin(), words_.end(), 0);
            for (int i = 0; i < asked.allowed_count; ++i)
                words_[asked.allowed[i] / 32] |= 1u << asked.allowed[i] % 32;
            keep(words_.data());
        }
        if (asked.mask) keep(asked.mask);
        for (int i = 0; i < asked.barred_count; ++i) logits_[asked.barred[i]] = BARRED;
    }

    void keep(const std::uint32_t* bits) {
        const words lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int word = 0; word < (vocabulary_ + 31) / 32; ++word)
            for (int half = 0; half < 2; ++half) {
                float* at = &logits_[word * 32 + half * WIDTH];
                ints open = (ints)(((words{} + bits[word]) >> (lanes + half * WIDTH)) & 1);
                store(at, open ? load(at) : floats{} + BARRED);
            }
    }

    // The largest logit of each block, of each chunk, and of all.
    void bound() {
        top_ = BARRED;
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            float of_chunk = BARRED;
            for (int block = chunk * CHUNK_BLOCKS; block < (chunk + 1) * CHUNK_BLOCKS; ++block) {
                const float* at = &logits_[block * BLOCK];
                largest_[block] = ::largest(max(load(at), load(at + WIDTH)));
                of_chunk = std::max(of_chunk, largest_[block]);
            }
            chunk_largest_[chunk] = of_chunk;
            top_ = std::max(top_, of_chunk);
        }
    }

    // The first token that has the largest logit.
    int first() const {
        auto block = std::find(largest_.begin(), largest_.end(), top_) - largest_.begin();
        auto from = logits_.begin() + block * BLOCK;
        return int(std::find(from, from + BLOCK, top_) - logits_.begin());
    }

    // exp of logits over the temperature, 1 for the largest. Only ever done here, so that equal
    // logits weigh the same to the bit.
    [[gnu::noinline]] void weigh(const float* logits, int count, float* weights) const {
        for (int i = 0; i < count; i += WIDTH)
            store(weights + i, exp((load(logits + i) - top_) / temperature_));
    }

    float weight(float logit) const {
        float lanes[WIDTH];
        store(lanes, floats{} + logit);
        weigh(lanes, WIDTH, lanes);
        return lanes[0];
    }

    // A logit below which no token weighs `weight`, with room for every rounding.
    float lowest(float weight) const {
        double distance = temperature_ * (std::log(double(weight)) - 1e-4);
        return float(top_ - 1e-6 * std::abs(top_) + distance);
    }

    struct Mass {
        double all = 0, graded[GRADES] = {};
    };

    // The sum of the weights that are `least` or more; those of each chunk are in `sums_`. With
    // `graded`, also of those that are 1/8 or more, 1/64 or more, …
    template <bool graded>
    Mass mass(float least) {
        float low = lowest(std::max(least, std::numeric_limits<float>::min()));
        Mass found;
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            floats sums{}, over[GRADES] = {};
            if (chunk_largest_[chunk] >= low) {
                float weights[CHUNK];
                weigh(&logits_[chunk * CHUNK], CHUNK, weights);
                for (int i = 0; i < CHUNK; i += WIDTH) {
                    floats w = load(weights + i);
                    w = w >= least ? w : floats{};
                    sums += w;
                    float grade = 1;
                    for (int g = 0; graded && g < GRADES; ++g)
                        over[g] += w >= (grade /= 8) ? w : floats{};
                }
            }
            sums_[chunk] = sum(sums);
            found.all += sums_[chunk];
            for (int g = 0; graded && g < GRADES; ++g) found.graded[g] += sum(over[g]);
        }
        return found;
    }

    // A draw by inverse CDF from all tokens: first a chunk, then one of its tokens.
    int any(double uniform) {
        double goal = uniform * mass<false>(0.0f).all, before = 0;
        int chunk = 0;
        while (before + sums_[chunk] <= goal) before += sums_[chunk++];
        float weights[CHUNK];
        weigh(&logits_[chunk * CHUNK], CHUNK, weights);
        int token = 0;
        double cumulative = 0;
        for (int i = 0; i < CHUNK; ++i)
            if (weights[i] > 0) {
                // The chunk's sum was rounded in another way: its last token takes what is over.
                token = i;
                cumulative += weights[i];
                if (cumulative > goal - before) break;
            }
        return chunk * CHUNK + token;
    }

    // A draw by inverse CDF from what min-p, then top-k, then top-p leave. Tokens that tie with
    // the last one kept are kept too.
    int filtered(const Draw& asked, int top_k) {
        float floor = asked.min_p;
        if (top_k) floor = std::max(floor, weight(kth(top_k)));
        if (asked.top_p >= 1) {
            gather(floor);
        } else if (top_k) {
            gather(floor);
            floor = nucleus(floor, asked.top_p * gathered(floor));
        } else {
            Mass found = mass<true>(floor);
            double goal = asked.top_p * found.all;
            // All that is lighter weighs less than what top-p leaves out, twice over.
            float least = float((found.all - goal) / vocabulary_ / 2), grade = 1;
            for (int g = 0; g < GRADES; ++g) {
                grade /= 8;
                if (found.graded[g] > goal * (1 + 1e-6)) {
                    least = grade;
                    break;
                }
            }
            floor = std::max(floor, least);
            gather(floor);
            floor = nucleus(floor, goal);
        }
        double goal = asked.uniform * gathered(floor), before = 0;
        int place = 0;
        while (before + sums_[place] <= goal) before += sums_[place++];
        int token = 0;
        double cumulative = 0;
        for (int i = 0; i < BLOCK; ++i) {
            float w = weights_[place * BLOCK + i];
            if (w < floor) continue;
            // The block's sum was rounded in another way: its last token takes what is over.
            token = ids_[place] * BLOCK + i;
            cumulative += w;
            if (cumulative > goal - before) break;
        }
        return token;
    }

    // The blocks that have a token that weighs something, and `least` or more; what they weigh.
    void gather(float& least) {
        least = std::max(least, std::numeric_limits<float>::min());
        float low = lowest(least);
        found_ = 0;
        for (int block = 0; block < blocks_; ++block)
            if (largest_[block] >= low) {
                weigh(&logits_[block * BLOCK], BLOCK, &weights_[found_ * BLOCK]);
                ids_[found_++] = block;
            }
    }

    // The sum of the gathered weights that are `least` or more; those of each block are in `sums_`.
    double gathered(float least) {
        double all = 0;
        for (int place = 0; place < found_; ++place) {
            floats a = load(&weights_[place * BLOCK]), b = load(&weights_[place * BLOCK + WIDTH]);
            sums_[place] = sum((a >= least ? a : floats{}) + (b >= least ? b : floats{}));
            all += sums_[place];
        }
        return all;
    }

    // The weight of the last token that stays: one stays while those before it, which weigh more,
    // have not reached the goal. So it is the largest weight that, with all above it, reaches it.
    // Bits of floats that are not negative sort as they do.
    float nucleus(float least, double goal) {
        std::fill(weights_.begin() + found_ * BLOCK,
                  weights_.begin() + (found_ + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS * CHUNK, 0.0f);
        auto low = bits_of(least), high = bits_of(1.0f) + 1;
        while (high - low > 1) {
            auto middle = low + (high - low) / 2;
            (heavier(float_of(middle)) >= goal ? low : high) = middle;
        }
        return float_of(low);
    }

    // The same as `gathered`, a chunk at a time and without the sums of blocks. It falls, or stays,
    // where `least` rises: every single rounding keeps the order.
    double heavier(float least) const {
        doubles sums{};
        for (int from = 0; from < found_ * BLOCK; from += CHUNK) {
            floats of_chunk{};
            for (int i = from; i < from + CHUNK; i += WIDTH) {
                floats w = load(&weights_[i]);
                of_chunk += w >= least ? w : floats{};
            }
            sums += __builtin_convertvector(of_chunk, doubles);
        }
        double all = 0;
        for (int lane = 0; lane < WIDTH; ++lane) all += sums[lane];
        return all;
    }

    static std::uint32_t bits_of(float value) {
        std::uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    }

    static float float_of(std::uint32_t bits) {
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    // The logit of the k-th likeliest token.
    float kth(int k) {
        float low = BARRED;
        const auto& largest = k <= chunks_ ? chunk_largest_ : largest_;
        if (k <= blocks_) {
            // k parts have a token at least as likely as the k-th largest of their largest.
            auto end = std::copy(largest.begin(), largest.end(), ordered_.begin());
            std::nth_element(ordered_.begin(), ordered_.begin() + k - 1, end,
                             std::greater<float>());
            low = ordered_[k - 1];
        }
        int count = 0;
        for (int block = 0; block < blocks_; ++block)
            if (largest_[block] >= low)
                for (int i = block * BLOCK; i < (block + 1) * BLOCK; ++i) {
                    weights_[count] = logits_[i];
                    count += logits_[i] >= low;
                }
        std::nth_element(weights_.begin(), weights_.begin() + k - 1, weights_.begin() + count,
                         std::greater<float>());
        return weights_[k - 1];
    }

    // The `count` likeliest tokens, the likeliest first, into `ids_`.
    void likeliest(int count) {
        if (!count) return;
        float low = kth(count);
        int found = 0;
        for (int block = 0; block < blocks_; ++block)
            if (largest_[block] >= low)
                for (int i = block * BLOCK; i < (block + 1) * BLOCK; ++i) {
                    ids_[found] = i;
                    found += logits_[i] >= low;
                }
        std::partial_sort(ids_.begin(), ids_.begin() + count, ids_.begin() + found,
                          [&](int a, int b) {
                              return logits_[a] > logits_[b] || (logits_[a] == logits_[b] && a < b);
                          });
    }

    int vocabulary_ = 0, chunks_ = 0, blocks_ = 0, found_ = 0;
    float top_ = BARRED, temperature_ = 1.0f;
    std::vector<float> logits_, largest_, chunk_largest_, ordered_;
    std::vector<float> weights_;  // of the gathered blocks
    std::vector<int> ids_;        // of the gathered blocks, or of tokens
    std::vector<int> counts_;
    std::vector<std::uint32_t> words_;
    std::vector<double> sums_;
};

class Sampler {
  public:
    explicit Sampler(int threads) : team_(threads), benches_(threads) {}

    // Calls `piece(bench, i)` for each i below `count`.
    template <typename Piece>
    void share(int count, const Piece& piece) {
        if (count == 1) return piece(benches_[0], 0);
        team_.run(1, [&](int thread) {
            Walk(team_).share(count, [&](int i) { piece(benches_[thread], i); });
        });
    }

  private:
    Team team_;
    std::vector<Bench> benches_;
};

}  // namespace

extern "C" {

Sampler* tidemill_sampler(int threads) { return new Sampler(threads); }

// The next token of each row of logits [rows, vocabulary], `stride` floats apart, or why there is
// none.
void tidemill_draw(Sampler* sampler, const float* logits, std::int64_t stride,
                   std::int32_t vocabulary, std::int32_t rows, const Draw* asked,
                   std::int32_t* tokens) {
    sampler->share(rows, [=](Bench& bench, int i) {
        tokens[i] = bench.draw(logits + i * stride, vocabulary, asked[i]);
    });
}

// Writes log probabilities where each of `asked` points; `states` are 0, or why there are none.
void tidemill_tell(Sampler* sampler, const float* logits, std::int64_t stride,
                   std::int32_t vocabulary, std::int32_t count, const Tell* asked,
                   std::int32_t* states) {
    sampler->share(count, [=](Bench& bench, int i) {
        states[i] = bench.tell(logits + asked[i].line * stride, vocabulary, asked[i]);
    });
}

}
