/* See streams.h. */
#include "streams.h"

#include <pthread.h>
#include <unistd.h>

typedef struct Work {
    struct Work *next;
    KvproofTask task;
    void *data;
} Work;

struct KvproofStream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Work *first, *last; /* the first is the one being done */
    int started, closing, error;
    KvproofStream *next; /* of all streams */
};

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static KvproofStream *all;

KvproofStream *kvproof_stream(void)
{
    KvproofStream *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    pthread_mutex_lock(&all_lock);
    made->next = all;
    all = made;
    pthread_mutex_unlock(&all_lock);
    return made;
}

static void *serve(void *argument)
{
    KvproofStream *stream = argument;
    const char *delay = getenv("KVPROOF_STREAM_DELAY_US");
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->closing)
            pthread_cond_wait(&stream->changed, &stream->lock);
        Work *work = stream->first;
        if (!work)
            break;
        int error = stream->error;
        pthread_mutex_unlock(&stream->lock);
        if (delay)
            usleep((useconds_t)strtoul(delay, NULL, 10));
        error = work->task(work->data, error);
        pthread_mutex_lock(&stream->lock);
        if (error && !stream->error)
            stream->error = error;
        stream->first = work->next;
        free(work);
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

int kvproof_submit(KvproofStream *stream, KvproofTask task, void *data)
{
    Work *work = malloc(sizeof *work);
    if (!work)
        return 0;
    *work = (Work){NULL, task, data};
    pthread_mutex_lock(&stream->lock);
    if (!stream->started)
        stream->started = !pthread_create(&stream->thread, NULL, serve, stream);
    int started = stream->started;
    if (started) {
        if (stream->first)
            stream->last->next = work;
        else
            stream->first = work;
        stream->last = work;
        pthread_cond_broadcast(&stream->changed);
    } else {
        free(work);
    }
    pthread_mutex_unlock(&stream->lock);
    return started;
}

typedef struct {
    const char *library, *symbol;
    void *target;
    const void *source;
    size_t bytes;
    int kind, failure;
} Copy;

static int carry_out(void *data, int error)
{
    Copy copy = *(Copy *)data;
    (void)error;
    free(data);
    return kvproof_copy(copy.library, copy.symbol, copy.target, copy.source, copy.bytes, copy.kind) ? 0 : copy.failure;
}

int kvproof_submit_copy(KvproofStream *stream, const char *library, const char *symbol, void *target,
                        const void *source, size_t bytes, int kind, int failure)
{
    Copy *copy = malloc(sizeof *copy);
    if (!copy)
        return 0;
    *copy = (Copy){library, symbol, target, source, bytes, kind, failure};
    if (kvproof_submit(stream, carry_out, copy))
        return 1;
    free(copy);
    return 0;
}

int kvproof_busy(KvproofStream *stream)
{
    pthread_mutex_lock(&stream->lock);
    int busy = stream->first != NULL;
    pthread_mutex_unlock(&stream->lock);
    return busy;
}

int kvproof_wait(KvproofStream *stream)
{
    pthread_mutex_lock(&stream->lock);
    while (stream->first)
        pthread_cond_wait(&stream->changed, &stream->lock);
    int error = stream->error;
    stream->error = 0;
    pthread_mutex_unlock(&stream->lock);
    return error;
}

int kvproof_wait_for_all(void)
{
    int first = 0;
    pthread_mutex_lock(&all_lock);
    for (KvproofStream *stream = all; stream; stream = stream->next) {
        int error = kvproof_wait(stream);
        first = first ? first : error;
    }
    pthread_mutex_unlock(&all_lock);
    return first;
}

void kvproof_stream_free(KvproofStream *stream)
{
    pthread_mutex_lock(&all_lock);
    KvproofStream **at = &all;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    pthread_mutex_unlock(&all_lock);
    pthread_mutex_lock(&stream->lock);
    stream->closing = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    if (stream->started)
        pthread_join(stream->thread, NULL);
    pthread_cond_destroy(&stream->changed);
    pthread_mutex_destroy(&stream->lock);
    free(stream);
}
