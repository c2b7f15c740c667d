/* The product of a float32 weight with rows: out = x weight^T + bias, over a packed weight.
 *
 * Owns the arithmetic, the order of a packed weight, and how the work is divided among threads. Knows pointers, counts and strides (in
 * elements); knows no torch.
 *
 * A weight is packed in panels of OUTPUTS outputs; in a panel, the weights of one input lie together, then those of the next. So a panel is read
 * once, from its begin to its end, for ROWS rows, whose sums stay in registers; rows are packed in the same way. Few rows wait for the memory, so
 * what is next is fetched meanwhile. Lanes are outputs: no sum is over lanes, and each is made in the order of the inputs, whatever the rows are.
 */
#include <stdint.h>

#include "groups.h"
#include "parallel.h"

int panel_outputs(void) { return OUTPUTS; }

extern void GOMP_barrier(void);

/* packed: the rows, in groups of ROWS, [inputs, rows of the group] each. */
typedef struct {
    const float *x, *weight, *bias;
    float *out, *packed;
    int64_t rows, inputs, outputs, x_row, taken;
} product;

static void pack_row(const product *p, int64_t row) {
    const int64_t group = row / ROWS * ROWS, width = least_of(ROWS, p->rows - group);
    const float *restrict x = p->x + row * p->x_row;
    float *restrict to = p->packed + group * p->inputs + (row - group);
    for (int64_t i = 0; i < p->inputs; i++) to[i * width] = x[i];
}

INLINE void finish(const product *p, floats sum, int64_t row, int64_t output) {
    if (p->bias) sum += load(p->bias + output);
    float *to = p->out + row * p->outputs + output;
    if (output + LANES <= p->outputs)
        store(to, sum);
    else if (output < p->outputs)
        memcpy(to, &sum, sizeof(float) * (size_t)(p->outputs - output));
}

/* One panel times the rows of a group. fetches: the panel comes from memory. */
INLINE void multiply(const product *p, int64_t row, int64_t panel, int rows, int fetches) {
    const float *weight = p->weight + panel * OUTPUTS * p->inputs, *x = p->packed + row * p->inputs;
    floats sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (floats){0};
    for (int64_t i = 0; i < p->inputs; i++, weight += OUTPUTS, x += rows) {
        const floats a = kept(load(weight)), b = kept(load(weight + LANES));
        if (fetches) fetch_ahead(weight, OUTPUTS * 4);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const floats of_row = kept((floats){0} + x[r]);
            sum[r][0] += of_row * a;
            sum[r][1] += of_row * b;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) finish(p, sum[r][half], row + r, panel * OUTPUTS + half * LANES);
}

static void multiply_panel(const product *p, int64_t panel) {
#define MULTIPLY(row, rows, fetches) multiply(p, row, panel, rows, fetches)
    FOR_EACH_GROUP(p->rows, MULTIPLY)
#undef MULTIPLY
}

static void body(void *data, int thread, int threads) {
    product *p = (product *)data;
    for (int64_t row = p->rows * thread / threads; row < p->rows * (thread + 1) / threads; row++) pack_row(p, row);
    if (threads > 1) GOMP_barrier();
    int64_t begin, end;
    while (take_part(&p->taken, (p->outputs + OUTPUTS - 1) / OUTPUTS, threads, &begin, &end))
        for (int64_t panel = begin; panel < end; panel++) multiply_panel(p, panel);
}

/* x: [rows, inputs], its rows x_row apart. weight: [panels, inputs, OUTPUTS]. bias: of whole panels, or null. out: [rows, outputs]. packed: memory for
 * rows * inputs. */
void panel_product(const float *x, const float *weight, const float *bias, float *out, float *packed, int64_t rows, int64_t inputs,
                   int64_t outputs, int64_t x_row, int threads) {
    product p = {x, weight, bias, out, packed, rows, inputs, outputs, x_row, 0};
    parallel(threads, body, &p);
}
