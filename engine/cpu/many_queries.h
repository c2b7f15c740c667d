/* An item of many queries, such as a part of a chunk: lanes are queries, a query being one head of one token.
 *
 * A block of keys and values is copied once. Two products of matrices follow, in tiles that stay in registers: keys by queries, and
 * transposed values by weights. No element of a head is a lane, so no sum is over lanes, and any size of heads will do.
 */
#pragma once

#include "item.h"

enum { WIDE = PANEL * LANES };

/* queries, sum: [panels, width, WIDE], width being dim padded to whole tiles. weights: [SLOTS, WIDE]. keys, values: [SLOTS, width].
 * seen: [panels, WIDE], the position of each query as int32. largest, total: [panels, WIDE]. shrink: [WIDE]. */
typedef struct {
    float *queries, *sum, *weights, *keys, *values, *seen, *largest, *total, *shrink;
    int64_t width;
} many;

/* out [rows, vectors] = shrink * out + the product of a [rows, depth] and b [depth, vectors]; without shrink, only the product. Steps are
 * in floats: a_row and a_step between the rows and along the depth of a. */
INLINE void tile(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t depth, float *out, const float *shrink, int vectors) {
    floats sum[TILE][PANEL];
#pragma GCC unroll 8
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[r][v] = shrink ? load(out + r * WIDE + v * LANES) * load(shrink + v * LANES) : (floats){0};
    for (int64_t k = 0; k < depth; k++, a += a_step, b += WIDE) {
        floats column[PANEL];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) column[v] = load(b + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < TILE; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] += column[v] * a[r * a_row];
    }
#pragma GCC unroll 8
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(out + r * WIDE + v * LANES, sum[r][v]);
}

/* Hides from each query the slots beyond its position and before its window. first: the block's first slot. */
INLINE void hide(const call *c, const int32_t *seen, float *weights, int64_t first, int64_t slots, int vectors) {
    const int32_t window = (int32_t)least(c->window, 1 << 30);
    for (int v = 0; v < vectors; v++) {
        signs at;
        memcpy(&at, seen + v * LANES, sizeof at);
        for (int64_t s = 0; s < slots; s++) {
            float *place = weights + s * WIDE + v * LANES;
            const signs slot = (signs){0} + (int32_t)(first + s);
            const words sees = (words)((slot <= at) & (slot > at - window));
            store(place, (floats)((sees & (words)load(place)) | (~sees & (words)((floats){0} + UNSEEN))));
        }
    }
}

/* Scores become weights, in exponents of two, and the state of the panel follows. */
INLINE void soften_panel(const many *m, int64_t panel, int64_t slots, int vectors) {
    for (int v = 0; v < vectors; v++) {
        float *weights = m->weights + v * LANES, *state = m->largest + panel * WIDE + v * LANES;
        const floats before = load(state);
        floats largest = before, sum = {0};
        for (int64_t s = 0; s < slots; s++) largest = larger(largest, load(weights + s * WIDE));
        for (int64_t s = 0; s < slots; s++) {
            const floats weight = exp2_of(load(weights + s * WIDE) - largest);
            store(weights + s * WIDE, weight);
            sum += weight;
        }
        const floats shrink = exp2_of(before - largest);
        store(state, largest);
        store(m->shrink + v * LANES, shrink);
        state = m->total + panel * WIDE + v * LANES;
        store(state, load(state) * shrink + sum);
    }
}

INLINE void block_of_panel(const call *c, const many *m, int64_t panel, int64_t first, int64_t slots, int hides, int vectors) {
    const float *queries = m->queries + panel * m->width * WIDE;
    float *sum = m->sum + panel * m->width * WIDE;
    for (int64_t s = 0; s < slots; s += TILE) tile(m->keys + s * m->width, m->width, 1, queries, c->dim, m->weights + s * WIDE, NULL, vectors);
    if (c->softcap > 0.0f)
        for (int64_t i = 0; i < slots * WIDE; i += LANES) store(m->weights + i, capped(load(m->weights + i), c->softcap));
    if (hides) hide(c, (const int32_t *)m->seen + panel * WIDE, m->weights, first, slots, vectors);
    soften_panel(m, panel, slots, vectors);
    for (int64_t d = 0; d < c->dim; d += TILE) tile(m->values + d, 1, m->width, m->weights, slots, sum + d * WIDE, m->shrink, vectors);
}

INLINE quads load_quad(const void *from, int64_t at, int is_bfloat16) {
    quads x;
    if (!is_bfloat16) memcpy(&x, (const float *)from + at, sizeof x);
    else
        for (int i = 0; i < 4; i++) x[i] = load_one(from, at + i, 1);
    return x;
}

