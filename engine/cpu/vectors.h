/* Vectors of floats as wide as the processor's registers, by the extensions that gcc and clang share.
 *
 * Owns their width, loads and stores in float32 and bfloat16, and the functions that C lacks. Knows no tensors.
 */
#pragma once

#include "bits.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16, REGISTERS = 32 };
#elif defined(__AVX__)
enum { LANES = 8, REGISTERS = 16 };
#elif defined(__aarch64__)
enum { LANES = 4, REGISTERS = 32 };
#else
enum { LANES = 4, REGISTERS = 16 };
#endif

/* Bytes of a line of the caches. */
enum { LINE = 64 };
#define LOG2_E 1.44269504f

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float quads __attribute__((vector_size(16)));
typedef int32_t signs __attribute__((vector_size(4 * LANES)));
typedef int32_t quad_signs __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* Elements of a and b by their numbers, those of b behind those of a. type: a vector of as many signs. */
#if defined(__clang__)
#define SHUFFLED(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

INLINE floats load(const float *from) {
    floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* x, in a register from here on: compilers would load it again for each use, and processors load fewer vectors than they multiply. */
INLINE floats kept(floats x) {
#if defined(__x86_64__)
    __asm__("" : "+v"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

INLINE void store(float *to, floats x) { memcpy(to, &x, sizeof x); }

/* Asks for what is needed soon: the processor's own prefetching ends where a page of memory does. It goes into the second cache, for which some
 * processors can wait for more lines at a time than for the first one. */
INLINE void fetch(const void *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch((const char *)from + at, 0, 2);
}

/* On x86 in the processor's own words: gcc widens a vector in two halves and joins them. */
INLINE floats load_bfloat16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (floats)((words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)) << 16);
#elif defined(__AVX2__)
    return (floats)((words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)) << 16);
#else
    halves x;
    memcpy(&x, from, sizeof x);
    return (floats)(__builtin_convertvector(x, words) << 16);
#endif
}

INLINE float from_bfloat16(uint16_t x) {
    return from_bits((uint32_t)x << 16);
}

/* Rounds to the nearest, and to even between two. NaN stays NaN. */
INLINE uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x == x ? rounded : 0x7fc0);
}

/* b where either is NaN. */
INLINE floats larger(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const words is_larger = (words)(a > b);
    return (floats)((is_larger & (words)a) | (~is_larger & (words)b));
#endif
}

/* Rows become columns. */
INLINE void transpose(quads *x) {
    const quads a = SHUFFLED(quad_signs, x[0], x[1], 0, 4, 1, 5), b = SHUFFLED(quad_signs, x[0], x[1], 2, 6, 3, 7);
    const quads c = SHUFFLED(quad_signs, x[2], x[3], 0, 4, 1, 5), d = SHUFFLED(quad_signs, x[2], x[3], 2, 6, 3, 7);
    x[0] = SHUFFLED(quad_signs, a, c, 0, 1, 4, 5);
    x[1] = SHUFFLED(quad_signs, a, c, 2, 3, 6, 7);
    x[2] = SHUFFLED(quad_signs, b, d, 0, 1, 4, 5);
    x[3] = SHUFFLED(quad_signs, b, d, 2, 3, 6, 7);
}

INLINE quads larger_quad(quads a, quads b) {
    const quad_signs is_larger = a > b;
    return (quads)((is_larger & (quad_signs)a) | (~is_larger & (quad_signs)b));
}

/* 2 to the power of x, for x of at most 0; 0 below -126.5; NaN stays NaN. The error is about one unit in the last place: Taylor's terms up to degree 6
 * over [-0.5, 0.5], times a power of two that is built in the exponent's bits. */
INLINE floats exp2_of(floats x) {
    x = larger((floats){0} - 127.0f, x);
    const signs whole = __builtin_convertvector(x - 0.5f, signs); /* drops the fraction, so it rounds to the nearest for x <= 0 */
    const floats rest = x - __builtin_convertvector(whole, floats);
    floats y = rest * 1.5403530e-4f + 1.3333558e-3f;
    y = y * rest + 9.6181291e-3f;
    y = y * rest + 5.5504109e-2f;
    y = y * rest + 2.4022651e-1f;
    y = y * rest + 6.9314718e-1f;
    y = y * rest + 1.0f;
    return y * (floats)((whole + 127) << 23);
}

/* x / (1 + e^-x), with e of no more than 1, so that nothing overflows. */
INLINE floats silu(floats x) {
    const words sign = (words)x & 0x80000000u;
    const floats e = exp2_of((floats)((words)x | 0x80000000u) * LOG2_E);
    const words is_negative = (words)((signs)sign >> 31);
    return (floats)((is_negative & (words)(x * e)) | (~is_negative & (words)x)) / (1.0f + e);
}
