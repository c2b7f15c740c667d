/* Attention over KV pages on CPU: decode rows and chunks, float32 and bfloat16 in, float32 within.
 *
 * Owns the sharing of items among threads. Does not know steps: `native.py` makes the items.
 *
 * Both kinds of items pass once over the context, in blocks of slots, with an online softmax (Milakov and Gimelshein 2018) in powers of two.
 */
#include "few_queries.h"
#include "many_queries.h"
#include "parallel.h"

/* How many queries an item should have at most, unless one token has more: two panels share what is copied. */
int64_t item_queries(void) { return 2 * WIDE; }

/* How many floats each thread needs for items of up to so many queries, and how many a partial result takes. */
int64_t workspace_floats(int64_t queries, int64_t group, int64_t dim) {
    const int64_t width = padded(dim, LANES), tiled = padded(dim, TILE), panels = padded(queries, WIDE);
    const int64_t few_floats = group * (2 * width + SLOTS + 3) + 2 * SLOTS * width;
    const int64_t many_floats = panels * (2 * tiled + 3) + WIDE + SLOTS * (WIDE + 2 * tiled);
    return padded(most(few_floats, many_floats), 64);
}

static void work(void *data, int thread, int threads) {
    (void)threads;
    call *c = (call *)data;
    float *workspace = c->workspace + thread * c->workspace_floats;
    for (;;) {
        const int64_t next = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED);
        if (next >= c->item_count * c->kv_heads) return;
        const item *t = c->items + next / c->kv_heads;
        const int64_t head = next % c->kv_heads;
        if (t->tokens * (c->heads / c->kv_heads) >= MANY) many_queries(c, t, head, workspace);
        else few_queries(c, t, head, workspace);
        if (t->parts > 1) merge(c, t, head, workspace);
    }
}

void paged_attention(call *c) {
    c->next = 0;
    memset(c->done, 0, c->split_count * c->kv_heads * sizeof *c->done);
    parallel((int)c->threads, work, c);
}
