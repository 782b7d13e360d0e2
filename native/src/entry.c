/* entry.c: job entries: find them, access them safely, change their phase. */
#include <errno.h>

#include "internal.h"

uint64_t blocks_of(uint64_t nbytes, uint64_t block) { return nbytes / block + (nbytes % block != 0); }

uint64_t first_beyond(const uint64_t *ends, uint64_t count, uint64_t block)
{
    uint64_t low = 0, high = count - 1;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (ends[middle] > block)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Increment `users` first and check `word` afterwards: see struct job. */
bool job_enter(struct job *job, uint64_t ticket)
{
    atomic_fetch_add(&job->users, 1);
    uint64_t word = atomic_load(&job->word);
    if (word_ticket(word) == ticket && word_phase(word) != PHASE_BUILDING)
        return true;
    job_leave(job);
    return false;
}

void job_leave(struct job *job) { atomic_fetch_sub(&job->users, 1); }

struct job *job_find(lck_engine *engine, uint64_t ticket)
{
    if (ticket == 0)
        return NULL;
    for (int i = 0; i < LCK_JOBS_MAX; i++) {
        struct job *job = &engine->jobs[i];
        if (word_ticket(atomic_load(&job->word)) == ticket && job_enter(job, ticket))
            return job;
    }
    return NULL;
}

enum phase job_phase(struct job *job) { return word_phase(atomic_load(&job->word)); }

bool job_move(lck_engine *engine, struct job *job, uint64_t ticket, enum phase from, enum phase to)
{
    uint64_t expected = word_of(ticket, from);
    uint64_t word = to == PHASE_FREE ? 0 : word_of(ticket, to);
    if (!atomic_compare_exchange_strong(&job->word, &expected, word))
        return false;
    engine_pulse_job(engine);
    return true;
}

static uint64_t failure_of(int32_t status, int error)
{
    return (uint64_t)(uint32_t)error << 32 | (uint32_t)status;
}

/* The first failure is kept. But on a full disk a store through the mapping fails with EIO (its page is missing), while
 * another thread's direct write fails with ENOSPC, which says more: then that is kept. */
void job_fail(struct job *job, int32_t status)
{
    int error = status == LCK_ESYS ? lck_last_errno() : 0;
    uint64_t before = 0;
    if (atomic_compare_exchange_strong(&job->failure, &before, failure_of(status, error)))
        return;
    if ((error == ENOSPC || error == EDQUOT) && before == failure_of(LCK_ESYS, EIO))
        atomic_compare_exchange_strong(&job->failure, &before, failure_of(status, error));
}

int32_t job_failure(struct job *job)
{
    uint64_t failure = atomic_load(&job->failure);
    int32_t status = (int32_t)(uint32_t)failure;
    if (status == LCK_ESYS)
        return status_sys((int)(failure >> 32));
    return status;
}
