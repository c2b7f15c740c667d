/* The draw of a token from the logits of each row, as `Kernels.sample` says: filters, noise, and the largest of what is left.
 *
 * Owns the arithmetic of it, which gives the bits that `torch_kernels` gives, and how rows and vocabularies are divided among threads. Knows
 * pointers, counts and strides (in elements); knows no torch.
 *
 * A token's place in a row is one number, by falling logit and, where those are equal, rising id: the bits of its scaled logit, which is at
 * most 0, without their sign, and the id in the ID_BITS below. What the filters leave is the tokens up to a last place.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "parallel.h"
#include "vectors.h"

/* BUCKETS: of places, by their upper bits. DIGIT: how many bits of a place are looked at next. */
enum { BLOCK = 512, ID_BITS = 21, DIGIT = 8, DIGITS = 5, BUCKETS = 1 << (31 + ID_BITS - DIGIT * DIGITS), ALONE = 1 << 14 };
#define EVERYTHING UINT64_MAX

typedef double doubles __attribute__((vector_size(8 * LANES)));

/* A token, and its logit or its logit with noise. */
typedef struct {
    float value;
    int32_t token;
} choice;

/* logits: [rows, vocab], their rows `row` apart. temperature: [rows], as are the next six; null: all rows are greedy, and these have no
 * meaning. found: [rows, parts], what each thread finds in its part of the vocabulary. best: [rows], of the whole vocabulary. last: [rows],
 * the last places that stay. places: [parts, vocab], for each thread. tokens: [rows]. parts: most threads. */
typedef struct {
    const float *logits, *temperature;
    const int64_t *top_k;
    const float *top_p, *min_logit;
    const int64_t *seed, *position;
    choice *found, *best;
    uint64_t *last, *places;
    int64_t *tokens;
    int64_t rows, vocab, row, parts;
    float greedy_below;
    int64_t taken;
} sample_work;

/* --- arithmetic, in which each operation is rounded: no sum is fused with a product or made in another order --------------------------- */

INLINE floats sum(floats a, floats b) { return kept(a + b); }
INLINE floats product(floats a, floats b) { return kept(a * b); }
INLINE floats all(float x) { return (floats){0} + x; }
INLINE floats chosen(signs where, floats a, floats b) { return (floats)((where & (signs)a) | (~where & (signs)b)); }

