/* libascendcl.so on a machine without CANN: one device whose memory is host memory and whose work is done at once.
 *
 * The SoC is declared by the environment variable KVPROOF_SOC (for example Ascend910B3), the memory the device says it
 * has by KVPROOF_DEVICE_BYTES. Only what is written here succeeds; the rest of what torch_npu links is a stub that ends
 * the process with its name, and what it looks up by name and does not find it reports itself. Signatures follow the
 * headers that torch_npu installs (torch_npu/include/acl).
 */
#include "hostrt.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

typedef int aclError;
enum {
    ACL_SUCCESS = 0,
    ACL_ERROR_INVALID_PARAM = 100000,
    ACL_ERROR_BAD_ALLOC = 200000,
    ACL_ERROR_RT_INVALID_DEVICEID = 107001,
    ACL_ERROR_RT_CONTEXT_NULL = 107002,
};
enum { COMPLETE = 0, RECORDED = 1 };

/* Device pages: the alignment of a large allocation on the card, in bytes. */
#define DEVICE_PAGE (2UL << 20)
#define DEFAULT_DEVICE_BYTES (64UL << 30)
#define DEVICE_COUNT 1

typedef struct {
    int id;
} Stream;
typedef struct {
    struct timespec at;
    int recorded;
} Event;
typedef struct {
    int device;
} Context;

static Context primary = {0};
static __thread Context *current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used_bytes;
static int streams_made;

static aclError refuse(const char *symbol, const char *what, long long value)
{
    fprintf(stderr, "kvproof-hostrt: libascendcl.so: %s: %s %lld\n", symbol, what, value);
    return ACL_ERROR_INVALID_PARAM;
}

static size_t device_bytes(void)
{
    const char *declared = getenv("KVPROOF_DEVICE_BYTES");
    return declared ? strtoull(declared, NULL, 10) : DEFAULT_DEVICE_BYTES;
}

/* ---- life and device ------------------------------------------------------------------------------------------ */

KVPROOF_EXPORT aclError aclInit(const char *config)
{
    (void)config;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclFinalize(void)
{
    return ACL_SUCCESS;
}

KVPROOF_EXPORT const char *aclGetRecentErrMsg(void)
{
    return "kvproof stand-in: see the lines that begin with kvproof-hostrt";
}

KVPROOF_EXPORT void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...)
{
    /* A log line of the caller, which it also keeps itself. */
    (void)level, (void)function, (void)file, (void)line, (void)format;
}

KVPROOF_EXPORT const char *aclrtGetSocName(void)
{
    const char *declared = getenv("KVPROOF_SOC");
    if (!declared) {
        fprintf(stderr, "kvproof-hostrt: libascendcl.so: aclrtGetSocName: KVPROOF_SOC is not set, no SoC is guessed\n");
        abort();
    }
    return declared;
}

