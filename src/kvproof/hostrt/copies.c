/* See copies.h. What Python calls is exported: it declares the memory of the device that it allocated itself (the KV
 * cache) and collects the copies made since it last asked. Before the first declaration nothing is recorded. */
#define _GNU_SOURCE /* process_vm_readv */
#include "copies.h"

#include <errno.h>
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

enum Kind { ALLOCATED, MAPPED, DECLARED };
typedef struct {
    uint64_t base, bytes;
    enum Kind kind;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range *ranges;
static size_t range_count, range_room;
static KvproofCopy *records;
static size_t record_count, record_room;

static void *grown(void *array, size_t *room, size_t item)
{
    *room = *room ? 2 * *room : 1024;
    array = realloc(array, *room * item);
    if (!array) {
        fprintf(stderr, "kvproof-hostrt: out of memory for %zu records\n", *room);
        abort();
    }
    return array;
}

static void remember(const void *base, size_t bytes, enum Kind kind)
{
    pthread_mutex_lock(&lock);
    if (range_count == range_room)
        ranges = grown(ranges, &range_room, sizeof *ranges);
    ranges[range_count++] = (Range){(uint64_t)(uintptr_t)base, bytes, kind};
    pthread_mutex_unlock(&lock);
}

void kvproof_allocated(const void *base, size_t bytes)
{
    remember(base, bytes, ALLOCATED);
}

void kvproof_mapped(const void *base, size_t bytes)
{
    remember(base, bytes, MAPPED);
}

void kvproof_freed(const void *base)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < range_count; i++)
        if (ranges[i].base == (uint64_t)(uintptr_t)base && ranges[i].kind != DECLARED) {
            ranges[i] = ranges[--range_count];
            break;
        }
    pthread_mutex_unlock(&lock);
}

KVPROOF_EXPORT void kvproof_declare(const void *base, size_t bytes)
{
    remember(base, bytes, DECLARED);
}

/* Moves the oldest records, at most `room`, to `into`; how many. */
KVPROOF_EXPORT size_t kvproof_collect(KvproofCopy *into, size_t room)
{
    pthread_mutex_lock(&lock);
    size_t count = record_count < room ? record_count : room;
    if (count) {
        memcpy(into, records, count * sizeof *into);
        memmove(records, records + count, (record_count - count) * sizeof *into);
        record_count -= count;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

static uint64_t end_of(const Range *range)
{
    return range->base + range->bytes;
}

/* The range around `address` that reaches furthest, NULL where there is none. Any kind, or one that was mapped. */
static const Range *around(uint64_t address, int any, int *declared)
{
    const Range *best = NULL;
    for (size_t i = 0; i < range_count; i++) {
        const Range *range = &ranges[i];
        if (address < range->base || address >= end_of(range) || !(any || range->kind == MAPPED))
            continue;
        *declared |= range->kind == DECLARED;
        if (!best || end_of(range) > end_of(best) || (end_of(range) == end_of(best) && range->kind == MAPPED))
            best = range;
    }
    return best;
}

/* Whether one end of a copy may be used; `device`: it has to be device memory. A declared range may be part of one that
 * was allocated here; ranges that were mapped side by side are one. Call with the lock held. */
static int usable(const char *library, const char *symbol, const char *end, uint64_t address, uint64_t bytes,
                  int device, int *declared)
{
    const Range *left = around(address, 1, declared);
    while (left && end_of(left) < address + bytes && left->kind == MAPPED) {
        const Range *next = around(end_of(left), 0, declared);
        if (!next)
            break;
        left = next;
    }
    if (left && end_of(left) >= address + bytes)
        return 1;
    if (left)
        fprintf(stderr,
                "kvproof-hostrt: %s: %s: %s %#lx + %lu bytes leaves device memory %#lx + %lu bytes by %lu bytes\n",
                library, symbol, end, address, bytes, left->base, left->bytes, address + bytes - end_of(left));
    else if (device)
        fprintf(stderr, "kvproof-hostrt: %s: %s: %s %#lx + %lu bytes is in none of %zu ranges of device memory\n",
                library, symbol, end, address, bytes, range_count);
    return !left && !device;
}

/* Carried out or not. Call with the lock held. */
static void record(uint64_t source, uint64_t target, uint64_t bytes, int kind)
{
    if (record_count == record_room)
        records = grown(records, &record_room, sizeof *records);
    records[record_count++] = (KvproofCopy){source, target, bytes, (uint64_t)kind};
}

/* Through the kernel, which answers for an address that is not mapped instead of ending the process. */
static int move(const char *library, const char *symbol, char *target, const char *source, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        struct iovec to = {target + done, bytes - done}, from = {(void *)(source + done), bytes - done};
        ssize_t moved = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
        if (moved <= 0 && (errno == ENOSYS || errno == EPERM)) {
            memmove(target + done, source + done, bytes - done); /* A sandbox that forbids the call. */
            return 1;
        }
        if (moved <= 0) {
            fprintf(stderr, "kvproof-hostrt: %s: %s: target %p, source %p, %zu bytes: not mapped from byte %zu on\n",
                    library, symbol, (void *)target, (const void *)source, bytes, done);
            return 0;
        }
        done += (size_t)moved;
    }
    return 1;
}

int kvproof_copy(const char *library, const char *symbol, void *target, const void *source, size_t bytes, int kind)
{
    uint64_t from = (uint64_t)(uintptr_t)source, to = (uint64_t)(uintptr_t)target;
    int declared = 0;
    if (bytes == 0)
        return 1;
    pthread_mutex_lock(&lock);
    int usable_source = usable(library, symbol, "source", from, bytes,
                               kind == KVPROOF_DEVICE_TO_HOST || kind == KVPROOF_DEVICE_TO_DEVICE, &declared);
    int usable_target = usable(library, symbol, "target", to, bytes,
                               kind == KVPROOF_HOST_TO_DEVICE || kind == KVPROOF_DEVICE_TO_DEVICE, &declared);
    pthread_mutex_unlock(&lock);
    int moved = usable_source && usable_target && move(library, symbol, target, source, bytes);
    if (declared || !moved) {
        pthread_mutex_lock(&lock);
        record(from, to, bytes, kind);
        pthread_mutex_unlock(&lock);
    }
    return moved;
}

int kvproof_fill(const char *library, const char *symbol, void *target, int value, size_t bytes)
{
    uint64_t to = (uint64_t)(uintptr_t)target;
    int declared = 0;
    pthread_mutex_lock(&lock);
    int allowed = usable(library, symbol, "target", to, bytes, 1, &declared);
    if (declared || !allowed)
        record(0, to, bytes, KVPROOF_HOST_TO_DEVICE);
    pthread_mutex_unlock(&lock);
    if (allowed)
        memset(target, value, bytes);
    return allowed;
}
