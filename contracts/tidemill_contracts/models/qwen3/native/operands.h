// The two sides of a product: activations in A tiles and weights in B tiles, both of bf16 or both of
// int8. What int8 stands for is times a scale, 1/127 of the largest magnitude: each row of
// activations has one, and each column of weights.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "tiles.h"
#include "vectors.h"

template <typename T>
T* grown(std::vector<T>& memory, std::size_t size) {
    if (memory.size() < size) memory.resize(size);
    return memory.data();
}

// Rounds `size` values to int8, 16 a call of `put(first, bytes)`; returns their scale. It is NaN or
// infinite where one of them is. int8.py has the same in torch.
template <typename X, typename Put>
float quantised(const X* x, int size, const Put& put) {
    words top{};
    for (int i = 0; i < size; i += WIDTH) {
        words magnitude = (words)load(x + i) & 0x7fffffff;  // ordered as the floats, NaN highest
        top = magnitude > top ? magnitude : top;
    }
    std::uint32_t bits = 0;
    for (int i = 0; i < WIDTH; ++i) bits = top[i] > bits ? top[i] : bits;
    float most;
    std::memcpy(&most, &bits, 4);
    most = most < 1e-30f ? 1e-30f : most;
    const float inverse = 127.0f / most;
    for (int i = 0; i < size; i += WIDTH) {
        // 1.5 · 2^23 rounds to nearest, and but once where the target multiplies and adds at once.
        floats shifted = load(x + i) * inverse + 12582912.0f;
        put(i, __builtin_convertvector((ints)shifted - 0x4b400000, bytes));
    }
    return most / 127.0f;
}

// Rows of activations. bf16 is rounded as it comes; int8 is kept wide until a row's largest value is
// known: then the row settles.
template <typename T>
class Inputs;

template <>
class Inputs<bf16> {
  public:
    static constexpr bool SETTLES = false;

    void resize(int rows, int depth) {
        depth_ = depth;
        grown(tiles_, std::size_t(tile::count(rows)) * tile::ROWS * depth);
    }

    int depth() const { return depth_; }

    // 16 values of `row` from `column` on.
    void put(int row, int column, floats value) {
        auto index = std::int64_t(row / tile::ROWS) * (depth_ / tile::DEPTH) + column / tile::DEPTH;
        store(tiles_.data() + index * tile::A_SIZE + row % tile::ROWS * tile::DEPTH +
                  column % tile::DEPTH,
              value);
    }

    void settle(int) {}

    // From `row` on, the first of a tile.
    const bf16* tiles(int row) const { return tiles_.data() + std::int64_t(row) * depth_; }

  private:
    int depth_ = 0;
    std::vector<bf16> tiles_;
};

template <>
class Inputs<int8> {
  public:
    static constexpr bool SETTLES = true;

    void resize(int rows, int depth) {
        depth_ = depth;
        std::size_t padded = std::size_t(tile::count(rows)) * tile::ROWS;
        grown(tiles_, padded * depth);
        grown(wide_, padded * depth);
        grown(scales_, padded);
    }

    int depth() const { return depth_; }

    void put(int row, int column, floats value) {
        store(wide_.data() + std::int64_t(row) * depth_ + column, value);
    }

    void settle(int row) {
        constexpr int DEPTH = tile::DEPTH_OF<int8>;
        int8* lines = tiles_.data() + std::int64_t(row / tile::ROWS) * tile::ROWS * depth_ +
                      row % tile::ROWS * DEPTH;
        scales_[row] = quantised(wide_.data() + std::int64_t(row) * depth_, depth_,
                                 [&](int i, bytes value) {
                                     int8* to = lines + i / DEPTH * tile::SIZE_OF<int8> + i % DEPTH;
                                     std::memcpy(to, &value, sizeof value);
                                 });
    }

    const int8* tiles(int row) const { return tiles_.data() + std::int64_t(row) * depth_; }
    float scale(int row) const { return scales_[row]; }

  private:
    int depth_ = 0;
    std::vector<int8> tiles_;
    std::vector<float> wide_, scales_;
};

// One matrix of weights: strips of B tiles (layout.py), with int8 the scale of each column.
template <typename T>
struct Weights {
    const T* strips;
    const float* scales;
    int columns, depth;

    // Of a stack of such matrices, one after another.
    Weights(const void* stack, const float* scales, int layer, int columns, int depth)
        : strips(static_cast<const T*>(stack) + std::int64_t(layer) * columns * depth),
          scales(scales == nullptr ? nullptr : scales + std::int64_t(layer) * columns),
          columns(columns),
          depth(depth) {}
};

// What a product leaves in `c`, `ld` sums from row to row.
template <typename T>
struct Sums {
    const float* c;
    int ld;

    const float* row(int i) const { return c + std::int64_t(i) * ld; }
};

// Sums of int8 are int32 in the place of floats.
template <>
struct Sums<int8> {
    const float* c;
    int ld, columns;
    const Inputs<int8>& a;
    int first;            // row of `a`
    const float* scales;  // of the columns
    float* line;          // room for a row

    // What the sums stand for, until the next call.
    const float* row(int i) const {
        const float scale = a.scale(first + i);
        for (int j = 0; j < columns; j += WIDTH) {
            ints sums;
            std::memcpy(&sums, c + std::int64_t(i) * ld + j, sizeof sums);
            store(line + j, __builtin_convertvector(sums, floats) * scale * load(scales + j));
        }
        return line;
    }
};
