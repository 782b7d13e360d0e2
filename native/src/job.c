/* job.c: the public operations on a job, from its submission to its end. */
#include <string.h>

#include "internal.h"

/* Waiting threads check again at least this often. */
#define RECHECK_NS ((uint64_t)5 * 1000 * 1000)

/* The LCK_JOB_... of a phase. A job that is being sealed is reported as copied. */
static uint32_t outer_state(enum phase phase)
{
    return phase == PHASE_SEALING ? LCK_JOB_COPIED : (uint32_t)phase;
}

static int32_t find(lck_engine *engine, uint64_t ticket, struct job **job)
{
    int32_t status = engine_check(engine);
    if (status != LCK_OK)
        return status;
    *job = job_find(engine, ticket);
    return *job != NULL ? LCK_OK : LCK_ESTATE;
}

/* ---- waiting ----------------------------------------------------------------------------------------- */

/* Whether the wait is over. If so, *status is its result. If not, *status has no meaning. */
static bool reached(struct job *job, uint32_t until, int32_t *status)
{
    switch (job_phase(job)) {
    case PHASE_COMMITTED: *status = LCK_OK; return true;
    case PHASE_FAILED: *status = job_failure(job); return true;
    case PHASE_DROPPED: *status = LCK_EDROPPED; return true;
    case PHASE_COPIED:
    case PHASE_SEALING: *status = LCK_OK; return until == LCK_JOB_COPIED;
    default: return false;
    }
}

/* The calling thread copies and, as a sealer, also seals. When it finds no work, it parks until other threads have
 * copied the blocks that they claimed. */
static int32_t wait_for(lck_engine *engine, struct job *job, uint64_t ticket, uint32_t until, uint64_t deadline)
{
    enum role role = until == LCK_JOB_COPIED ? ROLE_HELPER : ROLE_SEALER;
    bool priority_raised = false;
    int32_t status = LCK_ETIMEDOUT;
    for (;;) {
        uint32_t seen = atomic_load(&engine->pulse);
        if (reached(job, until, &status))
            break;
        uint64_t now = clock_ns();
        status = LCK_ETIMEDOUT;
        if (now >= deadline)
            break;
        if (work_once(engine, ticket, role))
            continue;
        if (!priority_raised)
            engine_raise_priority(engine);
        priority_raised = true;
        uint64_t left = deadline - now;
        engine_park(engine, seen, left < RECHECK_NS ? left : RECHECK_NS);
    }
    if (priority_raised)
        engine_restore_priority(engine);
    return status;
}

/* While this thread is counted in `waiters`, workers do not seal the job. If the wait times out, the pulse at the end
 * wakes a worker, which seals the job. */
static int32_t wait_for_commit(lck_engine *engine, struct job *job, uint64_t ticket, uint64_t deadline)
{
    if (atomic_load(&job->verdict) == VERDICT_OPEN && !phase_ended(job_phase(job)))
        return LCK_ESTATE;
    atomic_fetch_add(&job->waiters, 1);
    int32_t status = wait_for(engine, job, ticket, LCK_JOB_COMMITTED, deadline);
    atomic_fetch_sub(&job->waiters, 1);
    engine_pulse_job(engine);
    return status;
}

int32_t lck_job_wait(lck_engine *engine, uint64_t ticket, uint32_t until, uint32_t timeout_ms)
{
    if (until != LCK_JOB_COPIED && until != LCK_JOB_COMMITTED)
        return LCK_EINVAL;
    struct job *job;
    int32_t status = find(engine, ticket, &job);
    if (status != LCK_OK)
        return status;
    uint64_t deadline = clock_ns() + (uint64_t)timeout_ms * 1000000u;
    if (until == LCK_JOB_COMMITTED)
        status = wait_for_commit(engine, job, ticket, deadline);
    else
        status = wait_for(engine, job, ticket, until, deadline);
    job_leave(job);
    return status;
}

/* ---- held jobs --------------------------------------------------------------------------------------- */

int32_t lck_job_start(lck_engine *engine, uint64_t ticket, int32_t outcome)
{
    struct job *job;
    int32_t status = find(engine, ticket, &job);
    if (status != LCK_OK)
        return status;
    if (outcome != LCK_OK) {
        job_fail(job, outcome);
        work_skip_rest(engine, job, ticket);
    }
    atomic_store(&job->held, false);
    engine_pulse_job(engine);
    status = atomic_load(&job->verdict) == VERDICT_DROPPED ? LCK_EDROPPED : LCK_OK;
    job_leave(job);
    return status;
}

