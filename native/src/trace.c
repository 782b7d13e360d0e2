/* trace.c: record the operations of a medium, in an order consistent with what each thread could observe.
 *
 * An event is recorded after its operation and before the call returns. So if an operation ended before an operation of
 * another thread began, the trace has the two events in that order. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static _Atomic uint32_t thread_count;
static _Thread_local uint32_t thread_number; /* lck_event.thread + 1; 0: not assigned yet */

static uint32_t this_thread(void)
{
    if (thread_number == 0)
        thread_number = atomic_fetch_add(&thread_count, 1) + 1;
    return thread_number - 1;
}

void trace_init(struct trace *trace)
{
    memset(trace, 0, sizeof *trace);
    pthread_mutex_init(&trace->lock, NULL);
}

static void drop_events(struct trace *trace)
{
    free(trace->events);
    free(trace->data);
    trace->events = NULL;
    trace->data = NULL;
    trace->count = trace->capacity = trace->data_used = trace->data_capacity = 0;
    trace->lost = false;
}

void trace_free(struct trace *trace)
{
    drop_events(trace);
    pthread_mutex_destroy(&trace->lock);
}

static bool reserve(void **array, uint64_t *capacity, uint64_t needed, size_t item)
{
    if (needed <= *capacity)
        return true;
    uint64_t larger = needed + needed / 2 + 64;
    void *grown = realloc(*array, larger * item);
    if (grown == NULL)
        return false;
    *array = grown;
    *capacity = larger;
    return true;
}

static bool make_room(struct trace *trace, uint64_t stored_nbytes)
{
    void *events = trace->events, *data = trace->data;
    bool fits = reserve(&events, &trace->capacity, trace->count + 1, sizeof *trace->events);
    trace->events = events;
    fits = fits && reserve(&data, &trace->data_capacity, trace->data_used + stored_nbytes, 1);
    trace->data = data;
    return fits;
}

static void append(struct trace *trace, uint32_t kind, uint64_t off, uint64_t nbytes, const void *stored)
{
    uint64_t kept = stored == NULL ? 0 : nbytes;
    if (!make_room(trace, kept)) {
        trace->lost = true;
        return;
    }
    uint64_t data = kept == 0 ? 0 : trace->data_used;
    if (kept > 0)
        memcpy(trace->data + trace->data_used, stored, kept);
    trace->data_used += kept;
    trace->events[trace->count] = (lck_event){
        .seq = trace->count, .kind = kind, .thread = this_thread(), .off = off, .nbytes = nbytes, .data = data};
    trace->count++;
}

void trace_record(struct trace *trace, uint32_t kind, uint64_t off, uint64_t nbytes, const void *stored)
{
    pthread_mutex_lock(&trace->lock);
    if (atomic_load(&trace->on))
        append(trace, kind, off, nbytes, stored);
    pthread_mutex_unlock(&trace->lock);
}

int32_t lck_trace_start(lck_medium *medium)
{
    int32_t status = medium_check(medium);
    if (status != LCK_OK)
        return status;
    pthread_mutex_lock(&medium->trace.lock);
    drop_events(&medium->trace);
    atomic_store(&medium->trace.on, true);
    pthread_mutex_unlock(&medium->trace.lock);
    return LCK_OK;
}

int32_t lck_trace_stop(lck_medium *medium)
{
    int32_t status = medium_check(medium);
    if (status != LCK_OK)
        return status;
    pthread_mutex_lock(&medium->trace.lock);
    atomic_store(&medium->trace.on, false);
    status = medium->trace.lost ? LCK_ENOMEM : LCK_OK;
    pthread_mutex_unlock(&medium->trace.lock);
    return status;
}

/* The medium's trace; NULL if the medium is not usable. Casts const away: a reader takes the lock, but changes nothing
 * that the caller can see. */
static struct trace *trace_of(const lck_medium *medium)
{
    return medium_check(medium) == LCK_OK ? &((lck_medium *)(uintptr_t)medium)->trace : NULL;
}

uint64_t lck_trace_count(const lck_medium *medium)
{
    struct trace *trace = trace_of(medium);
    if (trace == NULL)
        return 0;
    pthread_mutex_lock(&trace->lock);
    uint64_t count = trace->count;
    pthread_mutex_unlock(&trace->lock);
    return count;
}

int32_t lck_trace_event(const lck_medium *medium, uint64_t index, lck_event *out)
{
    struct trace *trace = trace_of(medium);
    if (trace == NULL)
        return medium_check(medium);
    if (out == NULL)
        return LCK_EINVAL;
    pthread_mutex_lock(&trace->lock);
    bool known = index < trace->count;
    if (known)
        *out = trace->events[index];
    pthread_mutex_unlock(&trace->lock);
    return known ? LCK_OK : LCK_EINVAL;
}

const void *lck_trace_data(const lck_medium *medium, uint64_t *nbytes)
{
    struct trace *trace = trace_of(medium);
    if (nbytes != NULL)
        *nbytes = 0;
    if (trace == NULL)
        return NULL;
    pthread_mutex_lock(&trace->lock);
    const void *data = trace->data;
    if (nbytes != NULL)
        *nbytes = trace->data_used;
    pthread_mutex_unlock(&trace->lock);
    return data;
}
