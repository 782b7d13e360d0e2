/* Direct writes: bytes, checksums and traces as with stores; refusals; neighbours in the page cache; a truncated file.
 * The file lies in the folder of temporary files: on tmpfs the kernel accepts O_DIRECT, but uses its page cache. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"

enum {
    TENSORS = 12,
    LARGE = (1 << 20) + 70001,
    SMALL = 300,
    BLOCK = 1 << 20,
    NBYTES_MIN = 64 << 10,
    RECORD = 4096,
    HEADER = 8192,
    MANIFEST = 12288,
    PAYLOAD = 64 << 10,
    COUNTERS = 8,          /* each in a page of its own, between tensors */
    SIZE = 16 << 20,
    IMAGE = 2048,
    CRCS_OFF = 128,
    LONG_MS = 60000,
    ROUNDS = 10
};

struct pool {
    int fd, direct_fd;
    lck_medium *medium;
    lck_engine *engine;
    unsigned char *source, *expected, *got;
    unsigned char image[IMAGE];
    uint32_t raw[TENSORS * 2];
    lck_copy copies[TENSORS];
    uint64_t counters[COUNTERS]; /* their offsets */
    uint64_t generation;
};

/* ---- the kernel's answers ------------------------------------------------------------------------------ */

enum answer { AS_IT_IS, IN_PARTS, NEVER_MORE, WITH_A_PAUSE };
static _Atomic int answer;
static _Atomic int error_of_pwrite;
static void pause_in_pwrite(uint64_t off);

/* The library's calls of pwrite come here. */
__attribute__((visibility("default"))) ssize_t pwrite(int fd, const void *bytes, size_t nbytes, off_t off)
{
    switch (atomic_load(&answer)) {
    case IN_PARTS: /* not in whole pages either */
        nbytes = nbytes > 12288 ? 10000 / 512 * 512 : nbytes;
        return syscall(SYS_pwrite64, fd, bytes, nbytes, off);
    case NEVER_MORE: /* some bytes were written before it failed */
        (void)!syscall(SYS_pwrite64, fd, bytes, (size_t)4096, off);
        errno = atomic_load(&error_of_pwrite);
        return -1;
    case WITH_A_PAUSE:
        pause_in_pwrite((uint64_t)off);
        break;
    default:
        break;
    }
    return syscall(SYS_pwrite64, fd, bytes, nbytes, off);
}

/* ---- a pool -------------------------------------------------------------------------------------------- */

static int open_again(int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
}

static int open_buffered(int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDONLY | O_CLOEXEC);
}

static int temporary(uint64_t nbytes)
{
    FILE *file = tmpfile();
    CHECK(file != NULL);
    int fd = dup(fileno(file));
    fclose(file);
    CHECK_EQ(posix_fallocate(fd, 0, (off_t)nbytes), 0);
    return fd;
}

static bool is_direct(int fd)
{
    int direct_fd = open_again(fd);
    if (direct_fd >= 0)
        close(direct_fd);
    return direct_fd >= 0;
}

/* Tensors start at multiples of 256 bytes. So the large ones begin and end within pages that others share. */
static void lay_out(struct pool *pool)
{
    uint64_t at = PAYLOAD + 256, from = 0;
    uint32_t crc_index = 0;
    for (uint64_t i = 0; i < TENSORS; i++) {
        uint64_t nbytes = i % 2 == 0 ? LARGE : SMALL;
        pool->copies[i] = (lck_copy){.src = (uintptr_t)pool->source + from, .dst = at, .nbytes = nbytes, .tensor = i,
                                     .crc_index = crc_index};
        crc_index += (uint32_t)((nbytes + BLOCK - 1) / BLOCK);
        from += nbytes;
        at = (at + nbytes + 255) / 256 * 256;
        if (i % 3 == 0 && i / 3 < COUNTERS) {
            pool->counters[i / 3] = (at + 4095) / 4096 * 4096;
            at = pool->counters[i / 3] + 4096;
        }
    }
    CHECK(at + 4096 < SIZE && crc_index <= TENSORS * 2);
}

