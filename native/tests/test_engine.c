/* The engine: the order of commits, the ends of jobs, and the fences between copies and the commit record. */
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "check.h"

enum {
    SLOTS = 4,
    TENSORS = 5,
    BLOCK = 4096,
    RING = 8192,       /* offset of 16 commit records, 256 bytes apart */
    SLOT0 = 64 << 10,
    SLOT_NBYTES = 1 << 20,
    MANIFEST = 4096,   /* offset in a slot */
    PAYLOAD = 64 << 10, /* offset in a slot */
    SIZE = SLOT0 + SLOTS * SLOT_NBYTES,
    IMAGE = 2048,
    CRCS_OFF = 128,
    CRCS = 300,
    SHORT_MS = 30,
    LONG_MS = 60000
};

static const uint64_t nbytes_of[TENSORS] = {100, 300000, BLOCK, 0, 250001};

/* One checkpoint: its sources, the image of its manifest, and the arguments of lck_job_submit. Variables of this type
 * are named v, for the version of the state that the checkpoint holds. */
struct checkpoint {
    uint64_t generation, ticket;
    unsigned char *source[TENSORS];
    unsigned char image[IMAGE];
    uint32_t raw[CRCS];
    lck_copy copies[TENSORS];
    lck_commit commit;
};

static int fd;
static lck_medium *medium;
static lck_engine *engine;

static void setup(uint32_t threads)
{
    fd = open_memory(SIZE);
    medium = open_medium(fd, SIZE, LCK_MEDIUM_PM_EMULATED);
    CHECK_EQ(lck_engine_open(threads, &engine), LCK_OK);
    CHECK_EQ(lck_trace_start(medium), LCK_OK);
}

static void teardown(void)
{
    if (engine != NULL)
        CHECK_EQ(lck_engine_close(engine), LCK_OK);
    engine = NULL;
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    close(fd);
}

static uint64_t slot_off(uint64_t generation) { return SLOT0 + generation % SLOTS * SLOT_NBYTES; }
static uint64_t record_off(uint64_t generation) { return RING + generation % 16 * 256; }

static void fill_copies(struct checkpoint *v, uint32_t flags)
{
    uint32_t crc_index = 0;
    uint64_t dst = slot_off(v->generation) + PAYLOAD;
    for (uint64_t i = 0; i < TENSORS; i++) {
        v->copies[i] = (lck_copy){.src = (uintptr_t)v->source[i], .dst = dst, .nbytes = nbytes_of[i], .tensor = i,
                                  .crc_index = crc_index, .flags = flags};
        crc_index += (uint32_t)((nbytes_of[i] + BLOCK - 1) / BLOCK);
        dst += (nbytes_of[i] + 255) / 256 * 256;
    }
    CHECK(crc_index <= CRCS);
}

static struct checkpoint *checkpoint_new(uint64_t generation, uint32_t flags)
{
    struct checkpoint *v = calloc(1, sizeof *v);
    CHECK(v != NULL);
    v->generation = generation;
    for (uint64_t i = 0; i < TENSORS; i++) {
        v->source[i] = malloc(nbytes_of[i] + 1);
        CHECK(v->source[i] != NULL);
        fill_random(v->source[i], nbytes_of[i], generation * 100 + i);
    }
    fill_random(v->image, IMAGE, generation);
    fill_copies(v, flags);
    v->commit = (lck_commit){
        .header_off = slot_off(generation), .manifest_off = slot_off(generation) + MANIFEST,
        .record_off = record_off(generation), .image = (uintptr_t)v->image, .image_nbytes = IMAGE, .crcs_off = CRCS_OFF,
        .crcs_count = CRCS, .raw_crcs = (uintptr_t)v->raw, .block = BLOCK, .uuid_lo = 0x1111, .uuid_hi = 0x2222,
        .origin_lo = 0x3333, .origin_hi = 0x4444, .generation = generation, .incarnation = 7,
        .step = 1000 + generation, .slot = (uint32_t)(generation % SLOTS), .manifest_index = 1};
    return v;
}

static void checkpoint_free(struct checkpoint *v)
{
    for (int i = 0; i < TENSORS; i++)
        free(v->source[i]);
    free(v);
}

static void submit(struct checkpoint *v)
{
    CHECK_EQ(lck_job_submit(engine, medium, v->copies, TENSORS, &v->commit, &v->ticket), LCK_OK);
}

static lck_job_info info(struct checkpoint *v)
{
    lck_job_info out;
    CHECK_EQ(lck_job_info_get(engine, v->ticket, &out), LCK_OK);
    return out;
}

static int32_t wait_until(struct checkpoint *v, uint32_t until)
{
    return lck_job_wait(engine, v->ticket, until, LONG_MS);
}

static void forget(struct checkpoint *v) { CHECK_EQ(lck_job_forget(engine, v->ticket), LCK_OK); }

static void run(struct checkpoint *v)
{
    submit(v);
    CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
    CHECK_EQ(wait_until(v, LCK_JOB_COMMITTED), LCK_OK);
}

/* ---- the expected content of the medium ------------------------------------------------------------------------ */

