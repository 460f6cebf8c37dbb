/* libascendcl.so on a machine without CANN: one device whose memory is host memory, its streams those of streams.h.
 *
 * torch_npu puts no work on them: its kernels are replaced before they get here. What a connector's own binaries put on
 * them (copies, host functions) is done behind their caller, in order; a stream nobody put work on is never waited for.
 * The SoC is declared by the environment variable KVPROOF_SOC (for example Ascend910B3), the memory the device says it
 * has by KVPROOF_DEVICE_BYTES. Only what is written here succeeds; the rest of what torch_npu links is a stub that ends
 * the process with its name, and what it looks up by name and does not find it reports itself. Signatures follow the
 * headers that torch_npu installs (torch_npu/include/acl).
 */
#include "streams.h"

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
    ACL_ERROR_RT_THREAD_SUBSCRIBE = 107012,
    ACL_ERROR_RT_REPORT_TIMEOUT = 507012,
};
enum { COMPLETE = 0, NOT_READY = 1 };
enum { NOT_RECORDED = 0, RECORDED = 1 };

/* Device pages: the alignment of a large allocation on the card, in bytes. */
#define DEVICE_PAGE (2UL << 20)
#define DEFAULT_DEVICE_BYTES (64UL << 30)
#define DEVICE_COUNT 1

#define LIBRARY "libascendcl.so"

typedef struct {
    int device;
} Context;

static Context primary = {0};
static __thread Context *current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used_bytes;

static aclError refuse(const char *symbol, const char *what, long long value)
{
    fprintf(stderr, "kvproof-hostrt: " LIBRARY ": %s: %s %lld\n", symbol, what, value);
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
        fprintf(stderr, "kvproof-hostrt: " LIBRARY ": aclrtGetSocName: KVPROOF_SOC is not set, no SoC is guessed\n");
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
    return kvproof_wait_for_all();
}

