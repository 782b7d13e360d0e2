/* copy_portable.c: the kernel set in plain C. Its stores go through the caches, so they need a write-back to be durable
 * on persistent memory. */
#include <string.h>

#include "internal.h"

static uint32_t portable_copy(uint32_t state, void *dst, const void *src, size_t nbytes)
{
    unsigned char *to = dst;
    const unsigned char *from = src;
    for (size_t at = 0; at < nbytes; at += LCK_LINE) {
        unsigned char line[LCK_LINE];
        memcpy(line, from + at, LCK_LINE);
        __asm__ __volatile__("" : : "r"(line) : "memory"); /* so that the source is read once: see copy_part */
        memcpy(to + at, line, LCK_LINE);
        state = crc32c_update(state, line, LCK_LINE);
    }
    return state;
}

const struct kernel kernel_portable = {"portable", portable_copy, crc32c_update, crc64_update, false};
