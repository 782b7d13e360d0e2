/* crc.c: CRC-32C and CRC-64/XZ by tables, eight bytes at a time. All kernels must return the same checksums. */
#include <string.h>

#include "internal.h"

#define POLY32C 0x82F63B78u            /* reflected */
#define POLY64XZ 0xC96C5795D7870F42u   /* reflected */

static uint32_t table32[8][256];
static uint64_t table64[8][256];

static void fill_first(unsigned byte)
{
    uint32_t c32 = byte;
    uint64_t c64 = byte;
    for (int bit = 0; bit < 8; bit++) {
        c32 = c32 >> 1 ^ (c32 & 1 ? POLY32C : 0);
        c64 = c64 >> 1 ^ (c64 & 1 ? POLY64XZ : 0);
    }
    table32[0][byte] = c32;
    table64[0][byte] = c64;
}

/* table[k][b] is the effect of byte b followed by k zero bytes. */
void crc_init(void)
{
    for (unsigned byte = 0; byte < 256; byte++)
        fill_first(byte);
    for (int k = 1; k < 8; k++)
        for (unsigned byte = 0; byte < 256; byte++) {
            uint32_t c32 = table32[k - 1][byte];
            uint64_t c64 = table64[k - 1][byte];
            table32[k][byte] = c32 >> 8 ^ table32[0][c32 & 255];
            table64[k][byte] = c64 >> 8 ^ table64[0][c64 & 255];
        }
}

uint32_t crc32c_update(uint32_t state, const void *data, size_t nbytes)
{
    const unsigned char *p = data;
    for (; nbytes >= 8; nbytes -= 8, p += 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        w ^= state;
        state = table32[7][w & 255] ^ table32[6][w >> 8 & 255] ^ table32[5][w >> 16 & 255] ^
                table32[4][w >> 24 & 255] ^ table32[3][w >> 32 & 255] ^ table32[2][w >> 40 & 255] ^
                table32[1][w >> 48 & 255] ^ table32[0][w >> 56];
    }
    for (; nbytes > 0; nbytes--, p++)
        state = state >> 8 ^ table32[0][(state ^ *p) & 255];
    return state;
}

uint64_t crc64_update(uint64_t state, const void *data, size_t nbytes)
{
    const unsigned char *p = data;
    for (; nbytes >= 8; nbytes -= 8, p += 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        w ^= state;
        state = table64[7][w & 255] ^ table64[6][w >> 8 & 255] ^ table64[5][w >> 16 & 255] ^
                table64[4][w >> 24 & 255] ^ table64[3][w >> 32 & 255] ^ table64[2][w >> 40 & 255] ^
                table64[1][w >> 48 & 255] ^ table64[0][w >> 56];
    }
    for (; nbytes > 0; nbytes--, p++)
        state = state >> 8 ^ table64[0][(state ^ *p) & 255];
    return state;
}

uint32_t crc32c_xpow(uint32_t n)
{
    uint32_t value = 0x80000000u;
    for (; n > 0; n--)
        value = value >> 1 ^ (value & 1 ? POLY32C : 0);
    return value;
}

uint64_t crc64_xpow(uint32_t n)
{
    uint64_t value = 1ull << 63;
    for (; n > 0; n--)
        value = value >> 1 ^ (value & 1 ? POLY64XZ : 0);
    return value;
}

uint64_t lck_crc64(uint64_t crc, const void *data, uint64_t nbytes)
{
    return ~kernel_current()->crc64(~crc, data, nbytes);
}

uint32_t lck_crc32c(const void *data, uint64_t nbytes)
{
    size_t lines = nbytes & ~(uint64_t)(LCK_LINE - 1);
    uint32_t state = kernel_current()->crc(UINT32_MAX, data, lines);
    return ~crc32c_update(state, (const unsigned char *)data + lines, nbytes - lines);
}

int32_t lck_crc32c_blocks(const void *data, uint64_t nbytes, uint64_t block, uint32_t *out)
{
    if (block == 0 || (nbytes > 0 && (data == NULL || out == NULL)))
        return LCK_EINVAL;
    const unsigned char *p = data;
    for (; nbytes > 0; out++) {
        uint64_t n = nbytes < block ? nbytes : block;
        *out = lck_crc32c(p, n);
        p += n;
        nbytes -= n;
    }
    return LCK_OK;
}

int32_t lck_crc32c_each(const uint64_t *addresses, const uint64_t *nbytes, uint64_t count, uint32_t *out)
{
    if (count > 0 && (addresses == NULL || nbytes == NULL || out == NULL))
        return LCK_EINVAL;
    for (uint64_t i = 0; i < count; i++)
        out[i] = lck_crc32c((const void *)(uintptr_t)addresses[i], nbytes[i]);
    return LCK_OK;
}

uint32_t lck_crc32c_words(const void *data, const int64_t *numbers, uint64_t count)
{
    const struct kernel *kernel = kernel_current();
    uint32_t state = UINT32_MAX;
    uint64_t words[64]; /* the kernels need whole lines */
    for (uint64_t done = 0, n; done < count; done += n) {
        n = count - done < 64 ? count - done : 64;
        for (uint64_t i = 0; i < n; i++)
            memcpy(&words[i], (const unsigned char *)data + 8 * numbers[done + i], 8);
        state = n == 64 ? kernel->crc(state, words, sizeof words) : crc32c_update(state, words, 8 * n);
    }
    return ~state;
}

static uint64_t splitmix64(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* Return the word with each negative zero replaced by zero. `size`: bytes of a floating-point number; 0 for other
 * data. */
static uint64_t without_negative_zeros(uint64_t word, uint64_t size)
{
    if (size != 2 && size != 4 && size != 8)
        return word;
    uint64_t bits = 8 * size, all = size == 8 ? UINT64_MAX : (1ull << bits) - 1, sign = 1ull << (bits - 1);
    for (uint64_t shift = 0; shift < 64; shift += bits)
        if ((word >> shift & all) == sign)
            word &= ~(all << shift);
    return word;
}

uint32_t lck_crc32c_spread(const void *data, uint64_t nbytes, uint64_t size, uint64_t words)
{
    uint64_t whole = nbytes / 8, chosen = whole < words ? whole : words, word, last = 0;
    uint32_t state = UINT32_MAX;
    for (uint64_t k = 0; k < chosen; k++) {
        uint64_t begin = whole * k / chosen, length = whole * (k + 1) / chosen - begin;
        /* A pseudo-random word of the part, because words at a fixed distance may all lie in one column of a matrix. */
        uint64_t number = begin + splitmix64(k) % length;
        memcpy(&word, (const unsigned char *)data + 8 * number, 8);
        word = without_negative_zeros(word, size);
        state = crc32c_update(state, &word, 8);
    }
    if (nbytes % 8 > 0) {
        memcpy(&last, (const unsigned char *)data + 8 * whole, nbytes % 8);
        last = without_negative_zeros(last, size);
        state = crc32c_update(state, &last, 8);
    }
    return ~state;
}

uint32_t lck_block_seed(uint64_t uuid_lo, uint64_t uuid_hi, uint64_t tensor, uint64_t generation, uint64_t index)
{
    uint64_t x = splitmix64(splitmix64(uuid_lo) ^ uuid_hi);
    return (uint32_t)splitmix64(splitmix64(splitmix64(x ^ tensor) ^ generation) ^ index);
}
