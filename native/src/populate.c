/* populate.c: touch the pages of a mapping in the background. This is an optimisation: a failure only ends it. */
#include <errno.h>
#include <sys/mman.h>

#include "internal.h"

#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23
#endif

/* Bytes per step. Steps are small, because the kernel holds the lock of the address space (for reading) during a step.
 * A thread of idle priority may lose the processor meanwhile, and the training would wait for the lock in mmap. */
enum { STEP = 256 << 10, WAIT_NS = 200000 };

/* For kernels before 5.14, which lack MADV_POPULATE_WRITE. An atomic OR with 0 is safe while other threads store to the
 * same page. */
static void touch(unsigned char *start, uint64_t nbytes)
{
    struct guard guard;
    if (sigsetjmp(guard.back, 0) != 0)
        return;
    guard_enter(&guard, start, nbytes);
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    for (uint64_t at = 0; at < nbytes; at += page)
        __atomic_fetch_or(start + at, 0, __ATOMIC_RELAXED);
    guard_leave();
}

static bool populate_range(lck_medium *medium, uint64_t at)
{
    uint64_t left = medium->nbytes - at;
    uint64_t nbytes = left < STEP ? left : STEP;
    if (madvise(medium->base + at, nbytes, MADV_POPULATE_WRITE) == 0)
        return true;
    if (errno != EINVAL)
        return false;
    touch(medium->base + at, nbytes);
    return true;
}

static bool step(struct populate *populate)
{
    lck_medium *medium = atomic_load(&populate->medium);
    if (medium == NULL)
        return false;
    uint64_t at = atomic_fetch_add(&populate->next, STEP);
    if (at < medium->nbytes && populate_range(medium, at))
        return true;
    atomic_compare_exchange_strong(&populate->medium, &medium, NULL);
    return false;
}

bool populate_step(lck_engine *engine)
{
    bool worked = false;
    for (int i = 0; !worked && i < ENGINE_POPULATES; i++) {
        struct populate *populate = &engine->populates[i];
        if (atomic_load(&populate->medium) == NULL)
            continue;
        atomic_fetch_add(&populate->users, 1);
        worked = step(populate);
        atomic_fetch_sub(&populate->users, 1);
    }
    return worked;
}

/* The caller holds submit_lock, so that one thread at a time takes a free entry. */
static bool start(struct populate *populate, lck_medium *medium)
{
    if (atomic_load(&populate->medium) != NULL || atomic_load(&populate->users) != 0)
        return false;
    atomic_store(&populate->next, 0);
    atomic_store(&populate->owner, medium);
    atomic_store(&populate->medium, medium);
    return true;
}

int32_t lck_engine_populate(lck_engine *engine, lck_medium *medium)
{
    int32_t status = engine_check(engine);
    if (status == LCK_OK)
        status = medium_check(medium);
    if (status != LCK_OK)
        return status;
    bool started = false;
    pthread_mutex_lock(&engine->submit_lock);
    for (int i = 0; !started && i < ENGINE_POPULATES; i++)
        started = start(&engine->populates[i], medium);
    pthread_mutex_unlock(&engine->submit_lock);
    if (!started)
        return LCK_EBUSY;
    engine_pulse(engine);
    return LCK_OK;
}

static bool has_job_on(lck_engine *engine, const lck_medium *medium)
{
    for (int i = 0; i < LCK_JOBS_MAX; i++) {
        struct job *job = &engine->jobs[i];
        uint64_t ticket = word_ticket(atomic_load(&job->word));
        if (ticket == 0 || !job_enter(job, ticket))
            continue;
        bool busy = job->medium == medium && !phase_ended(job_phase(job));
        job_leave(job);
        if (busy)
            return true;
    }
    return false;
}

/* Stop populating if the entry belongs to `medium`, and wait until the entry has no users. The users of an entry of
 * another medium are not waited for, because they may take seconds. An entry changes its owner only while it has no
 * users. */
static void stop(struct populate *populate, lck_medium *medium)
{
    lck_medium *expected = medium;
    atomic_compare_exchange_strong(&populate->medium, &expected, NULL);
    _Atomic uint32_t never = 0; /* no thread changes this word, so park sleeps for WAIT_NS */
    while (atomic_load(&populate->owner) == medium && atomic_load(&populate->users) != 0)
        park(&never, 0, WAIT_NS);
}

int32_t lck_engine_quiesce(lck_engine *engine, lck_medium *medium)
{
    int32_t status = engine_check(engine);
    if (status == LCK_OK)
        status = medium_check(medium);
    if (status != LCK_OK)
        return status;
    if (has_job_on(engine, medium))
        return LCK_ESTATE;
    for (int i = 0; i < ENGINE_POPULATES; i++)
        stop(&engine->populates[i], medium);
    return LCK_OK;
}
