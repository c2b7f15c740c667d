/* Calls recorded functions one after the other, so that a thread of Python does it once.
 *
 * Owns nothing else. Does not know what the functions compute (`recording.py` has noted them).
 */
#include <stdint.h>

typedef struct {
    void (*function)(const void *call, int threads);
    const void *call;
} recorded;

void replay(const recorded *calls, int64_t count, int threads) {
    for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].call, threads);
}
