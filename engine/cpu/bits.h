/* The bits of a float32 number. */
#pragma once

#include <stdint.h>
#include <string.h>

/* A function whose integer arguments decide which code is made for it. */
#define INLINE static inline __attribute__((always_inline))

INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
