/* Streams of a device: work done in order, behind its caller, so that what is asynchronous on a card is asynchronous
 * here, and work that nobody waits for is late here too. KVPROOF_STREAM_DELAY_US makes every piece of work wait that many
 * microseconds before it begins. A thread belongs to a stream from its first piece of work on. */
#ifndef KVPROOF_STREAMS_H
#define KVPROOF_STREAMS_H

#include "copies.h"

typedef struct KvproofStream KvproofStream;

/* One piece of work; frees `data`. `error` is the stream's first failure that nobody was told of. The answer is the
 * failure of this piece, 0 where it succeeded. */
typedef int (*KvproofTask)(void *data, int error);

KvproofStream *kvproof_stream(void); /* NULL: out of memory */

/* 0 where there was no memory or no thread; then the work is not done. */
int kvproof_submit(KvproofStream *stream, KvproofTask task, void *data);

/* Submits a copy (see copies.h), which fails with `failure`. */
int kvproof_submit_copy(KvproofStream *stream, const char *library, const char *symbol, void *target,
                        const void *source, size_t bytes, int kind, int failure);

int kvproof_busy(KvproofStream *stream);

/* Until all work submitted to the stream is done; its first failure since somebody last waited. */
int kvproof_wait(KvproofStream *stream);

/* The same for every stream there is. */
int kvproof_wait_for_all(void);

/* Work already submitted is done first. */
void kvproof_stream_free(KvproofStream *stream);

#endif