static uint64_t u64_at(const unsigned char *p)
{
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

static uint64_t check_of(const void *data, uint64_t nbytes)
{
    const uint64_t uuid[2] = {0x1111, 0x2222};
    return lck_crc64(lck_crc64(0, uuid, 16), data, nbytes);
}

static void check_header(struct checkpoint *v)
{
    unsigned char header[64], zeros[24] = {0};
    read_back(fd, header, 64, v->commit.header_off);
    CHECK_EQ(u64_at(header), v->generation);
    CHECK(memcmp(header + 8, "LCKSLOT1", 8) == 0);
    CHECK_EQ(u64_at(header + 16), v->commit.slot);
    CHECK(memcmp(header + 24, zeros, 24) == 0);
    CHECK(u64_at(header + 56) == check_of(header, 56));
}

static void check_commit_record(struct checkpoint *v)
{
    unsigned char line[64]; /* the commit record */
    read_back(fd, line, 64, v->commit.record_off);
    CHECK_EQ(u64_at(line), v->generation);
    CHECK_EQ(u64_at(line + 8), 7);
    CHECK_EQ(u64_at(line + 16), 1000 + v->generation);
    CHECK_EQ(u64_at(line + 24), v->generation);
    CHECK(u64_at(line + 32) == check_of(v->image, IMAGE));
    CHECK_EQ(u64_at(line + 40), IMAGE | (uint64_t)1 << 32 | (uint64_t)v->commit.slot << 40 | (uint64_t)1 << 48);
    CHECK_EQ(u64_at(line + 48), 0);
    CHECK(u64_at(line + 56) == check_of(line, 56));
}

static int has_commit_record(struct checkpoint *v)
{
    unsigned char line[64]; /* the commit record */
    read_back(fd, line, 64, v->commit.record_off);
    return u64_at(line) == v->generation;
}

static void check_payload(struct checkpoint *v)
{
    static unsigned char got[300001];
    for (int i = 0; i < TENSORS; i++) {
        const lck_copy *copy = &v->copies[i];
        const lck_extent whole = {0, SIZE};
        const uint32_t *crcs = (const uint32_t *)(const void *)(v->image + CRCS_OFF) + copy->crc_index;
        CHECK_EQ(lck_read_verified(fd, &whole, 1, copy->dst, got, copy->nbytes, BLOCK, crcs, 0x3333, 0x4444, copy->tensor,
                                   v->generation, NULL),
                 LCK_OK);
        CHECK(memcmp(got, v->source[i], copy->nbytes) == 0);
        for (uint64_t at = 0, block = 0; at < copy->nbytes; at += BLOCK, block++) {
            uint64_t left = copy->nbytes - at;
            CHECK(v->raw[copy->crc_index + block] == lck_crc32c(v->source[i] + at, left < BLOCK ? left : BLOCK));
        }
    }
}

/* Check that the medium holds the committed checkpoint ("version") v. */
static void check_version(struct checkpoint *v)
{
    unsigned char image[IMAGE];
    check_header(v);
    check_commit_record(v);
    check_payload(v);
    read_back(fd, image, IMAGE, v->commit.manifest_off);
    CHECK(memcmp(image, v->image, IMAGE) == 0);
}

/* ---- the expected trace -------------------------------------------------------------------------- */

static lck_event *events;
static uint64_t event_count;

static void take_trace(void)
{
    CHECK_EQ(lck_trace_stop(medium), LCK_OK);
    event_count = lck_trace_count(medium);
    free(events);
    events = calloc(event_count + 1, sizeof *events);
    CHECK(events != NULL);
    for (uint64_t i = 0; i < event_count; i++)
        CHECK_EQ(lck_trace_event(medium, i, &events[i]), LCK_OK);
}

static int is_word(const lck_event *e)
{
    return e->kind == LCK_EV_STORE && e->nbytes == 8 && e->off >= RING && e->off < RING + 16 * 256;
}

static int orders(const lck_event *e) { return e->kind == LCK_EV_FENCE || e->kind == LCK_EV_SYNC; }

static int ordered_before(uint64_t from, uint64_t to)
{
    for (uint64_t i = from + 1; i < to; i++)
        if (events[i].thread == events[from].thread && orders(&events[i]))
            return 1;
    return 0;
}

/* Event `word` stores the first word of a commit record. Check the fences before it: each store to the record's slot
 * (from the slot header on) is fenced before the body of the record is stored, and the body is fenced before `word`. */
static void check_fences_before(uint64_t word, uint64_t generation)
{
    uint64_t slot = slot_off(generation), header = 0, body = 0;
    for (uint64_t i = 0; i < word; i++) {
        if (events[i].kind == LCK_EV_STORE && events[i].off == slot)
            header = i;
        if (events[i].kind == LCK_EV_STORE && events[i].off == events[word].off + 8)
            body = i;
    }
    CHECK(events[header].off == slot && ordered_before(header, word));
    CHECK(body > header && ordered_before(body, word));
    for (uint64_t i = header; i < word; i++)
        if ((events[i].kind == LCK_EV_COPY || events[i].kind == LCK_EV_STORE) && events[i].off >= slot &&
            events[i].off < slot + SLOT_NBYTES)
            CHECK(ordered_before(i, body));
}

static uint64_t word_value(const lck_event *e)
{
    const unsigned char *data = lck_trace_data(medium, NULL);
    return u64_at(data + e->data);
}

/* Returns the number of commit records. Their generations must grow, and each mark ACK must come after the record's
 * sync. */
static uint64_t check_trace_order(void)
{
    uint64_t last = 0, count = 0;
    for (uint64_t i = 0; i < event_count; i++) {
        if (!is_word(&events[i]))
            continue;
        uint64_t generation = word_value(&events[i]);
        CHECK(generation > last);
        last = generation;
        count++;
        check_fences_before(i, generation);
        uint64_t ack = i;
        while (ack < event_count && !(events[ack].kind == LCK_EV_MARK && events[ack].off == LCK_MARK_ACK))
            ack++;
        CHECK(ack == event_count || events[ack].nbytes == generation);
        CHECK(ack == event_count || ordered_before(i, ack));
    }
    return count;
}

/* ---- tests -------------------------------------------------------------------------------------------- */

static void test_many(uint32_t threads)
{
    setup(threads);
    for (uint64_t g = 1; g <= 40; g++) {
        struct checkpoint *v = checkpoint_new(g, 0);
        if (g % 3 == 0)
            v->copies[1].flags = LCK_NOW;
        run(v);
        lck_job_info i = info(v);
        CHECK_EQ(i.state, LCK_JOB_COMMITTED);
        CHECK_EQ(i.released, 1);
        CHECK_EQ(i.nbytes, 100 + 300000 + BLOCK + 250001 + IMAGE);
        CHECK_EQ(i.blocks, 1 + 74 + 1 + 62);
        CHECK(i.nbytes_helped <= i.nbytes);
        check_version(v);
        forget(v);
        CHECK_EQ(lck_job_forget(engine, v->ticket), LCK_ESTATE);
        checkpoint_free(v);
    }
    take_trace();
    CHECK_EQ(check_trace_order(), 40);
    CHECK(lck_engine_cpu_ns(engine) > 0);
    teardown();
}

/* If no thread waits, a worker commits. */
static void test_unattended(void)
{
    setup(2);
    struct checkpoint *v = checkpoint_new(1, 0);
    submit(v);
    CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
    CHECK_EQ(lck_job_release(engine, v->ticket), LCK_ESTATE);
    while (info(v).state != LCK_JOB_COMMITTED)
        usleep(500);
    check_version(v);
    CHECK_EQ(info(v).nbytes_helped, 0);
    checkpoint_free(v);
    teardown();
}

/* lck_job_commit seals on the calling thread. If all copies of a job were made inside lck_job_submit, no worker copies
 * or seals anything. */
static void test_commit_on_this_thread(void)
{
    setup(2);
    for (uint64_t generation = 1; generation <= 50; generation++) {
        struct checkpoint *v = checkpoint_new(generation, LCK_NOW);
        submit(v);
        CHECK_EQ(lck_job_commit(engine, v->ticket, LONG_MS), LCK_OK);
        CHECK_EQ(info(v).state, LCK_JOB_COMMITTED);
        CHECK(info(v).nbytes_helped > 0);
        CHECK_EQ(lck_job_commit(engine, v->ticket, LONG_MS), LCK_ESTATE);
        check_version(v);
        forget(v);
        checkpoint_free(v);
    }
    CHECK_EQ(lck_job_commit(engine, 12345, LONG_MS), LCK_ESTATE);
    teardown();
}

/* The commit of b waits for the earlier job a and times out. A worker commits b after a has ended, without a waiting
 * thread. */
static void test_commit_that_times_out(void)
{
    setup(2);
    struct checkpoint *a = checkpoint_new(1, LCK_NOW), *b = checkpoint_new(2, LCK_NOW);
    submit(a);
    submit(b);
    CHECK_EQ(lck_job_commit(engine, b->ticket, SHORT_MS), LCK_ETIMEDOUT);
    CHECK_EQ(lck_job_release(engine, b->ticket), LCK_ESTATE);
    CHECK_EQ(lck_job_release(engine, a->ticket), LCK_OK);
    while (info(b).state != LCK_JOB_COMMITTED)
        usleep(500);
    CHECK_EQ(info(a).state, LCK_JOB_COMMITTED);
    check_version(a);
    check_version(b);
    forget(a);
    CHECK_EQ(lck_job_drop(engine, b->ticket), LCK_ESTATE);
    checkpoint_free(a);
    checkpoint_free(b);
    teardown();
}

static void test_order(void)
{
    setup(2);
    struct checkpoint *a = checkpoint_new(1, 0), *b = checkpoint_new(2, 0);
    submit(a);
    submit(b);
    CHECK_EQ(wait_until(b, LCK_JOB_COPIED), LCK_OK);
    CHECK_EQ(lck_job_wait(engine, b->ticket, LCK_JOB_COMMITTED, SHORT_MS), LCK_ESTATE); /* not released */
    CHECK_EQ(lck_job_release(engine, b->ticket), LCK_OK);
    CHECK_EQ(lck_job_wait(engine, b->ticket, LCK_JOB_COMMITTED, SHORT_MS), LCK_ETIMEDOUT);
    CHECK_EQ(info(b).state, LCK_JOB_COPIED);
    CHECK(!has_commit_record(b));
    CHECK_EQ(lck_job_release(engine, a->ticket), LCK_OK);
    CHECK_EQ(wait_until(b, LCK_JOB_COMMITTED), LCK_OK);
    CHECK_EQ(info(a).state, LCK_JOB_COMMITTED);
    check_version(a);
    check_version(b);
    take_trace();
    CHECK_EQ(check_trace_order(), 2);
    checkpoint_free(a);
    checkpoint_free(b);
    teardown();
}

static void test_drop(void)
{
    setup(2);
    struct checkpoint *a = checkpoint_new(1, 0), *b = checkpoint_new(2, 0);
    submit(a);
    submit(b);
    CHECK_EQ(lck_job_release(engine, b->ticket), LCK_OK);
    CHECK_EQ(lck_job_forget(engine, a->ticket), LCK_ESTATE);
    CHECK_EQ(lck_job_drop(engine, a->ticket), LCK_OK);
    CHECK_EQ(info(a).state, LCK_JOB_DROPPED);
    CHECK_EQ(wait_until(a, LCK_JOB_COPIED), LCK_EDROPPED);
    CHECK_EQ(wait_until(a, LCK_JOB_COMMITTED), LCK_EDROPPED);
    CHECK_EQ(lck_job_release(engine, a->ticket), LCK_EDROPPED);
    CHECK_EQ(lck_job_drop(engine, b->ticket), LCK_ESTATE);
    CHECK_EQ(wait_until(b, LCK_JOB_COMMITTED), LCK_OK);
    CHECK(!has_commit_record(a));
    check_version(b);
    forget(a);
    checkpoint_free(a); /* no thread reads the sources any more */
    struct checkpoint *c = checkpoint_new(5, 0);
    submit(c);
    CHECK_EQ(wait_until(c, LCK_JOB_COPIED), LCK_OK);
    CHECK_EQ(lck_job_drop(engine, c->ticket), LCK_OK); /* copied already */
    CHECK_EQ(info(c).state, LCK_JOB_DROPPED);
    CHECK(!has_commit_record(c));
    checkpoint_free(b);
    checkpoint_free(c);
    teardown();
}

/* A drop skips blocks that no worker has claimed. Fast workers may have claimed all blocks, so there are several
 * attempts. */
static void test_drop_skips(void)
{
    setup(1);
    int skipped = 0;
    for (int attempt = 0; attempt < 50 && !skipped; attempt++) {
        struct checkpoint *v[8];
        for (int i = 0; i < 8; i++)
            submit(v[i] = checkpoint_new((uint64_t)(i + 1), 0));
        for (int i = 7; i >= 0; i--) {
            CHECK_EQ(lck_job_drop(engine, v[i]->ticket), LCK_OK);
            skipped |= info(v[i]).blocks < 138;
            forget(v[i]);
            checkpoint_free(v[i]);
        }
    }
    CHECK(skipped);
    teardown();
}

static void test_now(void)
{
    setup(2);
    struct checkpoint *v = checkpoint_new(1, 0);
    v->copies[4].flags = LCK_NOW;
    submit(v);
    unsigned char was = v->source[4][77];
    v->source[4][77] = (unsigned char)~was; /* the copy was made before submit returned */
    CHECK_EQ(wait_until(v, LCK_JOB_COPIED), LCK_OK);
    v->source[4][77] = was;
    CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
    CHECK_EQ(wait_until(v, LCK_JOB_COMMITTED), LCK_OK);
    check_version(v);
    forget(v);
    checkpoint_free(v);
    v = checkpoint_new(2, LCK_NOW); /* nothing left for the workers */
    submit(v);
    CHECK_EQ(info(v).state, LCK_JOB_COPIED);
    CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
    CHECK_EQ(wait_until(v, LCK_JOB_COMMITTED), LCK_OK);
    check_version(v);
    checkpoint_free(v);
    take_trace();
    CHECK_EQ(check_trace_order(), 2);
    teardown();
}

static void expect_failure(struct checkpoint *v, int error)
{
    CHECK_EQ(wait_until(v, LCK_JOB_COMMITTED), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), error);
    lck_job_info i = info(v);
    CHECK_EQ(i.state, LCK_JOB_FAILED);
    CHECK_EQ(i.status, LCK_ESYS);
    CHECK_EQ(i.error, error);
    forget(v);
}