KVPROOF_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout)
{
    (void)timeout;
    return kvproof_wait_for_all();
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
    kvproof_allocated(*pointer, size);
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
    kvproof_freed(pointer);
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

/* The device reaches host memory under the address the host uses; no page is pinned. */
KVPROOF_EXPORT aclError aclrtHostRegister(void *pointer, uint64_t size, int type, void **device)
{
    (void)type;
    if (!pointer || !size)
        return refuse("aclrtHostRegister", "size in bytes:", (long long)size);
    *device = pointer;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtHostUnregister(void *pointer)
{
    return pointer ? ACL_SUCCESS : refuse("aclrtHostUnregister", "address", 0);
}

KVPROOF_EXPORT aclError aclrtHostGetDevicePointer(void *host, void **device, uint32_t flag)
{
    if (flag)
        return refuse("aclrtHostGetDevicePointer", "flag must be 0, not", flag);
    *device = host;
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
    kvproof_mapped(address, size);
    return remember(address, size, NULL, 0);
}

KVPROOF_EXPORT aclError aclrtUnmapMem(void *address)
{
    Range *range = forget(address, 0);
    if (!range)
        return refuse("aclrtUnmapMem", "nothing is mapped at", (long long)(intptr_t)address);
    kvproof_freed(address);
    mmap(address, range->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    free(range);
    return ACL_SUCCESS;
}

/* The kinds of a copy that are more than those of copies.h. */
enum { HOST_TO_BUFFER_TO_DEVICE = KVPROOF_ANY + 1, INNER_DEVICE_TO_DEVICE, INTER_DEVICE_TO_DEVICE };

static aclError check(const char *symbol, size_t room, size_t count, int *kind)
{
    if (count > room)
        return refuse(symbol, "more bytes than the target holds:", (long long)count);
    if (*kind < KVPROOF_HOST_TO_HOST || *kind > INTER_DEVICE_TO_DEVICE)
        return refuse(symbol, "kind of copy 0..7, not", *kind);
    if (*kind > KVPROOF_ANY)
        *kind = *kind == HOST_TO_BUFFER_TO_DEVICE ? KVPROOF_HOST_TO_DEVICE : KVPROOF_DEVICE_TO_DEVICE;
    return ACL_SUCCESS;
}

static aclError copy(const char *symbol, void *target, size_t room, const void *source, size_t count, int kind)
{
    aclError error = check(symbol, room, count, &kind);
    if (error)
        return error;
    return kvproof_copy(LIBRARY, symbol, target, source, count, kind) ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM;
}

KVPROOF_EXPORT aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t count, int kind)
{
    return copy("aclrtMemcpy", target, room, source, count, kind);
}

KVPROOF_EXPORT aclError aclrtMemset(void *target, size_t room, int32_t value, size_t count)
{
    if (count > room)
        return refuse("aclrtMemset", "more bytes than the target holds:", (long long)count);
    return kvproof_fill(LIBRARY, "aclrtMemset", target, value, count) ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM;
}

/* ---- streams: the default one, NULL, works at once ------------------------------------------------------------- */

typedef struct Reports Reports;
typedef struct {
    int id;
    KvproofStream *work;
    Reports *reports; /* of the thread that runs its callbacks, NULL: none does */
} Stream;

static int streams_made;

KVPROOF_EXPORT aclError aclrtCreateStream(void **stream)
{
    Stream *made = calloc(1, sizeof *made);
    if (!made || !(made->work = kvproof_stream())) {
        free(made);
        return ACL_ERROR_BAD_ALLOC;
    }
    made->id = __sync_add_and_fetch(&streams_made, 1);
    *stream = made;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag)
{
    (void)priority, (void)flag;
    return aclrtCreateStream(stream);
}

/* Work already submitted is done first. */
KVPROOF_EXPORT aclError aclrtDestroyStream(void *stream)
{
    kvproof_stream_free(((Stream *)stream)->work);
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
    return stream ? kvproof_wait(((Stream *)stream)->work) : ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout)
{
    (void)timeout;
    return aclrtSynchronizeStream(stream);
}

KVPROOF_EXPORT aclError aclrtStreamQuery(void *stream, int *status)
{
    *status = stream && kvproof_busy(((Stream *)stream)->work) ? NOT_READY : COMPLETE;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t count, int kind,
                                         void *stream)
{
    if (!stream)
        return copy("aclrtMemcpyAsync", target, room, source, count, kind);
    aclError error = check("aclrtMemcpyAsync", room, count, &kind);
    if (error)
        return error;
    return kvproof_submit_copy(((Stream *)stream)->work, LIBRARY, "aclrtMemcpyAsync", target, source, count, kind,
                               ACL_ERROR_INVALID_PARAM)
               ? ACL_SUCCESS
               : ACL_ERROR_BAD_ALLOC;
}

/* Does `task` on `data`, which it frees: in the order of the stream, or at once. */
static aclError submit(Stream *stream, KvproofTask task, void *data)
{
    if (!stream)
        return task(data, ACL_SUCCESS);
    if (kvproof_submit(stream->work, task, data))
        return ACL_SUCCESS;
    free(data);
    return ACL_ERROR_BAD_ALLOC;
}

typedef struct {
    void *target;
    size_t count;
    int32_t value;
} Fill;

static int fill(void *data, int error)
{
    Fill fill = *(Fill *)data;
    (void)error;
    free(data);
    return aclrtMemset(fill.target, fill.count, fill.value, fill.count);
}

KVPROOF_EXPORT aclError aclrtMemsetAsync(void *target, size_t room, int32_t value, size_t count, void *stream)
{
    if (count > room)
        return refuse("aclrtMemsetAsync", "more bytes than the target holds:", (long long)count);
    Fill *work = malloc(sizeof *work);
    if (!work)
        return ACL_ERROR_BAD_ALLOC;
    *work = (Fill){target, count, value};
    return submit(stream, fill, work);
}

/* ---- host functions and callbacks ----------------------------------------------------------------------------- */

/* A host function runs on its stream's thread. */
typedef struct {
    void (*function)(void *);
    void *data;
} HostFunction;

static int run(void *data, int error)
{
    HostFunction host = *(HostFunction *)data;
    (void)error;
    free(data);
    host.function(host.data);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtLaunchHostFunc(void *stream, void (*function)(void *), void *data)
{
    HostFunction *work = malloc(sizeof *work);
    if (!work)
        return ACL_ERROR_BAD_ALLOC;
    *work = (HostFunction){function, data};
    return submit(stream, run, work);
}

/* A callback runs on the thread its stream is subscribed to, when that thread asks for reports. The stream goes on at
 * once, or after the callback where it is a blocking one. */
typedef struct Report {
    struct Report *next;
    void (*function)(void *);
    void *data;
    int blocking;
    Reports *reports;
} Report;

struct Reports {
    uint64_t thread;
    Report *first, *last;
    uint64_t put, taken; /* reports so far */
    Reports *next;
};

static pthread_mutex_t reports_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t reports_changed = PTHREAD_COND_INITIALIZER;
static Reports *all_reports;

/* Call with the lock held. */
static Reports *reports_of(uint64_t thread)
{
    Reports *reports = all_reports;
    while (reports && reports->thread != thread)
        reports = reports->next;
    return reports;
}

KVPROOF_EXPORT aclError aclrtSubscribeReport(uint64_t thread, void *stream)
{
    if (!stream)
        return refuse("aclrtSubscribeReport", "the default stream has no callbacks:", 0);
    pthread_mutex_lock(&reports_lock);
    Reports *reports = reports_of(thread);
    if (!reports && (reports = calloc(1, sizeof *reports))) {
        reports->thread = thread;
        reports->next = all_reports;
        all_reports = reports;
    }
    ((Stream *)stream)->reports = reports;
    pthread_cond_broadcast(&reports_changed);
    pthread_mutex_unlock(&reports_lock);
    return reports ? ACL_SUCCESS : ACL_ERROR_BAD_ALLOC;
}

KVPROOF_EXPORT aclError aclrtUnSubscribeReport(uint64_t thread, void *stream)
{
    pthread_mutex_lock(&reports_lock);
    Stream *mine = stream;
    int subscribed = mine && mine->reports && mine->reports->thread == thread;
    if (subscribed)
        mine->reports = NULL;
    pthread_mutex_unlock(&reports_lock);
    return subscribed ? ACL_SUCCESS
                      : refuse("aclrtUnSubscribeReport", "not the thread of this stream:", (long long)thread);
}

static int deliver(void *data, int error)
{
    Report *report = data;
    Reports *reports = report->reports;
    int blocking = report->blocking;
    (void)error;
    pthread_mutex_lock(&reports_lock);
    if (reports->first)
        reports->last->next = report;
    else
        reports->first = report;
    reports->last = report;
    uint64_t mine = ++reports->put;
    pthread_cond_broadcast(&reports_changed);
    while (blocking && reports->taken < mine)
        pthread_cond_wait(&reports_changed, &reports_lock);
    pthread_mutex_unlock(&reports_lock);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtLaunchCallback(void (*function)(void *), void *data, int blocking, void *stream)
{
    pthread_mutex_lock(&reports_lock);
    Reports *reports = stream ? ((Stream *)stream)->reports : NULL;
    pthread_mutex_unlock(&reports_lock);
    if (!reports)
        return refuse("aclrtLaunchCallback", "no thread is subscribed to stream", stream ? ((Stream *)stream)->id : 0);
    Report *report = malloc(sizeof *report);
    if (!report)
        return ACL_ERROR_BAD_ALLOC;
    *report = (Report){NULL, function, data, blocking, reports};
    return submit(stream, deliver, report);
}

/* Waits up to `timeout` milliseconds, for ever where it is -1, for a callback, and runs it. */
KVPROOF_EXPORT aclError aclrtProcessReport(int32_t timeout)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout / 1000 + (until.tv_nsec + timeout % 1000 * 1000000L) / 1000000000L;
    until.tv_nsec = (until.tv_nsec + timeout % 1000 * 1000000L) % 1000000000L;
    pthread_mutex_lock(&reports_lock);
    Reports *reports = reports_of((uint64_t)pthread_self());
    int late = 0;
    while (reports && !reports->first && !late)
        late = timeout < 0 ? pthread_cond_wait(&reports_changed, &reports_lock)
                           : pthread_cond_timedwait(&reports_changed, &reports_lock, &until);
    Report *report = reports ? reports->first : NULL;
    if (report)
        reports->first = report->next;
    pthread_mutex_unlock(&reports_lock);
    if (!report)
        return reports ? ACL_ERROR_RT_REPORT_TIMEOUT : ACL_ERROR_RT_THREAD_SUBSCRIBE;
    report->function(report->data);
    free(report);
    pthread_mutex_lock(&reports_lock);
    reports->taken++;
    pthread_cond_broadcast(&reports_changed);
    pthread_mutex_unlock(&reports_lock);
    return ACL_SUCCESS;
}

/* ---- events --------------------------------------------------------------------------------------------------- */

/* Recorded any number of times; a stream that is to wait for it waits for the recording before the wait. */
typedef struct {
    int references; /* its owner's, and one for each piece of work that will use it */
    uint64_t recorded, reached;
    struct timespec at;
} Event;

/* An event as it was when a piece of work was submitted. */
typedef struct {
    Event *event;
    uint64_t recording;
} Moment;

static pthread_mutex_t events_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t events_changed = PTHREAD_COND_INITIALIZER;

/* Call these three with the lock held. */
static void release(Event *event)
{
    if (--event->references == 0)
        free(event);
}

static void reach(Event *event, uint64_t recording)
{
    clock_gettime(CLOCK_MONOTONIC, &event->at);
    if (event->reached < recording)
        event->reached = recording;
    pthread_cond_broadcast(&events_changed);
}

static void await(Event *event, uint64_t recording)
{
    while (event->reached < recording)
        pthread_cond_wait(&events_changed, &events_lock);
}

/* Submits `task` for the event as it is now. Call with the lock held. */
static aclError at_this_moment(Stream *stream, KvproofTask task, Event *event)
{
    Moment *moment = malloc(sizeof *moment);
    if (!moment)
        return ACL_ERROR_BAD_ALLOC;
    *moment = (Moment){event, event->recorded};
    event->references++;
    aclError error = submit(stream, task, moment);
    if (error)
        event->references--;
    return error;
}

static int reach_moment(void *data, int error)
{
    Moment moment = *(Moment *)data;
    (void)error;
    free(data);
    pthread_mutex_lock(&events_lock);
    reach(moment.event, moment.recording);
    release(moment.event);
    pthread_mutex_unlock(&events_lock);
    return ACL_SUCCESS;
}

static int await_moment(void *data, int error)
{
    Moment moment = *(Moment *)data;
    (void)error;
    free(data);
    pthread_mutex_lock(&events_lock);
    await(moment.event, moment.recording);
    release(moment.event);
    pthread_mutex_unlock(&events_lock);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtCreateEvent(void **event)
{
    Event *made = calloc(1, sizeof *made);
    *event = made;
    if (!made)
        return ACL_ERROR_BAD_ALLOC;
    made->references = 1;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtCreateEventExWithFlag(void **event, uint32_t flag)
{
    (void)flag;
    return aclrtCreateEvent(event);
}

KVPROOF_EXPORT aclError aclrtCreateEventWithFlag(void **event, uint32_t flag)
{
    (void)flag;
    return aclrtCreateEvent(event);
}

KVPROOF_EXPORT aclError aclrtDestroyEvent(void *event)
{
    pthread_mutex_lock(&events_lock);
    release(event);
    pthread_mutex_unlock(&events_lock);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtRecordEvent(void *event, void *stream)
{
    Event *mine = event;
    aclError error = ACL_SUCCESS;
    pthread_mutex_lock(&events_lock);
    mine->recorded++;
    if (stream && kvproof_busy(((Stream *)stream)->work))
        error = at_this_moment(stream, reach_moment, mine);
    else
        reach(mine, mine->recorded);
    pthread_mutex_unlock(&events_lock);
    return error;
}

/* An event that waits to be used again: as if it had never been recorded. */
KVPROOF_EXPORT aclError aclrtResetEvent(void *event, void *stream)
{
    Event *mine = event;
    (void)stream;
    pthread_mutex_lock(&events_lock);
    await(mine, mine->recorded);
    mine->recorded = mine->reached = 0;
    pthread_mutex_unlock(&events_lock);
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtStreamWaitEvent(void *stream, void *event)
{
    Event *mine = event;
    aclError error = ACL_SUCCESS;
    pthread_mutex_lock(&events_lock);
    if (!stream)
        await(mine, mine->recorded);
    else if (mine->reached < mine->recorded)
        error = at_this_moment(stream, await_moment, mine);
    pthread_mutex_unlock(&events_lock);
    return error;
}

KVPROOF_EXPORT aclError aclrtSynchronizeEvent(void *event)
{
    Event *mine = event;
    pthread_mutex_lock(&events_lock);
    await(mine, mine->recorded);
    pthread_mutex_unlock(&events_lock);
    return ACL_SUCCESS;
}

static int reached(Event *event)
{
    pthread_mutex_lock(&events_lock);
    int answer = event->reached >= event->recorded;
    pthread_mutex_unlock(&events_lock);
    return answer;
}

KVPROOF_EXPORT aclError aclrtQueryEventStatus(void *event, int *status)
{
    *status = reached(event) ? RECORDED : NOT_RECORDED;
    return ACL_SUCCESS;
}

KVPROOF_EXPORT aclError aclrtQueryEventWaitStatus(void *event, int *status)
{
    *status = reached(event) ? COMPLETE : NOT_READY;
    return ACL_SUCCESS;
}

/* Milliseconds between two recorded events. */
KVPROOF_EXPORT aclError aclrtEventElapsedTime(float *milliseconds, void *begin, void *end)
{
    Event *a = begin, *b = end;
    if (!a->reached || !b->reached)
        return refuse("aclrtEventElapsedTime", "events recorded, of 2:", !!a->reached + !!b->reached);
    *milliseconds = (float)((b->at.tv_sec - a->at.tv_sec) * 1e3 + (b->at.tv_nsec - a->at.tv_nsec) / 1e6);
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
