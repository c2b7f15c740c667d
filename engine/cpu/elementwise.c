/* The small operations of a decoder, each in one pass over its tensors: decode inputs, embedding, norms, activation, rotary embedding, row
 * scales; and the replay of recorded calls.
 *
 * Owns the arithmetic and how it is divided among threads. Knows pointers, counts and strides (in elements); knows no torch. A tensor of a
 * model is float32, or bfloat16 where `is_bf16` is 1; what is computed in between is float32, and is rounded where torch rounds it. Each
 * function takes the structure that says what to compute, and the number of torch's threads.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "bits.h"
#include "parallel.h"

/* To the nearest, of two the even one; a NaN stays one. */
INLINE uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

INLINE float load(const void *from, int64_t i, int is_bf16) {
    return is_bf16 ? from_bits((uint32_t)((const uint16_t *)from)[i] << 16) : ((const float *)from)[i];
}

INLINE void store(void *to, int64_t i, float x, int is_bf16) {
    if (is_bf16)
        ((uint16_t *)to)[i] = to_bf16(x);
    else
        ((float *)to)[i] = x;
}

INLINE float rounded(float x, int is_bf16) { return is_bf16 ? from_bits((uint32_t)to_bf16(x) << 16) : x; }

INLINE const void *at(const void *base, int64_t i, int is_bf16) { return (const char *)base + (i << (is_bf16 ? 1 : 2)); }

/* Fewer elements are done sooner by one thread than a second one can be told of them. */
enum { ALONE = 1 << 14 };

static int threads_for(int64_t elements, int threads) { return elements < ALONE ? 1 : threads; }

/* The part of `count` that a thread does: [*begin, *end). */
INLINE void share(int64_t count, int thread, int threads, int64_t *begin, int64_t *end) {
    *begin = count * thread / threads;
    *end = count * (thread + 1) / threads;
}

/* e^x with a relative error of about 2^-22, for vectors: the compiler has no expf for them. Cephes' polynomial. Infinity above 88.4: the
 * exponent's bits are all set then. */
INLINE float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.7f ? 88.7f : x;
    const int32_t whole = (int32_t)rintf(x * 1.44269504f);
    const float r = x - (float)whole * 0.693359375f + (float)whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * from_bits((uint32_t)(whole + 127) << 23);
}

/* --- norms ---------------------------------------------------------------------------------------------------------------------------- */

/* out = rms_norm(total) * weight with total = x + residual. residual: null for a norm without one; then total is null too. x, residual: their
 * rows x_row and residual_row apart. out, total: [rows, width] contiguous. */
typedef struct {
    const void *x, *residual, *weight;
    void *out, *total;
    int64_t rows, width, x_row, residual_row;
    float eps;
    int is_bf16;
} norm_work;

INLINE void norm_row(const void *restrict x, const void *restrict residual, const void *restrict weight, void *restrict out,
                     void *restrict total, int64_t width, float eps, int is_bf16) {
    float squares = 0.0f;
    if (residual)
        for (int64_t i = 0; i < width; i++) {
            const float sum = rounded(load(x, i, is_bf16) + load(residual, i, is_bf16), is_bf16);
            store(total, i, sum, is_bf16);
            squares += sum * sum;
        }
    else
        for (int64_t i = 0; i < width; i++) squares += load(x, i, is_bf16) * load(x, i, is_bf16);
    const float scale = 1.0f / sqrtf(squares / (float)width + eps);
    const void *restrict source = residual ? total : x;
    for (int64_t i = 0; i < width; i++)
        store(out, i, rounded(load(source, i, is_bf16) * scale, is_bf16) * load(weight, i, is_bf16), is_bf16);
}

INLINE void norm_rows(const norm_work *w, int thread, int threads, int is_bf16) {
    int64_t begin, end;
    share(w->rows, thread, threads, &begin, &end);
    for (int64_t row = begin; row < end; row++)
        norm_row(at(w->x, row * w->x_row, is_bf16), w->residual ? at(w->residual, row * w->residual_row, is_bf16) : 0, w->weight,
                 (void *)at(w->out, row * w->width, is_bf16), w->total ? (void *)at(w->total, row * w->width, is_bf16) : 0, w->width,
                 w->eps, is_bf16);
}