static void setup(struct pool *pool, uint32_t threads)
{
    *pool = (struct pool){.fd = temporary(SIZE)};
    pool->direct_fd = open_again(pool->fd);
    CHECK(pool->direct_fd >= 0);
    pool->source = malloc(SIZE), pool->expected = calloc(1, SIZE);
    CHECK_EQ(posix_memalign((void **)&pool->got, 4096, SIZE), 0);
    CHECK(pool->source != NULL && pool->expected != NULL);
    lay_out(pool);
    pool->medium = open_medium(pool->fd, SIZE, LCK_MEDIUM_DISK);
    CHECK_EQ(lck_engine_open(threads, &pool->engine), LCK_OK);
    CHECK_EQ(lck_medium_direct(pool->medium, pool->engine, pool->direct_fd, NBYTES_MIN), LCK_OK);
}

static void teardown(struct pool *pool)
{
    CHECK_EQ(lck_engine_close(pool->engine), LCK_OK);
    CHECK_EQ(lck_medium_close(pool->medium), LCK_OK);
    close(pool->fd);
    close(pool->direct_fd);
    free(pool->source), free(pool->expected), free(pool->got);
}

static lck_commit commit_of(struct pool *pool)
{
    pool->generation++;
    return (lck_commit){
        .header_off = HEADER, .manifest_off = MANIFEST, .record_off = RECORD, .image = (uintptr_t)pool->image,
        .image_nbytes = IMAGE, .crcs_off = CRCS_OFF, .crcs_count = TENSORS * 2, .raw_crcs = (uintptr_t)pool->raw,
        .block = BLOCK, .uuid_lo = 1, .uuid_hi = 2, .origin_lo = 1, .origin_hi = 2, .generation = pool->generation,
        .incarnation = 1, .step = pool->generation};
}

static int32_t run(struct pool *pool)
{
    lck_commit commit = commit_of(pool);
    uint64_t ticket;
    CHECK_EQ(lck_job_submit(pool->engine, pool->medium, pool->copies, TENSORS, &commit, &ticket), LCK_OK);
    (void)lck_job_release(pool->engine, ticket);
    int32_t status = lck_job_wait(pool->engine, ticket, LCK_JOB_COMMITTED, LONG_MS);
    int error = status == LCK_ESYS ? lck_last_errno() : 0;
    CHECK_EQ(lck_job_forget(pool->engine, ticket), LCK_OK);
    errno = error;
    return status;
}

static void new_content(struct pool *pool, uint64_t seed)
{
    fill_random(pool->source, 7 * LARGE, seed);
    for (int i = 0; i < TENSORS; i++)
        memcpy(pool->expected + pool->copies[i].dst, (const void *)(uintptr_t)pool->copies[i].src,
               pool->copies[i].nbytes);
}

static void check_content(struct pool *pool, int fd)
{
    read_back(fd, pool->got, SIZE, 0);
    for (int i = 0; i < TENSORS; i++) {
        const lck_copy *copy = &pool->copies[i];
        CHECK(memcmp(pool->got + copy->dst, pool->expected + copy->dst, copy->nbytes) == 0);
        for (uint64_t at = 0, n = 0; at < copy->nbytes; at += BLOCK, n++) {
            uint64_t left = copy->nbytes - at;
            CHECK_EQ(pool->raw[copy->crc_index + n],
                     lck_crc32c(pool->expected + copy->dst + at, left < BLOCK ? left : BLOCK));
        }
    }
}

