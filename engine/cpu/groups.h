/* Products of rows with a packed weight: how the work is divided among threads, blocks of the weight and groups of rows.
 *
 * Owns the order of the work, and how results are written. Does not know what is multiplied.
 *
 * A weight is packed in blocks of OUTPUTS outputs, each read from its begin to its end, INPUT_BYTES at a time. The rows are packed in groups
 * of ROWS, whose sums stay in registers, two vectors for each row. All threads pack some of the rows, wait for each other, and compute some
 * of the blocks. A gated layer is SwiGLU (Shazeer 2020): the first vector of a block are gates, the second one what is multiplied by their
 * silu, so a block gives LANES results.
 */
#pragma once

#include "parallel.h"
#include "vectors.h"

enum { OUTPUTS = 2 * LANES, ROWS = REGISTERS == 32 ? 12 : 6, INPUT_BYTES = 4 * OUTPUTS };

/* What a layer gives: all outputs; of a gated one the products, or the gates and, behind them, what they gate. */
enum { PLAIN, GATED, HALVES };

/* out = x weight^T + bias. x: [rows, inputs], its rows x_row apart. weight: packed. scale, bias: of whole blocks; null: there is none. out: [rows,
 * outputs], or twice as wide with HALVES; outputs: half as many as the weight of a gated layer has. memory: for the packed rows. */
typedef struct {
    const float *x;
    const void *weight;
    const float *scale, *bias;
    float *out;
    void *memory;
    int64_t rows, inputs, outputs, x_row;
    int gated;
} product_call;

/* How far before its use a weight is fetched, in bytes. */
enum { AHEAD = 4096 };

extern void GOMP_barrier(void);

/* Where a row is in its group, and how many rows that has. */
typedef struct {
    int64_t first, at, rows;
} row_place;

INLINE row_place place_of(int64_t row, int64_t rows) {
    const int64_t first = row / ROWS * ROWS;
    return (row_place){first, row - first, least(ROWS, rows - first)};
}

/* MULTIPLY(row, count, fetches) for each group of rows, with counts that the compiler knows: only the first finds weights that are in no cache. */
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

/* pack_row: null if the rows are as they should be. multiply(product, block): all rows. */
typedef struct {
    const void *product;
    void (*pack_row)(const void *product, int64_t row);
    void (*multiply)(const void *product, int64_t block);
    int64_t rows, blocks, taken;
} work;

static void work_on(void *data, int thread, int threads) {
    work *w = (work *)data;
    if (w->pack_row) {
        for (int64_t row = w->rows * thread / threads; row < w->rows * (thread + 1) / threads; row++) w->pack_row(w->product, row);
        if (threads > 1) GOMP_barrier();
    }
    int64_t begin, end;
    while (take_part(&w->taken, w->blocks, threads, &begin, &end))
        for (int64_t block = begin; block < end; block++) w->multiply(w->product, block);
}

static int64_t blocks_of(int64_t outputs, int gated) {
    const int64_t of_block = gated ? LANES : OUTPUTS;
    return (outputs + of_block - 1) / of_block;
}

INLINE void store_first(float *to, floats x, int64_t count) {
    if (count >= LANES)
        store(to, x);
    else if (count > 0)
        memcpy(to, &x, sizeof(float) * (size_t)count);
}

/* What a block gives for one row. */
INLINE void store_results(float *out, int64_t row, int64_t outputs, int64_t block, floats first, floats second, int gated) {
    out += row * outputs * (gated == HALVES ? 2 : 1);
    if (gated == HALVES) {
        store_first(out + block * LANES, first, outputs - block * LANES);
        store_first(out + outputs + block * LANES, second, outputs - block * LANES);
        return;
    }
    if (gated) {
        store_first(out + block * LANES, silu(first) * second, outputs - block * LANES);
        return;
    }
    store_first(out + block * OUTPUTS, first, outputs - block * OUTPUTS);
    store_first(out + block * OUTPUTS + LANES, second, outputs - block * OUTPUTS - LANES);
}
