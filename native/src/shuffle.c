/* shuffle.c: put the bytes, or the bits, that have the same place in each element next to each other. */
#include <string.h>
#include "internal.h"

#define BLOCK 65536u /* docs/format.md: bits are shuffled in blocks of so many bytes */

/* `width` is a constant wherever these two are inlined, so that the compiler makes vector code of them. */
static inline __attribute__((always_inline)) void split(unsigned char *restrict out, const unsigned char *restrict in,
                                                        uint64_t count, uint64_t width)
{
    for (uint64_t i = 0; i < count; i++)
        for (uint64_t byte = 0; byte < width; byte++)
            out[byte * count + i] = in[width * i + byte];
}

static inline __attribute__((always_inline)) void merge(unsigned char *restrict out, const unsigned char *restrict in,
                                                        uint64_t count, uint64_t width)
{
    for (uint64_t i = 0; i < count; i++)
        for (uint64_t byte = 0; byte < width; byte++)
            out[width * i + byte] = in[byte * count + i];
}

static void split_bytes(unsigned char *out, const unsigned char *in, uint64_t count, uint32_t width)
{
    if (width == 2)
        split(out, in, count, 2);
    else if (width == 4)
        split(out, in, count, 4);
    else if (width == 8)
        split(out, in, count, 8);
    else
        memcpy(out, in, count);
}

static void merge_bytes(unsigned char *out, const unsigned char *in, uint64_t count, uint32_t width)
{
    if (width == 2)
        merge(out, in, count, 2);
    else if (width == 4)
        merge(out, in, count, 4);
    else if (width == 8)
        merge(out, in, count, 8);
    else
        memcpy(out, in, count);
}

/* Transpose 8 x 8 bits: bit i of byte k becomes bit k of byte i (Warren, "Hacker's Delight", 7-3). */
static inline uint64_t transposed(uint64_t x)
{
    uint64_t t = (x ^ x >> 7) & 0x00AA00AA00AA00AAu;
    x ^= t ^ t << 7;
    t = (x ^ x >> 14) & 0x0000CCCC0000CCCCu;
    x ^= t ^ t << 14;
    t = (x ^ x >> 28) & 0x00000000F0F0F0F0u;
    return x ^ t ^ t << 28;
}

/* `nbytes` is a multiple of 8. */
static void split_bits(unsigned char *restrict out, const unsigned char *restrict in, uint64_t nbytes)
{
    uint64_t count = nbytes / 8;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t x;
        memcpy(&x, in + 8 * i, 8);
        x = transposed(x);
        for (uint64_t bit = 0; bit < 8; bit++)
            out[bit * count + i] = (unsigned char)(x >> 8 * bit);
    }
}

static void merge_bits(unsigned char *restrict out, const unsigned char *restrict in, uint64_t nbytes)
{
    uint64_t count = nbytes / 8;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t x = 0;
        for (uint64_t bit = 0; bit < 8; bit++)
            x |= (uint64_t)in[bit * count + i] << 8 * bit;
        x = transposed(x);
        memcpy(out + 8 * i, &x, 8);
    }
}

static bool is_wrong(const void *out, const void *data, uint64_t nbytes, uint32_t width)
{
    bool is_width = width == 1 || width == 2 || width == 4 || width == 8;
    return !is_width || (nbytes && (!out || !data));
}

static void shuffle_block(unsigned char *out, const unsigned char *in, uint64_t nbytes, uint32_t width)
{
    unsigned char planes[BLOCK];
    uint64_t count = nbytes / width / 8 * 8, whole = count * width;
    split_bytes(planes, in, count, width);
    for (uint32_t byte = 0; byte < width; byte++)
        split_bits(out + byte * count, planes + byte * count, count);
    memcpy(out + whole, in + whole, nbytes - whole);
}

static void unshuffle_block(unsigned char *out, const unsigned char *in, uint64_t nbytes, uint32_t width)
{
    unsigned char planes[BLOCK];
    uint64_t count = nbytes / width / 8 * 8, whole = count * width;
    for (uint32_t byte = 0; byte < width; byte++)
        merge_bits(planes + byte * count, in + byte * count, count);
    merge_bytes(out, planes, count, width);
    memcpy(out + whole, in + whole, nbytes - whole);
}

typedef void move(unsigned char *out, const unsigned char *in, uint64_t n, uint32_t width);

/* With `bits`, call `block` for each block of BLOCK bytes (the last may be shorter); else call `bytes` once, for the
 * bytes of all elements. */
static int32_t move_all(void *out, const void *data, uint64_t nbytes, uint32_t width, int32_t bits, move *block,
                        move *bytes)
{
    if (is_wrong(out, data, nbytes, width))
        return LCK_EINVAL;
    unsigned char *to = out;
    const unsigned char *from = data;
    for (uint64_t at = 0; bits && at < nbytes; at += BLOCK)
        block(to + at, from + at, nbytes - at < BLOCK ? nbytes - at : BLOCK, width);
    if (!bits && nbytes) {
        uint64_t count = nbytes / width, whole = count * width;
        bytes(to, from, count, width);
        memcpy(to + whole, from + whole, nbytes - whole);
    }
    return LCK_OK;
}

int32_t lck_shuffle(void *out, const void *data, uint64_t nbytes, uint32_t width, int32_t bits)
{
    return move_all(out, data, nbytes, width, bits, shuffle_block, split_bytes);
}

int32_t lck_unshuffle(void *out, const void *data, uint64_t nbytes, uint32_t width, int32_t bits)
{
    return move_all(out, data, nbytes, width, bits, unshuffle_block, merge_bytes);
}
