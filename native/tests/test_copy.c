/* Every kernel set stores exactly the bytes of the source, changes no byte beside them, and returns their checksum. */
#include "check.h"

enum { SIZE = 4 << 20, GUARD = 256 };

static int fd;
static lck_medium *medium;
static unsigned char *source, *got;

static void check_copy(uint64_t off, size_t shift, size_t nbytes)
{
    static unsigned char guard[GUARD];
    memset(guard, 0xA5, GUARD);
    CHECK_EQ(lck_m_store(medium, off - GUARD, guard, GUARD), LCK_OK);
    CHECK_EQ(lck_m_store(medium, off + nbytes, guard, GUARD), LCK_OK);
    uint32_t crc = 0;
    CHECK_EQ(lck_m_copy(medium, off, source + shift, nbytes, &crc), LCK_OK);
    CHECK_EQ(lck_m_fence(medium), LCK_OK);
    read_back(fd, got, nbytes + 2 * GUARD, off - GUARD);
    CHECK(memcmp(got, guard, GUARD) == 0);
    CHECK(memcmp(got + GUARD, source + shift, nbytes) == 0);
    CHECK(memcmp(got + GUARD + nbytes, guard, GUARD) == 0);
    CHECK_EQ(lck_isa_set("portable"), LCK_OK);
    CHECK(crc == lck_crc32c(source + shift, nbytes));
}

static void check_isa(const char *name)
{
    uint64_t seed = 7;
    for (int i = 0; i < 2500; i++) {
        size_t nbytes = i < 700 ? (size_t)i : random64(&seed) % 5001;
        uint64_t off = 4096 + (i % 2 ? random64(&seed) % 300 : 256 * (random64(&seed) % 4));
        size_t shift = random64(&seed) % 130;
        CHECK_EQ(lck_isa_set(name), LCK_OK);
        check_copy(off, shift, nbytes);
    }
    static const size_t large[] = {1 << 20, (1 << 20) + 1, (1 << 20) - 63, (2 << 20) + 12345};
    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        for (size_t shift = 0; shift < 2; shift++) {
            CHECK_EQ(lck_isa_set(name), LCK_OK);
            check_copy(8192 + 13 * shift, 3 * shift, large[i]);
        }
}

int main(void)
{
    static const char *const names[] = {"portable", "sse2-table", "sse2", "avx2-narrow", "avx2", "avx512"};
    source = malloc(SIZE);
    got = malloc(SIZE);
    CHECK(source != NULL && got != NULL);
    fill_random(source, SIZE, 3);
    for (uint32_t kind = LCK_MEDIUM_CACHE; kind <= LCK_MEDIUM_PM_EMULATED; kind += LCK_MEDIUM_PM_EMULATED) {
        fd = open_memory(SIZE);
        medium = open_medium(fd, SIZE, kind);
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (lck_isa_set(names[i]) == LCK_OK)
                check_isa(names[i]);
        CHECK_EQ(lck_medium_close(medium), LCK_OK);
        close(fd);
    }
    free(source);
    free(got);
    return 0;
}