static void norm_part(void *data, int thread, int threads) {
    const norm_work *w = (const norm_work *)data;
    if (w->is_bf16)
        norm_rows(w, thread, threads, 1);
    else
        norm_rows(w, thread, threads, 0);
}

void add_rms_norm(const norm_work *w, int threads) { parallel(threads_for(w->rows * w->width, threads), norm_part, (void *)w); }

/* --- activation ----------------------------------------------------------------------------------------------------------------------- */

/* out[i] = silu(gate[i]) * up[i]. gate_up: [rows, 2 * width], the gate first, its rows `row` apart. out: [rows, width] contiguous. */
typedef struct {
    const void *gate_up;
    void *out;
    int64_t rows, width, row;
    int is_bf16;
} silu_work;

INLINE void silu_rows(const silu_work *w, int thread, int threads, int is_bf16) {
    int64_t begin, end;
    share(w->rows * w->width, thread, threads, &begin, &end);
    while (begin < end) {
        const int64_t row = begin / w->width, column = begin - row * w->width;
        const int64_t count = end - begin < w->width - column ? end - begin : w->width - column;
        const void *restrict gate = at(w->gate_up, row * w->row + column, is_bf16);
        const void *restrict up = at(w->gate_up, row * w->row + w->width + column, is_bf16);
        void *restrict out = (void *)at(w->out, begin, is_bf16);
        for (int64_t i = 0; i < count; i++) {
            const float g = load(gate, i, is_bf16);
            store(out, i, rounded(g / (1.0f + exp_of(-g)), is_bf16) * load(up, i, is_bf16), is_bf16);
        }
        begin += count;
    }
}

static void silu_part(void *data, int thread, int threads) {
    const silu_work *w = (const silu_work *)data;
    if (w->is_bf16)
        silu_rows(w, thread, threads, 1);
    else
        silu_rows(w, thread, threads, 0);
}

void silu_and_mul(const silu_work *w, int threads) { parallel(threads_for(w->rows * w->width, threads), silu_part, (void *)w); }

/* --- rotary embedding ----------------------------------------------------------------------------------------------------------------- */

/* heads: [tokens, query_heads + 2 * kv_heads, dim]. cos, sin: [tokens, half]. query_norm, key_norm: [dim], or null. queries: [tokens,
 * query_heads, dim]. keys, values: of a layer; page p, head h and slot s of it are at p * page + h * head + s * slot. Pages are as exact as
 * heads or less: bfloat16 where heads are. */
typedef struct {
    const void *heads;
    const float *cos, *sin;
    const void *query_norm, *key_norm;
    const int64_t *pages, *slots;
    void *queries, *keys, *values;
    int64_t tokens, token_row, head_row, query_heads, kv_heads, dim, half;
    int64_t key_page, key_head, key_slot, value_page, value_head, value_slot;
    float eps;
    int is_bf16, pages_are_bf16;
} rotate_work;

/* to_is_bf16: what is written; is_bf16: all that is read. */
INLINE void rotate_head(const void *restrict from, const float *restrict cos, const float *restrict sin, const void *restrict weight,
                        void *restrict to, int64_t dim, int64_t half, float eps, int is_bf16, int to_is_bf16) {
    if (weight) {
        float squares = 0.0f;
        for (int64_t i = 0; i < dim; i++) squares += load(from, i, is_bf16) * load(from, i, is_bf16);
        const float scale = 1.0f / sqrtf(squares / (float)dim + eps);
        for (int64_t i = 0; i < half; i++) {
            const float a = rounded(rounded(load(from, i, is_bf16) * scale, is_bf16) * load(weight, i, is_bf16), is_bf16);
            const float b = rounded(rounded(load(from, half + i, is_bf16) * scale, is_bf16) * load(weight, half + i, is_bf16), is_bf16);
            store(to, i, a * cos[i] - b * sin[i], to_is_bf16);
            store(to, half + i, b * cos[i] + a * sin[i], to_is_bf16);
        }
        for (int64_t i = 2 * half; i < dim; i++)
            store(to, i, rounded(load(from, i, is_bf16) * scale, is_bf16) * load(weight, i, is_bf16), to_is_bf16);
        return;
    }
    for (int64_t i = 0; i < half; i++) {
        const float a = load(from, i, is_bf16), b = load(from, half + i, is_bf16);
        store(to, i, a * cos[i] - b * sin[i], to_is_bf16);
        store(to, half + i, b * cos[i] + a * sin[i], to_is_bf16);
    }
    for (int64_t i = 2 * half; i < dim; i++) store(to, i, load(from, i, is_bf16), to_is_bf16);
}

