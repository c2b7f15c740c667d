/* The product of a float32 weight with rows: out = x weight^T + bias, over a packed weight.
 *
 * Owns the arithmetic. Knows pointers, counts and strides (in elements); knows no torch.
 *
 * In a block of the weight (`groups.h`), the weights of one input lie together, then those of the next; rows are packed in the same way.
 * Lanes are outputs: no sum is over lanes, and each is made in the order of the inputs, whatever the rows are.
 */
#include "groups.h"

int panel_outputs(void) { return OUTPUTS; }

/* packed: the rows, in groups of ROWS, [inputs, rows of the group] each. */
typedef struct {
    const float *x, *weight, *bias;
    float *out;
    const float *packed;
    int64_t rows, inputs, outputs, x_row;
    int gated;
} product;

static void pack_row(const void *data, int64_t row) {
    const product *p = (const product *)data;
    const row_place place = place_of(row, p->rows);
    const float *restrict x = p->x + row * p->x_row;
    float *restrict to = (float *)p->packed + place.first * p->inputs + place.at;
    for (int64_t i = 0; i < p->inputs; i++) to[i * place.rows] = x[i];
}

/* One block times the rows of a group. fetches: the block's weights come from memory. */
INLINE void multiply(const product *p, int64_t block, int64_t row, int rows, int fetches) {
    const float *weight = p->weight + block * OUTPUTS * p->inputs, *x = p->packed + row * p->inputs;
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
        store_results(p->out + (row + r) * p->outputs, p->outputs, block, sum[r][0] + bias[0], sum[r][1] + bias[1], p->gated);
}

static void multiply_rows(const void *data, int64_t block) {
    const product *p = (const product *)data;
#define MULTIPLY(row, rows, fetches) multiply(p, block, row, rows, fetches)
    FOR_EACH_GROUP(p->rows, MULTIPLY)
#undef MULTIPLY
}

/* x: [rows, inputs], its rows x_row apart. weight: [blocks, inputs, OUTPUTS]. bias: of whole blocks, or null. out: [rows, outputs]; gated: half as many
 * as the weight has. packed: memory for rows * inputs. */
void panel_product(const float *x, const float *weight, const float *bias, float *out, float *packed, int64_t rows, int64_t inputs,
                   int64_t outputs, int64_t x_row, int gated, int threads) {
    const int is_packed = rows == 1;
    const product p = {x, weight, bias, out, is_packed ? x : packed, rows, inputs, outputs, x_row, gated};
    work w = {&p, is_packed ? 0 : pack_row, multiply_rows, rows, blocks_of(outputs, gated), 0};
    parallel(threads, work_on, &w);
}
