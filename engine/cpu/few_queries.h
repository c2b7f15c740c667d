/* An item of few queries, such as a decode row: lanes are elements of a head.
 *
 * Keys and values are read in place, block by block, and as they lie in a page: the keys of all heads, then the values of all. Each is read
 * once for up to four query heads of its group. What comes AHEAD bytes later is fetched meanwhile. Where a head is not whole vectors, its part of
 * a block is copied, with zeros behind each row.
 */
#pragma once

#include "item.h"

enum {
    BLOCK = 32,   /* slots of a block, or those of a page where that has more, but not above SLOTS */
    AHEAD = 8192, /* bytes */
};

/* The state of the query heads of one token and some KV heads, which are `queries`. query, sum: [queries, width], width being dim padded to whole
 * vectors. scores: [queries, SLOTS]. largest, total, shrink and found, the last block's largest or total: [queries]. copy: [SLOTS, width], for keys
 * or values that cannot be read in place. */
typedef struct {
    float *query, *sum, *scores, *largest, *total, *shrink, *found, *copy;
    int64_t queries, width;
} few;

/* The runs of a block, which has `slots` in all. */
typedef struct {
    run runs[SLOTS];
    int64_t slots;
    int count;
} block;

/* Keys, or values, of one KV head in a block. */
typedef struct {
    const block *of;
    const char *base;
} piece;

INLINE floats joined(floats a, floats b, int adds) { return adds ? a + b : larger(a, b); }
INLINE quads joined_quads(quads a, quads b, int adds) { return adds ? a + b : larger_quad(a, b); }

/* The totals of four vectors, or the largest numbers in them: each step joins halves of what is left, of two vectors at a time. */
INLINE quads folded(const floats *x, int adds) {
#if defined(__AVX512F__)
#define HALVES(a, b)                                                                              \
    joined(SHUFFLED(signs, a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),         \
           SHUFFLED(signs, a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31), adds)
    const floats a = HALVES(x[0], x[1]), b = HALVES(x[2], x[3]);
#undef HALVES
    floats four = joined(SHUFFLED(signs, a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                         SHUFFLED(signs, a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31), adds);
    four = joined(four, SHUFFLED(signs, four, four, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13), adds);
    four = joined(four, SHUFFLED(signs, four, four, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14), adds);
    four = SHUFFLED(signs, four, four, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    quads numbers;
    memcpy(&numbers, &four, sizeof numbers);
    return numbers;
#else
    quads part[4];
    for (int i = 0; i < 4; i++) {
        quads of[LANES / 4];
        memcpy(of, x + i, sizeof of);
        part[i] = of[0];
        for (int j = 1; j < LANES / 4; j++) part[i] = joined_quads(part[i], of[j], adds);
    }
    transpose(part);
    return joined_quads(joined_quads(part[0], part[2], adds), joined_quads(part[1], part[3], adds), adds);
#endif
}

INLINE float total_of(floats x) {
    const floats one[4] = {x};
    return folded(one, 1)[0];
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
            const quads totals = folded(sum[h], 1);
            memcpy(scores + h * SLOTS, &totals, sizeof totals);
            continue;
        }
        for (int s = 0; s < slots; s++) scores[h * SLOTS + s] = total_of(sum[h][s]);
    }
}

/* One row of a piece, if it has that row. bytes: of the row. */
INLINE void fetch_row(const piece *p, int r, int64_t s, int64_t bytes, int64_t item) {
    if (r < p->of->count && s < p->of->runs[r].slots) fetch(p->base + p->of->runs[r].at * item + s * bytes, bytes);
}

/* The scores of queries [h, h + heads), which are of one KV head. */
INLINE void score(const few *f, int64_t h, const piece *keys, const piece *ahead, int heads, int is_bfloat16) {
    const int slots = heads == 4 && REGISTERS == 16 ? 2 : 4;
    const int64_t item = is_bfloat16 ? 2 : 4, row = f->width * item;
    const float *query = f->query + h * f->width;
    float *scores = f->scores + h * SLOTS;
    for (int r = 0; r < keys->of->count; r++) {
        const run of = keys->of->runs[r];
        const char *key = keys->base + of.at * item;
        int64_t s = 0;
        for (; s + slots <= of.slots; s += slots) {
            if (ahead)
                for (int i = 0; i < slots; i++) fetch_row(ahead, r, s + i, row, item);
            dots(query, f->width, key + s * row, scores + s, heads, slots, is_bfloat16);
        }
        for (; s < of.slots; s++) {
            if (ahead) fetch_row(ahead, r, s, row, item);
            dots(query, f->width, key + s * row, scores + s, heads, 1, is_bfloat16);
        }
        scores += of.slots;
    }
}