INLINE void copy_head(const void *restrict from, void *restrict to, int64_t dim, int is_bf16, int to_is_bf16) {
    if (is_bf16 == to_is_bf16)
        memcpy(to, from, (size_t)dim << (is_bf16 ? 1 : 2));
    else
        for (int64_t i = 0; i < dim; i++) store(to, i, load(from, i, is_bf16), to_is_bf16);
}

INLINE void rotate_tokens(const rotate_work *w, int thread, int threads, int is_bf16, int pages_are_bf16) {
    int64_t begin, end;
    const int64_t all_heads = w->query_heads + 2 * w->kv_heads;
    share(w->tokens * all_heads, thread, threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const int64_t token = i / all_heads, head = i - token * all_heads;
        const void *from = at(w->heads, token * w->token_row + head * w->head_row, is_bf16);
        const float *cos = w->cos + token * w->half, *sin = w->sin + token * w->half;
        const int64_t page = w->pages[token], slot = w->slots[token], kv = head - w->query_heads;
        if (kv < 0) {
            void *to = (void *)at(w->queries, (token * w->query_heads + head) * w->dim, is_bf16);
            rotate_head(from, cos, sin, w->query_norm, to, w->dim, w->half, w->eps, is_bf16, is_bf16);
        } else if (kv < w->kv_heads) {
            void *to = (void *)at(w->keys, page * w->key_page + kv * w->key_head + slot * w->key_slot, pages_are_bf16);
            rotate_head(from, cos, sin, w->key_norm, to, w->dim, w->half, w->eps, is_bf16, pages_are_bf16);
        } else {
            const int64_t place = page * w->value_page + (kv - w->kv_heads) * w->value_head + slot * w->value_slot;
            copy_head(from, (void *)at(w->values, place, pages_are_bf16), w->dim, is_bf16, pages_are_bf16);
        }
    }
}

static void rotate_part(void *data, int thread, int threads) {
    const rotate_work *w = (const rotate_work *)data;
    if (w->is_bf16)
        rotate_tokens(w, thread, threads, 1, 1);
    else if (w->pages_are_bf16)
        rotate_tokens(w, thread, threads, 0, 1);
    else
        rotate_tokens(w, thread, threads, 0, 0);
}

void rotate_and_write(const rotate_work *w, int threads) {
    parallel(threads_for(w->tokens * (w->query_heads + 2 * w->kv_heads) * w->dim, threads), rotate_part, (void *)w);
}

/* cos, sin: [tokens, half], of positions [tokens] times frequencies [half], both times factor. */
typedef struct {
    const int64_t *positions;
    const float *frequencies;
    float *cos, *sin;
    int64_t tokens, half;
    float factor;
} angle_work;

static void angle_part(void *data, int thread, int threads) {
    const angle_work *w = (const angle_work *)data;
    int64_t begin, end;
    share(w->tokens, thread, threads, &begin, &end);
    for (int64_t i = begin * w->half; i < end * w->half; i++) {
        const float angle = (float)w->positions[i / w->half] * w->frequencies[i % w->half];
        w->cos[i] = cosf(angle) * w->factor;
        w->sin[i] = sinf(angle) * w->factor;
    }
}

void rotation(const angle_work *w, int threads) {
    parallel(threads_for(w->tokens * w->half * 16, threads), angle_part, (void *)w); /* an angle takes as long as many sums */
}

