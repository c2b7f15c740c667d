/* The product of a weight with a few rows: out = x weight^T + bias, float32, over the weight as it lies in memory.
 *
 * Owns the arithmetic and how it is divided among threads. Knows pointers, counts and strides (in elements); knows no torch.
 *
 * Few rows are bound by the memory: each weight is read once, and what is next is fetched while the rows are multiplied with what is here. It goes
 * into the second cache, for which some processors can wait for more lines at a time than for the first one.
 * A block of OUTPUTS outputs meets all rows before the next block, a tile of ROWS rows at a time, whose sums stay in registers. Lanes are inputs,
 * so the weight needs no other order, and chunks use the same copy of it by another product.
 */
#include <stdint.h>

#include "parallel.h"
#include "vectors.h"

/* INPUTS: of a block; its weights stay in the first cache while the tiles pass. The sums of a tile and what it multiplies fit the registers. */
enum { OUTPUTS = 4, ROWS = REGISTERS == 32 ? 6 : 2, INPUTS = 512, MOST_ROWS = 64 };

typedef struct {
    const float *x, *weight, *bias;
    float *out;
    int64_t rows, inputs, outputs, x_row, taken;
} product;

/* A tile's sums over `inputs` inputs, a multiple of LANES; added to what is in `sums` unless it is the first. ahead: the weights to fetch, or null. */
INLINE void multiply(const float *x, int64_t x_row, const float *weight, int64_t weight_row, int64_t inputs, floats *sums, int is_first, int rows,
                     const float *ahead) {
    floats total[OUTPUTS][ROWS];
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < rows; r++) total[o][r] = is_first ? (floats){0} : sums[r * OUTPUTS + o];
    for (int64_t i = 0; i < inputs; i += LANES) {
        floats w[OUTPUTS];
        for (int o = 0; o < OUTPUTS; o++) {
            w[o] = load(weight + o * weight_row + i);
            if (ahead) __builtin_prefetch(ahead + o * weight_row + i, 0, 2);
        }
        for (int r = 0; r < rows; r++) {
            const floats v = load(x + r * x_row + i);
            for (int o = 0; o < OUTPUTS; o++) total[o][r] += v * w[o];
        }
    }
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < rows; r++) sums[r * OUTPUTS + o] = total[o][r];
}

/* OUTPUTS outputs of all rows. last: there is no weight after these. */
static void block(const product *p, int64_t output, int is_last) {
    floats sums[MOST_ROWS * OUTPUTS];
    const float *weight = p->weight + output * p->inputs;
    for (int64_t i = 0; i < p->inputs; i += INPUTS) {
        const int64_t inputs = p->inputs - i < INPUTS ? p->inputs - i : INPUTS;
        const float *next = i + INPUTS < p->inputs ? weight + i + INPUTS : is_last ? 0 : weight + OUTPUTS * p->inputs;
        for (int64_t r = 0; r < p->rows; r += ROWS) {
            const float *x = p->x + r * p->x_row + i, *ahead = r ? 0 : next;
            floats *to = sums + r * OUTPUTS;
            switch (p->rows - r) { /* of a count that is known to the compiler, the sums are registers */
#define TILE(n) multiply(x, p->x_row, weight + i, p->inputs, inputs, to, !i, n < ROWS ? n : ROWS, ahead)
                case 1: TILE(1); break;
                case 2: TILE(2); break;
                case 3: TILE(3); break;
                case 4: TILE(4); break;
                case 5: TILE(5); break;
                default: TILE(ROWS);
#undef TILE
            }
        }
    }
    for (int64_t r = 0; r < p->rows; r++)
        for (int o = 0; o < OUTPUTS; o++) {
            const floats v = sums[r * OUTPUTS + o];
            float sum = p->bias ? p->bias[output + o] : 0.0f;
            for (int lane = 0; lane < LANES; lane++) sum += v[lane];
            p->out[r * p->outputs + output + o] = sum;
        }
}

static void body(void *data, int thread, int threads) {
    (void)thread;
    product *p = (product *)data;
    const int64_t blocks = p->outputs / OUTPUTS;
    int64_t begin, end;
    while (take_part(&p->taken, blocks, threads, &begin, &end))
        for (int64_t b = begin; b < end; b++) block(p, b * OUTPUTS, b + 1 == blocks);
}

/* x: [rows, inputs], its rows x_row apart. weight: [outputs, inputs]. bias: [outputs], or null. out: [rows, outputs]. rows: 1 to MOST_ROWS.
 * Returns 1, and does nothing, unless inputs are a multiple of LANES, and outputs one of OUTPUTS. */
int few_rows(const float *x, const float *weight, const float *bias, float *out, int64_t rows, int64_t inputs, int64_t outputs, int64_t x_row,
             int threads) {
    if (inputs % LANES || outputs % OUTPUTS || rows < 1 || rows > MOST_ROWS) return 1;
    product p = {x, weight, bias, out, rows, inputs, outputs, x_row, 0};
    parallel(threads, body, &p);
    return 0;
}
