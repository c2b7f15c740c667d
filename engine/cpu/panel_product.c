/* The product of a float32 weight with rows: out = x weight^T + bias, over a packed weight.
 *
 * Owns the arithmetic. Knows pointers, counts and strides (in elements); knows no torch.
 *
 * In a block of the weight (`groups.h`), the weights of one input lie together, then those of the next; rows are packed in the same way.
 * Lanes are outputs: no sum is over lanes, and each is made in the order of the inputs, whatever the rows are.
 */
#include "groups.h"

int panel_outputs(void) { return OUTPUTS; }

/* The rows in groups of ROWS, [inputs, rows of the group] each: one row is so as it is. */
static const float *packed_rows(const product_call *p) { return p->rows == 1 ? (const float *)p->x : (const float *)p->memory; }

static void pack_row(const void *data, int64_t row) {
    const product_call *p = (const product_call *)data;
    const row_place place = place_of(row, p->rows);
    const float *restrict x = p->x + row * p->x_row;
    float *restrict to = (float *)p->memory + place.first * p->inputs + place.at;
    for (int64_t i = 0; i < p->inputs; i++) to[i * place.rows] = x[i];
}

/* One block times the rows of a group. fetches: the block's weights come from memory. */
INLINE void multiply(const product_call *p, int64_t block, int64_t row, int rows, int fetches) {
    const float *weight = (const float *)p->weight + block * OUTPUTS * p->inputs, *x = packed_rows(p) + row * p->inputs;
    floats sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (floats){0};
    for (int64_t i = 0; i < p->inputs; i++, weight += OUTPUTS, x += rows) {
        const floats first = kept(load(weight)), second = kept(load(weight + LANES));
        if (fetches) fetch((const char *)weight + AHEAD, INPUT_BYTES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const floats of_row = kept((floats){0} + x[r]);
            sum[r][0] += of_row * first;
            sum[r][1] += of_row * second;
        }
    }
    floats bias[2] = {{0}};
    if (p->bias) memcpy(bias, p->bias + block * OUTPUTS, sizeof bias);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        store_results(p->out, row + r, p->outputs, block, sum[r][0] + bias[0], sum[r][1] + bias[1], p->gated);
}

static void multiply_rows(const void *data, int64_t block) {
    const product_call *p = (const product_call *)data;
#define MULTIPLY(row, rows, fetches) multiply(p, block, row, rows, fetches)
    FOR_EACH_GROUP(p->rows, MULTIPLY)
#undef MULTIPLY
}

/* weight: [blocks, inputs, OUTPUTS] float32. scale: null. memory: for rows * inputs floats. */
void panel_product(const product_call *p, int threads) {
    work w = {p, p->rows == 1 ? 0 : pack_row, multiply_rows, p->rows, blocks_of(p->outputs, p->gated), 0};
    parallel(threads, work_on, &w);
}
