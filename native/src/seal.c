/* seal.c: write what begins and ends a checkpoint: slot header, manifest, commit record (docs/format.md). */
#include <string.h>

#include "internal.h"

enum { KIND_CHECKPOINT = 1 };

struct header {
    uint64_t generation;
    unsigned char magic[8];
    uint32_t slot, zero;
    uint64_t zeros[4];
    uint64_t check;
};

struct commit_record {
    uint64_t generation, incarnation, step, payload_generation, manifest_hash;
    uint32_t manifest_nbytes;
    uint8_t kind, slot, manifest_index, zero;
    uint64_t zeros;
    uint64_t check;
};

_Static_assert(sizeof(struct header) == LCK_LINE, "slot header");
_Static_assert(sizeof(struct commit_record) == LCK_LINE, "commit record");
_Static_assert(offsetof(struct header, check) == 56 && offsetof(struct commit_record, check) == 56, "check");
_Static_assert(offsetof(struct commit_record, kind) == 44, "kind");

/* All checksums of metadata include the pool's uuid: a commit record or header of another pool is not valid here. */
static uint64_t check_of(const lck_commit *commit, const void *data, uint64_t nbytes)
{
    const uint64_t uuid[2] = {commit->uuid_lo, commit->uuid_hi};
    return lck_crc64(lck_crc64(0, uuid, sizeof uuid), data, nbytes);
}

/* Write the slot header of the new generation, which makes all older commit records of this slot invalid. */
void seal_header(lck_medium *medium, const lck_commit *commit)
{
    struct header header = {.generation = commit->generation, .slot = commit->slot};
    memcpy(header.magic, "LCKSLOT1", sizeof header.magic);
    header.check = check_of(commit, &header, offsetof(struct header, check));
    medium_store(medium, commit->header_off, &header, sizeof header);
    medium_flush(medium, commit->header_off, sizeof header);
    medium_fence(medium);
    kill_point(KILL_HEADER);
}

static int32_t write_manifest(struct job *job)
{
    const lck_commit *commit = &job->commit;
    const void *image = (const void *)(uintptr_t)commit->image;
    int32_t status = medium_copy(job->medium, commit->manifest_off, image, commit->image_nbytes, NULL);
    if (status != LCK_OK)
        return status;
    medium_flush(job->medium, commit->manifest_off, commit->image_nbytes);
    kill_point(KILL_MANIFEST);
    return LCK_OK;
}

/* Make payload and manifest durable, before the commit record is written. Every copying thread has fenced its own
 * stores. */
static int32_t sync_payload(struct job *job)
{
    int32_t status = medium_sync(job->medium);
    if (status == LCK_OK)
        kill_point(KILL_SEALED);
    return status;
}

static int32_t write_commit_record(struct job *job)
{
    const lck_commit *commit = &job->commit;
    struct commit_record record = {
        .generation = commit->generation,
        .incarnation = commit->incarnation,
        .step = commit->step,
        .payload_generation = commit->generation,
        .manifest_hash = check_of(commit, (const void *)(uintptr_t)commit->image, commit->image_nbytes),
        .manifest_nbytes = (uint32_t)commit->image_nbytes,
        .kind = KIND_CHECKPOINT,
        .slot = (uint8_t)commit->slot,
        .manifest_index = (uint8_t)commit->manifest_index,
    };
    record.check = check_of(commit, &record, offsetof(struct commit_record, check));
    return medium_commit_record(job->medium, commit->record_off, &record);
}

static int32_t timed(lck_engine *engine, struct job *job, uint32_t kind, int32_t (*step)(struct job *), uint64_t nbytes,
                    bool helped)
{
    struct span span;
    bool spanned = span_begin(engine, &span);
    int32_t status = step(job);
    if (spanned)
        span_end(engine, &span, kind, job->commit.generation, 0, nbytes, helped);
    return status;
}

int32_t seal_job(lck_engine *engine, struct job *job, bool helped)
{
    if (job->commit.flags & LCK_PART) /* its bytes are fenced already, and a later job commits them */
        return LCK_OK;
    uint64_t nbytes = job->commit.image_nbytes;
    int32_t status = timed(engine, job, LCK_SPAN_MANIFEST, write_manifest, nbytes, helped);
    if (status == LCK_OK)
        status = timed(engine, job, LCK_SPAN_SYNC, sync_payload, 0, helped);
    if (status != LCK_OK)
        return status;
    atomic_fetch_add(&job->nbytes, nbytes);
    if (helped)
        atomic_fetch_add(&job->nbytes_helped, nbytes);
    status = timed(engine, job, LCK_SPAN_COMMIT_RECORD, write_commit_record, LCK_LINE, helped);
    if (status == LCK_OK)
        medium_mark(job->medium, LCK_MARK_ACK, job->commit.generation);
    return status;
}
