/* Verified reads: a block that matches its checksum is stored. The first block that does not match is reported, and its
 * bytes do not stay in dst. */
#include <errno.h>

#include "check.h"

enum { SIZE = 10000, BLOCK = 1024, BLOCKS = 10, OFF = 512, PARTS = 4 };

static unsigned char data[SIZE], dst[SIZE];
static uint32_t crcs[BLOCKS];
static int fd;
/* The pool's extents: one after the other in the file, or apart. Extents end inside a block, at the end of a block, and
 * one byte before the end of the last block. */
static const lck_extent whole[PARTS] = {{0, 600}, {600, 4008}, {4608, 5903}, {10511, 1}};
static const lck_extent apart[PARTS] = {{7000, 600}, {20000, 4008}, {100, 5903}, {9000, 1}};
static const lck_extent *parts;

static off_t place(uint64_t off)
{
    for (int i = 0; i < PARTS; i++) {
        if (off < parts[i].nbytes)
            return (off_t)(parts[i].off + off);
        off -= parts[i].nbytes;
    }
    exit(1);
}

static int32_t read_it(void *to, uint64_t generation, uint64_t *bad)
{
    memset(dst, 0xEE, SIZE);
    return lck_read_verified(fd, parts, PARTS, OFF, to, SIZE, BLOCK, crcs, 11, 22, 3, generation, bad);
}

static void setup(void)
{
    fill_random(data, SIZE, 9);
    CHECK_EQ(lck_crc32c_blocks(data, SIZE, BLOCK, crcs), LCK_OK);
    for (uint64_t i = 0; i < BLOCKS; i++)
        crcs[i] ^= lck_block_seed(11, 22, 3, 77, i);
    fd = open_memory(parts == whole ? OFF + SIZE : 24008);
    for (uint64_t i = 0; i < SIZE; i++)
        CHECK_EQ(pwrite(fd, &data[i], 1, place(OFF + i)), 1);
}

static void check_good(void)
{
    uint64_t bad = 99;
    CHECK_EQ(read_it(dst, 77, &bad), LCK_OK);
    CHECK_EQ(bad, 99);
    CHECK(memcmp(dst, data, SIZE) == 0);
    CHECK_EQ(read_it(NULL, 77, NULL), LCK_OK);
    CHECK_EQ(dst[0], 0xEE);
    CHECK_EQ(lck_read_verified(fd, parts, PARTS, OFF, dst, 0, BLOCK, NULL, 1, 2, 3, 4, NULL), LCK_OK);
}

static void check_untouched_from(size_t at)
{
    for (size_t i = at; i < SIZE; i++)
        CHECK_EQ(dst[i], 0xEE);
}

static void check_ends_before(size_t block)
{
    CHECK(memcmp(dst, data, block * BLOCK) == 0);
    check_untouched_from(block * BLOCK);
}

static void check_refused(size_t block)
{
    size_t end = (block + 1) * BLOCK < SIZE ? (block + 1) * BLOCK : SIZE;
    CHECK(memcmp(dst, data, block * BLOCK) == 0);
    for (size_t i = block * BLOCK; i < end; i++)
        CHECK_EQ(dst[i], LCK_REFUSED);
    check_untouched_from(end);
}

/* Read the same bytes from memory, as from the mapping of a device without read(). */
static void check_memory(void)
{
    unsigned char *pool = malloc(OFF + SIZE);
    lck_extent here[2] = {{(uint64_t)(uintptr_t)pool, OFF + 100}, {(uint64_t)(uintptr_t)pool + OFF + 100, SIZE - 100}};
    uint64_t bad = 99;
    CHECK(pool != NULL);
    memcpy(pool + OFF, data, SIZE);
    memset(dst, 0xEE, SIZE);
    CHECK_EQ(lck_read_verified(LCK_MEMORY, here, 2, OFF, dst, SIZE, BLOCK, crcs, 11, 22, 3, 77, &bad), LCK_OK);
    CHECK(memcmp(dst, data, SIZE) == 0);
    pool[OFF + 4 * BLOCK] ^= 1;
    memset(dst, 0xEE, SIZE);
    CHECK_EQ(lck_read_verified(LCK_MEMORY, here, 2, OFF, dst, SIZE, BLOCK, crcs, 11, 22, 3, 77, &bad), LCK_ECHECKSUM);
    CHECK_EQ(bad, 4);
    check_refused(4);
    CHECK_EQ(lck_read_verified(LCK_MEMORY, here, 2, OFF + SIZE, dst, 10, BLOCK, crcs, 1, 2, 3, 4, &bad), LCK_ESHORT);
    free(pool);
    const void *mapped;
    CHECK_EQ(lck_map(fd, OFF + SIZE, &mapped), LCK_OK);
    if (parts == whole)
        CHECK(memcmp((const unsigned char *)mapped + OFF, data, SIZE) == 0);
    CHECK_EQ(lck_unmap(mapped, OFF + SIZE), LCK_OK);
    CHECK_EQ(lck_map(fd, 0, &mapped), LCK_EINVAL);
    CHECK_EQ(lck_map(9999, 4096, &mapped), LCK_ESYS);
}