/* Lays out the queries of an item, four at a time, and sets their state. */
static void begin_many(const call *c, const item *t, int64_t head, const many *m, int64_t queries) {
    const int64_t group = c->heads / c->kv_heads, dim = c->dim, all = padded(queries, WIDE);
    const float scale = query_scale(c);
    int32_t *seen = (int32_t *)m->seen;
    memset(m->sum, 0, all * m->width * sizeof *m->sum);
    for (int64_t q = 0; q < all; q += 4) {
        float *to = m->queries + q / WIDE * m->width * WIDE + q % WIDE;
        int64_t at[4], d = 0;
        for (int i = 0; i < 4; i++) {
            const int64_t query = least(q + i, queries - 1), token = query / group;
            at[i] = ((t->token + token) * c->heads + head * group + query % group) * dim;
            seen[q + i] = (int32_t)(t->position + token);
            m->largest[q + i] = LOWEST;
            m->total[q + i] = 0.0f;
        }
        for (; d + 4 <= dim; d += 4) {
            quads x[4];
            for (int i = 0; i < 4; i++) x[i] = load_quad(c->query, at[i] + d, c->query_is_bfloat16) * scale;
            transpose(x);
            for (int i = 0; i < 4; i++) memcpy(to + (d + i) * WIDE, x + i, sizeof *x);
        }
        for (; d < dim; d++)
            for (int i = 0; i < 4; i++) to[d * WIDE + i] = scale * load_one(c->query, at[i] + d, c->query_is_bfloat16);
    }
}

/* Writes the results of an item, four queries at a time. The room of keys is free by now. */
static void finish_many(const call *c, const item *t, int64_t head, const many *m, int64_t queries) {
    for (int64_t q = 0; q < queries; q += 4) {
        const float *sum = m->sum + q / WIDE * m->width * WIDE + q % WIDE;
        for (int64_t d = 0; d < m->width; d += 4) {
            quads x[4];
            for (int i = 0; i < 4; i++) memcpy(x + i, sum + (d + i) * WIDE, sizeof *x);
            transpose(x);
            for (int i = 0; i < 4; i++) memcpy(m->keys + i * m->width + d, x + i, sizeof *x);
        }
        for (int64_t i = 0; i < least(4, queries - q); i++) finish(c, t, head, q + i, m->keys + i * m->width, m->largest[q + i], m->total[q + i]);
    }
}

/* Copies the keys and values of a block, and zeros the rows that fill its last tile. */
static void copy_block(const call *c, const item *t, int64_t head, const many *m, int64_t first, int64_t slots) {
    run runs[SLOTS];
    const int count = find_runs(c, t, first, first + slots, runs);
    float *keys = m->keys, *values = m->values;
    for (int r = 0; r < count; r++) {
        const int64_t at = runs[r].at + head * c->head_stride;
        copy_rows(moved(c->keys, at, c->pages_are_bfloat16), runs[r].slots, c->dim, keys, m->width, c->pages_are_bfloat16);
        copy_rows(moved(c->values, at, c->pages_are_bfloat16), runs[r].slots, c->dim, values, m->width, c->pages_are_bfloat16);
        keys += runs[r].slots * m->width;
        values += runs[r].slots * m->width;
    }
    memset(keys, 0, (padded(slots, TILE) - slots) * m->width * sizeof *keys);
}

static void many_queries(const call *c, const item *t, int64_t head, float *workspace) {
    const int64_t group = c->heads / c->kv_heads, queries = t->tokens * group, panels = padded(queries, WIDE) / WIDE;
    many m = {.queries = workspace, .width = padded(c->dim, TILE)};
    m.sum = m.queries + panels * m.width * WIDE;
    m.weights = m.sum + panels * m.width * WIDE;
    m.keys = m.weights + SLOTS * WIDE;
    m.values = m.keys + SLOTS * m.width;
    m.seen = m.values + SLOTS * m.width;
    m.largest = m.seen + panels * WIDE;
    m.total = m.largest + panels * WIDE;
    m.shrink = m.total + panels * WIDE;
    begin_many(c, t, head, &m, queries);
    const int64_t last_token = t->position + t->tokens - 1, last = least(t->last, last_token + 1);
    for (int64_t slot = most(t->first, t->position + 1 - c->window); slot < last; slot += SLOTS) {
        const int64_t slots = least(SLOTS, last - slot);
        const int hides = slot + slots - 1 > t->position || slot <= last_token - c->window;
        copy_block(c, t, head, &m, slot, slots);
        for (int64_t p = 0; p < panels; p++) {
            const int64_t left = queries - p * WIDE, last_query = least(queries, (p + 1) * WIDE) - 1;
            const int64_t seen = least(slots, t->position + last_query / group + 1 - slot);
            if (seen <= 0) continue;
            if (left > 2 * LANES) block_of_panel(c, &m, p, slot, seen, hides, 3);
            else if (left > LANES) block_of_panel(c, &m, p, slot, seen, hides, 2);
            else block_of_panel(c, &m, p, slot, seen, hides, 1);
        }
    }
    finish_many(c, t, head, &m, queries);
}
