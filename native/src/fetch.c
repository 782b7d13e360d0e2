/* fetch.c: many verified reads on several threads, because during a recovery no other work needs the processors.
 *
 * Threads claim blocks in the order of the reads. When a bad block is found, all earlier blocks are claimed already and
 * are still read. So the reported bad block does not depend on the timing of the threads. */
#include <pthread.h>
#include <stdlib.h>

#include "internal.h"

enum { FETCH_THREADS = 16 }; /* maximum number of threads besides the calling one */

struct fetch {
    struct read_from from;
    const lck_read *reads;
    uint64_t count, total;        /* number of reads; number of blocks of all reads */
    uint64_t *ends;               /* ends[i]: number of blocks of reads 0..i */
    _Atomic uint64_t next, bad;   /* block numbers: the next to claim; the first bad one so far, or total */
    pthread_mutex_t lock;         /* guards the two fields below, and writes to bad */
    int32_t status;
    int error;
};

static void note_bad(struct fetch *fetch, uint64_t block, int32_t status)
{
    pthread_mutex_lock(&fetch->lock);
    if (block < atomic_load(&fetch->bad)) {
        atomic_store(&fetch->bad, block);
        fetch->status = status;
        fetch->error = status == LCK_ESYS ? lck_last_errno() : 0;
    }
    pthread_mutex_unlock(&fetch->lock);
}

static void fetch_blocks(struct fetch *fetch, unsigned char *buffer)
{
    for (;;) {
        uint64_t block = atomic_fetch_add(&fetch->next, 1);
        if (block >= atomic_load(&fetch->bad))
            break;
        uint64_t which = first_beyond(fetch->ends, fetch->count, block);
        uint64_t first = which == 0 ? 0 : fetch->ends[which - 1];
        int32_t status = read_block(&fetch->from, &fetch->reads[which], block - first, buffer);
        if (status != LCK_OK)
            note_bad(fetch, block, status);
    }
    cpu_fence();
}

static void *fetch_thread(void *argument)
{
    struct fetch *fetch = argument;
    unsigned char *buffer = malloc(fetch->from.block);
    if (buffer != NULL) /* otherwise the other threads read all blocks */
        fetch_blocks(fetch, buffer);
    free(buffer);
    return NULL;
}

/* Read all blocks on up to `threads` threads, the calling one included. If no thread can be started, the calling thread
 * reads all. */
static int32_t fetch_all(struct fetch *fetch, uint32_t threads)
{
    pthread_t others[FETCH_THREADS];
    uint32_t started = 0;
    unsigned char *buffer = malloc(fetch->from.block);
    if (buffer == NULL)
        return LCK_ENOMEM;
    while (started + 1 < threads && started < FETCH_THREADS &&
           pthread_create(&others[started], NULL, fetch_thread, fetch) == 0)
        started++;
    fetch_blocks(fetch, buffer);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
    free(buffer);
    return LCK_OK;
}

static int32_t number_blocks(struct fetch *fetch)
{
    fetch->ends = calloc(fetch->count, sizeof *fetch->ends);
    if (fetch->ends == NULL)
        return LCK_ENOMEM;
    for (uint64_t i = 0; i < fetch->count; i++) {
        /* The check limits a read to less than 2^63 bytes, so that the offsets of its blocks do not overflow. */
        if (read_check_one(&fetch->reads[i]) != LCK_OK)
            return LCK_EINVAL;
        fetch->total += blocks_of(fetch->reads[i].nbytes, fetch->from.block);
        fetch->ends[i] = fetch->total;
    }
    return LCK_OK;
}

static int32_t fetch_result(const struct fetch *fetch, uint64_t *bad_read, uint64_t *bad_block)
{
    uint64_t bad = atomic_load(&fetch->bad);
    if (bad == fetch->total)
        return LCK_OK;
    *bad_read = first_beyond(fetch->ends, fetch->count, bad);
    *bad_block = bad - (*bad_read == 0 ? 0 : fetch->ends[*bad_read - 1]);
    return fetch->status == LCK_ESYS ? status_sys(fetch->error) : fetch->status;
}

int32_t lck_read_many(int32_t fd, const lck_extent *extents, uint64_t count, const lck_read *reads, uint64_t n_reads,
                      uint64_t block, uint64_t uuid_lo, uint64_t uuid_hi, uint32_t threads, uint64_t *bad_read,
                      uint64_t *bad_block)
{
    struct fetch fetch = {.from = {fd, extents, count, block, uuid_lo, uuid_hi}, .reads = reads, .count = n_reads};
    if (read_check(&fetch.from) != LCK_OK || bad_read == NULL || bad_block == NULL)
        return LCK_EINVAL;
    if (n_reads == 0)
        return LCK_OK;
    if (reads == NULL)
        return LCK_EINVAL;
    int32_t status = number_blocks(&fetch);
    if (status == LCK_OK && fetch.total > 0) {
        atomic_store(&fetch.bad, fetch.total);
        pthread_mutex_init(&fetch.lock, NULL);
        status = fetch_all(&fetch, threads);
        pthread_mutex_destroy(&fetch.lock);
        if (status == LCK_OK)
            status = fetch_result(&fetch, bad_read, bad_block);
    }
    free(fetch.ends);
    return status;
}
