// The matrix unit's tiles: 16 lines of 64 bytes. Pairs of bf16 go in and float32 sums come out, or
// int8 in fours and int32 sums.
//
// A C tile is 16 rows by 16 columns of sums; an A tile 16 rows by 32 values of bf16 or 64 of int8; a
// B tile 16 pairs or fours of values by 16 columns, those of a pair or four beside each other. Where
// the compiler's target has no such unit the same operations run in plain loops: slow, for tests
// only.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

using bf16 = std::uint16_t;
using int8 = std::int8_t;

namespace tile {

constexpr int ROWS = 16;
constexpr int LINE = 64;  // bytes
template <typename T>
constexpr int DEPTH_OF = LINE / int(sizeof(T));  // values that one product sums over
template <typename T>
constexpr int SIZE_OF = ROWS * DEPTH_OF<T>;  // elements of an A tile, and of a B tile
constexpr int DEPTH = DEPTH_OF<bf16>, A_SIZE = SIZE_OF<bf16>;

// Tiles that hold so many rows.
inline int count(int rows) { return (rows + ROWS - 1) / ROWS; }

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

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
template <int C, int A, int B, typename T = bf16>
inline void multiply() {
    if constexpr (std::is_same_v<T, int8>)
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    else
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

inline float value(bf16 half) {
    std::uint32_t bits = std::uint32_t(half) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline std::int32_t value(int8 number) { return number; }

template <int C, int A, int B, typename T = bf16>
inline void multiply() {
    constexpr int TOGETHER = 4 / sizeof(T);
    auto c = reinterpret_cast<decltype(value(T())) (*)[16]>(lines[C]);
    auto a = reinterpret_cast<const T(*)[DEPTH_OF<T>]>(lines[A]);
    auto b = reinterpret_cast<const T(*)[DEPTH_OF<T>]>(lines[B]);
    for (int row = 0; row < ROWS; ++row)
        for (int line = 0; line < 16; ++line)
            for (int column = 0; column < 16; ++column)
                for (int i = 0; i < TOGETHER; ++i)
                    c[row][column] += value(a[row][TOGETHER * line + i]) *
                                      value(b[line][TOGETHER * column + i]);
}

#endif

}  // namespace tile
