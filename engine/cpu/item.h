/* An item of work: what it computes, where its keys and values lie, and where its results go.
 *
 * Owns the arguments of a call, the way from slots to memory, and the merge of items that share their queries. Does not know how scores
 * and weighted values are computed (`few_queries.h`, `many_queries.h`).
 *
 * Page p of a layer begins at p * page_stride, head h in it at h * head_stride, slot s in that at s * dim: strides are in elements.
 */
#pragma once

#include <float.h>
#include <math.h>

#include "vectors.h"

enum {
    SLOTS = 64,                         /* of a block, at most */
    PANEL = 3,                          /* vectors of queries whose results a tile holds */
    TILE = REGISTERS == 32 ? 8 : 4,     /* rows of a tile: with PANEL vectors each, they fill the registers but for some */
    MANY = LANES,                       /* from so many queries on, lanes are queries */
    TURNS = 16,                         /* a thread has at least so many where it can: fewer are longer runs of memory, more balance better */
};
#define UNSEEN -INFINITY /* The score of a slot that a query does not see: its weight is 0, because no largest score is below LOWEST. */
#define LOWEST -FLT_MAX  /* The largest score before any is seen. */

/* Query tokens [token, token + tokens) of the step, the first at `position` of its row, over slots [first, last) of the context.
 * A token sees the slots up to its own position. parts: how many items share these tokens; if several, `partial` is where this one leaves
 * its results, `first_partial` where the first of them does (both in results, one for each query), and `split` counts those that are done.
 * cost: of one KV head. */
typedef struct {
    int64_t token, tokens, position, row, first, last, parts, partial, first_partial, split, cost;
} item;

/* What the layers of a step share that attend alike, and then what is of one layer. table: page ids, by row. items: [items]. workspace: floats of
 * each thread. partials: [items of splits] of [kv_heads, queries of the item, dim + 2]. done: [splits, kv_heads]. window: most slots that a
 * token sees. threads: at most, as there is workspace and work for them. softcap: 0 for none. query, out: [tokens, heads, dim]. keys, values: a
 * layer's pages. next: of the turns in which items are taken. together: KV heads of a turn, at most. */
typedef struct {
    const int32_t *table;
    const item *items;
    float *workspace, *partials;
    int64_t *done;
    int64_t item_count, split_count, table_stride, page_stride, head_stride, workspace_floats;
    int64_t heads, kv_heads, page_size, dim, window, threads;
    int32_t query_is_bfloat16, pages_are_bfloat16;
    float scale, softcap;
    const void *query, *keys, *values;
    void *out;
    int64_t next, together;
} call;

/* Slots of one page: `at` is where they begin, in elements behind the layer's keys, or values, of head 0. */
typedef struct {
    int64_t at, slots;
} run;

INLINE floats load_as(const void *from, int64_t at, int is_bfloat16) {
    return is_bfloat16 ? load_bfloat16((const uint16_t *)from + at) : load((const float *)from + at);
}

INLINE float load_one(const void *from, int64_t at, int is_bfloat16) {
    return is_bfloat16 ? from_bfloat16(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

INLINE const void *moved(const void *base, int64_t elements, int is_bfloat16) {
    return (const char *)base + elements * (is_bfloat16 ? 2 : 4);
}

/* The runs of slots [first, last), which lie in as many pages. Returns their number. */
static int find_runs(const call *c, const item *t, int64_t first, int64_t last, run *runs) {
    const int32_t *pages = c->table + t->row * c->table_stride;
    int count = 0;
    for (int64_t slot = first; slot < last; count++) {
        const int64_t in_page = slot % c->page_size;
        runs[count].at = pages[slot / c->page_size] * c->page_stride + in_page * c->dim;
        runs[count].slots = least(c->page_size - in_page, last - slot);
        slot += runs[count].slots;
    }
    return count;
}

/* Copies rows of `dim` elements into rows of `width` floats, with zeros behind them. */
INLINE void copy_as(const void *from, int64_t rows, int64_t dim, float *to, int64_t width, int is_bfloat16) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) store(to + r * width + d, load_as(from, r * dim + d, is_bfloat16));
        for (; d < dim; d++) to[r * width + d] = load_one(from, r * dim + d, is_bfloat16);
        for (; d < width; d++) to[r * width + d] = 0.0f;
    }
}

static void copy_rows(const void *from, int64_t rows, int64_t dim, float *to, int64_t width, int is_bfloat16) {
    if (is_bfloat16) copy_as(from, rows, dim, to, width, 1);
    else copy_as(from, rows, dim, to, width, 0);
}

/* What turns a product of query and key into the number that `capped` takes: without a softcap that is the exponent of two. */
static float query_scale(const call *c) { return c->softcap > 0.0f ? c->scale / c->softcap : c->scale * LOG2_E; }

/* softcap * tanh(x), as an exponent of two. With e = exp(-2|x|), tanh(|x|) is (1 - e) / (1 + e). */
INLINE floats capped(floats x, float softcap) {
    const words sign = (words)x & 0x80000000u;
    const floats size = (floats)((words)x ^ sign);
    const floats e = exp2_of(size * (-2.0f * LOG2_E));
    const floats tanh = (1.0f - e) / (1.0f + e);
    return (floats)((words)tanh | sign) * (softcap * LOG2_E);
}

/* Writes the result of one query, `sum` [dim] with its largest exponent and total weight: to `out`, or where the merge finds it. */
static void finish(const call *c, const item *t, int64_t head, int64_t query, const float *sum, float largest, float total) {
    const int64_t group = c->heads / c->kv_heads, dim = c->dim;
    if (t->parts > 1) {
        float *part = c->partials + (t->partial * c->kv_heads + head * t->tokens * group + query) * (dim + 2);
        for (int64_t d = 0; d < dim; d++) part[d] = sum[d];
        part[dim] = largest;
        part[dim + 1] = total;
        return;
    }
    const int64_t at = ((t->token + query / group) * c->heads + head * group + query % group) * dim;
    const float share = 1.0f / total;
    if (c->query_is_bfloat16)
        for (int64_t d = 0; d < dim; d++) ((uint16_t *)c->out)[at + d] = to_bfloat16(sum[d] * share);
    else
        for (int64_t d = 0; d < dim; d++) ((float *)c->out)[at + d] = sum[d] * share;
}

/* Adds up what the items of one split left, once the last of them is done. */
static void merge(const call *c, const item *t, int64_t head, float *sum) {
    const int64_t dim = c->dim, queries = t->tokens * (c->heads / c->kv_heads), stride = c->kv_heads * queries * (dim + 2);
    if (__atomic_add_fetch(c->done + t->split * c->kv_heads + head, 1, __ATOMIC_ACQ_REL) < t->parts) return;
    item whole = *t;
    whole.parts = 1;
    for (int64_t q = 0; q < queries; q++) {
        const float *first = c->partials + (t->first_partial * c->kv_heads + head * queries + q) * (dim + 2);
        float largest = LOWEST, total = 0.0f;
        for (int64_t p = 0; p < t->parts; p++) largest = first[p * stride + dim] > largest ? first[p * stride + dim] : largest;
        memset(sum, 0, dim * sizeof *sum);
        for (int64_t p = 0; p < t->parts; p++) {
            const float *part = first + p * stride;
            const float weight = exp2_of((floats){0} + (part[dim] - largest))[0];
            total += weight * part[dim + 1];
            for (int64_t d = 0; d < dim; d++) sum[d] += weight * part[d];
        }
        finish(c, &whole, head, q, sum, largest, total);
    }
}
