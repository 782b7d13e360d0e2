/* The emulation of a memory's speed: first its arithmetic, with times that the test chooses, then its effect on copies,
 * fences and reads. Measured times are compared only with a minimum, because a machine may always be slower. */
#include <stdatomic.h>
#include <pthread.h>

#include "check.h"

/* This file compiles a second copy of the arithmetic, because the library does not export it. */
#define lck_emulate own_emulate
#include "../src/emulate.c"
#undef lck_emulate

uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

enum { GB = 1000000000, SIZE = 4 << 20, THREADS = 4, TAKES = 10000 };

static void test_a_bucket_is_shared_and_gives_no_credit(void)
{
    struct bucket bucket = {0};
    CHECK_EQ(bucket_take(&bucket, 1000, 2000, 2 * (uint64_t)GB), 2000);   /* 2000 bytes at 2 bytes per ns */
    CHECK_EQ(bucket_take(&bucket, 1500, 2000, 2 * (uint64_t)GB), 3000);   /* begins when the last one ends */
    CHECK_EQ(bucket_take(&bucket, 1500, 0, 2 * (uint64_t)GB), 3000);
    CHECK_EQ(bucket_take(&bucket, 900000, 2000, 2 * (uint64_t)GB), 901000); /* the pause made this one no faster */
    CHECK_EQ(bucket_take(&bucket, 900000, (uint64_t)40 * GB, (uint64_t)40 * GB), 1000901000);
}

static void test_a_part_of_a_unit_costs_a_whole_one(void)
{
    CHECK_EQ(whole_units(0, 256, 256), 256);
    CHECK_EQ(whole_units(0, 1, 256), 256);
    CHECK_EQ(whole_units(255, 2, 256), 512);
    CHECK_EQ(whole_units(256, 257, 256), 512);
    CHECK_EQ(whole_units(100, 0, 256), 0);
    CHECK_EQ(whole_units(100, 7, 0), 7);
}

static struct bucket raced;

static void *take_many(void *unused)
{
    for (int i = 0; i < TAKES; i++)
        bucket_take(&raced, 0, 64, GB);
    return unused;
}

static void test_no_transfer_is_lost_between_threads(void)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, take_many, NULL), 0);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(atomic_load(&raced.free_at), (uint64_t)THREADS * TAKES * 64);
}

static void test_a_wait_is_never_short(void)
{
    const uint64_t lengths[] = {0, 200, 30000, 400000};
    for (int i = 0; i < 4; i++) {
        uint64_t until = clock_ns() + lengths[i];
        emulate_wait(until);
        CHECK(clock_ns() >= until);
    }
}

/* ---- in the library ------------------------------------------------------------------------------------ */

static uint64_t time_of_copy(lck_medium *medium, const void *source, uint64_t nbytes)
{
    uint64_t begin = clock_ns();
    CHECK_EQ(lck_m_copy(medium, 0, source, nbytes, NULL), LCK_OK);
    return clock_ns() - begin;
}

static void test_copies_fences_and_reads_take_their_time(void)
{
    unsigned char *source = calloc(1, SIZE);
    int fd = open_memory(SIZE);
    CHECK(source != NULL);
    CHECK_EQ(lck_emulate(GB / 10, GB / 5, 300000, 256), LCK_OK); /* 4 MiB: a write takes 42 ms, a read 21 ms */
    lck_medium *slow = open_medium(fd, SIZE, LCK_MEDIUM_CACHE);
    CHECK(time_of_copy(slow, source, SIZE) >= 40000000);
    uint64_t begin = clock_ns();
    CHECK_EQ(lck_m_fence(slow), LCK_OK);
    CHECK_EQ(lck_m_sync(slow), LCK_OK);
    CHECK(clock_ns() - begin >= 600000);
    uint32_t crcs[SIZE >> 20];
    CHECK_EQ(lck_crc32c_blocks(source, SIZE, 1 << 20, crcs), LCK_OK);
    for (uint64_t i = 0; i < SIZE >> 20; i++)
        crcs[i] ^= lck_block_seed(1, 2, 3, 4, i);
    const lck_extent whole = {0, SIZE};
    begin = clock_ns();
    CHECK_EQ(lck_read_verified(fd, &whole, 1, 0, NULL, SIZE, 1 << 20, crcs, 1, 2, 3, 4, NULL), LCK_OK);
    CHECK(clock_ns() - begin >= 20000000);

    /* A medium that was opened during the emulation stays slow after the emulation has ended. */
    CHECK_EQ(lck_emulate(0, 0, 0, 0), LCK_OK);
    lck_medium *plain = open_medium(fd, SIZE, LCK_MEDIUM_CACHE);
    CHECK(time_of_copy(slow, source, SIZE) >= 40000000);
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < 20 && best >= 40000000; i++) {
        uint64_t took = time_of_copy(plain, source, SIZE);
        best = took < best ? took : best;
    }
    CHECK(best < 40000000);
    CHECK_EQ(lck_medium_close(slow), LCK_OK);
    CHECK_EQ(lck_medium_close(plain), LCK_OK);
    close(fd);
    free(source);
}

static void test_arguments(void)
{
    CHECK_EQ(lck_emulate(1, 1, 1, 255), LCK_EINVAL);
    CHECK_EQ(lck_emulate(1, 1, 1, 2 << 20), LCK_EINVAL);
    CHECK_EQ(lck_emulate(1, 1, 2 * (uint64_t)LCK_EMULATED_FENCE_MAX, 256), LCK_EINVAL);
    CHECK_EQ(lck_emulate(0, 0, 0, 0), LCK_OK);
}

int main(void)
{
    test_a_bucket_is_shared_and_gives_no_credit();
    test_a_part_of_a_unit_costs_a_whole_one();
    test_no_transfer_is_lost_between_threads();
    test_a_wait_is_never_short();
    test_copies_fences_and_reads_take_their_time();
    test_arguments();
    return 0;
}