static void check_refusals(void)
{
    const lck_extent parts[] = {{0, 4096}, {8192, 4096}};
    int fd = temporary(SIZE), direct_fd = open_again(fd);
    lck_engine *engine = NULL;
    CHECK_EQ(lck_engine_open(1, &engine), LCK_OK);
    lck_medium *medium = open_medium(fd, SIZE, LCK_MEDIUM_CACHE);
    CHECK_EQ(lck_medium_direct(medium, engine, direct_fd, NBYTES_MIN), LCK_EINVAL); /* not a disk */
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    medium = open_medium(fd, SIZE, LCK_MEDIUM_DISK);
    CHECK_EQ(lck_medium_direct(NULL, engine, direct_fd, NBYTES_MIN), LCK_EINVAL);
    CHECK_EQ(lck_medium_direct(medium, NULL, direct_fd, NBYTES_MIN), LCK_EINVAL);
    CHECK_EQ(lck_medium_direct(medium, engine, -1, NBYTES_MIN), LCK_EINVAL);
    CHECK_EQ(lck_medium_direct(medium, engine, direct_fd, 4095), LCK_EINVAL);
    CHECK_EQ(lck_medium_direct(medium, engine, 9999, NBYTES_MIN), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), EBADF);
    CHECK_EQ(lck_medium_direct(medium, engine, fd, NBYTES_MIN), LCK_ESYS); /* without O_DIRECT */
    CHECK_EQ(lck_last_errno(), EOPNOTSUPP);
    CHECK_EQ(lck_medium_direct_nbytes(medium), 0);
    CHECK_EQ(lck_medium_direct(medium, engine, direct_fd, NBYTES_MIN), LCK_OK);
    CHECK_EQ(lck_medium_direct(medium, engine, direct_fd, NBYTES_MIN), LCK_EINVAL); /* twice */
    CHECK_EQ(lck_medium_direct_error(medium), 0);
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    CHECK_EQ(lck_medium_open(fd, parts, 2, LCK_MEDIUM_DISK, &medium), LCK_OK);
    CHECK_EQ(lck_medium_direct(medium, engine, direct_fd, NBYTES_MIN), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), EOPNOTSUPP);
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    CHECK_EQ(lck_engine_close(engine), LCK_OK);
    close(direct_fd);
    close(fd);
}

/* The trace has one COPY event for each block, with its bytes, whichever way they went. */
static void check_trace(struct pool *pool)
{
    uint64_t copied = 0;
    CHECK_EQ(lck_trace_stop(pool->medium), LCK_OK);
    const unsigned char *data = lck_trace_data(pool->medium, NULL);
    for (uint64_t i = 0; i < lck_trace_count(pool->medium); i++) {
        lck_event event;
        CHECK_EQ(lck_trace_event(pool->medium, i, &event), LCK_OK);
        if (event.kind != LCK_EV_COPY || event.off < PAYLOAD)
            continue;
        CHECK(memcmp(data + event.data, pool->expected + event.off, event.nbytes) == 0);
        copied += event.nbytes;
    }
    CHECK_EQ(copied, TENSORS / 2 * (LARGE + SMALL));
}

static void check_bytes(void)
{
    struct pool pool;
    setup(&pool, 3);
    for (uint64_t round = 1; round <= 3; round++) {
        CHECK_EQ(lck_trace_start(pool.medium), LCK_OK);
        new_content(&pool, round);
        CHECK_EQ(run(&pool), LCK_OK);
        check_trace(&pool);
        check_content(&pool, pool.fd);
        check_content(&pool, pool.direct_fd); /* what is on the disk, not what is in the page cache */
    }
    uint64_t pages_min = 3 * (TENSORS / 2) * (uint64_t)(BLOCK - 8192 + 70001 - 8192), written;
    written = lck_medium_direct_nbytes(pool.medium);
    CHECK(written >= pages_min && written < 3 * (TENSORS / 2) * (uint64_t)LARGE);
    for (int i = 0; i < TENSORS; i++) /* copies at the boundary do not wait for the disk */
        pool.copies[i].flags = LCK_NOW;
    new_content(&pool, 9);
    CHECK_EQ(run(&pool), LCK_OK);
    CHECK_EQ(lck_medium_direct_nbytes(pool.medium), written);
    check_content(&pool, pool.direct_fd);
    for (int i = 0; i < TENSORS; i++) /* over pages that are in the page cache now */
        pool.copies[i].flags = 0;
    new_content(&pool, 10);
    CHECK_EQ(run(&pool), LCK_OK);
    check_content(&pool, pool.fd);
    check_content(&pool, pool.direct_fd);
    teardown(&pool);
}

/* ---- neighbours ---------------------------------------------------------------------------------------- */

static atomic_bool is_over;

/* Store to pages between the tensors, as the training does for the next-batch record. After each pause the reader has
 * most likely brought the page back, in a large folio. */
static void *store_counters(void *argument)
{
    struct pool *pool = argument;
    uint64_t state = 7;
    for (uint64_t n = 1; !atomic_load(&is_over); n++)
        for (int i = 0; i < COUNTERS && pool->counters[i] != 0; i++) {
            CHECK_EQ(lck_m_store8(pool->medium, pool->counters[i], n), LCK_OK);
            usleep((useconds_t)(random64(&state) % 3000));
        }
    return NULL;
}

