/* A stand-in for CUDA's runtime: kernels that are started are written down and not run, and copies are those of host memory.
 *
 * It has the soname and the symbol version of the real one, so compiled modules of FlashInfer find it in its place once it is
 * loaded. A Hopper card: 132 multiprocessors, and 227 KiB of shared memory for a block that asks for it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } dim3;
typedef struct { dim3 grid, block; size_t shared_bytes; void *stream; void *attributes; unsigned count; } launch_config;
enum { OK = 0, INVALID_VALUE = 1, NOT_SUPPORTED = 801 };
enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, SHARED_OF_MULTIPROCESSOR = 81, SHARED_OF_BLOCK_OPTIN = 97, SHARED_OF_BLOCK = 8 };
enum { MOST_SHARED = 232448, FREE_SHARED = 49152, MOST_DYNAMIC_SHARED = 8, MOST_KERNELS = 4096 };

static struct { const void *function; char *name; long shared_allowed; } kernels[MOST_KERNELS];
static int kernel_count;
static int occupancy = 2;
static char *told;
static size_t told_bytes, told_room;

static void tell(const char *line) {
    size_t length = strlen(line);
    if (told_bytes + length + 1 > told_room) told = realloc(told, told_room = 2 * (told_bytes + length + 1));
    memcpy(told + told_bytes, line, length + 1);
    told_bytes += length;
}

static int found(const void *function) {
    for (int at = 0; at < kernel_count; ++at) if (kernels[at].function == function) return at;
    return -1;
}

/* --- for the test --- */

void stub_set_occupancy(int blocks) { occupancy = blocks; }

/* What was started and copied since it was last asked, a line each. */
const char *stub_take(void) {
    static char *given;
    free(given);
    given = told ? told : calloc(1, 1);
    told = NULL, told_bytes = told_room = 0;
    return given;
}

/* --- the runtime --- */

void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int a, size_t b, int c, int d) {}
void __cudaRegisterFunction(void **handle, const void *host, char *device, const char *name, int limit, void *a, void *b, void *c,
                            void *d, int *e) {
    if (kernel_count == MOST_KERNELS) abort();
    kernels[kernel_count].function = host;
    kernels[kernel_count].shared_allowed = FREE_SHARED;
    kernels[kernel_count++].name = strdup(name);
}
int __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, OK; }
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) { return INVALID_VALUE; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return INVALID_VALUE; }

static int start(const void *function, dim3 grid, dim3 block, size_t shared) {
    char line[16384];
    int at = found(function);
    unsigned threads = block.x * block.y * block.z;
    int refused = at < 0 || !grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || !threads || threads > 1024 ||
                  (long)shared > kernels[at].shared_allowed;
    snprintf(line, sizeof line, "%s %u,%u,%u %u,%u,%u %zu %.16000s\n", refused ? "refused" : "launch", grid.x, grid.y, grid.z, block.x,
             block.y, block.z, shared, at < 0 ? "?" : kernels[at].name);
    tell(line);
    return refused ? INVALID_VALUE : OK;
}
int cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    return start(function, grid, block, shared);
}
int __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    return start(function, grid, block, shared);
}
int cudaLaunchKernelExC(const launch_config *config, const void *function, void **arguments) {
    return start(function, config->grid, config->block, config->shared_bytes);
}
int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    int at = found(function);
    if (at < 0 || (attribute == MOST_DYNAMIC_SHARED && value > MOST_SHARED)) return INVALID_VALUE;
    if (attribute == MOST_DYNAMIC_SHARED) kernels[at].shared_allowed = value;
    return OK;
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    char line[128];
    snprintf(line, sizeof line, "copy %zu %zu\n", (size_t)to, bytes);
    tell(line);
    return memcpy(to, from, bytes), OK;
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case MULTIPROCESSORS: return *value = 132, OK;
        case MAJOR: return *value = 9, OK;
        case MINOR: return *value = 0, OK;
        case SHARED_OF_MULTIPROCESSOR: return *value = 233472, OK;
        case SHARED_OF_BLOCK_OPTIN: return *value = MOST_SHARED, OK;
        case SHARED_OF_BLOCK: return *value = FREE_SHARED, OK;
    }
    char line[64];
    snprintf(line, sizeof line, "refused attribute %d\n", attribute);
    tell(line);
    return NOT_SUPPORTED;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared, unsigned flags) {
    if (found(function) < 0) return INVALID_VALUE;
    return *blocks = occupancy, OK;
}
/* cuTensorMapEncodeTiled of the driver, which refuses as the real one does: see CUDA's driver API, tensor map object management. */
static int encode_tiled(void *map, int type, unsigned rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                        const unsigned *box, const unsigned *steps, int interleave, int swizzle, int promotion, int fill) {
    int refused = rank < 1 || rank > 5 || (uintptr_t)address % 16;
    for (unsigned at = 0; at < rank; ++at) refused |= !sizes[at] || sizes[at] > 1ull << 32 || !box[at] || box[at] > 256;
    for (unsigned at = 0; at + 1 < rank; ++at) refused |= strides[at] % 16 || strides[at] >= 1ull << 40;
    if (refused) tell("refused tensor map\n");
    return refused ? INVALID_VALUE : OK;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *result) {
    if (strcmp(name, "cuTensorMapEncodeTiled")) return NOT_SUPPORTED;
    *function = encode_tiled;
    if (result) *result = 0;
    return OK;
}
int cudaGetDevice(int *device) { return *device = 0, OK; }
int cudaSetDevice(int device) { return OK; }
int cudaGetLastError(void) { return OK; }
int cudaPeekAtLastError(void) { return OK; }
int cudaStreamSynchronize(void *stream) { return OK; }
int cudaDeviceSynchronize(void) { return OK; }
const char *cudaGetErrorName(int error) { return error ? "an error" : "no error"; }
const char *cudaGetErrorString(int error) { return cudaGetErrorName(error); }
