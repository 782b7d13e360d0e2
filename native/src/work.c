/* work.c: what workers and waiting threads do: claim and copy blocks, finish a job's copies, seal it. */
#include <string.h>

#include "internal.h"

/* ---- one block --------------------------------------------------------------------------------------- */

static void put_checksum(struct job *job, const lck_copy *copy, uint64_t index, uint32_t crc)
{
    const lck_commit *commit = &job->commit;
    uint64_t at = copy->crc_index + index;
    uint32_t seeded = crc ^ lck_block_seed(commit->origin_lo, commit->origin_hi, copy->tensor, commit->generation,
                                           index);
    memcpy((unsigned char *)(uintptr_t)commit->image + commit->crcs_off + 4 * at, &seeded, 4);
    if (commit->raw_crcs != 0)
        memcpy((unsigned char *)(uintptr_t)commit->raw_crcs + 4 * at, &crc, 4);
}

/* Copy one block. The caller must fence on this thread before it reports the block as done, because a fence orders only
 * the stores of its own thread. */
static int32_t copy_block(lck_engine *engine, struct job *job, const lck_copy *copy, uint64_t index, bool helped)
{
    struct span span;
    bool spanned = ((copy->flags & LCK_NOW) == 0 || copy->nbytes >= job->commit.block) && span_begin(engine, &span);
    uint64_t start = index * job->commit.block;
    uint64_t left = copy->nbytes - start;
    uint64_t nbytes = left < job->commit.block ? left : job->commit.block;
    const void *src = copy->flags & LCK_PLACED ? NULL : (const void *)(uintptr_t)(copy->src + start);
    uint32_t crc;
    bool is_background = src != NULL && (copy->flags & LCK_NOW) == 0;
    int32_t status = is_background ? medium_copy_background(job->medium, copy->dst + start, src, nbytes, &crc)
                                   : medium_copy(job->medium, copy->dst + start, src, nbytes, &crc);
    if (status != LCK_OK)
        return status;
    put_checksum(job, copy, index, crc);
    atomic_fetch_add_explicit(&job->nbytes, nbytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&job->blocks, 1, memory_order_relaxed);
    if (helped)
        atomic_fetch_add_explicit(&job->nbytes_helped, nbytes, memory_order_relaxed);
    kill_point(KILL_BLOCK);
    if (spanned)
        span_end(engine, &span, LCK_SPAN_COPY, job->commit.generation, copy->tensor, nbytes, helped);
    return LCK_OK;
}

static int32_t copy_flagged(lck_engine *engine, struct job *job, const lck_copy *copies, uint64_t count, uint32_t flags)
{
    for (uint64_t i = 0; i < count; i++) {
        if ((copies[i].flags & flags) != flags)
            continue;
        uint64_t blocks = blocks_of(copies[i].nbytes, job->commit.block);
        for (uint64_t index = 0; index < blocks; index++) {
            int32_t status = copy_block(engine, job, &copies[i], index, false);
            if (status != LCK_OK)
                return status;
        }
    }
    return LCK_OK;
}

int32_t work_copy_now(lck_engine *engine, struct job *job, const lck_copy *copies, uint64_t count, uint32_t flags)
{
    struct span span;
    bool spanned = span_begin(engine, &span);
    uint64_t before = atomic_load_explicit(&job->nbytes, memory_order_relaxed);
    int32_t status = copy_flagged(engine, job, copies, count, flags);
    medium_fence(job->medium); /* one fence for all copies: one per tensor would be slow for thousands of tensors */
    if (spanned)
        span_end(engine, &span, LCK_SPAN_NOW, job->commit.generation, 0,
                 atomic_load_explicit(&job->nbytes, memory_order_relaxed) - before, false);
    return status;
}

/* ---- the queue of a job ------------------------------------------------------------------------------ */

void work_end_dropped(lck_engine *engine, struct job *job, uint64_t ticket)
{
    if (atomic_load(&job->verdict) == VERDICT_DROPPED)
        job_move(engine, job, ticket, PHASE_COPIED, PHASE_DROPPED);
}

/* Count blocks as done. The thread that brings `done` to `total` ends the phase PHASE_COPYING. All stores are fenced by
 * then. */
static void report_done(lck_engine *engine, struct job *job, uint64_t ticket, uint64_t blocks)
{
    if (blocks == 0 || atomic_fetch_add(&job->done, blocks) + blocks != job->total)
        return;
    bool failed = atomic_load(&job->failure) != 0;
    job_move(engine, job, ticket, PHASE_COPYING, failed ? PHASE_FAILED : PHASE_COPIED);
    work_end_dropped(engine, job, ticket);
}

void work_skip_rest(lck_engine *engine, struct job *job, uint64_t ticket)
{
    uint64_t claimed = atomic_exchange(&job->next, job->total);
    if (claimed < job->total)
        report_done(engine, job, ticket, job->total - claimed);
}

