/* The product of an int8 weight with rows that are quantised here: out = x weight^T + bias, for processors that multiply bytes (VNNI).
 *
 * Owns the arithmetic. Knows pointers, counts and strides (in elements); knows no torch.
 *
 * The instruction multiplies bytes without a sign by bytes with one, and adds four products to each number of a vector. So weights are moved by
 * 128, and what that adds to a sum is taken off it, which takes the sum of a row's numbers alone. In a block of the weight (`groups.h`),
 * four inputs of each output lie together, then the next four; rows are packed in the same way.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "groups.h"

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define DOT "vpdpbusd"
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define DOT "%{vex%} vpdpbusd"
#endif

/* SOME: so many numbers of a row are quantised at a time. */
enum { TOGETHER = 4, SOME = 64, LARGEST = 127, MOVED = 128 };

/* Outputs of a block; 0: this processor has no such instruction, or the compiler does not know it. */
int int8_block(void) {
#ifdef DOT
    return OUTPUTS;
#else
    return 0;
#endif
}

#ifdef DOT

/* numbers: the quantised rows, `stride` each, in groups of ROWS. row_scale, row_sum: of each row. */
typedef struct {
    const float *x;
    const uint8_t *weight;
    const float *scale, *bias;
    float *out, *row_scale;
    int32_t *row_sum;
    int8_t *numbers;
    int64_t rows, inputs, outputs, x_row, stride;
    int gated;
} product;

/* As an instruction of its own: of the function that compilers have for it, some make copies of all sums. */
INLINE signs add_products(signs sum, signs weights, signs numbers) {
    __asm__(DOT " %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(numbers));
    return sum;
}

/* Numbers from -LARGEST to LARGEST, by a scale of the row. Those behind the last input are 0. */
static void quantise(const void *data, int64_t row) {
    const product *p = (const product *)data;
    const float *restrict x = p->x + row * p->x_row;
    const row_place place = place_of(row, p->rows);
    int8_t *to = p->numbers + place.first * p->stride + place.at * TOGETHER;
    const float smallest = 1e-30f;
    uint32_t most;
    memcpy(&most, &smallest, sizeof most); /* numbers without a sign are ordered as their bits are */
    for (int64_t i = 0; i < p->inputs; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, sizeof largest);
    if (!(largest <= FLT_MAX)) { /* such a row has no numbers: its outputs are NaN */
        for (int64_t i = 0; i < p->stride; i += TOGETHER) memset(to + i * place.rows, 0, TOGETHER);
        p->row_scale[row] = NAN;
        p->row_sum[row] = 0;
        return;
    }
    const float inverse = LARGEST / largest;
    int32_t sum = 0;
    for (int64_t i = 0; i < p->stride; i += SOME) {
        int32_t some[SOME];
        int8_t numbers[SOME];
        const int64_t count = least(SOME, p->inputs - i);
        if (count == SOME)
            for (int64_t j = 0; j < SOME; j++) some[j] = (int32_t)rintf(x[i + j] * inverse);
        else
            for (int64_t j = 0; j < SOME; j++) some[j] = j < count ? (int32_t)rintf(x[i + j] * inverse) : 0;
        for (int64_t j = 0; j < SOME; j++) {
            numbers[j] = (int8_t)some[j];
            sum += some[j];
        }
        for (int64_t j = 0; j < least(SOME, p->stride - i); j += TOGETHER) memcpy(to + (i + j) * place.rows, numbers + j, TOGETHER);
    }
    p->row_scale[row] = largest / LARGEST;
    p->row_sum[row] = sum;
}

/* The sums of a vector of outputs of one row become numbers. */
INLINE floats scaled(const product *p, signs sum, int64_t row, int64_t output) {
    const signs moved = sum - MOVED * p->row_sum[row];
    const floats y = kept(kept(__builtin_convertvector(moved, floats) * load(p->scale + output)) * p->row_scale[row]); /* rounded in one order */
    return p->bias ? y + load(p->bias + output) : y;
}

/* One block times the rows of a group. fetches: the block's weights come from memory. */
INLINE void multiply(const product *p, int64_t block, int64_t row, int rows, int fetches) {
    const uint8_t *weight = p->weight + block * OUTPUTS * p->stride;
    const int8_t *numbers = p->numbers + row * p->stride;
    signs sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (signs){0};
    for (int64_t i = 0; i < p->stride; i += TOGETHER) {
        signs weights[2];
        memcpy(weights, weight + i * OUTPUTS, sizeof weights);
        if (fetches) fetch(weight + i * OUTPUTS + AHEAD, INPUT_BYTES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, numbers + i * rows + r * TOGETHER, sizeof four);
            const signs of_row = (signs){0} + four;
            sum[r][0] = add_products(sum[r][0], weights[0], of_row);
            sum[r][1] = add_products(sum[r][1], weights[1], of_row);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        const floats first = scaled(p, sum[r][0], row + r, block * OUTPUTS), second = scaled(p, sum[r][1], row + r, block * OUTPUTS + LANES);
        store_results(p->out, row + r, p->outputs, block, first, second, p->gated);
    }
}

static void multiply_rows(const void *data, int64_t block) {
    const product *p = (const product *)data;
#define MULTIPLY(row, rows, fetches) multiply(p, block, row, rows, fetches)
    FOR_EACH_GROUP(p->rows, MULTIPLY)
#undef MULTIPLY
}

/* weight: of inputs that are a multiple of TOGETHER, uint8, moved by 128. scale: not null. memory: (inputs rounded up + 8) bytes for each row. */
void int8_product(const product_call *c, int threads) {
    const int64_t stride = padded(c->inputs, TOGETHER);
    float *row_scale = (float *)c->memory;
    int32_t *row_sum = (int32_t *)(row_scale + c->rows);
    const product p = {c->x, (const uint8_t *)c->weight, c->scale, c->bias, c->out, row_scale, row_sum, (int8_t *)(row_sum + c->rows),
                       c->rows, c->inputs, c->outputs, c->x_row, stride, c->gated};
    work w = {&p, quantise, multiply_rows, c->rows, blocks_of(c->outputs, c->gated), 0};
    parallel(threads, work_on, &w);
}

#endif
