/* The items of a step: how its tokens and their contexts are divided, and in which order they are computed.
 *
 * Owns the division. Does not know what an item computes (`item.h` says what it is), or the memory of the step (`native.py`).
 *
 * Long contexts are split, so that few rows give work to all threads. A row is split by its own length, whatever the other rows and the number
 * of threads are: sums are made in one order. The largest items come first.
 */
#pragma once

#include <stdlib.h>

#include "item.h"

/* Tokens [begin, end) of the step: a chunk, or one token of a decode row, the first at position `start` of the row. */
typedef struct {
    int64_t begin, end, start, row;
} segment;

/* item_tokens: most tokens of an item. split_slots: an item of a split covers about so many or more. split_items: a segment becomes at most about
 * so many items, all KV heads together. lightest: a slot costs as much for a few queries as for this many. items: null at first, when they are
 * counted; then as many as item_count. Found: item_count, splits, partials (results of splits, in one KV head) and cost (queries times
 * slots, in one KV head). */
typedef struct {
    const segment *segments;
    int64_t count, group, kv_heads, window, item_tokens, split_slots, split_items, lightest;
    item *items;
    int64_t item_count, splits, partials, cost;
} planning;

static void add_parts(planning *p, item whole, int64_t most_parts) {
    const int64_t slots = whole.last - whole.first, parts = most(1, least(most_parts, (slots + p->split_slots - 1) / p->split_slots));
    const int64_t queries = whole.tokens * p->group, of_slot = most(queries, p->lightest), split = p->splits, first = p->partials;
    if (parts > 1) p->partials += parts * queries, p->splits++;
    for (int64_t part = 0; part < parts; part++, p->item_count++) {
        item t = whole;
        t.first = whole.first + slots * part / parts;
        t.last = whole.first + slots * (part + 1) / parts;
        t.parts = parts;
        if (parts > 1) t.partial = first + part * queries, t.first_partial = first, t.split = split;
        t.cost = of_slot * (t.last - t.first);
        p->cost += t.cost;
        if (p->items) p->items[p->item_count] = t;
    }
}

/* The largest first; those that cost the same in the order of the step. */
static int by_cost(const void *first, const void *second) {
    const item *a = (const item *)first, *b = (const item *)second;
    if (a->cost != b->cost) return a->cost > b->cost ? -1 : 1;
    if (a->token != b->token) return a->token < b->token ? -1 : 1;
    return a->first < b->first ? -1 : a->first > b->first;
}

void plan_items(planning *p) {
    p->item_count = p->splits = p->partials = p->cost = 0;
    for (int64_t i = 0; i < p->count; i++) {
        const segment *s = p->segments + i;
        const int64_t wholes = (s->end - s->begin + p->item_tokens - 1) / p->item_tokens;
        for (int64_t token = s->begin; token < s->end; token += p->item_tokens) {
            const int64_t tokens = least(p->item_tokens, s->end - token), position = s->start + token - s->begin;
            const int64_t first = most(0, position + 1 - p->window);
            const item whole = {.token = token, .tokens = tokens, .position = position, .row = s->row, .first = first, .last = position + tokens};
            add_parts(p, whole, p->split_items / (p->kv_heads * wholes));
        }
    }
    if (p->items) qsort(p->items, (size_t)p->item_count, sizeof *p->items, by_cost);
}
