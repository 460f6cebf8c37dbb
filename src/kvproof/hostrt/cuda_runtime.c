/* libcudart.so.12 on a machine without a GPU: one device whose memory is host memory, its streams those of streams.h.
 *
 * An event is one that PyTorch recorded: its stand-in completes work when it is submitted, so every event is complete.
 * No kernel runs: launching one ends the process with its name.
 */
#include "streams.h"

#define LIBRARY "libcudart.so.12"

typedef int cudaError_t;
enum { SUCCESS = 0, INVALID_VALUE = 1, MEMORY_ALLOCATION = 2, INVALID_DEVICE = 101, INVALID_HANDLE = 400 };
typedef struct {
    unsigned int x, y, z;
} Dim3;
typedef void (*Callback)(KvproofStream *stream, cudaError_t status, void *data);

static __thread cudaError_t last_error;

/* What a call returns, kept for cudaGetLastError where it is a failure. */
static cudaError_t answer(cudaError_t error)
{
    if (error)
        last_error = error;
    return error;
}

static cudaError_t refuse(const char *symbol, const char *what, long long value, cudaError_t error)
{
    fprintf(stderr, "kvproof-hostrt: " LIBRARY ": %s: %s %lld\n", symbol, what, value);
    return answer(error);
}

KVPROOF_EXPORT cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = SUCCESS;
    return error;
}

KVPROOF_EXPORT cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

KVPROOF_EXPORT const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case SUCCESS:
        return "no error";
    case INVALID_VALUE:
        return "invalid argument (kvproof stand-in: see the lines that begin with kvproof-hostrt)";
    case MEMORY_ALLOCATION:
        return "out of memory (kvproof stand-in)";
    case INVALID_DEVICE:
        return "invalid device ordinal (kvproof stand-in)";
    case INVALID_HANDLE:
        return "invalid resource handle (kvproof stand-in)";
    default:
        return "unrecognized error code (kvproof stand-in)";
    }
}

/* ---- device --------------------------------------------------------------------------------------------------- */

KVPROOF_EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return SUCCESS;
}

KVPROOF_EXPORT cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return SUCCESS;
}

KVPROOF_EXPORT cudaError_t cudaSetDevice(int device)
{
    return device == 0 ? SUCCESS : refuse("cudaSetDevice", "one device, 0, not", device, INVALID_DEVICE);
}

KVPROOF_EXPORT cudaError_t cudaDeviceReset(void)
{
    /* Gives back what the process holds of a device. It holds none; its allocations are freed one by one. */
    return SUCCESS;
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

#define PAGE 4096

static cudaError_t take(const char *symbol, void **pointer, size_t bytes)
{
    if (bytes == 0)
        return refuse(symbol, "size in bytes:", 0, INVALID_VALUE);
    return posix_memalign(pointer, PAGE, bytes) ? answer(MEMORY_ALLOCATION) : SUCCESS;
}

KVPROOF_EXPORT cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    cudaError_t error = take("cudaMalloc", pointer, bytes);
    if (!error)
        kvproof_allocated(*pointer, bytes);
    return error;
}

KVPROOF_EXPORT cudaError_t cudaFree(void *pointer)
{
    kvproof_freed(pointer);
    free(pointer);
    return SUCCESS;
}

KVPROOF_EXPORT cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    return take("cudaMallocHost", pointer, bytes);
}

KVPROOF_EXPORT cudaError_t cudaFreeHost(void *pointer)
{
    free(pointer);
    return SUCCESS;
}

KVPROOF_EXPORT cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags)
{
    (void)flags; /* How pages are pinned; none is. */
    return pointer && bytes ? SUCCESS : refuse("cudaHostRegister", "size in bytes:", (long long)bytes, INVALID_VALUE);
}

KVPROOF_EXPORT cudaError_t cudaHostUnregister(void *pointer)
{
    return pointer ? SUCCESS : refuse("cudaHostUnregister", "address", 0, INVALID_VALUE);
}

/* The device reaches host memory under the address the host uses. */
KVPROOF_EXPORT cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags)
{
    if (flags)
        return refuse("cudaHostGetDevicePointer", "flags must be 0, not", flags, INVALID_VALUE);
    *device = host;
    return SUCCESS;
}

static int is_kind(int kind)
{
    return kind >= KVPROOF_HOST_TO_HOST && kind <= KVPROOF_ANY;
}

static cudaError_t copy(const char *symbol, void *target, const void *source, size_t bytes, int kind)
{
    if (!is_kind(kind))
        return refuse(symbol, "kind of copy 0..4, not", kind, INVALID_VALUE);
    return answer(kvproof_copy(LIBRARY, symbol, target, source, bytes, kind) ? SUCCESS : INVALID_VALUE);
}

KVPROOF_EXPORT cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, int kind)
{
    return copy("cudaMemcpy", target, source, bytes, kind);
}

KVPROOF_EXPORT cudaError_t cudaMemset(void *target, int value, size_t bytes)
{
    return answer(kvproof_fill(LIBRARY, "cudaMemset", target, value, bytes) ? SUCCESS : INVALID_VALUE);
}

/* ---- streams -------------------------------------------------------------------------------------------------- */