/* As `torch_kernels.exponential`: e^x for x of at most 0. */
INLINE floats exponential(floats x) {
    static const float terms[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    const floats inside = chosen(x < -87.0f, all(-87.0f), x), rounds = all(12582912.0f);
    const floats whole = sum(sum(product(inside, all(1.44269504f)), rounds), -rounds);
    const floats rest = sum(sum(inside, -product(whole, all(0.693359375f))), product(whole, all(2.12194440e-4f)));
    floats y = product(rest, all(terms[0]));
    for (int i = 1; i < 5; i++) y = product(sum(y, all(terms[i])), rest);
    y = sum(sum(product(sum(y, all(terms[5])), product(rest, rest)), rest), all(1.0f));
    y = product(y, (floats)((__builtin_convertvector(whole, signs) + 127) << 23));
    return chosen(x < -87.0f, all(0.0f), y);
}

/* As `torch_kernels._logarithm`. */
INLINE floats logarithm(floats exponent, floats rest) {
    static const float terms[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                                  -1.6668057665e-1f, 2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
    const floats square = product(rest, rest);
    floats y = product(rest, all(terms[0]));
    for (int i = 1; i < 8; i++) y = product(sum(y, all(terms[i])), rest);
    y = product(product(sum(y, all(terms[8])), rest), square);
    y = sum(sum(y, -product(exponent, all(2.12194440e-4f))), -product(square, all(0.5f)));
    return sum(sum(rest, y), product(exponent, all(0.693359375f)));
}

INLINE floats parts_of(floats x, floats *exponent) {
    const signs whole = ((signs)x - 0x3F3504F3) >> 23;
    *exponent = __builtin_convertvector(whole, floats);
    return sum((floats)((signs)x - (whole << 23)), all(-1.0f));
}

/* As `torch_kernels.gumbel`, from 32 random bits. */
INLINE floats gumbel(uint32_t bits) {
    const int is_upper = (int)(bits >> 31);
    const floats distance = all((float)(2 * (is_upper ? ~bits : bits) + 1u) * 0x1p-33f);
    floats exponent, rest = parts_of(distance, &exponent);
    if (is_upper) {
        const int is_far = distance[0] > 0.29289323f;
        exponent = all(is_far ? -1.0f : 0.0f);
        rest = is_far ? sum(all(1.0f), -(distance + distance)) : -distance;
    }
    rest = parts_of(-logarithm(exponent, rest), &exponent);
    return -logarithm(exponent, rest);
}

/* (logit - largest) / temperature as a rounded division gives it: two numbers of 24 bits have no quotient so near to the middle between two
 * others that an error of float64 matters. 0 where they are equal, if infinite too. A NaN is minus infinity. */
INLINE floats scaled(floats logit, floats largest, double inverse) {
    logit = chosen(logit == logit, logit, all(-INFINITY));
    const doubles quotient = __builtin_convertvector(logit - largest, doubles) * inverse;
    return chosen(logit == largest, all(0.0f), __builtin_convertvector(quotient, floats));
}

/* Each scaled logit of `count` tokens, at most BLOCK. */
INLINE void scale(const float *logits, int64_t count, float largest, double inverse, float *out) {
    const floats most = all(largest);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, scaled(load(logits + i), most, inverse));
    if (i < count) {
        floats rest = most;
        memcpy(&rest, logits + i, (size_t)(count - i) * sizeof(float));
        store(out + i, scaled(rest, most, inverse));
    }
}

INLINE uint64_t place(float x, uint32_t token) {
    return (uint64_t)(bits_of(x) & 0x7fffffff) << ID_BITS | token;
}

/* --- filters -------------------------------------------------------------------------------------------------------------------------- */

/* How many tokens lie in each of some ranges of places, and their probabilities in whole numbers. */
typedef struct {
    int64_t mass;
    int64_t count;
} sums;

/* Those that lie ahead of a place. */
INLINE sums ahead(sums a, sums b) { return (sums){a.mass + b.mass, a.count + b.count}; }

static int64_t share_of(uint64_t place) { return (int64_t)(exponential(-all(from_bits((uint32_t)(place >> ID_BITS))))[0] * 0x1p40f); }

/* The last of some ranges, one after the other, that begins before `limit`, with those ahead of it in *before. */
static int last_within(const sums *ranges, int count, sums limit, sums *before) {
    int at = 0;
    for (sums next = ahead(*before, ranges[0]); at + 1 < count && next.count < limit.count && next.mass < limit.mass;) {
        *before = next;
        next = ahead(next, ranges[++at]);
    }
    return at;
}

/* The last place that lies before `limit`: fewer tokens are ahead, and less mass. buckets: of all the row's tokens. Afterwards *total is the
 * sums up to there. */
static uint64_t last_place(const sample_work *w, int64_t row, const sums *buckets, uint64_t *places, sums limit, sums *total) {
    const float *logits = w->logits + row * w->row, largest = w->best[row].value;
    const double inverse = 1.0 / (double)w->temperature[row];
    sums before = {0, 0};
    uint64_t prefix = (uint64_t)last_within(buckets, BUCKETS, limit, &before);
    int64_t count = 0;
    for (int64_t begin = 0; begin < w->vocab; begin += BLOCK) {
        const int64_t size = least(BLOCK, w->vocab - begin);
        float x[BLOCK + LANES];
        scale(logits + begin, size, largest, inverse, x);
        for (int64_t i = 0; i < size; i++) {
            places[count] = place(x[i], (uint32_t)(begin + i));
            count += places[count] >> (DIGIT * DIGITS) == prefix;
        }
    }
    for (int shift = DIGIT * (DIGITS - 1); shift >= 0; shift -= DIGIT) {
        sums digits[1 << DIGIT] = {{0, 0}};
        for (int64_t i = 0; i < count; i++) {
            sums *digit = digits + (places[i] >> shift & ((1 << DIGIT) - 1));
            *digit = ahead(*digit, (sums){share_of(places[i]), 1});
        }
        prefix = prefix << DIGIT | (uint64_t)last_within(digits, 1 << DIGIT, limit, &before);
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            places[left] = places[i];
            left += places[i] >> shift == prefix;
        }
        count = left;
    }
    *total = count ? ahead(before, (sums){share_of(places[0]), 1}) : before;
    return prefix;
}