/* Another reader of the file: its read-ahead brings large folios with both kinds of pages into the page cache. It grows
 * while a file is read in order, so the reader begins some way before each page. */
static void *read_file(void *argument)
{
    enum { BEFORE = 512 << 10, AFTER = 256 << 10 };
    struct pool *pool = argument;
    unsigned char *bytes = malloc(BEFORE + AFTER);
    int fd = open_buffered(pool->fd);
    CHECK(bytes != NULL && fd >= 0);
    while (!atomic_load(&is_over))
        for (int i = 0; i < COUNTERS && pool->counters[i] != 0; i++) {
            uint64_t at = pool->counters[i] > BEFORE ? pool->counters[i] - BEFORE : 0;
            (void)posix_fadvise(fd, (off_t)at, BEFORE + AFTER, POSIX_FADV_DONTNEED);
            for (uint64_t n = 0; n < BEFORE + AFTER; n += 64 << 10)
                read_back(fd, bytes, 64 << 10, at + n);
        }
    close(fd);
    free(bytes);
    return NULL;
}

/* Stores of others during direct writes, with pages of both kinds in the same folios of the page cache. */
static void check_neighbours(void)
{
    struct pool pool;
    pthread_t threads[4];
    setup(&pool, 3);
    atomic_store(&is_over, false);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, i < 1 ? store_counters : read_file, &pool), 0);
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        new_content(&pool, round);
        CHECK_EQ(run(&pool), LCK_OK);
        check_content(&pool, pool.fd);
        check_content(&pool, pool.direct_fd);
    }
    atomic_store(&is_over, true);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    teardown(&pool);
}

/* The kernel marks a whole folio as changed by a store. If it was read into the page cache during a direct write to
 * another page of it, its old bytes would stay, and the next sync would fail. So such a store must wait. */
enum { WINDOW = 2 << 20 };
static lck_medium *paused_medium;
static _Atomic uint64_t paused_at; /* offset of the first direct write with a pause */
static atomic_bool near_began, near_stored;

static void *store_near(void *argument)
{
    (void)argument;
    atomic_store(&near_began, true);
    CHECK_EQ(lck_m_store8(paused_medium, atomic_load(&paused_at) / WINDOW * WINDOW, 1), LCK_OK);
    atomic_store(&near_stored, true);
    return NULL;
}

static void pause_in_pwrite(uint64_t off)
{
    pthread_t thread;
    atomic_store(&answer, AS_IT_IS); /* only once */
    atomic_store(&paused_at, off);
    CHECK_EQ(pthread_create(&thread, NULL, store_near, NULL), 0);
    CHECK_EQ(pthread_detach(thread), 0);
    while (!atomic_load(&near_began))
        usleep(1000);
    CHECK_EQ(lck_m_store8(paused_medium, (off + 2 * WINDOW) / WINDOW * WINDOW, 2), LCK_OK); /* does not wait */
    usleep(100000);
    CHECK(!atomic_load(&near_stored));
}

static void check_apart(void)
{
    struct pool pool;
    setup(&pool, 1);
    new_content(&pool, 1);
    paused_medium = pool.medium;
    atomic_store(&answer, WITH_A_PAUSE);
    lck_copy first = pool.copies[8]; /* begins in a later window than the first, so that the store hits no metadata */
    CHECK(first.dst / WINDOW > 0 && first.dst + 3 * WINDOW < SIZE);
    lck_commit commit = commit_of(&pool);
    uint64_t ticket;
    CHECK_EQ(lck_job_submit(pool.engine, pool.medium, &first, 1, &commit, &ticket), LCK_OK);
    CHECK_EQ(lck_job_release(pool.engine, ticket), LCK_OK);
    CHECK_EQ(lck_job_wait(pool.engine, ticket, LCK_JOB_COMMITTED, LONG_MS), LCK_OK);
    CHECK_EQ(lck_job_forget(pool.engine, ticket), LCK_OK);
    CHECK(atomic_load(&near_began));
    while (!atomic_load(&near_stored)) /* it goes on when the write is over */
        usleep(1000);
    teardown(&pool);
}

/* ---- failures ------------------------------------------------------------------------------------------ */

