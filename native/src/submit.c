/* submit.c: start a checkpoint. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* ---- arguments --------------------------------------------------------------------------------------- */

static bool commit_fits(const lck_medium *medium, const lck_commit *commit)
{
    bool places = commit->header_off % LCK_LINE == 0 && medium_holds(medium, commit->header_off, LCK_LINE) &&
                  commit->record_off % LCK_LINE == 0 && medium_holds(medium, commit->record_off, LCK_LINE) &&
                  medium_holds(medium, commit->manifest_off, commit->image_nbytes);
    bool image = commit->image != 0 && commit->image_nbytes > 0 && commit->image_nbytes <= UINT32_MAX &&
                 commit->crcs_off % 4 == 0 && commit->crcs_off <= commit->image_nbytes &&
                 commit->crcs_count <= (commit->image_nbytes - commit->crcs_off) / 4;
    bool block = commit->block > 0 && commit->block % 256 == 0 && commit->block <= LCK_MAX_BLOCK;
    /* The numbers that name the checkpoint, and the flags. In the commit log, generation 0 means that there is no
     * commit record. */
    bool names = commit->generation != 0 && commit->slot <= UINT8_MAX && commit->manifest_index <= 1 &&
                 (commit->flags & ~(uint32_t)(LCK_PART | LCK_FOLLOWS | LCK_HELD)) == 0;
    return places && image && block && names;
}

static bool copy_fits(const lck_medium *medium, const lck_commit *commit, const lck_copy *copy)
{
    uint64_t blocks = blocks_of(copy->nbytes, commit->block);
    bool placed = (copy->flags & LCK_PLACED) != 0;
    return (copy->flags & ~(uint32_t)(LCK_NOW | LCK_PLACED)) == 0 && (copy->src != 0 || copy->nbytes == 0 || placed) &&
           medium_holds(medium, copy->dst, copy->nbytes) && copy->crc_index <= commit->crcs_count &&
           blocks <= commit->crcs_count - copy->crc_index;
}

static bool copies_fit(const lck_medium *medium, const lck_commit *commit, const lck_copy *copies, uint64_t count)
{
    if (copies == NULL && count > 0)
        return false;
    for (uint64_t i = 0; i < count; i++)
        if (!copy_fits(medium, commit, &copies[i]))
            return false;
    return true;
}

/* ---- the entry --------------------------------------------------------------------------------------- */

/* Take the entry if it is free, and return true. Return false if it is not free, or if a worker is accessing it: to
 * wait for a thread of idle priority could take long. */
static bool take(struct job *job, uint64_t ticket)
{
    if (atomic_load(&job->word) != 0)
        return false;
    atomic_store(&job->word, word_of(ticket, PHASE_BUILDING));
    if (atomic_load(&job->users) == 0)
        return true;
    atomic_store(&job->word, 0);
    return false;
}

/* Take a free entry for the next ticket; NULL if there is none. Because of the lock, a thread with a later ticket sees
 * the entries of all earlier tickets. */
static struct job *take_entry(lck_engine *engine, uint64_t *ticket)
{
    struct job *found = NULL;
    pthread_mutex_lock(&engine->submit_lock);
    *ticket = engine->tickets + 1;
    for (int i = 0; found == NULL && i < LCK_JOBS_MAX; i++)
        if (take(&engine->jobs[i], *ticket))
            found = &engine->jobs[i];
    if (found != NULL)
        engine->tickets = *ticket;
    pthread_mutex_unlock(&engine->submit_lock);
    return found;
}

/* Make room for `count` copies. False if memory is short. */
static bool reserve(struct job *job, uint64_t count)
{
    if (count <= job->capacity)
        return true;
    lck_copy *copies = realloc(job->copies, count * sizeof *copies);
    if (copies != NULL)
        job->copies = copies;
    uint64_t *ends = realloc(job->ends, count * sizeof *ends);
    if (ends != NULL)
        job->ends = ends;
    if (copies == NULL || ends == NULL)
        return false;
    job->capacity = count;
    return true;
}

/* Queue the copies that the workers make: all copies except empty ones and those with LCK_NOW. */
static void queue(struct job *job, const lck_copy *copies, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t blocks = blocks_of(copies[i].nbytes, job->commit.block);
        if ((copies[i].flags & LCK_NOW) || blocks == 0)
            continue;
        job->total += blocks;
        job->copies[job->count] = copies[i];
        job->ends[job->count] = job->total;
        job->count++;
    }
}

static bool build(struct job *job, lck_medium *medium, const lck_copy *copies, uint64_t count,
                  const lck_commit *commit)
{
    job->medium = medium;
    job->commit = *commit;
    job->count = job->total = 0;
    atomic_store(&job->waiters, 0);
    atomic_store(&job->held, (commit->flags & LCK_HELD) != 0);
    atomic_store(&job->verdict, VERDICT_OPEN);
    atomic_store(&job->failure, 0);
    atomic_store(&job->next, 0);
    atomic_store(&job->done, 0);
    atomic_store(&job->nbytes, 0);
    atomic_store(&job->nbytes_helped, 0);
    atomic_store(&job->blocks, 0);
    if (!reserve(job, count))
        return false;
    queue(job, copies, count);
    return true;
}

/* ---- begin ------------------------------------------------------------------------------------------- */

static void write_header(lck_engine *engine, struct job *job)
{
    struct span span;
    bool spanned = span_begin(engine, &span);
    medium_mark(job->medium, LCK_MARK_BEGIN, job->commit.generation);
    seal_header(job->medium, &job->commit);
    if (spanned)
        span_end(engine, &span, LCK_SPAN_HEADER, job->commit.generation, 0, LCK_LINE, false);
}

static int32_t begin(lck_engine *engine, struct job *job, const lck_copy *copies, uint64_t count)
{
    if ((job->commit.flags & LCK_FOLLOWS) == 0)
        write_header(engine, job);
    return work_copy_now(engine, job, copies, count, LCK_NOW);
}

int32_t lck_job_submit(lck_engine *engine, lck_medium *medium, const lck_copy *copies, uint64_t count,
                       const lck_commit *commit, uint64_t *ticket)
{
    int32_t status = engine_check(engine);
    if (status == LCK_OK)
        status = medium_check(medium);
    if (status != LCK_OK)
        return status;
    if (commit == NULL || ticket == NULL)
        return LCK_EINVAL;
    if (!commit_fits(medium, commit) || !copies_fit(medium, commit, copies, count))
        return LCK_EINVAL;
    uint64_t drawn;
    struct job *job = take_entry(engine, &drawn);
    if (job == NULL)
        return LCK_EBUSY;
    status = build(job, medium, copies, count, commit) ? begin(engine, job, copies, count) : LCK_ENOMEM;
    if (status == LCK_OK) {
        *ticket = drawn;
        job_move(engine, job, drawn, PHASE_BUILDING, job->total > 0 ? PHASE_COPYING : PHASE_COPIED);
    } else {
        job_move(engine, job, drawn, PHASE_BUILDING, PHASE_FREE);
    }
    return status;
}
