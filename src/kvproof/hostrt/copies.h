/* Copies between a host and its device, where both are host memory: checked, carried out, recorded. */
#ifndef KVPROOF_COPIES_H
#define KVPROOF_COPIES_H

#include "hostrt.h"

enum { KVPROOF_HOST_TO_HOST, KVPROOF_HOST_TO_DEVICE, KVPROOF_DEVICE_TO_HOST, KVPROOF_DEVICE_TO_DEVICE, KVPROOF_ANY };

/* One copy that touched declared device memory, or would have. Addresses as given, sizes in bytes. */
typedef struct {
    uint64_t source, target, bytes, kind;
} KvproofCopy;

/* Memory of the device that the runtime library itself handed out. A copy may go on from one mapped range into the
 * next, from one allocation into another it may not. */
void kvproof_allocated(const void *base, size_t bytes);
void kvproof_mapped(const void *base, size_t bytes);
void kvproof_freed(const void *base);

/* 1 when the bytes moved. 0, and a line on standard error that names every number, when an end of the copy that has to
 * be device memory is not, or is not mapped at all: nothing moved beyond the part that is mapped. */
int kvproof_copy(const char *library, const char *symbol, void *target, const void *source, size_t bytes, int kind);

/* The same for a fill. */
int kvproof_fill(const char *library, const char *symbol, void *target, int value, size_t bytes);

#endif
