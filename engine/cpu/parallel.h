/* Runs one function on all threads of the OpenMP runtime that torch has loaded.
 *
 * Owns the way into that runtime. It is called by its own symbols and not with pragmas: clang's pragmas need LLVM's runtime, which would
 * be a second pool of threads beside torch's. LLVM's and Intel's runtimes have these symbols too.
 *
 * Pass torch.get_num_threads() as `threads`. A region with another count makes the runtime end threads, and start them again for torch.
 */
#pragma once

#include <stdint.h>

extern void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags);
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

typedef struct {
    void (*body)(void *data, int thread, int threads);
    void *data;
} parallel_call;

static void parallel_enter(void *call) {
    const parallel_call *c = (const parallel_call *)call;
    c->body(c->data, omp_get_thread_num(), omp_get_num_threads());
}

/* Calls body(data, thread, threads) once on each thread, and returns when all have. The runtime may give fewer threads than asked, so
 * divide the work by the count that the body gets. With one thread, the body runs here and the runtime is left alone. */
static inline void parallel(int threads, void (*body)(void *data, int thread, int threads), void *data) {
    if (threads <= 1) {
        body(data, 0, 1);
        return;
    }
    parallel_call call = {body, data};
    GOMP_parallel(parallel_enter, &call, (unsigned)threads, 0);
}

/* Each thread takes the next part of `count` until none is left, because other processes may hold one of them up. PARTS: of each thread; more
 * parts balance better, fewer are longer runs of memory. */
enum { PARTS = 8 };

static inline int take_part(int64_t *taken, int64_t count, int threads, int64_t *begin, int64_t *end) {
    const int64_t wanted = threads > 1 ? (int64_t)threads * PARTS : 1, parts = wanted < count ? wanted : count, part = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
    if (part >= parts) return 0;
    *begin = count * part / parts;
    *end = count * (part + 1) / parts;
    return 1;
}
