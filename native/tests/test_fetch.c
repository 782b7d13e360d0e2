/* Many verified reads at once: all blocks are read, or the first bad block in the order of the reads is reported, with
 * any number of threads. */
#include <errno.h>

#include "check.h"

enum { BLOCK = 4096, READS = 40, SIZE = 10 * BLOCK + 77, BLOCKS = 11, TURNS = 20 };

static unsigned char data[READS][SIZE], dst[READS][SIZE];
static uint32_t crcs[READS][BLOCKS];
static lck_read reads[READS];
static int fd;
static const lck_extent whole = {0, (uint64_t)READS * SIZE};

static void setup(void)
{
    fd = open_memory(READS * SIZE);
    for (uint64_t i = 0; i < READS; i++) {
        uint64_t nbytes = i % 5 == 4 ? 0 : SIZE - 997 * i; /* different lengths, some 0 */
        fill_random(data[i], SIZE, (uint32_t)i + 1);
        CHECK_EQ(lck_crc32c_blocks(data[i], nbytes, BLOCK, crcs[i]), LCK_OK);
        for (uint64_t k = 0; k < BLOCKS; k++)
            crcs[i][k] ^= lck_block_seed(11, 22, i, 7 + i, k);
        CHECK_EQ(pwrite(fd, data[i], SIZE, (off_t)(i * SIZE)), SIZE);
        reads[i] = (lck_read){i * SIZE, (uint64_t)(uintptr_t)dst[i], nbytes, (uint64_t)(uintptr_t)crcs[i], i, 7 + i, 0};
    }
}

static int32_t fetch(uint32_t threads, uint64_t *bad_read, uint64_t *bad_block)
{
    memset(dst, 0xEE, sizeof dst);
    return lck_read_many(fd, &whole, 1, reads, READS, BLOCK, 11, 22, threads, bad_read, bad_block);
}

static void check_read(uint64_t i, uint64_t nbytes)
{
    CHECK(memcmp(dst[i], data[i], nbytes) == 0);
}

static void check_good(uint32_t threads)
{
    uint64_t bad_read = 99, bad_block = 99;
    CHECK_EQ(fetch(threads, &bad_read, &bad_block), LCK_OK);
    CHECK_EQ(bad_read, 99);
    for (uint64_t i = 0; i < READS; i++) {
        check_read(i, reads[i].nbytes);
        CHECK_EQ(dst[i][SIZE - 1], i == 0 ? data[0][SIZE - 1] : 0xEE);
    }
}

static void flip(uint64_t read, uint64_t at)
{
    unsigned char flipped;
    off_t place = (off_t)(read * SIZE + at);
    CHECK_EQ(pread(fd, &flipped, 1, place), 1);
    flipped ^= 4;
    CHECK_EQ(pwrite(fd, &flipped, 1, place), 1);
}

/* Two bad blocks: the first is reported, all blocks before it are in dst, and no byte of the two is in dst. */
static void check_bad(uint32_t threads)
{
    uint64_t bad_read = 99, bad_block = 99;
    flip(21, 3 * BLOCK + 5);
    flip(20, BLOCK);
    CHECK_EQ(fetch(threads, &bad_read, &bad_block), LCK_ECHECKSUM);
    CHECK_EQ(bad_read, 20);
    CHECK_EQ(bad_block, 1);
    for (uint64_t i = 0; i < 20; i++)
        check_read(i, reads[i].nbytes);
    check_read(20, BLOCK);
    for (uint64_t k = BLOCK; k < 2 * BLOCK; k++) {
        CHECK_EQ(dst[20][k], LCK_REFUSED);
        CHECK(dst[21][2 * BLOCK + k] == 0xEE || dst[21][2 * BLOCK + k] == LCK_REFUSED);
    }
    flip(20, BLOCK);
    flip(21, 3 * BLOCK + 5);
}

static void check_verify_only(void)
{
    uint64_t bad_read, bad_block;
    reads[3].dst = 0;
    CHECK_EQ(fetch(2, &bad_read, &bad_block), LCK_OK);
    CHECK_EQ(dst[3][0], 0xEE);
    reads[3].dst = (uint64_t)(uintptr_t)dst[3];
}

/* A read from the middle of a tensor: its checksums are those of the blocks there. */
static void check_first(void)
{
    uint64_t bad_read = 99, bad_block = 99;
    lck_read middle = reads[1];
    middle.first = 3;
    middle.off += 3 * BLOCK;
    middle.nbytes = 2 * BLOCK;
    middle.crcs += 3 * sizeof(uint32_t);
    memset(dst, 0xEE, sizeof dst);
    CHECK_EQ(lck_read_many(fd, &whole, 1, &middle, 1, BLOCK, 11, 22, 2, &bad_read, &bad_block), LCK_OK);
    CHECK(memcmp(dst[1], data[1] + 3 * BLOCK, 2 * BLOCK) == 0);
    CHECK_EQ(dst[1][2 * BLOCK], 0xEE);
    middle.first = 2; /* the checksums of other blocks */
    CHECK_EQ(lck_read_many(fd, &whole, 1, &middle, 1, BLOCK, 11, 22, 2, &bad_read, &bad_block), LCK_ECHECKSUM);
    CHECK_EQ(bad_block, 0);
}

static void check_arguments(void)
{
    uint64_t r = 0, b = 0;
    CHECK_EQ(lck_read_many(fd, &whole, 1, NULL, 0, BLOCK, 1, 2, 2, &r, &b), LCK_OK);
    CHECK_EQ(lck_read_many(fd, &whole, 1, NULL, 1, BLOCK, 1, 2, 2, &r, &b), LCK_EINVAL);
    CHECK_EQ(lck_read_many(fd, &whole, 1, reads, READS, 0, 1, 2, 2, &r, &b), LCK_EINVAL);
    CHECK_EQ(lck_read_many(fd, &whole, 1, reads, READS, BLOCK, 1, 2, 2, NULL, &b), LCK_EINVAL);
    CHECK_EQ(lck_read_many(fd, NULL, 1, reads, READS, BLOCK, 1, 2, 2, &r, &b), LCK_EINVAL);
    lck_read wrong = reads[0];
    wrong.crcs = 0;
    CHECK_EQ(lck_read_many(fd, &whole, 1, &wrong, 1, BLOCK, 1, 2, 2, &r, &b), LCK_EINVAL);
    wrong = reads[0];
    wrong.off = UINT64_MAX;
    CHECK_EQ(lck_read_many(fd, &whole, 1, &wrong, 1, BLOCK, 1, 2, 2, &r, &b), LCK_EINVAL);
    wrong.off = (uint64_t)READS * SIZE - 10;
    CHECK_EQ(lck_read_many(fd, &whole, 1, &wrong, 1, BLOCK, 1, 2, 2, &r, &b), LCK_ESHORT);
    CHECK_EQ(lck_read_many(9999, &whole, 1, reads, READS, BLOCK, 11, 22, 3, &r, &b), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), EBADF);
    CHECK_EQ(r, 0);
}

int main(void)
{
    setup();
    for (uint32_t turn = 0; turn < TURNS; turn++) {
        check_good(turn % 5);
        check_bad(turn % 5);
    }
    check_good(1000);
    check_verify_only();
    check_first();
    check_arguments();
    close(fd);
    return 0;
}