/* Counts the row's tokens by the upper bits of their places. */
static void fill(const sample_work *w, int64_t row, sums *buckets) {
    const float *logits = w->logits + row * w->row, largest = w->best[row].value;
    const double inverse = 1.0 / (double)w->temperature[row];
    memset(buckets, 0, BUCKETS * sizeof *buckets);
    for (int64_t begin = 0; begin < w->vocab; begin += BLOCK) {
        const int64_t size = least(BLOCK, w->vocab - begin);
        float x[BLOCK + LANES], probability[BLOCK + LANES];
        scale(logits + begin, size, largest, inverse, x);
        for (int64_t i = 0; i < size; i += LANES) store(probability + i, product(exponential(load(x + i)), all(0x1p40f)));
        for (int64_t i = 0; i < size; i++) {
            sums *bucket = buckets + (place(x[i], 0) >> (DIGIT * DIGITS));
            *bucket = ahead(*bucket, (sums){(int64_t)probability[i], 1});
        }
    }
}

/* The last place that the row's filters leave. */
static uint64_t filtered(const sample_work *w, int64_t row, uint64_t *places) {
    const float top_p = w->top_p[row];
    uint64_t last = place(w->min_logit[row], (1u << ID_BITS) - 1);
    if (w->top_k[row] <= 0 && !(top_p < 1.0f)) return last;
    sums buckets[BUCKETS], limit = {INT64_MAX, w->top_k[row] > 0 ? w->top_k[row] : INT64_MAX}, total = {0, 0};
    fill(w, row, buckets);
    if (w->top_k[row] > 0)
        last = (uint64_t)least((int64_t)last, (int64_t)last_place(w, row, buckets, places, limit, &total));
    else
        for (int i = 0; i < BUCKETS; i++) total = ahead(total, buckets[i]);
    if (top_p < 1.0f) {
        limit.mass = most(1, (int64_t)ceil((double)top_p * (double)total.mass)); /* of none, one token stays all the same */
        last = (uint64_t)least((int64_t)last, (int64_t)last_place(w, row, buckets, places, limit, &total));
    }
    return last;
}

/* --- the draw ------------------------------------------------------------------------------------------------------------------------- */

/* Whole numbers in the order of the numbers; NaN is minus infinity. The compiler has a vector maximum of whole numbers only. */
INLINE int32_t order_of(float x) {
    const int32_t bits = (int32_t)bits_of(x), order = bits ^ ((bits >> 31) & 0x7fffffff);
    const int32_t nan = -(order > 0x7f800000);
    return (order & ~nan) | (INT32_MIN & nan);
}

/* The largest of `count` logits and the first token that has it; NaN counts as minus infinity. */
static choice largest(const float *logits, int64_t count) {
    choice best = {-INFINITY, 0};
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t size = least(BLOCK, count - begin);
        const float *part = logits + begin;
        int32_t most = INT32_MIN;
        for (int64_t i = 0; i < size; i++) {
            const int32_t order = order_of(part[i]);
            most = order > most ? order : most;
        }
        const float value = from_bits((uint32_t)(most ^ ((most >> 31) & 0x7fffffff)));
        if (value > best.value) {
            int64_t first = 0;
            while (part[first] != value) first++;
            best = (choice){value, (int32_t)(begin + first)};
        }
    }
    return best;
}

