/* Spans: each block and each part of a commit has one span, a full queue counts the spans that it drops, and after a
 * stop no span is recorded. */
#include <stdbool.h>

#include "check.h"

enum { BLOCK = 4096, TENSORS = 3, IMAGE = 1024, CRCS_OFF = 64, CRCS = 200, SIZE = 4 << 20, PAYLOAD = 1 << 20 };
enum { LONG_MS = 60000, MOST = 4096 };

static const uint64_t nbytes_of[TENSORS] = {100, 100 * BLOCK, 50 * BLOCK + 1};
static const uint64_t blocks = 1 + 100 + 51;

static int fd;
static lck_medium *medium;
static lck_engine *engine;
static unsigned char *source, image[IMAGE];
static lck_span spans[MOST];
static uint64_t generation;

static void setup(uint32_t threads)
{
    fd = open_memory(SIZE);
    medium = open_medium(fd, SIZE, LCK_MEDIUM_CACHE);
    source = malloc(nbytes_of[1]);
    CHECK(source != NULL);
    fill_random(source, nbytes_of[1], 1);
    CHECK_EQ(lck_engine_open(threads, &engine), LCK_OK);
}

static void teardown(void)
{
    CHECK_EQ(lck_engine_close(engine), LCK_OK);
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    free(source);
    close(fd);
}

/* Submit and commit one checkpoint. now: all copies are made inside lck_job_submit. */
static void run(bool now)
{
    generation++;
    lck_copy copies[TENSORS];
    uint64_t dst = PAYLOAD, crc = 0;
    for (uint64_t i = 0; i < TENSORS; i++) {
        copies[i] = (lck_copy){.src = (uintptr_t)source, .dst = dst, .nbytes = nbytes_of[i], .tensor = i,
                               .crc_index = (uint32_t)crc, .flags = now ? LCK_NOW : 0};
        dst += (nbytes_of[i] + 255) / 256 * 256;
        crc += (nbytes_of[i] + BLOCK - 1) / BLOCK;
    }
    lck_commit commit = {.header_off = 64 << 10, .manifest_off = 128 << 10, .record_off = 8192,
                         .image = (uintptr_t)image, .image_nbytes = IMAGE, .crcs_off = CRCS_OFF, .crcs_count = CRCS,
                         .block = BLOCK, .generation = generation, .incarnation = 1};
    uint64_t ticket;
    CHECK_EQ(lck_job_submit(engine, medium, copies, TENSORS, &commit, &ticket), LCK_OK);
    CHECK_EQ(lck_job_release(engine, ticket), LCK_OK);
    CHECK_EQ(lck_job_wait(engine, ticket, LCK_JOB_COMMITTED, LONG_MS), LCK_OK);
    CHECK_EQ(lck_job_forget(engine, ticket), LCK_OK);
}

static uint64_t take(uint64_t *dropped)
{
    uint64_t count;
    CHECK_EQ(lck_spans_take(engine, spans, MOST, &count, dropped), LCK_OK);
    return count;
}

/* Take `wanted` spans. A thread can publish the span of the last block later than the commit, so this function waits
 * for the spans. */
static uint64_t take_all(uint64_t wanted)
{
    uint64_t got = 0, dropped;
    for (int i = 0; i < LONG_MS && got < wanted; i++) {
        uint64_t count;
        CHECK_EQ(lck_spans_take(engine, spans + got, MOST - got, &count, &dropped), LCK_OK);
        CHECK_EQ(dropped, 0);
        got += count;
        if (got < wanted)
            usleep(1000);
    }
    return got;
}

static uint64_t count_of(uint64_t n, uint32_t kind, uint64_t *nbytes)
{
    uint64_t found = 0;
    *nbytes = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (spans[i].kind != kind)
            continue;
        found++;
        *nbytes += spans[i].nbytes;
        CHECK_EQ(spans[i].generation, generation);
        CHECK(spans[i].begin_ns > 0 && spans[i].begin_ns <= spans[i].end_ns && spans[i].thread != 0);
        CHECK(kind != LCK_SPAN_COPY || spans[i].tensor < TENSORS);
    }
    return found;
}