/* The default stream under its three names works at once. */
static int is_default(const KvproofStream *stream)
{
    return (uintptr_t)stream <= 2;
}

KVPROOF_EXPORT cudaError_t cudaStreamCreate(KvproofStream **stream)
{
    *stream = kvproof_stream();
    return answer(*stream ? SUCCESS : MEMORY_ALLOCATION);
}

KVPROOF_EXPORT cudaError_t cudaStreamCreateWithFlags(KvproofStream **stream, unsigned int flags)
{
    (void)flags; /* Whether it waits for the default stream, which is never busy. */
    return cudaStreamCreate(stream);
}

KVPROOF_EXPORT cudaError_t cudaStreamSynchronize(KvproofStream *stream)
{
    return is_default(stream) ? SUCCESS : answer(kvproof_wait(stream));
}

/* Work already submitted is done first. */
KVPROOF_EXPORT cudaError_t cudaStreamDestroy(KvproofStream *stream)
{
    if (is_default(stream))
        return refuse("cudaStreamDestroy", "not a stream that was created:", (long long)(intptr_t)stream,
                      INVALID_HANDLE);
    kvproof_stream_free(stream);
    return SUCCESS;
}

KVPROOF_EXPORT cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, int kind,
                                           KvproofStream *stream)
{
    if (is_default(stream) || !is_kind(kind))
        return copy("cudaMemcpyAsync", target, source, bytes, kind);
    return answer(kvproof_submit_copy(stream, LIBRARY, "cudaMemcpyAsync", target, source, bytes, kind, INVALID_VALUE)
                      ? SUCCESS
                      : MEMORY_ALLOCATION);
}

typedef struct {
    KvproofStream *stream;
    Callback callback;
    void *data;
} Call;

static int call_back(void *data, int error)
{
    Call call = *(Call *)data;
    free(data);
    call.callback(call.stream, error, call.data);
    return SUCCESS;
}

KVPROOF_EXPORT cudaError_t cudaStreamAddCallback(KvproofStream *stream, Callback callback, void *data,
                                                 unsigned int flags)
{
    if (flags || !callback)
        return refuse("cudaStreamAddCallback", "flags must be 0, not", flags, INVALID_VALUE);
    Call *call = malloc(sizeof *call);
    if (!call)
        return answer(MEMORY_ALLOCATION);
    *call = (Call){stream, callback, data};
    if (is_default(stream))
        return call_back(call, SUCCESS);
    if (kvproof_submit(stream, call_back, call))
        return SUCCESS;
    free(call);
    return answer(MEMORY_ALLOCATION);
}

/* ---- events: complete by the time anybody has one ------------------------------------------------------------- */

static cudaError_t complete(const char *symbol, const void *event)
{
    return event ? SUCCESS : refuse(symbol, "event", 0, INVALID_HANDLE);
}

KVPROOF_EXPORT cudaError_t cudaStreamWaitEvent(KvproofStream *stream, void *event, unsigned int flags)
{
    (void)stream, (void)flags;
    return complete("cudaStreamWaitEvent", event);
}

KVPROOF_EXPORT cudaError_t cudaEventSynchronize(void *event)
{
    return complete("cudaEventSynchronize", event);
}

KVPROOF_EXPORT cudaError_t cudaEventQuery(void *event)
{
    return complete("cudaEventQuery", event);
}

/* ---- kernels: known by name, never launched ------------------------------------------------------------------- */

typedef struct Kernel {
    struct Kernel *next;
    const void *function;
    const char *name;
} Kernel;

static Kernel *kernels;

KVPROOF_EXPORT void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    (void)binary;
    return &handle;
}

KVPROOF_EXPORT void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

KVPROOF_EXPORT void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

/* Called while a library is loaded, one at a time. */
KVPROOF_EXPORT void __cudaRegisterFunction(void **handle, const void *function, char *device_function,
                                           const char *name, int limit, void *thread, void *block, Dim3 *threads,
                                           Dim3 *blocks, int *warp)
{
    (void)handle, (void)device_function, (void)limit, (void)thread, (void)block, (void)threads, (void)blocks;
    (void)warp;
    Kernel *kernel = malloc(sizeof *kernel);
    if (!kernel)
        abort();
    *kernel = (Kernel){kernels, function, name};
    kernels = kernel;
}

/* Grid and block sizes on their way to a launch, which does not come. */
KVPROOF_EXPORT unsigned int __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream)
{
    (void)grid, (void)block, (void)shared, (void)stream;
    return SUCCESS;
}

KVPROOF_EXPORT cudaError_t __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void *stream)
{
    *grid = *block = (Dim3){1, 1, 1};
    *shared = 0;
    *(void **)stream = NULL;
    return SUCCESS;
}

KVPROOF_EXPORT cudaError_t cudaLaunchKernel(const void *function, Dim3 grid, Dim3 block, void **arguments,
                                            size_t shared, KvproofStream *stream)
{
    (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    const Kernel *kernel = kernels;
    while (kernel && kernel->function != function)
        kernel = kernel->next;
    fprintf(stderr, "kvproof-hostrt: " LIBRARY ": cudaLaunchKernel: kernel %s cannot run on a host\n",
            kernel ? kernel->name : "(unregistered)");
    fflush(stderr);
    abort();
}
