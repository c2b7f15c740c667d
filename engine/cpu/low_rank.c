/* What adapters of low rank add to a layer's outputs: out += (x A^T) B for each token, with the A and B of its adapter (LoRA, Hu et al. 2021).
 *
 * Owns the arithmetic. Knows pointers, counts and strides (in elements); knows no torch.
 *
 * Tokens come in tiles with one adapter each (`AdaptedTokens` in `ports.py`). All threads multiply by A, some ranks of a tile at a time, wait
 * for each other, and then by B, some outputs of a tile at a time. So few tokens keep all threads busy, and the weights of a tile are read
 * once. No sum depends on which other tokens there are.
 */
#include "parallel.h"
#include "vectors.h"

enum { RANKS = 4, TOKENS = 3, CHUNK = 512 };

/* x: [tokens, inputs], its rows x_row apart. a: [slots, parts, rank, inputs]. b: [slots, rank, outputs]. out: [tokens, outputs]. inner: [tiles *
 * tile_tokens, parts * rank]. order, begins, counts, slots: of the tiles. ranks: of the slots. ends: of the parts' outputs. */
typedef struct {
    const float *x, *a, *b;
    float *out, *inner;
    const int64_t *order, *begins, *counts, *slots, *ranks, *ends;
    int64_t tiles, inputs, outputs, parts, rank, x_row, tile_tokens;
} low_rank_call;

typedef struct {
    const low_rank_call *call;
    int64_t chunks, taken[2];
} low_rank_work;

extern void GOMP_barrier(void);

INLINE float sum_of(floats x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

/* RANKS rows of A times some tokens. */
INLINE void multiply_tokens(const low_rank_call *p, const float *a, const int64_t *order, float *inner, int tokens) {
    const int64_t whole = p->inputs / LANES * LANES;
    floats sum[TOKENS][RANKS] = {{{0}}};
    for (int64_t i = 0; i < whole; i += LANES) {
        floats weight[RANKS];
        for (int r = 0; r < RANKS; r++) weight[r] = load(a + r * p->inputs + i);
        for (int t = 0; t < tokens; t++) {
            const floats x = kept(load(p->x + order[t] * p->x_row + i));
            for (int r = 0; r < RANKS; r++) sum[t][r] += x * weight[r];
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < RANKS; r++) {
            float total = sum_of(sum[t][r]);
            for (int64_t i = whole; i < p->inputs; i++) total += p->x[order[t] * p->x_row + i] * a[r * p->inputs + i];
            inner[t * p->parts * p->rank + r] = total;
        }
}

/* item: a tile and RANKS rows of one part's A. */
static void shrink(const low_rank_call *p, int64_t item) {
    const int64_t groups = p->parts * p->rank / RANKS, tile = item / groups, row = item % groups * RANKS;
    const int64_t slot = p->slots[tile], count = p->counts[tile];
    if (!count || row % p->rank >= p->ranks[slot]) return;
    const float *a = p->a + (slot * p->parts * p->rank + row) * p->inputs;
    const int64_t *order = p->order + p->begins[tile];
    float *inner = p->inner + tile * p->tile_tokens * p->parts * p->rank + row;
    for (int64_t t = 0; t < count; t += TOKENS, inner += TOKENS * p->parts * p->rank) switch (count - t) {
            case 1: multiply_tokens(p, a, order + t, inner, 1); break;
            case 2: multiply_tokens(p, a, order + t, inner, 2); break;
            default: multiply_tokens(p, a, order + t, inner, TOKENS);
        }
}

/* out[0 .. count) += inner[0 .. RANKS) times as many rows of B. */
INLINE void add_rows(float *restrict out, const float *restrict b, const float *restrict inner, int64_t b_row, int64_t count) {
    const int64_t whole = count / LANES * LANES;
    for (int64_t o = 0; o < whole; o += LANES) {
        floats sum = load(out + o);
        for (int r = 0; r < RANKS; r++) sum += inner[r] * load(b + r * b_row + o);
        store(out + o, sum);
    }
    for (int64_t o = whole; o < count; o++)
        for (int r = 0; r < RANKS; r++) out[o] += inner[r] * b[r * b_row + o];
}

/* item: a tile and up to CHUNK outputs of one part. */
static void expand(const low_rank_call *p, int64_t chunks, int64_t item) {
    const int64_t tile = item / chunks, slot = p->slots[tile], count = p->counts[tile], width = p->parts * p->rank;
    if (!count) return;
    int64_t chunk = item % chunks, part = 0, begin = 0;
    while (chunk >= (p->ends[part] - begin + CHUNK - 1) / CHUNK) {
        chunk -= (p->ends[part] - begin + CHUNK - 1) / CHUNK;
        begin = p->ends[part++];
    }
    begin += chunk * CHUNK;
    const int64_t outputs = least(CHUNK, p->ends[part] - begin);
    for (int64_t r = 0; r < p->ranks[slot]; r += RANKS) {
        const float *b = p->b + (slot * p->rank + r) * p->outputs + begin;
        for (int64_t t = 0; t < count; t++) {
            float *out = p->out + p->order[p->begins[tile] + t] * p->outputs + begin;
            add_rows(out, b, p->inner + (tile * p->tile_tokens + t) * width + part * p->rank + r, p->outputs, outputs);
        }
    }
}

static void work_on(void *data, int thread, int threads) {
    low_rank_work *w = (low_rank_work *)data;
    const low_rank_call *p = w->call;
    int64_t begin, end;
    (void)thread;
    while (take_part(&w->taken[0], p->tiles * (p->parts * p->rank / RANKS), threads, &begin, &end))
        for (int64_t item = begin; item < end; item++) shrink(p, item);
    if (threads > 1) GOMP_barrier();
    while (take_part(&w->taken[1], p->tiles * w->chunks, threads, &begin, &end))
        for (int64_t item = begin; item < end; item++) expand(p, w->chunks, item);
}

void add_low_rank(const low_rank_call *p, int threads) {
    low_rank_work w = {p, 0, {0, 0}};
    for (int64_t part = 0, begin = 0; part < p->parts; begin = p->ends[part++]) w.chunks += (p->ends[part] - begin + CHUNK - 1) / CHUNK;
    parallel(threads, work_on, &w);
}