/* Check that the n spans are those of one checkpoint: `copies` background copies with `copied` bytes together, and
 * copies at the boundary with `at_once` bytes. */
static void check_version(uint64_t n, uint64_t copies, uint64_t copied, uint64_t at_once)
{
    uint64_t nbytes;
    CHECK_EQ(count_of(n, LCK_SPAN_COPY, &nbytes), copies);
    CHECK_EQ(nbytes, copied);
    CHECK_EQ(count_of(n, LCK_SPAN_NOW, &nbytes), 1);
    CHECK_EQ(nbytes, at_once);
    CHECK_EQ(count_of(n, LCK_SPAN_HEADER, &nbytes), 1);
    CHECK_EQ(count_of(n, LCK_SPAN_MANIFEST, &nbytes), 1);
    CHECK_EQ(nbytes, IMAGE);
    CHECK_EQ(count_of(n, LCK_SPAN_SYNC, &nbytes), 1);
    CHECK_EQ(count_of(n, LCK_SPAN_COMMIT_RECORD, &nbytes), 1);
}

static void test_every_part_is_there_once(uint32_t threads)
{
    uint64_t dropped, all = nbytes_of[0] + nbytes_of[1] + nbytes_of[2];
    setup(threads);
    run(false);
    CHECK_EQ(take(&dropped), 0);
    CHECK_EQ(lck_spans_start(engine, 1024), LCK_OK);
    for (int i = 0; i < 20; i++) { /* the queue wraps around several times */
        run(false);
        check_version(take_all(blocks + 5), blocks, all, 0);
    }
    run(true);
    check_version(take_all(blocks - 1 + 5), blocks - 1, all - nbytes_of[0], all);
    CHECK_EQ(lck_spans_stop(engine), LCK_OK);
    run(false);
    CHECK_EQ(take(&dropped), 0);
    CHECK_EQ(dropped, 0);
    CHECK_EQ(lck_spans_start(engine, 1024), LCK_OK);
    run(false);
    check_version(take_all(blocks + 5), blocks, all, 0);
    teardown();
}

static void test_a_full_queue_drops_and_counts(void)
{
    uint64_t dropped = 0, count = 0, lost = 0;
    setup(2);
    CHECK_EQ(lck_spans_start(engine, 16), LCK_OK);
    run(false);
    for (int i = 0; i < LONG_MS && count + dropped < blocks + 5; i++) {
        count += take(&lost);
        dropped += lost;
        usleep(1000);
    }
    CHECK_EQ(count + dropped, blocks + 5);
    CHECK(count >= 16 && dropped > 0);
    CHECK_EQ(take(&lost) + lost, 0);
    teardown();
}

static void test_arguments(void)
{
    uint64_t count, dropped;
    setup(1);
    CHECK_EQ(lck_spans_start(engine, 0), LCK_EINVAL);
    CHECK_EQ(lck_spans_start(engine, 1), LCK_EINVAL);
    CHECK_EQ(lck_spans_start(engine, 24), LCK_EINVAL);
    CHECK_EQ(lck_spans_start(engine, 2 * (uint64_t)LCK_SPANS_MAX), LCK_EINVAL);
    CHECK_EQ(lck_spans_start(NULL, 16), LCK_EINVAL);
    CHECK_EQ(lck_spans_stop(NULL), LCK_EINVAL);
    CHECK_EQ(lck_spans_take(engine, NULL, 1, &count, &dropped), LCK_EINVAL);
    CHECK_EQ(lck_spans_take(engine, spans, 1, NULL, &dropped), LCK_EINVAL);
    CHECK_EQ(lck_spans_take(engine, spans, 1, &count, &dropped), LCK_OK);
    CHECK_EQ(count + dropped, 0);
    teardown();
}

int main(void)
{
    test_every_part_is_there_once(1);
    test_every_part_is_there_once(4);
    test_a_full_queue_drops_and_counts();
    test_arguments();
    return 0;
}
