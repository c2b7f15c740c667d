/* FlashInfer's planner of FA2 as a function of C. Its own headers (attention/scheduler.cuh and what that includes) are compiled
 * without CUDA: what follows stands in for CUDA's. */
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

enum cudaError_t { cudaSuccess };
enum { cudaDevAttrMultiProcessorCount, cudaMemcpyHostToDevice };
typedef void *cudaStream_t;
static int multiprocessors;
inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int *value, int, int) { return *value = multiprocessors, cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void *, const void *, size_t, int, cudaStream_t) { return cudaSuccess; }
template <typename... T> cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *, T...) { return cudaSuccess; }
template <typename A, typename B> std::common_type_t<A, B> max(A a, B b) { return a > b ? a : b; }
template <typename A, typename B> std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
#define __global__
#define __grid_constant__
#define FLASHINFER_CUDA_CALL(call) call
#define DISPATCH_COMPUTE_CAP_DECODE_NUM_STAGES_SMEM(...)

namespace flashinfer {
enum class PosEncodingMode { kNone };
template <typename A, typename B> std::common_type_t<A, B> ceil_div(A x, B y) { return (x + y - 1) / y; }
inline std::pair<int, int> GetCudaComputeCapability() { return {9, 0}; }
#include "tile_of_queries.h"
}

#include "attention/scheduler.cuh"

using namespace flashinfer;

/* plan: gets the 15 numbers of FlashInfer's PrefillPlanInfo, by which its kernels are started. Returns 0, or 1 where a workspace is too small. */
extern "C" int plan_fa2(int sms, int64_t float_bytes, int64_t int_bytes, void *int_buffer, int32_t *queries, int32_t *pages, int rows,
                        int query_heads, int kv_heads, int dim, int page_size, int is_graph, int window_left, int64_t *plan) {
    multiprocessors = sms;
    PrefillPlanInfo info;
    try {
        PrefillPlan<int32_t>((void *)4096, float_bytes, int_buffer, int_buffer, int_bytes, info, queries, pages, queries[rows], rows,
                             query_heads, kv_heads, dim, dim, page_size, is_graph, 2, window_left, -1, false, 0, nullptr);
    } catch (const std::exception &) { return 1; }
    auto numbers = info.ToVector();
    std::copy(numbers.begin(), numbers.end(), plan);
    return 0;
}
