/* Verified reads: what passes is stored, what does not is named and never stored. */
#include <errno.h>

#include "check.h"

enum { SIZE = 10000, BLOCK = 1024, BLOCKS = 10, OFF = 512 };

static unsigned char data[SIZE], dst[SIZE];
static uint32_t crcs[BLOCKS];
static int fd;

static int32_t read_it(void *to, uint64_t generation, uint64_t *bad)
{
    memset(dst, 0xEE, SIZE);
    return lck_read_verified(fd, OFF, to, SIZE, BLOCK, crcs, 11, 22, 3, generation, bad);
}

static void setup(void)
{
    fill_random(data, SIZE, 9);
    CHECK_EQ(lck_crc32c_blocks(data, SIZE, BLOCK, crcs), LCK_OK);
    for (uint64_t i = 0; i < BLOCKS; i++)
        crcs[i] ^= lck_block_seed(11, 22, 3, 77, i);
    fd = open_memory(OFF + SIZE);
    CHECK_EQ(pwrite(fd, data, SIZE, OFF), SIZE);
}

static void check_good(void)
{
    uint64_t bad = 99;
    CHECK_EQ(read_it(dst, 77, &bad), LCK_OK);
    CHECK_EQ(bad, 99);
    CHECK(memcmp(dst, data, SIZE) == 0);
    CHECK_EQ(read_it(NULL, 77, NULL), LCK_OK);
    CHECK_EQ(dst[0], 0xEE);
    CHECK_EQ(lck_read_verified(fd, OFF, dst, 0, BLOCK, NULL, 1, 2, 3, 4, NULL), LCK_OK);
}

static void check_untouched_from(size_t block)
{
    CHECK(memcmp(dst, data, block * BLOCK) == 0);
    for (size_t i = block * BLOCK; i < SIZE; i++)
        CHECK_EQ(dst[i], 0xEE);
}

static void check_bad(void)
{
    uint64_t bad = 99;
    for (size_t block = 0; block < BLOCKS; block++) {
        size_t at = block * BLOCK + block * 31;
        unsigned char flipped = data[at] ^ 4;
        CHECK_EQ(pwrite(fd, &flipped, 1, (off_t)(OFF + at)), 1);
        CHECK_EQ(read_it(dst, 77, &bad), LCK_ECHECKSUM);
        CHECK_EQ(bad, block);
        check_untouched_from(block);
        CHECK_EQ(read_it(NULL, 77, &bad), LCK_ECHECKSUM);
        CHECK_EQ(pwrite(fd, &data[at], 1, (off_t)(OFF + at)), 1);
    }
    CHECK_EQ(read_it(dst, 78, &bad), LCK_ECHECKSUM); /* intact bytes of another generation */
    CHECK_EQ(bad, 0);
}

static void check_short(void)
{
    uint64_t bad = 99;
    CHECK_EQ(ftruncate(fd, OFF + 5 * BLOCK + 7), 0);
    CHECK_EQ(read_it(dst, 77, &bad), LCK_ESHORT);
    CHECK_EQ(bad, 5);
    check_untouched_from(5);
}

static void check_arguments(void)
{
    CHECK_EQ(lck_read_verified(fd, 0, dst, 10, 0, crcs, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(fd, 0, dst, 10, (1 << 20) + 1, crcs, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(fd, 0, dst, 10, BLOCK, NULL, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(fd, UINT64_MAX, dst, 10, BLOCK, crcs, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(9999, 0, dst, 10, BLOCK, crcs, 1, 2, 3, 4, NULL), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), EBADF);
}

int main(void)
{
    setup();
    check_good();
    check_bad();
    check_short();
    check_arguments();
    close(fd);
    return 0;
}
