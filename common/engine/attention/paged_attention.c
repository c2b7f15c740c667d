/* Decode attention over KV pages in place: one query token per row, float32.
 *
 * Owns one pass over the row's keys and values with an online softmax (Milakov and Gimelshein 2018). Knows strides and page tables; knows
 * no threads: the caller gives each thread its own rows.
 *
 * All strides are in elements. Page p of a layer begins at base + p * page_stride; slot s of head h in it at + h * head_stride + s * dim.
 */
#include <math.h>
#include <stdint.h>

enum { MAX_DIM = 512 };

static float dot(const float *a, const float *b, int dim) {
    float sum = 0.0f;
    for (int i = 0; i < dim; i++) sum += a[i] * b[i];
    return sum;
}

/* One query head of one row, over its slots [first, length). scores: room for page_size floats. */
static void attend(const float *query, const float *keys, const float *values, const int32_t *pages, int64_t first, int64_t length,
                   int64_t page_stride, int page_size, int dim, float scale, float *scores, float *out) {
    float largest = -INFINITY, total = 0.0f;
    float sum[MAX_DIM];
    for (int i = 0; i < dim; i++) sum[i] = 0.0f;
    for (int64_t begin = first / page_size * page_size; begin < length; begin += page_size) {
        const int64_t page = pages[begin / page_size];
        const int skipped = begin < first ? (int)(first - begin) : 0;
        const float *key = keys + page * page_stride, *value = values + page * page_stride;
        const int slots = length - begin < page_size ? (int)(length - begin) : page_size;
        float page_largest = largest;
        for (int s = skipped; s < slots; s++) {
            scores[s] = scale * dot(query, key + (int64_t)s * dim, dim);
            if (scores[s] > page_largest) page_largest = scores[s];
        }
        const float shrink = expf(largest - page_largest);
        largest = page_largest;
        total *= shrink;
        for (int i = 0; i < dim; i++) sum[i] *= shrink;
        for (int s = skipped; s < slots; s++) {
            const float weight = expf(scores[s] - largest);
            const float *v = value + (int64_t)s * dim;
            total += weight;
            for (int i = 0; i < dim; i++) sum[i] += weight * v[i];
        }
    }
    for (int i = 0; i < dim; i++) out[i] = sum[i] / total;
}

/* Rows [first, last) of: query and out [rows, heads, dim] contiguous; page_table [rows, table_stride]; lengths [rows], this token included.
 * A row sees its last `window` slots; 0: all. */
int paged_attention(const float *query, const float *keys, const float *values, const int32_t *page_table, const int64_t *lengths,
                    int64_t first, int64_t last, int64_t table_stride, int64_t page_stride, int64_t head_stride, int64_t window, int heads,
                    int kv_heads, int page_size, int dim, float scale, float *scores, float *out) {
    if (dim > MAX_DIM || heads % kv_heads != 0) return 1;
    const int group = heads / kv_heads;
    for (int64_t row = first; row < last; row++)
        for (int h = 0; h < heads; h++) {
            const int64_t at = (row * heads + h) * dim, head = (int64_t)(h / group) * head_stride;
            const int64_t begin = window > 0 && lengths[row] > window ? lengths[row] - window : 0;
            attend(query + at, keys + head, values + head, page_table + row * table_stride, begin, lengths[row], page_stride, page_size, dim,
                   scale, scores, out + at);
        }
    return 0;
}