/* ---- verdicts ---------------------------------------------------------------------------------------- */

/* Set the verdict. Return false if the job was released or dropped before. */
static bool give_verdict(struct job *job, uint32_t verdict)
{
    uint32_t open = VERDICT_OPEN;
    return atomic_compare_exchange_strong(&job->verdict, &open, verdict);
}

static int32_t release(lck_engine *engine, struct job *job)
{
    int32_t status = LCK_OK;
    if (job_phase(job) == PHASE_FAILED)
        return job_failure(job);
    if (!give_verdict(job, VERDICT_RELEASED))
        status = atomic_load(&job->verdict) == VERDICT_DROPPED ? LCK_EDROPPED : LCK_ESTATE;
    engine_pulse_job(engine);
    return status;
}

int32_t lck_job_release(lck_engine *engine, uint64_t ticket)
{
    struct job *job;
    int32_t status = find(engine, ticket, &job);
    if (status != LCK_OK)
        return status;
    status = release(engine, job);
    job_leave(job);
    return status;
}

/* Wait until the blocks that are being copied are done. This thread does not copy meanwhile, because it would copy
 * blocks of other jobs, and the wait would take longer. */
static void wait_for_end(lck_engine *engine, struct job *job)
{
    engine_raise_priority(engine);
    for (uint32_t seen = atomic_load(&engine->pulse); !phase_ended(job_phase(job)); seen = atomic_load(&engine->pulse))
        engine_park(engine, seen, RECHECK_NS);
    engine_restore_priority(engine);
}

static int32_t drop(lck_engine *engine, struct job *job, uint64_t ticket)
{
    if (!give_verdict(job, VERDICT_DROPPED))
        return LCK_ESTATE;
    work_skip_rest(engine, job, ticket);
    work_end_dropped(engine, job, ticket);
    wait_for_end(engine, job);
    return LCK_OK;
}

int32_t lck_job_drop(lck_engine *engine, uint64_t ticket)
{
    struct job *job;
    int32_t status = find(engine, ticket, &job);
    if (status != LCK_OK)
        return status;
    status = drop(engine, job, ticket);
    job_leave(job);
    return status;
}

/* This thread is counted in `waiters` before the release, so that no worker is woken to seal the job. */
int32_t lck_job_commit(lck_engine *engine, uint64_t ticket, uint32_t timeout_ms)
{
    struct job *job;
    int32_t status = find(engine, ticket, &job);
    if (status != LCK_OK)
        return status;
    uint64_t deadline = clock_ns() + (uint64_t)timeout_ms * 1000000u;
    atomic_fetch_add(&job->waiters, 1);
    status = release(engine, job);
    if (status == LCK_OK)
        status = wait_for(engine, job, ticket, LCK_JOB_COMMITTED, deadline);
    atomic_fetch_sub(&job->waiters, 1);
    engine_pulse_job(engine);
    job_leave(job);
    return status;
}

/* ---- information ------------------------------------------------------------------------------------- */

int32_t lck_job_info_get(lck_engine *engine, uint64_t ticket, lck_job_info *out)
{
    if (out == NULL)
        return LCK_EINVAL;
    struct job *job;
    int32_t status = find(engine, ticket, &job);
    if (status != LCK_OK)
        return status;
    uint64_t failure = atomic_load(&job->failure);
    *out = (lck_job_info){
        .state = outer_state(job_phase(job)),
        .status = (int32_t)(uint32_t)failure,
        .error = (int32_t)(failure >> 32),
        .released = atomic_load(&job->verdict) == VERDICT_RELEASED,
        .nbytes = atomic_load(&job->nbytes),
        .nbytes_helped = atomic_load(&job->nbytes_helped),
        .blocks = atomic_load(&job->blocks),
    };
    job_leave(job);
    return LCK_OK;
}

int32_t lck_job_forget(lck_engine *engine, uint64_t ticket)
{
    struct job *job;
    int32_t status = find(engine, ticket, &job);
    if (status != LCK_OK)
        return status;
    enum phase phase = job_phase(job);
    bool freed = phase_ended(phase) && job_move(engine, job, ticket, phase, PHASE_FREE);
    job_leave(job);
    return freed ? LCK_OK : LCK_ESTATE;
}
