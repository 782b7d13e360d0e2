/* Checksums are compared with published check values and with bit-by-bit references. */
#include "check.h"

static uint32_t slow_crc32c(const unsigned char *p, size_t nbytes)
{
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < nbytes; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

static uint64_t slow_crc64(const unsigned char *p, size_t nbytes)
{
    uint64_t crc = UINT64_MAX;
    for (size_t i = 0; i < nbytes; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xC96C5795D7870F42u : 0);
    }
    return ~crc;
}

static void check_values(void)
{
    unsigned char zeros[32] = {0}, ones[32];
    memset(ones, 0xFF, sizeof ones);
    CHECK(lck_crc32c("123456789", 9) == 0xE3069283u);
    CHECK(lck_crc32c(zeros, 32) == 0x8A9136AAu); /* RFC 3720, B.4 */
    CHECK(lck_crc32c(ones, 32) == 0x62A8AB43u);
    CHECK(lck_crc32c("", 0) == 0);
    CHECK(lck_crc64(0, "123456789", 9) == 0x995DC9BBDF1939FAu);
    CHECK(lck_crc64(0, "", 0) == 0);
}

static void check_references(void)
{
    static unsigned char data[3000];
    fill_random(data, sizeof data, 1);
    for (size_t nbytes = 0; nbytes < 1200; nbytes++) {
        const unsigned char *p = data + nbytes % 67;
        CHECK(lck_crc32c(p, nbytes) == slow_crc32c(p, nbytes));
        CHECK(lck_crc64(0, p, nbytes) == slow_crc64(p, nbytes));
        CHECK(lck_crc64(lck_crc64(0, p, nbytes / 3), p + nbytes / 3, nbytes - nbytes / 3) == slow_crc64(p, nbytes));
    }
}

static void check_blocks(void)
{
    static unsigned char data[1000];
    uint32_t crcs[5] = {0};
    fill_random(data, sizeof data, 2);
    CHECK_EQ(lck_crc32c_blocks(data, 1000, 256, crcs), LCK_OK);
    for (size_t i = 0; i < 4; i++)
        CHECK(crcs[i] == slow_crc32c(data + 256 * i, i < 3 ? 256 : 232));
    CHECK_EQ(crcs[4], 0);
    CHECK_EQ(lck_crc32c_blocks(data, 0, 256, crcs), LCK_OK);
    CHECK_EQ(lck_crc32c_blocks(data, 1000, 0, crcs), LCK_EINVAL);
}

static void check_each(void)
{
    static unsigned char data[1000];
    uint64_t addresses[3], nbytes[3] = {400, 0, 77};
    uint32_t crcs[3] = {1, 1, 1};
    fill_random(data, sizeof data, 3);
    for (size_t i = 0; i < 3; i++)
        addresses[i] = (uintptr_t)data + 300 * i + 1;
    CHECK_EQ(lck_crc32c_each(addresses, nbytes, 3, crcs), LCK_OK);
    for (size_t i = 0; i < 3; i++)
        CHECK(crcs[i] == slow_crc32c(data + 300 * i + 1, nbytes[i]));
    CHECK_EQ(lck_crc32c_each(NULL, NULL, 0, NULL), LCK_OK);
    CHECK_EQ(lck_crc32c_each(NULL, nbytes, 1, crcs), LCK_EINVAL);
}

static void check_words(void)
{
    static unsigned char data[1000], chosen[8 * 131];
    int64_t numbers[131];
    fill_random(data, sizeof data, 4);
    for (size_t i = 0; i < 131; i++) {
        numbers[i] = (int64_t)(i * 37 % 124);
        memcpy(chosen + 8 * i, data + 1 + 8 * numbers[i], 8);
    }
    for (size_t n = 0; n <= 131; n++)
        CHECK(lck_crc32c_words(data + 1, numbers, n) == slow_crc32c(chosen, 8 * n));
}

static uint32_t spread(const void *data, uint64_t nbytes, uint64_t size)
{
    return lck_crc32c_spread(data, nbytes, size, 32);
}

static void check_spread(void)
{
    static unsigned char data[4096];
    float some[3] = {1.0f, 0.0f, -0.0f}, same[3] = {1.0f, -0.0f, 0.0f}, other[3] = {1.0f, 0.0f, 2.0f};
    uint16_t half[2] = {0x3C00, 0x8000}, halves[2] = {0x3C00, 0};
    double zero = 0.0, minus = -0.0;
    uint32_t before;
    size_t seen = 0;
    CHECK(spread(some, sizeof some, 4) == spread(same, sizeof same, 4));
    CHECK(spread(some, sizeof some, 0) != spread(same, sizeof same, 0));
    CHECK(spread(some, sizeof some, 4) != spread(other, sizeof other, 4));
    CHECK(spread(&zero, 8, 8) == spread(&minus, 8, 8));
    CHECK(spread(&zero, 8, 8) != spread(&minus, 8, 0));
    CHECK(spread(half, sizeof half, 2) == spread(halves, sizeof halves, 2));
    CHECK(spread(half, sizeof half, 4) != spread(halves, sizeof halves, 4));
    CHECK(spread(data, 0, 4) == 0);
    before = spread(data, sizeof data, 4);
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = 1;
        seen += spread(data, sizeof data, 4) != before;
        data[i] = 0;
    }
    CHECK_EQ(seen, 32 * 8); /* 32 words of 8 bytes are in the sample, one of each part */
}

int main(void)
{
    static const char *const names[] = {"portable", "sse2-table", "sse2", "avx2-narrow", "avx2", "avx512", "auto"};
    CHECK_EQ(lck_abi_version(), LCK_ABI_VERSION);
    CHECK_EQ(lck_sizeof(1), sizeof(lck_commit));
    CHECK_EQ(lck_sizeof(9), 0);
    CHECK_EQ(lck_isa_set("mmx"), LCK_EINVAL);
    CHECK_EQ(lck_isa_set(NULL), LCK_EINVAL);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (lck_isa_set(names[i]) != LCK_OK)
            continue;
        CHECK(strcmp(names[i], "auto") == 0 || strncmp(names[i], lck_isa_name(), strlen(lck_isa_name())) == 0);
        check_words();
        check_spread();
        check_values();
        check_references();
        check_blocks();
        check_each();
    }
    return 0;
}
