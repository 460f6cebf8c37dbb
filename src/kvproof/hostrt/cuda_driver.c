/* libcuda.so.1 on a machine without a driver: the few entries asked before any device is used answer "no device". */
#include "hostrt.h"

typedef int CUresult;
#define CUDA_ERROR_NOT_INITIALIZED 3
#define CUDA_ERROR_NO_DEVICE 100

KVPROOF_EXPORT CUresult cuInit(unsigned int flags)
{
    (void)flags;
    return CUDA_ERROR_NO_DEVICE;
}

KVPROOF_EXPORT CUresult cuDriverGetVersion(int *version)
{
    if (version)
        *version = 0;
    return CUDA_ERROR_NOT_INITIALIZED;
}

KVPROOF_EXPORT CUresult cuDeviceGetCount(int *count)
{
    if (count)
        *count = 0;
    return CUDA_ERROR_NO_DEVICE;
}

/* The CUDA runtime asks for every entry through this one; refused, it reports "no device" in its own words. */
KVPROOF_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **entry, int version, uint64_t flags, int *status)
{
    (void)symbol, (void)version, (void)flags;
    if (entry)
        *entry = NULL;
    if (status)
        *status = 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    return CUDA_ERROR_NO_DEVICE;
}

KVPROOF_EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
    (void)error;
    *text = "no CUDA driver (kvproof stand-in)";
    return 0;
}

KVPROOF_EXPORT CUresult cuGetErrorName(CUresult error, const char **text)
{
    (void)error;
    *text = "CUDA_ERROR_NO_DEVICE";
    return 0;
}