/* --- decode rows ---------------------------------------------------------------------------------------------------------------------- */

/* rows: [count], each once but for `null`, whose length does not grow. last_token, length: of all rows. table: of all rows, table_row apart.
 * token_ids, positions, pages, slots: [count]. */
typedef struct {
    const int64_t *rows, *last_token;
    int64_t *length;
    const int32_t *table;
    int64_t *token_ids, *positions, *pages, *slots;
    int64_t count, table_row, page_size, null;
} decode_work;

void decode_inputs(const decode_work *w, int threads) {
    (void)threads;
    for (int64_t i = 0; i < w->count; i++) {
        const int64_t row = w->rows[i], position = w->length[row];
        w->token_ids[i] = w->last_token[row];
        w->positions[i] = position;
        w->pages[i] = w->table[row * w->table_row + position / w->page_size];
        w->slots[i] = position % w->page_size;
        w->length[row] = row == w->null ? 0 : position + 1;
    }
}

/* --- embedding ------------------------------------------------------------------------------------------------------------------------ */

/* out[i] = table[ids[i]], rows of `bytes`. ids: [count]; zeros for those outside of [0, rows). */
typedef struct {
    const void *table;
    const int64_t *ids;
    void *out;
    int64_t count, rows, bytes;
} embed_work;

static void embed_part(void *data, int thread, int threads) {
    const embed_work *w = (const embed_work *)data;
    int64_t begin, end;
    share(w->count, thread, threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        char *to = (char *)w->out + i * w->bytes;
        if (w->ids[i] >= 0 && w->ids[i] < w->rows)
            memcpy(to, (const char *)w->table + w->ids[i] * w->bytes, (size_t)w->bytes);
        else
            memset(to, 0, (size_t)w->bytes);
    }
}

void embed(const embed_work *w, int threads) { parallel(threads_for(w->count * w->bytes / 4, threads), embed_part, (void *)w); }

/* --- int8 ----------------------------------------------------------------------------------------------------------------------------- */

/* Each row in whole numbers from -largest to largest with a scale of its own. x: [rows, width], its rows `row` apart. out: the same plus
 * largest + 1, contiguous. scales: [rows]. */
typedef struct {
    const void *x;
    uint8_t *out;
    float *scales;
    int64_t rows, width, row;
    int largest, is_bf16;
} quantise_work;

INLINE void quantise_rows(const quantise_work *w, int thread, int threads, int is_bf16) {
    const int64_t width = w->width;
    const float largest = (float)w->largest;
    const int32_t zero = w->largest + 1;
    int64_t begin, end;
    share(w->rows, thread, threads, &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const void *restrict x = at(w->x, row * w->row, is_bf16);
        uint8_t *restrict out = w->out + row * width;
        uint32_t most = bits_of(1e-30f); /* numbers without a sign are ordered as their bits are */
        for (int64_t i = 0; i < width; i++) {
            const uint32_t bits = bits_of(load(x, i, is_bf16)) & 0x7fffffff;
            most = bits > most ? bits : most;
        }
        const float largest_number = from_bits(most), inverse = largest / largest_number;
        for (int64_t i = 0; i < width; i++) out[i] = (uint8_t)((int32_t)rintf(load(x, i, is_bf16) * inverse) + zero);
        w->scales[row] = largest_number / largest;
    }
}

static void quantise_part(void *data, int thread, int threads) {
    const quantise_work *w = (const quantise_work *)data;
    if (w->is_bf16)
        quantise_rows(w, thread, threads, 1);
    else
        quantise_rows(w, thread, threads, 0);
}

void quantise_int8(const quantise_work *w, int threads) { parallel(threads_for(w->rows * w->width, threads), quantise_part, (void *)w); }

/* --- recordings ----------------------------------------------------------------------------------------------------------------------- */

/* A function of any of these files, and what it is given. */
typedef struct {
    void (*function)(const void *call, int threads);
    const void *call;
} recorded;

/* Calls functions one after the other, so that a thread of Python does it once. */
void replay(const recorded *calls, int64_t count, int threads) {
    for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].call, threads);
}