static void test_faults(void)
{
    setup(2);
    struct checkpoint *v = checkpoint_new(1, 0);
    CHECK_EQ(lck_fault(LCK_OP_COPY, 5, EIO), LCK_OK);
    submit(v);
    CHECK_EQ(wait_until(v, LCK_JOB_COPIED), LCK_ESYS);
    CHECK_EQ(lck_job_release(engine, v->ticket), LCK_ESYS);
    expect_failure(v, EIO);
    CHECK(!has_commit_record(v));
    checkpoint_free(v);

    v = checkpoint_new(2, LCK_NOW); /* fails inside submit: nothing is queued */
    CHECK_EQ(lck_fault(LCK_OP_COPY, 3, ENOSPC), LCK_OK);
    CHECK_EQ(lck_job_submit(engine, medium, v->copies, TENSORS, &v->commit, &v->ticket), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), ENOSPC);
    checkpoint_free(v);

    v = checkpoint_new(3, 0);
    CHECK_EQ(lck_fault(LCK_OP_SYNC, 1, EIO), LCK_OK); /* payload and manifest */
    submit(v);
    CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
    expect_failure(v, EIO);
    CHECK(!has_commit_record(v));
    checkpoint_free(v);

    v = checkpoint_new(4, 0);
    CHECK_EQ(lck_fault(LCK_OP_SYNC, 2, EIO), LCK_OK); /* the commit record */
    submit(v);
    CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
    expect_failure(v, EIO);
    checkpoint_free(v);

    v = checkpoint_new(5, 0);
    CHECK_EQ(lck_fault(LCK_OP_COPY, 1, EIO), LCK_OK);
    submit(v);
    CHECK_EQ(wait_until(v, LCK_JOB_COPIED), LCK_ESYS);
    CHECK_EQ(info(v).state, LCK_JOB_FAILED);
    CHECK_EQ(lck_job_drop(engine, v->ticket), LCK_OK);
    forget(v);
    checkpoint_free(v);

    v = checkpoint_new(6, 0);
    run(v);
    check_version(v);
    checkpoint_free(v);
    take_trace();
    for (uint64_t i = 0; i < event_count; i++)
        if (events[i].kind == LCK_EV_MARK && events[i].off == LCK_MARK_ACK)
            CHECK_EQ(events[i].nbytes, 6);
    teardown();
}

