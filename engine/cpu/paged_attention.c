/* Attention over KV pages on CPU: decode rows and chunks, float32 and bfloat16 in, float32 within.
 *
 * Owns the sharing of items among threads. Does not know steps: `plan.h` makes the items.
 *
 * Both kinds of items pass once over the context, in blocks of slots, with an online softmax (Milakov and Gimelshein 2018) in powers of two.
 */
#include "few_queries.h"
#include "many_queries.h"
#include "parallel.h"
#include "plan.h"

/* How many queries an item should have at most, unless one token has more: two panels share what is copied. */
int64_t item_queries(void) { return 2 * WIDE; }

/* How many floats each thread needs for items of up to so many queries. */
int64_t workspace_floats(int64_t queries, int64_t kv_heads, int64_t group, int64_t dim) {
    const int64_t width = padded(dim, LANES), tiled = padded(dim, TILE), panels = padded(queries, WIDE);
    const int64_t few_floats = state_floats(kv_heads * group, width);
    const int64_t many_floats = panels * (2 * tiled + 3) + WIDE + SLOTS * (WIDE + 2 * tiled);
    return padded(most(few_floats, many_floats), 64);
}

static void work(void *data, int thread, int threads) {
    (void)threads;
    call *c = (call *)data;
    float *workspace = c->workspace + thread * c->workspace_floats;
    const int64_t turns = (c->kv_heads + c->together - 1) / c->together;
    for (;;) {
        const int64_t next = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED);
        if (next >= c->item_count * turns) return;
        const item *t = c->items + next / turns;
        const int64_t first = next % turns * c->together, last = least(first + c->together, c->kv_heads);
        const int is_many = t->tokens * (c->heads / c->kv_heads) >= MANY;
        if (!is_many) few_queries(c, t, first, last - first, workspace);
        for (int64_t head = first; head < last; head++) {
            if (is_many) many_queries(c, t, head, workspace);
            if (t->parts > 1) merge(c, t, head, workspace);
        }
    }
}

/* plan: what it says of a layer does not count. */
typedef struct {
    const call *plan;
    const void *query, *keys, *values;
    void *out;
} layer_call;

void paged_attention(const layer_call *l, int threads) {
    call c = *l->plan;
    const int64_t sharing = least(threads, c.threads);
    c.query = l->query, c.keys = l->keys, c.values = l->values, c.out = l->out;
    c.next = 0;
    c.together = most(1, least(c.kv_heads, c.item_count * c.kv_heads / (sharing * TURNS)));
    memset(c.done, 0, c.split_count * c.kv_heads * sizeof *c.done);
    parallel((int)sharing, work, &c);
}
