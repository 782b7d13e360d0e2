/* copy.c: copies of any length and alignment, built on kernels that copy whole cache lines only. */
#include <string.h>

#include "internal.h"

/* Copy part of a cache line by ordinary stores. Without the barrier (the empty asm) the compiler may read the source
 * twice, and then the checksum and the stored bytes could differ. */
static uint32_t copy_part(uint32_t state, void *dst, const void *src, size_t nbytes)
{
    unsigned char part[LCK_LINE];
    memcpy(part, src, nbytes);
    __asm__ __volatile__("" : : "r"(part) : "memory");
    memcpy(dst, part, nbytes);
    return crc32c_update(state, part, nbytes);
}

uint32_t kernel_copy(const struct kernel *kernel, void *dst, const void *src, size_t nbytes)
{
    unsigned char *to = dst;
    const unsigned char *from = src;
    uint32_t state = UINT32_MAX;
    size_t head = (size_t)(-(uintptr_t)to & (LCK_LINE - 1));
    if (head > nbytes)
        head = nbytes;
    if (head > 0)
        state = copy_part(state, to, from, head);
    size_t lines = (nbytes - head) & ~(size_t)(LCK_LINE - 1);
    if (lines > 0)
        state = kernel->copy(state, to + head, from + head, lines);
    size_t tail = nbytes - head - lines;
    if (tail > 0)
        state = copy_part(state, to + head + lines, from + head + lines, tail);
    return ~state;
}