/* After a failed copy, blocks that are not claimed are skipped. With one worker and no waiting thread their number is
 * exact. */
static void test_failure_skips(void)
{
    setup(1);
    struct checkpoint *v = checkpoint_new(1, 0);
    CHECK_EQ(lck_fault(LCK_OP_COPY, 5, EIO), LCK_OK);
    submit(v);
    while (info(v).state == LCK_JOB_COPYING)
        usleep(200);
    CHECK_EQ(info(v).state, LCK_JOB_FAILED);
    CHECK_EQ(info(v).blocks, 4);
    checkpoint_free(v);
    teardown();
}

/* Submit the first `n` tensors as a partial job, and the others as the job that commits. */
static void submit_split(struct checkpoint *v, uint64_t n, uint64_t *part)
{
    lck_commit begun = v->commit;
    begun.flags = LCK_PART;
    CHECK_EQ(lck_job_submit(engine, medium, v->copies, n, &begun, part), LCK_OK);
    v->commit.flags = LCK_FOLLOWS;
    CHECK_EQ(lck_job_submit(engine, medium, v->copies + n, TENSORS - n, &v->commit, &v->ticket), LCK_OK);
}

static uint64_t headers_written(uint64_t generation)
{
    uint64_t found = 0;
    for (uint64_t i = 0; i < event_count; i++)
        found += events[i].kind == LCK_EV_STORE && events[i].off == slot_off(generation) && events[i].nbytes == 64;
    return found;
}