KVPROOF_EXPORT aclError aclrtGetDeviceCount(uint32_t *count)
{
    *count = DEVICE_COUNT;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSetDevice(int32_t device)
{
    if (device < 0 || device >= DEVICE_COUNT)
        return ACL_ERROR_RT_INVALID_DEVICEID;
    current = &primary;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtResetDevice(int32_t device)
{
    if (device < 0 || device >= DEVICE_COUNT)
        return ACL_ERROR_RT_INVALID_DEVICEID;
    current = NULL;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtGetDevice(int32_t *device)
{
    if (!current)
        return ACL_ERROR_RT_CONTEXT_NULL;
    *device = current->device;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtGetCurrentContext(void **context)
{
    *context = current;
    return current ? ACL_SUCCESS : ACL_ERROR_RT_CONTEXT_NULL;
}

KVPROOF_EXPORT aclError aclrtSetCurrentContext(void *context)
{
    if (context != &primary)
        return refuse("aclrtSetCurrentContext", "not a context of this device:", (long long)(intptr_t)context);
    current = context;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSynchronizeDevice(void)
{
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout)
{
    (void)timeout;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    (void)device, (void)peer;
    *can = 0;
    return ACL_SUCCESS;
}

/* What the device computes with, declared: KVPROOF_CUBE_CORES, KVPROOF_VECTOR_CORES, KVPROOF_L2_BYTES. */
enum { CUBE_CORES, VECTOR_CORES, L2_BYTES };

KVPROOF_EXPORT aclError aclGetDeviceCapability(uint32_t device, int question, int64_t *value)
{
    if (device >= DEVICE_COUNT)
        return ACL_ERROR_RT_INVALID_DEVICEID;
    static const char *const names[] = {"KVPROOF_CUBE_CORES", "KVPROOF_VECTOR_CORES", "KVPROOF_L2_BYTES"};
    const char *declared = question >= CUBE_CORES && question <= L2_BYTES ? getenv(names[question]) : NULL;
    if (!declared)
        return refuse("aclGetDeviceCapability", "not declared:", question);
    *value = strtoll(declared, NULL, 10);
    return ACL_SUCCESS;
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

static aclError take(void **pointer, size_t size, size_t alignment)
{
    pthread_mutex_lock(&lock);
    int full = used_bytes + size > device_bytes();
    pthread_mutex_unlock(&lock);
    if (full || size == 0 || posix_memalign(pointer, alignment, size))
        return size == 0 ? refuse("aclrtMalloc", "size in bytes:", 0) : ACL_ERROR_BAD_ALLOC;
    pthread_mutex_lock(&lock);
    used_bytes += malloc_usable_size(*pointer);
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtMalloc(void **pointer, size_t size, int policy)
{
    (void)policy;
    return take(pointer, size, DEVICE_PAGE);
}

KVPROOF_EXPORT aclError aclrtMallocAlign32(void **pointer, size_t size, int policy)
{
    (void)policy;
    return take(pointer, size, DEVICE_PAGE);
}

KVPROOF_EXPORT aclError aclrtFree(void *pointer)
{
    pthread_mutex_lock(&lock);
    used_bytes -= malloc_usable_size(pointer);
    pthread_mutex_unlock(&lock);
    free(pointer);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtMallocHost(void **pointer, size_t size)
{
    return posix_memalign(pointer, 4096, size ? size : 1) ? ACL_ERROR_BAD_ALLOC : ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtFreeHost(void *pointer)
{
    free(pointer);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total)
{
    (void)attribute;
    *total = device_bytes();
    pthread_mutex_lock(&lock);
    *free_bytes = *total - used_bytes;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* Virtual addresses reserved at once, backed by pages as they are mapped: torch_npu's expandable segments. */
typedef struct Range {
    char *start;
    size_t size;
    char *reserved; /* what mmap gave, before alignment; NULL for a mapping inside a reservation */
    size_t reserved_size;
    struct Range *next;
} Range;
static Range *ranges;

static aclError remember(void *start, size_t size, void *reserved, size_t reserved_size)
{
    Range *made = malloc(sizeof *made);
    if (!made)
        return ACL_ERROR_BAD_ALLOC;
    pthread_mutex_lock(&lock);
    *made = (Range){start, size, reserved, reserved_size, ranges};
    ranges = made;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* Takes the range that starts at ``start`` out of the list; a reservation or a mapping, as asked. */
static Range *forget(void *start, int reservation)
{
    pthread_mutex_lock(&lock);
    Range **at = &ranges;
    while (*at && ((*at)->start != start || ((*at)->reserved != NULL) != reservation))
        at = &(*at)->next;
    Range *found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

KVPROOF_EXPORT aclError aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *expected,
                                               uint64_t flags)
{
    (void)alignment, (void)expected, (void)flags;
    size_t whole = size + DEVICE_PAGE;
    char *got = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED)
        return ACL_ERROR_BAD_ALLOC;
    *address = (void *)(((uintptr_t)got + DEVICE_PAGE - 1) / DEVICE_PAGE * DEVICE_PAGE);
    return remember(*address, size, got, whole);
}

KVPROOF_EXPORT aclError aclrtReleaseMemAddress(void *address)
{
    Range *range = forget(address, 1);
    if (!range)
        return refuse("aclrtReleaseMemAddress", "nothing is reserved at", (long long)(intptr_t)address);
    munmap(range->reserved, range->reserved_size);
    free(range);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtMallocPhysical(void **handle, size_t size, const void *property, uint64_t flags)
{
    (void)property, (void)flags;
    pthread_mutex_lock(&lock);
    int full = used_bytes + size > device_bytes();
    used_bytes += full ? 0 : size;
    pthread_mutex_unlock(&lock);
    size_t *made = full ? NULL : malloc(sizeof *made);
    if (!made)
        return ACL_ERROR_BAD_ALLOC;
    *made = size;
    *handle = made;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtFreePhysical(void *handle)
{
    pthread_mutex_lock(&lock);
    used_bytes -= *(size_t *)handle;
    pthread_mutex_unlock(&lock);
    free(handle);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtMapMem(void *address, size_t size, size_t offset, void *handle, uint64_t flags)
{
    (void)flags;
    if (offset || size > *(size_t *)handle)
        return refuse("aclrtMapMem", "bytes past the physical memory:", (long long)(offset + size));
    if (mprotect(address, size, PROT_READ | PROT_WRITE))
        return refuse("aclrtMapMem", "address was not reserved:", (long long)(intptr_t)address);
    return remember(address, size, NULL, 0);
}

KVPROOF_EXPORT aclError aclrtUnmapMem(void *address)
{
    Range *range = forget(address, 0);
    if (!range)
        return refuse("aclrtUnmapMem", "nothing is mapped at", (long long)(intptr_t)address);
    mmap(address, range->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    free(range);
    return ACL_SUCCESS;
}

static aclError copy(const char *symbol, void *target, size_t room, const void *source, size_t count)
{
    if (count > room)
        return refuse(symbol, "more bytes than the target holds:", (long long)count);
    memmove(target, source, count);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t count, int kind)
{
    (void)kind;
    return copy("aclrtMemcpy", target, room, source, count);
}

KVPROOF_EXPORT aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t count, int kind,
                                         void *stream)
{
    (void)kind, (void)stream;
    return copy("aclrtMemcpyAsync", target, room, source, count);
}

KVPROOF_EXPORT aclError aclrtMemset(void *target, size_t room, int32_t value, size_t count)
{
    if (count > room)
        return refuse("aclrtMemset", "more bytes than the target holds:", (long long)count);
    memset(target, value, count);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtMemsetAsync(void *target, size_t room, int32_t value, size_t count, void *stream)
{
    (void)stream;
    return aclrtMemset(target, room, value, count);
}

/* ---- streams and events: work is done when it is submitted ---------------------------------------------------- */

KVPROOF_EXPORT aclError aclrtCreateStream(void **stream)
{
    Stream *made = calloc(1, sizeof *made);
    if (!made)
        return ACL_ERROR_BAD_ALLOC;
    made->id = __sync_add_and_fetch(&streams_made, 1);
    *stream = made;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag)
{
    (void)priority, (void)flag;
    return aclrtCreateStream(stream);
}

KVPROOF_EXPORT aclError aclrtDestroyStream(void *stream)
{
    free(stream);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtDestroyStreamForce(void *stream)
{
    return aclrtDestroyStream(stream);
}

KVPROOF_EXPORT aclError aclrtStreamGetId(void *stream, int32_t *id)
{
    *id = stream ? ((Stream *)stream)->id : 0;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSynchronizeStream(void *stream)
{
    (void)stream;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout)
{
    (void)stream, (void)timeout;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtStreamQuery(void *stream, int *status)
{
    (void)stream;
    *status = COMPLETE;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtCreateEventExWithFlag(void **event, uint32_t flag)
{
    (void)flag;
    *event = calloc(1, sizeof(Event));
    return *event ? ACL_SUCCESS : ACL_ERROR_BAD_ALLOC;
}

KVPROOF_EXPORT aclError aclrtCreateEventWithFlag(void **event, uint32_t flag)
{
    return aclrtCreateEventExWithFlag(event, flag);
}

KVPROOF_EXPORT aclError aclrtDestroyEvent(void *event)
{
    free(event);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtRecordEvent(void *event, void *stream)
{
    (void)stream;
    Event *mine = event;
    clock_gettime(CLOCK_MONOTONIC, &mine->at);
    mine->recorded = 1;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtResetEvent(void *event, void *stream)
{
    (void)stream;
    ((Event *)event)->recorded = 0;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtStreamWaitEvent(void *stream, void *event)
{
    (void)stream, (void)event;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSynchronizeEvent(void *event)
{
    (void)event;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtQueryEventStatus(void *event, int *status)
{
    (void)event;
    *status = RECORDED;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtQueryEventWaitStatus(void *event, int *status)
{
    (void)event;
    *status = COMPLETE;
    return ACL_SUCCESS;
}

/* Milliseconds between two recorded events. */
KVPROOF_EXPORT aclError aclrtEventElapsedTime(float *milliseconds, void *begin, void *end)
{
    Event *a = begin, *b = end;
    if (!a->recorded || !b->recorded)
        return refuse("aclrtEventElapsedTime", "events recorded, of 2:", a->recorded + b->recorded);
    *milliseconds = (float)((b->at.tv_sec - a->at.tv_sec) * 1e3 + (b->at.tv_nsec - a->at.tv_nsec) / 1e6);
    return ACL_SUCCESS;
}

/* Host functions in the order of their stream: at once. */
KVPROOF_EXPORT aclError aclrtLaunchHostFunc(void *stream, void (*function)(void *), void *data)
{
    (void)stream;
    function(data);
    return ACL_SUCCESS;
}

/* ---- settings that only concern kernels ----------------------------------------------------------------------- */

KVPROOF_EXPORT aclError aclrtSetOpWaitTimeout(uint32_t seconds)
{
    (void)seconds;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t seconds)
{
    (void)seconds;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSetDeviceSatMode(int mode)
{
    (void)mode;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSetStreamFailureMode(void *stream, uint64_t mode)
{
    (void)stream, (void)mode;
    return ACL_SUCCESS;
}

/* System parameters (determinism, debug kernels): kept and given back, since only kernels heed them. */
#define SYSTEM_PARAMETERS 16
static int64_t parameters[SYSTEM_PARAMETERS];

KVPROOF_EXPORT aclError aclrtGetSysParamOpt(int option, int64_t *value)
{
    if (option < 0 || option >= SYSTEM_PARAMETERS)
        return refuse("aclrtGetSysParamOpt", "unknown parameter", option);
    *value = parameters[option];
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSetSysParamOpt(int option, int64_t value)
{
    if (option < 0 || option >= SYSTEM_PARAMETERS)
        return refuse("aclrtSetSysParamOpt", "unknown parameter", option);
    parameters[option] = value;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtCtxSetSysParamOpt(int option, int64_t value)
{
    return aclrtSetSysParamOpt(option, value);
}

/* ---- profiling: nobody ever listens --------------------------------------------------------------------------- */

KVPROOF_EXPORT int32_t MsprofRegisterCallback(uint32_t module, void *callback)
{
    /* Kept by the profiler for the day it is switched on, which does not come here. */
    (void)module, (void)callback;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT uint64_t MsprofSysCycleTime(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000UL + (uint64_t)now.tv_nsec;
}
