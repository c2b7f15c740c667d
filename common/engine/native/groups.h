/* Products over packed weights take the rows in groups, whose sums stay in registers, two vectors for each row.
 *
 * Owns how many rows a group has, and the calls with counts that the compiler knows. Does not know what is multiplied.
 */
#pragma once

#include "vectors.h"

/* OUTPUTS: of a block of the weight. ROWS: of a group: their sums fill the registers but for some. LINE: bytes of the caches. AHEAD: how far
 * before its use a weight is fetched, in bytes: the processor's own prefetching ends where a page of memory does. */
enum { OUTPUTS = 2 * LANES, ROWS = REGISTERS == 32 ? 12 : 6, LINE = 64, AHEAD = 4096 };

INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* Asks for what lies AHEAD of the weights that are multiplied next. They go into the second cache, for which some processors can wait for more
 * lines at a time than for the first one. */
INLINE void fetch_ahead(const void *weights, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch((const char *)weights + AHEAD + at, 0, 2);
}

/* MULTIPLY(row, count, fetches) for each group of rows: only the first finds weights that are not in a cache. */
#define FOR_EACH_GROUP(rows, MULTIPLY)                  \
    for (int64_t row = 0; row < (rows); row += ROWS)    \
        switch ((rows) - row) {                         \
            case 1: MULTIPLY(row, 1, 1); break;         \
            case 2: MULTIPLY(row, 2, 1); break;         \
            case 3: MULTIPLY(row, 3, 1); break;         \
            case 4: MULTIPLY(row, 4, 1); break;         \
            case 5: MULTIPLY(row, 5, 1); break;         \
            MORE_ROWS(MULTIPLY)                         \
            default:                                    \
                if (row) MULTIPLY(row, ROWS, 0);        \
                else MULTIPLY(row, ROWS, 1);            \
        }
#if defined(__AVX512F__) || defined(__aarch64__) /* REGISTERS is 32 */
#define MORE_ROWS(MULTIPLY)                             \
            case 6: MULTIPLY(row, 6, 1); break;         \
            case 7: MULTIPLY(row, 7, 1); break;         \
            case 8: MULTIPLY(row, 8, 1); break;         \
            case 9: MULTIPLY(row, 9, 1); break;         \
            case 10: MULTIPLY(row, 10, 1); break;       \
            case 11: MULTIPLY(row, 11, 1); break;
#else
#define MORE_ROWS(MULTIPLY)
#endif