static void test_parts(uint32_t threads)
{
    setup(threads);
    for (uint64_t g = 1; g <= 9; g++) {
        struct checkpoint *v = checkpoint_new(g, 0);
        uint64_t part;
        submit_split(v, g % TENSORS, &part);
        CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
        CHECK_EQ(lck_job_wait(engine, part, LCK_JOB_COPIED, LONG_MS), LCK_OK);
        CHECK_EQ(lck_job_wait(engine, v->ticket, LCK_JOB_COMMITTED, SHORT_MS), LCK_ETIMEDOUT);
        CHECK(!has_commit_record(v)); /* the part is not released */
        CHECK_EQ(lck_job_release(engine, part), LCK_OK);
        CHECK_EQ(wait_until(v, LCK_JOB_COMMITTED), LCK_OK);
        check_version(v);
        CHECK_EQ(lck_job_forget(engine, part), LCK_OK);
        forget(v);
        checkpoint_free(v);
    }
    take_trace();
    CHECK_EQ(check_trace_order(), 9);
    for (uint64_t g = 7; g <= 9; g++)
        CHECK_EQ(headers_written(g), (g - 1) / SLOTS + 1); /* one for each generation that this slot has held so far */
    teardown();
}

static void test_lost_part(void)
{
    setup(1);
    for (uint64_t g = 1; g <= 2; g++) {
        struct checkpoint *v = checkpoint_new(g, 0);
        uint64_t part;
        if (g == 1)
            CHECK_EQ(lck_fault(LCK_OP_COPY, 3, EIO), LCK_OK);
        submit_split(v, 2, &part);
        if (g == 1)
            CHECK(lck_job_wait(engine, part, LCK_JOB_COPIED, LONG_MS) != LCK_OK);
        else
            CHECK_EQ(lck_job_drop(engine, part), LCK_OK);
        (void)lck_job_release(engine, v->ticket);
        CHECK(wait_until(v, LCK_JOB_COMMITTED) != LCK_OK);
        CHECK(!has_commit_record(v));
        CHECK_EQ(info(v).state, LCK_JOB_FAILED);
        CHECK_EQ(lck_job_forget(engine, part), LCK_OK);
        forget(v);
        checkpoint_free(v);
    }
    teardown();
}

/* Empty the sources before the submit. give_sources fills them after it, as a device transfer does. */
static void take_sources(struct checkpoint *v, unsigned char **kept)
{
    for (int i = 0; i < TENSORS; i++) {
        kept[i] = malloc(nbytes_of[i] + 1);
        CHECK(kept[i] != NULL);
        memcpy(kept[i], v->source[i], nbytes_of[i]);
        memset(v->source[i], 0, nbytes_of[i]);
    }
}

static void give_sources(struct checkpoint *v, unsigned char **kept)
{
    for (int i = 0; i < TENSORS; i++) {
        memcpy(v->source[i], kept[i], nbytes_of[i]);
        free(kept[i]);
    }
}

static void test_held(uint32_t threads)
{
    setup(threads);
    for (uint64_t g = 1; g <= 6; g++) {
        struct checkpoint *v = checkpoint_new(g, 0);
        unsigned char *kept[TENSORS];
        take_sources(v, kept);
        v->commit.flags = LCK_HELD;
        submit(v);
        CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
        CHECK_EQ(lck_job_wait(engine, v->ticket, LCK_JOB_COMMITTED, SHORT_MS), LCK_ETIMEDOUT);
        CHECK_EQ(info(v).blocks, 0);
        give_sources(v, kept);
        CHECK_EQ(lck_job_start(engine, v->ticket, LCK_OK), LCK_OK);
        CHECK_EQ(lck_job_start(engine, v->ticket, LCK_OK), LCK_OK);
        CHECK_EQ(wait_until(v, LCK_JOB_COMMITTED), LCK_OK);
        check_version(v);
        forget(v);
        CHECK_EQ(lck_job_start(engine, v->ticket, LCK_OK), LCK_ESTATE);
        checkpoint_free(v);
    }
    teardown();
}