static void check_fault(void)
{
    struct pool pool;
    setup(&pool, 1);
    new_content(&pool, 1);
    CHECK_EQ(lck_fault(LCK_OP_COPY, 3, ENOSPC), LCK_OK);
    CHECK_EQ(run(&pool), LCK_ESYS);
    CHECK_EQ(errno, ENOSPC);
    CHECK_EQ(lck_fault(LCK_OP_COPY, 0, 0), LCK_OK);
    CHECK_EQ(run(&pool), LCK_OK);
    check_content(&pool, pool.direct_fd);
    teardown(&pool);
}

static void check_short_writes(void)
{
    struct pool pool;
    setup(&pool, 2);
    new_content(&pool, 1);
    atomic_store(&answer, IN_PARTS);
    CHECK_EQ(run(&pool), LCK_OK);
    atomic_store(&answer, AS_IT_IS);
    check_content(&pool, pool.direct_fd);
    CHECK_EQ(lck_medium_direct_error(pool.medium), 0);
    teardown(&pool);
}

/* If the kernel takes no more direct writes, the page cache is used. An error of the disk is none of that. */
static void check_answers(void)
{
    static const int refusals[] = {EINVAL, EOPNOTSUPP, EFBIG}, failures[] = {EIO, ENOSPC, EDQUOT};
    for (int i = 0; i < 3; i++) {
        struct pool pool;
        setup(&pool, 2);
        new_content(&pool, 1);
        atomic_store(&error_of_pwrite, refusals[i]);
        atomic_store(&answer, NEVER_MORE);
        CHECK_EQ(run(&pool), LCK_OK);
        check_content(&pool, pool.fd);
        CHECK_EQ(lck_medium_direct_error(pool.medium), refusals[i]);
        CHECK_EQ(lck_medium_direct_nbytes(pool.medium), 0);
        atomic_store(&answer, AS_IT_IS);
        new_content(&pool, 2);
        CHECK_EQ(run(&pool), LCK_OK);
        check_content(&pool, pool.direct_fd);
        CHECK_EQ(lck_medium_direct_nbytes(pool.medium), 0); /* not tried again */
        teardown(&pool);
        setup(&pool, 2);
        new_content(&pool, 1);
        atomic_store(&error_of_pwrite, failures[i]);
        atomic_store(&answer, NEVER_MORE);
        CHECK_EQ(run(&pool), LCK_ESYS);
        CHECK_EQ(errno, failures[i]);
        CHECK_EQ(lck_medium_direct_error(pool.medium), 0);
        atomic_store(&answer, AS_IT_IS);
        CHECK_EQ(run(&pool), LCK_OK);
        check_content(&pool, pool.direct_fd);
        teardown(&pool);
    }
}

/* A direct write beyond the new end makes the file longer, so that no later store finds a page missing. */
static void check_truncated(void)
{
    struct pool pool;
    setup(&pool, 1);
    new_content(&pool, 1);
    CHECK_EQ(run(&pool), LCK_OK);
    CHECK_EQ(ftruncate(pool.fd, PAYLOAD + 2 * LARGE), 0);
    CHECK_EQ(run(&pool), LCK_ESYS);
    CHECK_EQ(errno, EIO);
    CHECK_EQ(lck_m_sync(pool.medium), LCK_ESYS);
    teardown(&pool);
}

static void check_fork(void)
{
    struct pool pool;
    setup(&pool, 2);
    new_content(&pool, 1);
    CHECK_EQ(run(&pool), LCK_OK);
    pid_t child = fork();
    if (child == 0) {
        bool is_refused = lck_medium_direct(pool.medium, pool.engine, pool.direct_fd, NBYTES_MIN) == LCK_EFORK &&
                          lck_medium_direct_nbytes(pool.medium) == 0 && lck_medium_direct_error(pool.medium) == 0;
        _exit(is_refused ? 0 : 1);
    }
    int status;
    new_content(&pool, 2);
    CHECK_EQ(run(&pool), LCK_OK);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    check_content(&pool, pool.direct_fd);
    teardown(&pool);
}

int main(void)
{
    int fd = temporary(4096);
    bool has_direct = is_direct(fd);
    close(fd);
    if (!has_direct) {
        fprintf(stderr, "the folder of temporary files is on a file system without O_DIRECT\n");
        return 77;
    }
    check_refusals();
    check_bytes();
    check_neighbours();
    check_apart();
    check_short_writes();
    check_answers();
    check_fault();
    check_truncated();
    check_fork();
    return 0;
}