/* As `torch_kernels._mix`. */
INLINE uint32_t mix(uint32_t x) {
    x += 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

static uint32_t key_of(int64_t seed, int64_t position) {
    const uint32_t key = mix(mix((uint32_t)seed) ^ (mix((uint32_t)(seed >> 32)) * 3u));
    return mix(key ^ mix((uint32_t)position));
}

/* The largest noisy logit among tokens [begin, end) that stay. Few tokens need the logarithms: noise is -log(-log(u)) <= -log(1 - u), and
 * log(x) >= log(2) * (x's bits as a number / 2^23 - 127), because the mantissa's logarithm is concave. A token whose bound is below the best so
 * far cannot win. SLACK is far above the roundings of both. */
static choice most_noisy(const sample_work *w, int64_t row, int64_t begin, int64_t end) {
    const float SLACK = 1e-3f, LOG2 = 0.69314718f, UNIT = LOG2 / 8388608.0f;
    const float *logits = w->logits + row * w->row;
    const choice first = w->best[row];
    const uint32_t key = key_of(w->seed[row], w->position[row]);
    const double exact_inverse = 1.0 / (double)w->temperature[row];
    const float inverse = (float)exact_inverse;
    choice best = {gumbel(mix(mix((uint32_t)first.token) ^ key))[0], first.token};
    for (int64_t at = begin; at < end; at += BLOCK) {
        const int64_t size = least(BLOCK, end - at);
        const float *part = logits + at;
        float bounds[BLOCK];
        int32_t candidates = 0;
        for (int32_t i = 0; i < (int32_t)size; i++) {
            const uint32_t bits = mix(mix((uint32_t)at + (uint32_t)i) ^ key);
            const float beyond = (float)(int32_t)(~bits >> 8) * 256.0f + 0.5f; /* at most 2^32 * (1 - u) */
            bounds[i] = (part[i] - first.value) * inverse + UNIT * (float)(int32_t)(0x4F800000u - bits_of(beyond)) + SLACK;
            candidates += !(bounds[i] < best.value); /* infinity minus itself is no number */
        }
        for (int64_t i = 0; candidates > 0 && i < size; i++) {
            if (bounds[i] < best.value) continue;
            const uint32_t token = (uint32_t)(at + i);
            const float x = scaled(all(part[i]), all(first.value), exact_inverse)[0];
            if (place(x, token) > w->last[row]) continue;
            const choice other = {x + gumbel(mix(mix(token) ^ key))[0], (int32_t)token};
            if (other.value > best.value || (other.value == best.value && other.token < best.token)) best = other;
        }
    }
    return best;
}

INLINE int is_noisy(const sample_work *w, int64_t row) { return w->temperature && !(w->temperature[row] < w->greedy_below); }

static void largest_part(void *data, int thread, int threads) {
    const sample_work *w = (const sample_work *)data;
    const int64_t begin = w->vocab * thread / threads, end = w->vocab * (thread + 1) / threads;
    for (int64_t row = 0; row < w->rows; row++) {
        const choice found = largest(w->logits + row * w->row + begin, end - begin);
        w->found[row * w->parts + thread] = (choice){found.value, found.token + (int32_t)begin};
    }
}

static void filtered_part(void *data, int thread, int threads) {
    sample_work *w = (sample_work *)data;
    int64_t begin, end;
    while (take_part(&w->taken, w->rows, threads, &begin, &end))
        for (int64_t row = begin; row < end; row++)
            w->last[row] = is_noisy(w, row) ? filtered(w, row, w->places + thread * w->vocab) : 0;
}

static void noisy_part(void *data, int thread, int threads) {
    const sample_work *w = (const sample_work *)data;
    const int64_t begin = w->vocab * thread / threads, end = w->vocab * (thread + 1) / threads;
    for (int64_t row = 0; row < w->rows; row++)
        if (is_noisy(w, row)) w->found[row * w->parts + thread] = most_noisy(w, row, begin, end);
}

/* Runs the body, and then sets the best of each row that it concerns: the first of equal ones. */
static void find(const sample_work *w, void (*body)(void *, int, int), int is_noise, int threads) {
    for (int64_t i = 0; i < w->rows * w->parts; i++) w->found[i] = (choice){-INFINITY, 0}; /* there may be fewer threads than parts */
    parallel(threads, body, (void *)w);
    for (int64_t row = 0; row < w->rows; row++) {
        if (is_noise && !is_noisy(w, row)) continue;
        choice best = w->found[row * w->parts];
        for (int64_t i = 1; i < w->parts; i++) {
            const choice other = w->found[row * w->parts + i];
            if (other.value > best.value || (other.value == best.value && other.token < best.token)) best = other;
        }
        w->best[row] = best;
    }
}

void sample(const sample_work *given, int threads) {
    sample_work work = *given, *w = &work;
    const int sharing = w->rows * w->vocab < ALONE ? 1 : (int)least(threads, w->parts);
    int some = 0;
    find(w, largest_part, 0, sharing);
    for (int64_t i = 0; i < w->rows; i++) some |= is_noisy(w, i);
    if (some) {
        w->taken = 0;
        parallel(sharing, filtered_part, w);
        find(w, noisy_part, 1, sharing);
    }
    for (int64_t i = 0; i < w->rows; i++) w->tokens[i] = w->best[i].token;
}