/* sum [heads, vectors] = shrink * sum + weights * values, at element d of a head. */
INLINE void weigh(const few *f, int64_t h, int64_t d, const piece *values, const piece *ahead, int heads, int vectors, int is_bfloat16) {
    const int64_t item = is_bfloat16 ? 2 : 4, row = f->width * item;
    floats sum[4][8];
#pragma GCC unroll 4
    for (int i = 0; i < heads; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[i][v] = load(f->sum + (h + i) * f->width + d + v * LANES) * f->shrink[h + i];
    const float *weights = f->scores + h * SLOTS;
    for (int r = 0; r < values->of->count; r++) {
        const run of = values->of->runs[r];
        const char *at = values->base + (of.at + d) * item;
        for (int64_t s = 0; s < of.slots; s++, weights++) {
            if (ahead) fetch_row(ahead, r, s, row, item);
            floats value[8];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) value[v] = kept(load_as(at + s * row, v * LANES, is_bfloat16));
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

INLINE void weigh_heads(const few *f, int64_t h, const piece *values, const piece *ahead, int heads, int is_bfloat16) {
    const int widest = (REGISTERS == 32 ? 16 : 8) / heads < 8 ? (REGISTERS == 32 ? 16 : 8) / heads : 8;
    int64_t d = 0;
    for (; d + widest * LANES <= f->width; d += widest * LANES) weigh(f, h, d, values, d ? NULL : ahead, heads, widest, is_bfloat16);
    for (; d + 2 * LANES <= f->width; d += 2 * LANES) weigh(f, h, d, values, d ? NULL : ahead, heads, 2, is_bfloat16);
    for (; d < f->width; d += LANES) weigh(f, h, d, values, d ? NULL : ahead, heads, 1, is_bfloat16);
}

/* Scores of a block become weights, in exponents of two. */
static void soften(const call *c, const few *f, int64_t slots) {
    const int64_t end = padded(slots, LANES);
    for (int64_t q = 0; q < f->queries; q += 4) {
        floats found[4];
        for (int i = 0; i < 4; i++) {
            float *scores = f->scores + (q + i) * SLOTS;
            if (c->softcap > 0.0f)
                for (int64_t s = 0; s < end; s += LANES) store(scores + s, capped(load(scores + s), c->softcap));
            for (int64_t s = slots; s < end; s++) scores[s] = UNSEEN;
            found[i] = load(scores);
            for (int64_t s = LANES; s < end; s += LANES) found[i] = larger(found[i], load(scores + s));
        }
        const quads largest = folded(found, 0);
        memcpy(f->found + q, &largest, sizeof largest);
    }
    for (int64_t q = 0; q < f->queries; q += LANES) {
        const floats before = load(f->largest + q), largest = larger(before, load(f->found + q));
        store(f->shrink + q, exp2_of(before - largest));
        store(f->largest + q, largest);
    }
    for (int64_t q = 0; q < f->queries; q += 4) {
        floats found[4];
        for (int i = 0; i < 4; i++) {
            float *scores = f->scores + (q + i) * SLOTS;
            found[i] = (floats){0};
            for (int64_t s = 0; s < end; s += LANES) {
                const floats weight = exp2_of(load(scores + s) - f->largest[q + i]);
                store(scores + s, weight);
                found[i] += weight;
            }
        }
        const quads total = folded(found, 1);
        memcpy(f->found + q, &total, sizeof total);
    }
    for (int64_t q = 0; q < f->queries; q += LANES) store(f->total + q, load(f->total + q) * load(f->shrink + q) + load(f->found + q));
}

/* Keys or values of a block, in the order in which they are read: the keys of all of `kv_heads`, then the values. */
static piece piece_of(const call *c, const block *b, int64_t first_head, int64_t kv_heads, int64_t number) {
    const void *from = number < kv_heads ? c->keys : c->values;
    return (piece){b, moved(from, (first_head + number % kv_heads) * c->head_stride, c->pages_are_bfloat16)};
}

/* How many pieces later what is fetched is read. */
static int64_t pieces_ahead(const call *c, const block *b, int64_t kv_heads) {
    const int64_t bytes = b->slots * c->dim * (c->pages_are_bfloat16 ? 2 : 4);
    return least(2 * kv_heads, (AHEAD + bytes - 1) / bytes);
}

/* Fetches what no block before this one has. */
static void fetch_first(const call *c, const block *b, int64_t first_head, int64_t kv_heads) {
    const int64_t item = c->pages_are_bfloat16 ? 2 : 4, row = c->dim * item;
    for (int64_t number = 0; number < pieces_ahead(c, b, kv_heads); number++) {
        const piece p = piece_of(c, b, first_head, kv_heads, number);
        for (int r = 0; r < b->count; r++)
            for (int64_t s = 0; s < b->runs[r].slots; s++) fetch_row(&p, r, s, row, item);
    }
}

/* A piece whose rows are not whole vectors, with zeros behind each. of: becomes the runs of the copy. */
static piece copied(const call *c, const few *f, const piece *p, block *of) {
    of->count = 1;
    of->runs[0] = (run){0, p->of->slots};
    float *to = f->copy;
    for (int r = 0; r < p->of->count; r++) {
        const run rows = p->of->runs[r];
        copy_rows(moved(p->base, rows.at, c->pages_are_bfloat16), rows.slots, c->dim, to, f->width, c->pages_are_bfloat16);
        to += rows.slots * f->width;
    }
    return (piece){of, (const char *)f->copy};
}

INLINE void read_piece(const few *f, int64_t h, const piece *read, const piece *ahead, int are_keys, int heads, int is_bfloat16) {
    if (are_keys) score(f, h, read, ahead, heads, is_bfloat16);
    else weigh_heads(f, h, read, ahead, heads, is_bfloat16);
}

INLINE void block_of_slots(const call *c, const few *f, const block *now, const block *next, int64_t first_head, int64_t kv_heads, int is_bfloat16) {
    const int64_t group = c->heads / c->kv_heads, pieces = 2 * kv_heads, further = pieces_ahead(c, now, kv_heads);
    for (int64_t number = 0; number < pieces; number++) {
        if (number == kv_heads) soften(c, f, now->slots);
        piece read = piece_of(c, now, first_head, kv_heads, number);
        const int is_later = number + further >= pieces, is_copied = f->width != c->dim;
        const piece ahead = piece_of(c, is_later ? next : now, first_head, kv_heads, number + further - (is_later ? pieces : 0));
        block of_copy;
        if (is_copied) read = copied(c, f, &read, &of_copy);
        const int64_t begin = number % kv_heads * group, end = begin + group;
        int64_t h = begin;
        const piece *fetched = is_copied ? NULL : &ahead;
        for (; h + 4 <= end; h += 4) read_piece(f, h, &read, h == begin ? fetched : NULL, number < kv_heads, 4, is_bfloat16);
        for (; h + 2 <= end; h += 2) read_piece(f, h, &read, h == begin ? fetched : NULL, number < kv_heads, 2, is_bfloat16);
        for (; h < end; h++) read_piece(f, h, &read, h == begin ? fetched : NULL, number < kv_heads, 1, is_bfloat16);
    }
}

/* Floats of the state of so many queries. The arrays of numbers are whole vectors. */
static int64_t state_floats(int64_t queries, int64_t width) {
    const int64_t all = padded(queries, LANES);
    return all * (2 * width + SLOTS + 4) + SLOTS * width;
}

static few state_of(float *memory, int64_t queries, int64_t width) {
    const int64_t all = padded(queries, LANES);
    few f = {.query = memory, .queries = queries, .width = width};
    f.sum = f.query + all * width;
    f.scores = f.sum + all * width;
    f.largest = f.scores + all * SLOTS;
    f.total = f.largest + all;
    f.shrink = f.total + all;
    f.found = f.shrink + all;
    f.copy = f.found + all;
    return f;
}

/* token: of the item. */
static void begin_few(const call *c, const item *t, int64_t token, int64_t first_head, const few *f) {
    const int64_t all = padded(f->queries, LANES), at = ((t->token + token) * c->heads + first_head * (c->heads / c->kv_heads)) * c->dim;
    const float scale = query_scale(c);
    copy_rows(moved(c->query, at, c->query_is_bfloat16), f->queries, c->dim, f->query, f->width, c->query_is_bfloat16);
    for (int64_t i = 0; i < f->queries * f->width; i++) f->query[i] *= scale;
    memset(f->sum, 0, f->queries * f->width * sizeof *f->sum);
    memset(f->scores + f->queries * SLOTS, 0, (all - f->queries) * SLOTS * sizeof *f->scores);
    for (int64_t q = 0; q < all; q++) f->largest[q] = LOWEST, f->total[q] = f->found[q] = 0.0f;
}

/* The block of [first, last) that begins at `first`; it has no slots if nothing is left. Blocks end where pages do. */
static void find_block(const call *c, const item *t, int64_t first, int64_t last, block *b) {
    const int64_t size = least(SLOTS, most(BLOCK, c->page_size)), end = least(last, (first / size + 1) * size);
    b->slots = most(0, end - first);
    b->count = find_runs(c, t, first, end, b->runs);
}

static void few_queries(const call *c, const item *t, int64_t first_head, int64_t kv_heads, float *workspace) {
    const int64_t group = c->heads / c->kv_heads, width = padded(c->dim, LANES);
    const few f = state_of(workspace, kv_heads * group, width);
    for (int64_t token = 0; token < t->tokens; token++) {
        const int64_t end = t->position + token + 1, last = least(t->last, end);
        int64_t slot = most(t->first, end - c->window);
        block blocks[2];
        find_block(c, t, slot, last, blocks);
        if (slot < last) fetch_first(c, blocks, first_head, kv_heads);
        begin_few(c, t, token, first_head, &f);
        for (int turn = 0; slot < last; turn = !turn) {
            const block *now = blocks + turn;
            slot += now->slots;
            find_block(c, t, slot, last, blocks + !turn);
            if (c->pages_are_bfloat16 && width == c->dim) block_of_slots(c, &f, now, blocks + !turn, first_head, kv_heads, 1);
            else block_of_slots(c, &f, now, blocks + !turn, first_head, kv_heads, 0);
        }
        for (int64_t q = 0; q < f.queries; q++) finish(c, t, first_head + q / group, token * group + q % group, f.sum + q * width, f.largest[q], f.total[q]);
    }
}