static int written_back_next(uint64_t at)
{
    uint64_t next = at + 1;
    while (next < event_count && events[next].thread != events[at].thread)
        next++;
    return next < event_count && events[next].kind == LCK_EV_FLUSH && events[next].off == events[at].off &&
           events[next].nbytes == events[at].nbytes;
}

/* This function stores into the slot, as a device does: the copies have no source. */
static void test_placed(uint32_t threads)
{
    setup(threads);
    unsigned char *base = (unsigned char *)(uintptr_t)lck_medium_address(medium);
    CHECK(base != NULL);
    struct checkpoint *v = checkpoint_new(1, LCK_PLACED);
    for (int i = 0; i < TENSORS; i++)
        v->copies[i].src = 0;
    v->commit.flags = LCK_HELD;
    submit(v);
    check_header(v);
    for (int i = 0; i < TENSORS; i++)
        memcpy(base + v->copies[i].dst, v->source[i], nbytes_of[i]);
    CHECK_EQ(lck_job_start(engine, v->ticket, LCK_OK), LCK_OK);
    CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
    CHECK_EQ(wait_until(v, LCK_JOB_COMMITTED), LCK_OK);
    check_version(v);
    take_trace();
    CHECK_EQ(check_trace_order(), 1);
    uint64_t stored = 0, payload = slot_off(1) + PAYLOAD;
    for (uint64_t i = 0; i < event_count; i++) {
        if (events[i].kind != LCK_EV_STORE || events[i].off < payload || events[i].off >= slot_off(1) + SLOT_NBYTES)
            continue;
        CHECK(written_back_next(i));
        stored += events[i].nbytes;
    }
    CHECK_EQ(stored, info(v).nbytes - IMAGE);
    forget(v);
    checkpoint_free(v);
    teardown();
}

/* Held jobs that are never started end at a drop or at lck_engine_close, and later jobs commit. */
static void test_held_for_ever(void)
{
    setup(1);
    struct checkpoint *dropped = checkpoint_new(1, 0), *left = checkpoint_new(2, 0), *good = checkpoint_new(3, 0);
    dropped->commit.flags = left->commit.flags = LCK_HELD;
    submit(dropped);
    CHECK_EQ(lck_job_drop(engine, dropped->ticket), LCK_OK);
    CHECK_EQ(info(dropped).state, LCK_JOB_DROPPED);
    CHECK_EQ(info(dropped).blocks, 0);
    CHECK_EQ(lck_job_start(engine, dropped->ticket, LCK_OK), LCK_EDROPPED);
    struct checkpoint *failed = checkpoint_new(5, 0);
    failed->commit.flags = LCK_HELD;
    submit(failed);
    CHECK_EQ(lck_job_start(engine, failed->ticket, LCK_ESTATE), LCK_OK);
    CHECK_EQ(wait_until(failed, LCK_JOB_COPIED), LCK_ESTATE);
    CHECK_EQ(info(failed).blocks, 0);
    CHECK_EQ(lck_job_drop(engine, failed->ticket), LCK_OK);
    checkpoint_free(failed);
    submit(left);
    CHECK_EQ(lck_job_release(engine, left->ticket), LCK_OK);
    submit(good);
    CHECK_EQ(lck_job_release(engine, good->ticket), LCK_OK);
    CHECK_EQ(lck_engine_close(engine), LCK_OK);
    engine = NULL;
    CHECK(!has_commit_record(dropped));
    CHECK(!has_commit_record(left));
    CHECK(has_commit_record(good));
    checkpoint_free(dropped);
    checkpoint_free(left);
    checkpoint_free(good);
    teardown();
}

static void test_arguments(void)
{
    setup(1);
    lck_engine *none = NULL;
    CHECK_EQ(lck_engine_open(0, &none), LCK_EINVAL);
    CHECK_EQ(lck_engine_open(1000, &none), LCK_EINVAL);
    CHECK_EQ(lck_engine_close(NULL), LCK_EINVAL);
    const uint32_t processors[] = {0, 1 << 16};
    CHECK_EQ(lck_engine_run_on(NULL, processors, 1), LCK_EINVAL);
    CHECK_EQ(lck_engine_run_on(engine, processors, 0), LCK_EINVAL);
    CHECK_EQ(lck_engine_run_on(engine, processors, 2), LCK_EINVAL);
    struct checkpoint *v = checkpoint_new(1, 0);
    lck_commit good = v->commit;
    uint64_t ticket;
#define REFUSED(field, value)                                                                                \
    do {                                                                                                     \
        v->commit = good;                                                                                    \
        v->commit.field = (value);                                                                           \
        CHECK_EQ(lck_job_submit(engine, medium, v->copies, TENSORS, &v->commit, &ticket), LCK_EINVAL);       \
    } while (0)
    REFUSED(header_off, 32);
    REFUSED(header_off, SIZE);
    REFUSED(record_off, RING + 8);
    REFUSED(manifest_off, SIZE - 100);
    REFUSED(image, 0);
    REFUSED(image_nbytes, 100);
    REFUSED(crcs_off, 130);
    REFUSED(crcs_count, 1000);
    REFUSED(crcs_count, UINT64_MAX / 4);
    REFUSED(crcs_count, 100);
    REFUSED(block, 0);
    REFUSED(block, 100);
    REFUSED(block, 2 << 20);
    REFUSED(generation, 0);
    REFUSED(slot, 256);
    REFUSED(manifest_index, 2);
    REFUSED(flags, 8);
    v->commit = good;
    v->copies[2].flags = 6;
    CHECK_EQ(lck_job_submit(engine, medium, v->copies, TENSORS, &v->commit, &ticket), LCK_EINVAL);
    v->copies[2].flags = 0;
    CHECK_EQ(lck_job_submit(engine, medium, NULL, 1, &v->commit, &ticket), LCK_EINVAL);
    CHECK_EQ(lck_job_wait(engine, 99, LCK_JOB_COPIED, 0), LCK_ESTATE);
    CHECK_EQ(lck_job_wait(engine, 0, LCK_JOB_COPIED, 0), LCK_ESTATE);
    CHECK_EQ(lck_job_wait(engine, 99, 1, 0), LCK_EINVAL);
    CHECK_EQ(lck_trace_count(medium), 0);
    checkpoint_free(v);
    teardown();
}

