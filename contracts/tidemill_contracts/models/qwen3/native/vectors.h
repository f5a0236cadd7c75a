// Sixteen floats at once, as the compiler's own vectors: they become whatever the target has.
#pragma once

#include <cstdint>
#include <cstring>

#include "tiles.h"

typedef float floats __attribute__((vector_size(64)));
typedef std::int32_t ints __attribute__((vector_size(64)));
typedef std::uint32_t words __attribute__((vector_size(64)));
typedef std::uint16_t halves __attribute__((vector_size(32)));
typedef std::int8_t bytes __attribute__((vector_size(16)));
constexpr int WIDTH = 16;

inline floats load(const float* from) {
    floats out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

inline void store(float* to, floats value) { std::memcpy(to, &value, sizeof value); }

inline floats load(const bf16* from) {
    halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return (floats)(__builtin_convertvector(bits, words) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline halves rounded(floats value) {
    words bits = (words)value;
    words up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words nan = (words)(value != value);
    return __builtin_convertvector((up & ~nan) | (0x7fc0 & nan), halves);
}

inline void store(bf16* to, floats value) {
    halves bits = rounded(value);
    std::memcpy(to, &bits, sizeof bits);
}

// Always summed in this one order.
inline float sum(floats value) {
    float lanes[WIDTH];
    store(lanes, value);
    for (int width = WIDTH / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline float largest(floats value) {
    float lanes[WIDTH];
    store(lanes, value);
    for (int width = WIDTH / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

inline floats max(floats a, floats b) { return a > b ? a : b; }

// e^x within 2 units in the last place for x ≤ 88, and 0 below −87. NaN stays NaN. By Cephes'
// polynomial on [−ln 2 / 2, ln 2 / 2] (Moshier, expf).
inline floats exp(floats x) {
    floats clamped = x < -87.0f ? floats{} - 87.0f : x;
    clamped = clamped > 88.0f ? floats{} + 88.0f : clamped;
    floats shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 · 2^23 rounds to nearest
    floats n = shifted - 12582912.0f;
    floats r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints power = ((ints)shifted - 0x4b400000 + 127) << 23;
    floats out = p * (floats)power;
    return x < -87.0f ? floats{} : (x != x ? x : out);
}