static void check_bad(void)
{
    uint64_t bad = 99;
    for (size_t block = 0; block < BLOCKS; block++) {
        size_t at = block * BLOCK + block * 31;
        unsigned char flipped = data[at] ^ 4;
        CHECK_EQ(pwrite(fd, &flipped, 1, place(OFF + at)), 1);
        CHECK_EQ(read_it(dst, 77, &bad), LCK_ECHECKSUM);
        CHECK_EQ(bad, block);
        check_refused(block);
        CHECK_EQ(read_it(NULL, 77, &bad), LCK_ECHECKSUM);
        CHECK_EQ(pwrite(fd, &data[at], 1, place(OFF + at)), 1);
    }
    CHECK_EQ(read_it(dst, 78, &bad), LCK_ECHECKSUM); /* intact bytes of another generation */
    CHECK_EQ(bad, 0);
}

static void check_short(void)
{
    uint64_t bad = 99;
    if (parts == apart) { /* the second part, from pool offset 600 on, is the last in the file */
        CHECK_EQ(ftruncate(fd, 20000 + (OFF + 3 * BLOCK + 7 - 600)), 0);
        CHECK_EQ(read_it(dst, 77, &bad), LCK_ESHORT);
        CHECK_EQ(bad, 3);
        check_ends_before(3);
        return;
    }
    CHECK_EQ(ftruncate(fd, OFF + 5 * BLOCK + 7), 0);
    CHECK_EQ(read_it(dst, 77, &bad), LCK_ESHORT);
    CHECK_EQ(bad, 5);
    check_ends_before(5);
}

static void check_arguments(void)
{
    const lck_extent nothing = {0, 0}, endless[] = {{0, INT64_MAX}, {0, INT64_MAX}};
    uint64_t bad = 99;
    CHECK_EQ(lck_read_verified(fd, NULL, 1, 0, dst, 10, BLOCK, crcs, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(fd, parts, 0, 0, dst, 10, BLOCK, crcs, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(fd, &nothing, 1, 0, dst, 10, BLOCK, crcs, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(fd, endless, 2, 0, dst, 10, BLOCK, crcs, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(fd, parts, PARTS, OFF + SIZE, dst, 10, BLOCK, crcs, 1, 2, 3, 4, &bad), LCK_ESHORT);
    CHECK_EQ(bad, 0);
    CHECK_EQ(lck_read_verified(fd, parts, PARTS, 0, dst, 10, 0, crcs, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(fd, parts, PARTS, 0, dst, 10, (1 << 20) + 1, crcs, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(fd, parts, PARTS, 0, dst, 10, BLOCK, NULL, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(fd, parts, PARTS, UINT64_MAX, dst, 10, BLOCK, crcs, 1, 2, 3, 4, NULL), LCK_EINVAL);
    CHECK_EQ(lck_read_verified(9999, parts, PARTS, 0, dst, 10, BLOCK, crcs, 1, 2, 3, 4, NULL), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), EBADF);
}

int main(void)
{
    const lck_extent *places[] = {whole, apart};
    for (int i = 0; i < 2; i++) {
        parts = places[i];
        setup();
        check_good();
        check_memory();
        check_bad();
        check_short();
        check_arguments();
        close(fd);
    }
    return 0;
}