static bool copy_next(lck_engine *engine, struct job *job, uint64_t ticket, enum role role)
{
    if (atomic_load(&job->held))
        return false;
    if (atomic_load(&job->next) >= job->total) /* otherwise the counter would grow without limit */
        return false;
    uint64_t block = atomic_fetch_add(&job->next, 1);
    if (block >= job->total)
        return false;
    uint64_t which = first_beyond(job->ends, job->count, block);
    uint64_t first = which == 0 ? 0 : job->ends[which - 1];
    int32_t status = copy_block(engine, job, &job->copies[which], block - first, role != ROLE_WORKER);
    if (status != LCK_OK) {
        job_fail(job, status);
        work_skip_rest(engine, job, ticket);
    } else {
        medium_fence(job->medium);
    }
    report_done(engine, job, ticket, 1);
    return true;
}

/* ---- sealing ----------------------------------------------------------------------------------------- */

/* Whether there is a job with a smaller ticket that has not ended. */
static bool earlier_unended(lck_engine *engine, uint64_t ticket)
{
    for (int i = 0; i < LCK_JOBS_MAX; i++) {
        uint64_t word = atomic_load(&engine->jobs[i].word);
        if (word != 0 && word_ticket(word) < ticket && !phase_ended(word_phase(word)))
            return true;
    }
    return false;
}

/* Whether a thread waits for the commit of this job or a later one. A worker then leaves the sealing to that thread,
 * which runs at normal priority and seals sooner. A thread that stops waiting calls engine_pulse_job, so that a worker
 * seals what the thread has not sealed. */
static bool left_to_waiter(lck_engine *engine, uint64_t ticket)
{
    for (int i = 0; i < LCK_JOBS_MAX; i++) {
        struct job *job = &engine->jobs[i];
        if (word_ticket(atomic_load(&job->word)) >= ticket && atomic_load(&job->waiters) > 0)
            return true;
    }
    return false;
}

/* Whether a part of this job's checkpoint (a job with LCK_PART) has failed or was dropped. */
static bool lacks_part(lck_engine *engine, const struct job *job)
{
    for (int i = 0; i < LCK_JOBS_MAX; i++) {
        struct job *part = &engine->jobs[i];
        uint64_t word = atomic_load(&part->word);
        enum phase phase = word_phase(word);
        if (part == job || (phase != PHASE_FAILED && phase != PHASE_DROPPED) || !job_enter(part, word_ticket(word)))
            continue;
        bool same = part->medium == job->medium && part->commit.generation == job->commit.generation;
        job_leave(part);
        if (same)
            return true;
    }
    return false;
}

static bool try_seal(lck_engine *engine, struct job *job, uint64_t ticket, enum role role)
{
    if (role == ROLE_HELPER || job_phase(job) != PHASE_COPIED || atomic_load(&job->verdict) != VERDICT_RELEASED)
        return false;
    if (earlier_unended(engine, ticket) || (role == ROLE_WORKER && left_to_waiter(engine, ticket)))
        return false;
    if (!job_move(engine, job, ticket, PHASE_COPIED, PHASE_SEALING))
        return false;
    int32_t status = lacks_part(engine, job) ? LCK_ESTATE : seal_job(engine, job, role != ROLE_WORKER);
    if (status != LCK_OK)
        job_fail(job, status);
    job_move(engine, job, ticket, PHASE_SEALING, status == LCK_OK ? PHASE_COMMITTED : PHASE_FAILED);
    return true;
}

/* This function may miss a job that another thread is changing. That thread calls engine_pulse_job after its change. */
bool work_for_a_worker(lck_engine *engine)
{
    for (int i = 0; i < LCK_JOBS_MAX; i++) {
        uint64_t word = atomic_load(&engine->jobs[i].word);
        if (word_phase(word) == PHASE_COPYING)
            return true;
        if (word_phase(word) == PHASE_COPIED && atomic_load(&engine->jobs[i].verdict) == VERDICT_RELEASED &&
            !left_to_waiter(engine, word_ticket(word)))
            return true;
    }
    return false;
}

/* ---- choice ------------------------------------------------------------------------------------------ */

/* The oldest job with after < ticket <= upto that may need work; *ticket becomes its ticket. NULL if there is none. The
 * caller must call job_enter before it accesses the job. */
static struct job *oldest(lck_engine *engine, uint64_t after, uint64_t upto, uint64_t *ticket)
{
    struct job *found = NULL;
    *ticket = UINT64_MAX;
    for (int i = 0; i < LCK_JOBS_MAX; i++) {
        uint64_t word = atomic_load(&engine->jobs[i].word), at = word_ticket(word);
        bool active = word_phase(word) == PHASE_COPYING || word_phase(word) == PHASE_COPIED;
        if (active && at > after && at <= upto && at < *ticket) {
            found = &engine->jobs[i];
            *ticket = at;
        }
    }
    return found;
}

bool work_once(lck_engine *engine, uint64_t upto, enum role role)
{
    uint64_t ticket = 0;
    for (struct job *job; (job = oldest(engine, ticket, upto, &ticket)) != NULL;) {
        if (!job_enter(job, ticket))
            continue;
        bool worked = job_phase(job) == PHASE_COPYING ? copy_next(engine, job, ticket, role)
                                                      : try_seal(engine, job, ticket, role);
        job_leave(job);
        if (worked)
            return true;
    }
    return false;
}