static void test_busy_and_close(void)
{
    struct checkpoint *v[LCK_JOBS_MAX + 1], *one_more;
    setup(2);
    for (uint64_t i = 0; i <= LCK_JOBS_MAX; i++)
        v[i] = checkpoint_new(i + 1, 0);
    for (int i = 0; i < LCK_JOBS_MAX; i++)
        submit(v[i]);
    one_more = v[LCK_JOBS_MAX];
    CHECK_EQ(lck_job_submit(engine, medium, one_more->copies, TENSORS, &one_more->commit, &one_more->ticket),
             LCK_EBUSY);
    CHECK_EQ(lck_engine_quiesce(engine, medium), LCK_ESTATE);
    CHECK_EQ(lck_job_release(engine, v[9]->ticket), LCK_OK);
    CHECK_EQ(lck_job_release(engine, v[14]->ticket), LCK_OK);
    CHECK_EQ(lck_engine_close(engine), LCK_OK); /* commits the two released jobs, drops the others */
    engine = NULL;
    for (int i = 0; i <= LCK_JOBS_MAX; i++) {
        CHECK_EQ(has_commit_record(v[i]), i == 9 || i == 14);
        checkpoint_free(v[i]);
    }
    teardown();
}

static uint64_t pages_present(int file)
{
    struct stat st;
    CHECK_EQ(fstat(file, &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

static void test_populate(void)
{
    setup(2);
    CHECK_EQ(lck_engine_populate(engine, medium), LCK_OK);
    struct checkpoint *v = checkpoint_new(1, 0);
    run(v); /* copies take precedence over populating */
    while (pages_present(fd) < SIZE)
        usleep(500);
    check_version(v); /* populating has changed no byte */
    CHECK_EQ(lck_engine_quiesce(engine, medium), LCK_OK);
    checkpoint_free(v);
    teardown();

    setup(1); /* stop before all pages are populated */
    CHECK_EQ(lck_engine_populate(engine, medium), LCK_OK);
    CHECK_EQ(lck_engine_quiesce(engine, medium), LCK_OK);
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    CHECK_EQ(lck_engine_close(engine), LCK_OK);
    engine = NULL;
    close(fd);
}

/* ---- several threads at once --------------------------------------------------------------------------- */

static _Atomic int ended;

static void *waiter(void *arg)
{
    struct checkpoint *v = arg;
    for (;;) {
        int32_t status = lck_job_wait(engine, v->ticket, LCK_JOB_COPIED, 1);
        if (status == LCK_OK || status == LCK_EDROPPED)
            break;
        CHECK_EQ(status, LCK_ETIMEDOUT);
    }
    if (v->generation % 3 == 0) {
        int32_t status = lck_job_drop(engine, v->ticket);
        CHECK_EQ(status, LCK_OK);
    } else {
        CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
        /* Some threads stop waiting early: then a worker must seal. */
        int32_t status = lck_job_wait(engine, v->ticket, LCK_JOB_COMMITTED, v->generation % 5 == 0 ? 1 : LONG_MS);
        CHECK(status == LCK_OK || status == LCK_ETIMEDOUT);
    }
    atomic_fetch_add(&ended, 1);
    return NULL;
}

static void test_storm(void)
{
    enum { AT_ONCE = 4, ROUNDS = 12 };
    setup(3);
    uint64_t generation = 0, committed = 0;
    for (int round = 0; round < ROUNDS; round++) {
        struct checkpoint *v[AT_ONCE];
        pthread_t threads[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) {
            v[i] = checkpoint_new(++generation, 0);
            submit(v[i]);
            CHECK_EQ(pthread_create(&threads[i], NULL, waiter, v[i]), 0);
        }
        for (int i = 0; i < AT_ONCE; i++)
            CHECK_EQ(pthread_join(threads[i], NULL), 0);
        for (int i = 0; i < AT_ONCE; i++) {
            if (v[i]->generation % 3 != 0) {
                while (info(v[i]).state != LCK_JOB_COMMITTED) /* no thread waits for it any more */
                    usleep(200);
                check_version(v[i]);
                committed++;
            }
            forget(v[i]);
            checkpoint_free(v[i]);
        }
    }
    take_trace();
    CHECK_EQ(check_trace_order(), committed);
    teardown();
}

/* ---- priority ------------------------------------------------------------------------------------------ */

static pid_t copier(void)
{
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    pid_t found = 0;
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char path[300], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = task->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (file != NULL && fgets(name, sizeof name, file) != NULL && strcmp(name, "lightck-copy-0\n") == 0)
            found = (pid_t)atoi(task->d_name);
        if (file != NULL)
            fclose(file);
    }
    closedir(tasks);
    CHECK(found != 0);
    return found;
}

static _Atomic bool watching;
static _Atomic int hurried; /* how many times `watch` saw the worker at normal priority */

static void *watch(void *arg)
{
    pid_t worker = *(pid_t *)arg;
    while (atomic_load(&watching)) {
        if (sched_getscheduler(worker) == SCHED_OTHER)
            atomic_fetch_add(&hurried, 1);
        usleep(300);
    }
    return NULL;
}

/* Set *arg to whether the system permits a thread to return from idle to normal priority. */
static void *may_stop_idling(void *arg)
{
    const struct sched_param none = {0};
    *(bool *)arg = pthread_setschedparam(pthread_self(), SCHED_IDLE, &none) == 0 &&
                   pthread_setschedparam(pthread_self(), SCHED_OTHER, &none) == 0;
    return NULL;
}

/* A worker that has claimed the last block runs at normal priority while the caller waits for that block. */
static void test_hurry(void)
{
    bool permitted;
    pthread_t asker, watcher;
    CHECK_EQ(pthread_create(&asker, NULL, may_stop_idling, &permitted), 0);
    CHECK_EQ(pthread_join(asker, NULL), 0);
    CHECK_EQ(lck_emulate(100000, 0, 0, 0), LCK_OK); /* a block of 4 KiB takes 40 ms */
    setup(1);
    CHECK_EQ(lck_emulate(0, 0, 0, 0), LCK_OK);
    usleep(20000);
    pid_t worker = copier();
    CHECK_EQ(sched_getscheduler(worker), SCHED_IDLE);
    atomic_store(&watching, true);
    CHECK_EQ(pthread_create(&watcher, NULL, watch, &worker), 0);
    for (uint64_t g = 1; g <= 20 && (g == 1 || (permitted && atomic_load(&hurried) == 0)); g++) {
        struct checkpoint *v = checkpoint_new(g, 0);
        CHECK_EQ(lck_job_submit(engine, medium, &v->copies[2], 1, &v->commit, &v->ticket), LCK_OK);
        usleep(10000); /* in most rounds the worker has claimed the only block by now */
        CHECK_EQ(wait_until(v, LCK_JOB_COPIED), LCK_OK);
        CHECK_EQ(sched_getscheduler(worker), SCHED_IDLE);
        CHECK_EQ(lck_job_drop(engine, v->ticket), LCK_OK);
        forget(v);
        checkpoint_free(v);
    }
    CHECK((atomic_load(&hurried) > 0) == permitted);
    atomic_store(&watching, false);
    CHECK_EQ(pthread_join(watcher, NULL), 0);
    CHECK_EQ(sched_getscheduler(worker), SCHED_IDLE);
    teardown();
}

/* ---- processes ----------------------------------------------------------------------------------------- */

static void test_fork(void)
{
    setup(1);
    struct checkpoint *v = checkpoint_new(1, 0);
    submit(v);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        uint64_t ticket;
        lck_job_info i;
        CHECK_EQ(lck_job_submit(engine, medium, v->copies, 1, &v->commit, &ticket), LCK_EFORK);
        CHECK_EQ(lck_job_release(engine, v->ticket), LCK_EFORK);
        CHECK_EQ(lck_job_drop(engine, v->ticket), LCK_EFORK);
        CHECK_EQ(lck_job_wait(engine, v->ticket, LCK_JOB_COPIED, 0), LCK_EFORK);
        CHECK_EQ(lck_job_info_get(engine, v->ticket, &i), LCK_EFORK);
        CHECK_EQ(lck_job_forget(engine, v->ticket), LCK_EFORK);
        CHECK_EQ(lck_engine_populate(engine, medium), LCK_EFORK);
        CHECK_EQ(lck_engine_quiesce(engine, medium), LCK_EFORK);
        CHECK_EQ(lck_engine_cpu_ns(engine), 0);
        CHECK_EQ(lck_engine_close(engine), LCK_EFORK);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(lck_job_release(engine, v->ticket), LCK_OK);
    CHECK_EQ(wait_until(v, LCK_JOB_COMMITTED), LCK_OK);
    check_version(v);
    checkpoint_free(v);
    teardown();
}

/* Whether the commit record ("line") of a checkpoint is complete after the process was killed at `site`. This function
 * forks, so call it before a thread is started in this process. */
static int line_after_kill(const char *site, uint64_t nth)
{
    int file = open_memory(SIZE);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        medium = open_medium(file, SIZE, LCK_MEDIUM_CACHE);
        CHECK_EQ(lck_engine_open(2, &engine), LCK_OK);
        struct checkpoint *v = checkpoint_new(1, 0);
        CHECK_EQ(lck_kill(site, nth), LCK_OK);
        run(v);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    unsigned char word[8];
    read_back(file, word, 8, record_off(1));
    close(file);
    return u64_at(word) == 1;
}

static void test_kills(void)
{
    CHECK(!line_after_kill("header", 1));
    CHECK(!line_after_kill("block", 1));
    CHECK(!line_after_kill("block", 138));
    CHECK(!line_after_kill("manifest", 1));
    CHECK(!line_after_kill("sealed", 1));
    CHECK(!line_after_kill("body", 1));
    CHECK(line_after_kill("word", 1));
    CHECK(line_after_kill("ack", 1));
}

int main(void)
{
    test_kills();
    test_many(1);
    test_many(4);
    test_unattended();
    test_commit_on_this_thread();
    test_commit_that_times_out();
    test_order();
    test_drop();
    test_drop_skips();
    test_now();
    test_faults();
    test_failure_skips();
    test_parts(1);
    test_parts(3);
    test_lost_part();
    test_held(1);
    test_held(3);
    test_held_for_ever();
    test_placed(1);
    test_placed(3);
    test_arguments();
    test_busy_and_close();
    test_populate();
    test_storm();
    test_hurry();
    test_fork();
    free(events);
    return 0;
}
