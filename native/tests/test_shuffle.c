/* Shuffled elements are compared with a definition that looks at one bit at a time, and are put back. */
#include "check.h"

#define BLOCK 65536u

static unsigned bit_of(const unsigned char *p, uint64_t number) { return p[number / 8] >> number % 8 & 1; }

/* Where byte `byte` of element `i` of `count` lies. */
static void check_bytes(const unsigned char *data, uint64_t nbytes, uint32_t width)
{
    static unsigned char out[200000];
    uint64_t count = nbytes / width;
    CHECK_EQ(lck_shuffle(out, data, nbytes, width, 0), LCK_OK);
    for (uint64_t i = 0; i < count; i++)
        for (uint32_t byte = 0; byte < width; byte++)
            CHECK(out[byte * count + i] == data[i * width + byte]);
    CHECK(memcmp(out + count * width, data + count * width, nbytes - count * width) == 0);
}

static void check_bits(const unsigned char *data, uint64_t nbytes, uint32_t width)
{
    static unsigned char out[200000];
    CHECK_EQ(lck_shuffle(out, data, nbytes, width, 1), LCK_OK);
    for (uint64_t at = 0; at < nbytes; at += BLOCK) {
        uint64_t size = nbytes - at < BLOCK ? nbytes - at : BLOCK, count = size / width / 8 * 8;
        for (uint64_t i = 0; i < count; i++)
            for (uint32_t bit = 0; bit < 8 * width; bit++)
                CHECK(bit_of(out + at, bit * count + i) == bit_of(data + at, 8 * width * i + bit));
        CHECK(memcmp(out + at + count * width, data + at + count * width, size - count * width) == 0);
    }
}

static void check_back(const unsigned char *data, uint64_t nbytes, uint32_t width, int bits)
{
    static unsigned char out[200001], back[200001];
    memset(out, 0x5A, sizeof out);
    memset(back, 0x5A, sizeof back);
    CHECK_EQ(lck_shuffle(out, data, nbytes, width, bits), LCK_OK);
    CHECK_EQ(lck_unshuffle(back, out, nbytes, width, bits), LCK_OK);
    CHECK(memcmp(back, data, nbytes) == 0);
    CHECK(out[nbytes] == 0x5A && back[nbytes] == 0x5A);
}

int main(void)
{
    static unsigned char data[200000];
    fill_random(data, sizeof data, 3);
    const uint64_t sizes[] = {0, 1, 7, 8, 63, 64, 65, 1000, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 777};
    for (uint32_t width = 1; width <= 8; width *= 2)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            check_bytes(data + i, sizes[i], width);
            check_bits(data + i, sizes[i], width);
            check_back(data + i, sizes[i], width, 0);
            check_back(data + i, sizes[i], width, 1);
        }
    CHECK_EQ(lck_shuffle(data, data, 8, 3, 0), LCK_EINVAL);
    CHECK_EQ(lck_unshuffle(data, data, 8, 16, 1), LCK_EINVAL);
    CHECK_EQ(lck_shuffle(NULL, data, 8, 4, 0), LCK_EINVAL);
    CHECK_EQ(lck_shuffle(NULL, NULL, 0, 4, 0), LCK_OK);
    return 0;
}
