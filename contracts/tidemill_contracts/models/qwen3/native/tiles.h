// The matrix unit's tiles: 16 lines of 64 bytes. bf16 pairs go in, float32 sums come out.
//
// A C tile is 16 rows by 16 columns of float; an A tile 16 rows by 32 values of bf16; a B tile
// 16 pairs of values by 16 columns, the two of a pair beside each other. Where the compiler's
// target has no such unit the same operations run in plain loops: slow, for tests only.
#pragma once

#include <cstdint>
#include <cstring>

using bf16 = std::uint16_t;

namespace tile {

constexpr int ROWS = 16;
constexpr int DEPTH = 32;           // values of bf16 that one product sums over
constexpr int A_SIZE = ROWS * DEPTH;  // elements of an A tile, and of a B tile

#if defined(__AMX_BF16__)

inline void configure() {
    struct alignas(64) {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t bytes[16] = {};
        std::uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
        config.bytes[i] = 64;
        config.rows[i] = ROWS;
    }
    // gcc 12 believes that only the first eight bytes are read, and would drop the others.
    asm volatile("" ::"r"(&config) : "memory");
    asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void release() { asm volatile("tilerelease"); }

template <int T>
inline void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

// `stride` in bytes from line to line.
template <int T>
inline void load(const void* from, std::intptr_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
inline void store(void* to, std::intptr_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

// C += A · B
template <int C, int A, int B>
inline void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

inline thread_local unsigned char lines[8][ROWS][64];

inline void configure() {}
inline void release() {}

template <int T>
inline void zero() {
    std::memset(lines[T], 0, sizeof lines[T]);
}

template <int T>
inline void load(const void* from, std::intptr_t stride) {
    for (int row = 0; row < ROWS; ++row)
        std::memcpy(lines[T][row], static_cast<const char*>(from) + row * stride, 64);
}

template <int T>
inline void store(void* to, std::intptr_t stride) {
    for (int row = 0; row < ROWS; ++row)
        std::memcpy(static_cast<char*>(to) + row * stride, lines[T][row], 64);
}

template <int C, int A, int B>
inline void multiply() {
    auto value = [](bf16 half) {
        std::uint32_t bits = std::uint32_t(half) << 16;
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    };
    auto c = reinterpret_cast<float(*)[16]>(lines[C]);
    auto a = reinterpret_cast<const bf16(*)[32]>(lines[A]);
    auto b = reinterpret_cast<const bf16(*)[32]>(lines[B]);
    for (int row = 0; row < ROWS; ++row)
        for (int pair = 0; pair < 16; ++pair)
            for (int column = 0; column < 16; ++column) {
                c[row][column] += value(a[row][2 * pair]) * value(b[pair][2 * column]);
                c[row][column] += value(a[row][2 * pair + 1]) * value(b[pair][2 * column + 1]);
            }
}

#endif

}  // namespace tile
