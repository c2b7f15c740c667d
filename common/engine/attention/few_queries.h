/* An item of few queries, such as a decode row: lanes are elements of a head.
 *
 * Keys and values are read in place, each once for up to four query heads of its group. Where a head is not whole vectors, a block of
 * them is copied, with zeros behind each row.
 */
#pragma once

#include "item.h"

/* The state of the query heads of one token and one KV head. query, sum: [heads, width], width being dim padded to whole vectors. scores: [heads, SLOTS].
 * copy: [2, SLOTS, width], for keys and values that cannot be read in place. */
typedef struct {
    float *query, *sum, *scores, *copy, *largest, *total, *shrink;
    int64_t width;
} few;

/* The totals of four vectors: each step adds halves of what is left, of two vectors at a time. */
INLINE quads totals_of(const floats *x) {
#if defined(__AVX512F__)
#define HALVES(a, b)                                                                         \
    (SHUFFLED(signs, a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +         \
     SHUFFLED(signs, a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    const floats a = HALVES(x[0], x[1]), b = HALVES(x[2], x[3]);
#undef HALVES
    floats four = SHUFFLED(signs, a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  SHUFFLED(signs, a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    four += SHUFFLED(signs, four, four, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    four += SHUFFLED(signs, four, four, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    four = SHUFFLED(signs, four, four, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    quads totals;
    memcpy(&totals, &four, sizeof totals);
    return totals;
#else
    quads part[4];
    for (int i = 0; i < 4; i++) {
        quads of[LANES / 4];
        memcpy(of, x + i, sizeof of);
        part[i] = of[0];
        for (int j = 1; j < LANES / 4; j++) part[i] += of[j];
    }
    const quads a = SHUFFLED(quad_signs, part[0], part[1], 0, 4, 1, 5) + SHUFFLED(quad_signs, part[0], part[1], 2, 6, 3, 7);
    const quads b = SHUFFLED(quad_signs, part[2], part[3], 0, 4, 1, 5) + SHUFFLED(quad_signs, part[2], part[3], 2, 6, 3, 7);
    return SHUFFLED(quad_signs, a, b, 0, 1, 4, 5) + SHUFFLED(quad_signs, a, b, 2, 3, 6, 7);
#endif
}

INLINE float total_of(floats x) {
    const floats one[4] = {x};
    return totals_of(one)[0];
}

/* scores [heads, slots] of slots whose keys lie one behind the other. */
INLINE void dots(const float *query, int64_t width, const void *keys, float *scores, int heads, int slots, int is_bfloat16) {
    floats sum[4][4] = {{{0}}};
    for (int64_t d = 0; d < width; d += LANES) {
        floats key[4];
#pragma GCC unroll 4
        for (int s = 0; s < slots; s++) key[s] = kept(load_as(keys, s * width + d, is_bfloat16));
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            const floats of_head = kept(load(query + h * width + d));
#pragma GCC unroll 4
            for (int s = 0; s < slots; s++) sum[h][s] += key[s] * of_head;
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
        if (slots == 4) {
            const quads totals = totals_of(sum[h]);
            memcpy(scores + h * SLOTS, &totals, sizeof totals);
            continue;
        }
        for (int s = 0; s < slots; s++) scores[h * SLOTS + s] = total_of(sum[h][s]);
    }
}

/* While keys are read, which is done first, the values that belong to them are fetched, but once for all heads. */
INLINE void score_runs(const few *f, int64_t h, const run *runs, int count, int heads, int is_bfloat16) {
    const int slots = heads == 4 && REGISTERS == 16 ? 2 : 4;
    float *scores = f->scores + h * SLOTS;
    for (int r = 0; r < count; r++) {
        const int64_t row = f->width * (is_bfloat16 ? 2 : 4);
        int64_t s = 0;
        for (; s + slots <= runs[r].count; s += slots) {
            if (h == 0) fetch((const char *)runs[r].values + s * row, slots * row);
            dots(f->query + h * f->width, f->width, moved(runs[r].keys, s * f->width, is_bfloat16), scores + s, heads, slots, is_bfloat16);
        }
        for (; s < runs[r].count; s++)
            dots(f->query + h * f->width, f->width, moved(runs[r].keys, s * f->width, is_bfloat16), scores + s, heads, 1, is_bfloat16);
        scores += runs[r].count;
    }
}

/* sum [heads, vectors] = shrink * sum + weights * values, at element d of a head. While values are read, the keys of the next block are fetched. */
INLINE void weigh(const few *f, int64_t h, int64_t d, const run *runs, int count, const run *next, int heads, int vectors, int is_bfloat16) {
    floats sum[4][8];
#pragma GCC unroll 4
    for (int i = 0; i < heads; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[i][v] = load(f->sum + (h + i) * f->width + d + v * LANES) * f->shrink[h + i];
    const float *weights = f->scores + h * SLOTS;
    const int64_t row = f->width * (is_bfloat16 ? 2 : 4);
    for (int r = 0; r < count; r++) {
        const int64_t ahead = h == 0 && d == 0 ? next[r].count : 0;
        for (int64_t s = 0; s < runs[r].count; s++, weights++) {
            if (s < ahead) fetch((const char *)next[r].keys + s * row, row);
            floats value[8];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) value[v] = kept(load_as(runs[r].values, s * f->width + d + v * LANES, is_bfloat16));
#pragma GCC unroll 4
            for (int i = 0; i < heads; i++)
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) sum[i][v] += value[v] * weights[i * SLOTS];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < heads; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store(f->sum + (h + i) * f->width + d + v * LANES, sum[i][v]);
}

/* Scores become weights, in exponents of two. slots: of the block; the rest of it is filled. */
INLINE void soften(const call *c, const few *f, int64_t h, int64_t slots) {
    float *scores = f->scores + h * SLOTS;
    for (int64_t s = slots; s < padded(slots, LANES); s++) scores[s] = UNSEEN;
    floats most_seen = (floats){0} + LOWEST, sum = {0};
    for (int64_t s = 0; s < slots; s += LANES) {
        if (c->softcap > 0.0f) store(scores + s, capped(load(scores + s), c->softcap));
        most_seen = larger(most_seen, load(scores + s));
    }
    for (int64_t s = slots; s < padded(slots, LANES); s++) scores[s] = UNSEEN; /* a cap lifts it */
    float largest = f->largest[h];
    for (int i = 0; i < LANES; i++) largest = most_seen[i] > largest ? most_seen[i] : largest;
    for (int64_t s = 0; s < slots; s += LANES) {
        const floats weight = exp2_of(load(scores + s) - largest);
        store(scores + s, weight);
        sum += weight;
    }
    f->shrink[h] = exp2_of((floats){0} + (f->largest[h] - largest))[0];
    f->total[h] = f->total[h] * f->shrink[h] + total_of(sum);
    f->largest[h] = largest;
}

INLINE void block_of_heads(const call *c, const few *f, int64_t h, const run *runs, int count, const run *next, int64_t slots, int heads,
                           int is_bfloat16) {
    score_runs(f, h, runs, count, heads, is_bfloat16);
    for (int i = 0; i < heads; i++) soften(c, f, h + i, slots);
    const int widest = (REGISTERS == 32 ? 16 : 8) / heads < 8 ? (REGISTERS == 32 ? 16 : 8) / heads : 8;
    int64_t d = 0;
    for (; d + widest * LANES <= f->width; d += widest * LANES) weigh(f, h, d, runs, count, next, heads, widest, is_bfloat16);
    for (; d + 2 * LANES <= f->width; d += 2 * LANES) weigh(f, h, d, runs, count, next, heads, 2, is_bfloat16);
    for (; d < f->width; d += LANES) weigh(f, h, d, runs, count, next, heads, 1, is_bfloat16);
}

/* next: the runs of the next block, as many as of this one; those that are not there have no slots. */
INLINE void block_of_slots(const call *c, const few *f, const run *runs, int count, const run *next, int64_t slots, int is_bfloat16) {
    const int64_t group = c->heads / c->kv_heads;
    int64_t h = 0;
    for (; h + 4 <= group; h += 4) block_of_heads(c, f, h, runs, count, next, slots, 4, is_bfloat16);
    for (; h + 2 <= group; h += 2) block_of_heads(c, f, h, runs, count, next, slots, 2, is_bfloat16);
    for (; h < group; h++) block_of_heads(c, f, h, runs, count, next, slots, 1, is_bfloat16);
}

/* Copies the keys and values of a block whose rows are not whole vectors. Returns them as one run. */
static run copied(const call *c, const few *f, const run *runs, int count) {
    run all = {f->copy, f->copy + SLOTS * f->width, 0};
    for (int r = 0; r < count; r++) {
        copy_rows(runs[r].keys, runs[r].count, c->dim, f->copy + all.count * f->width, f->width, c->pages_are_bfloat16);
        copy_rows(runs[r].values, runs[r].count, c->dim, f->copy + (SLOTS + all.count) * f->width, f->width, c->pages_are_bfloat16);
        all.count += runs[r].count;
    }
    return all;
}

/* Floats of the state of one KV head, without the copy. */
static int64_t state_floats(int64_t group, int64_t width) { return padded(group * (2 * width + SLOTS + 3), LANES); }

INLINE few state_of(float *memory, int64_t group, int64_t width, float *copy) {
    few f = {.query = memory, .copy = copy, .width = width};
    f.sum = f.query + group * width;
    f.scores = f.sum + group * width;
    f.largest = f.scores + group * SLOTS;
    f.total = f.largest + group;
    f.shrink = f.total + group;
    return f;
}

/* Block by block of the context, all heads of one before the next: they lie together in a page. */
static void few_queries(const call *c, const item *t, int64_t first_head, int64_t kv_heads, float *workspace) {
    const int64_t group = c->heads / c->kv_heads, width = padded(c->dim, LANES), of_head = state_floats(group, width);
    float *copy = workspace + kv_heads * of_head;
    run blocks[2][SLOTS];
    for (int64_t token = 0; token < t->tokens; token++) {
        const int64_t end = t->position + token + 1, first = most(t->first, end - c->window), last = least(t->last, end);
        for (int64_t h = 0; h < kv_heads; h++) {
            const few f = state_of(workspace + h * of_head, group, width, copy);
            const int64_t at = ((t->token + token) * c->heads + (first_head + h) * group) * c->dim;
            copy_rows(moved(c->query, at, c->query_is_bfloat16), group, c->dim, f.query, width, c->query_is_bfloat16);
            for (int64_t i = 0; i < group * width; i++) f.query[i] *= query_scale(c), f.sum[i] = 0.0f;
            for (int64_t i = 0; i < group; i++) f.largest[i] = LOWEST, f.total[i] = 0.0f;
        }
        run *runs = blocks[0], *next = blocks[1];
        int count = find_runs(c, t, first_head, first, least(first + SLOTS, last), runs);
        for (int64_t slot = first, h = 0; slot < last;) {
            const few f = state_of(workspace + h * of_head, group, width, copy);
            const int64_t slots = least(SLOTS, last - slot);
            if (++h == kv_heads) h = 0, slot += SLOTS;
            const int next_count = find_runs(c, t, first_head + h, slot, least(slot + SLOTS, last), next);
            for (int r = next_count; r < count; r++) next[r].count = 0;
            if (width != c->dim) {
                const run in_copy = copied(c, &f, runs, count), nothing = {0};
                block_of_slots(c, &f, &in_copy, 1, &nothing, slots, 0);
            }
            else if (c->pages_are_bfloat16) block_of_slots(c, &f, runs, count, next, slots, 1);
            else block_of_slots(c, &f, runs, count, next, slots, 0);
            run *done = runs;
            runs = next, next = done, count = next_count;
        }
        for (int64_t h = 0; h < kv_heads; h++) {
            const few f = state_of(workspace + h * of_head, group, width, copy);
            for (int64_t i = 0; i < group; i++) finish(c, t, first_head + h, token * group + i, f.sum + i * width, 1, f.largest[i], f.total[i]);
        }
    }
}
