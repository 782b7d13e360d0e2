/* read.c: reads that are verified before they are believed. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static int32_t read_all(int fd, unsigned char *buffer, uint64_t nbytes, uint64_t off)
{
    while (nbytes > 0) {
        ssize_t got = pread(fd, buffer, nbytes, (off_t)off);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return status_sys(errno);
        if (got == 0)
            return LCK_ESHORT;
        buffer += got;
        off += (uint64_t)got;
        nbytes -= (uint64_t)got;
    }
    return LCK_OK;
}

/* The same at a pool's offset: a block may lie in more than one extent. */
static int32_t read_pool(int fd, const lck_extent *extents, uint64_t count, unsigned char *buffer, uint64_t nbytes,
                         uint64_t off)
{
    uint64_t inside;
    for (uint64_t i = extents_find(extents, count, off, &inside); nbytes > 0; i++, inside = 0) {
        if (i == count)
            return LCK_ESHORT;
        uint64_t left = extents[i].nbytes - inside;
        uint64_t n = nbytes < left ? nbytes : left;
        int32_t status = read_all(fd, buffer, n, extents[i].off + inside);
        if (status != LCK_OK)
            return status;
        buffer += n;
        nbytes -= n;
    }
    return LCK_OK;
}

/* Verified in memory that nobody else can change, and not stored before: neither a bad medium nor a writer at
 * work can put a byte into dst that did not pass. */
int32_t lck_read_verified(int32_t fd, const lck_extent *extents, uint64_t count, uint64_t off, void *dst,
                          uint64_t nbytes, uint64_t block, const uint32_t *crcs, uint64_t uuid_lo, uint64_t uuid_hi,
                          uint64_t tensor, uint64_t generation, uint64_t *bad)
{
    uint64_t total;
    if (extents_total(extents, count, &total) != LCK_OK)
        return LCK_EINVAL;
    if (block == 0 || block > LCK_MAX_BLOCK || off > INT64_MAX || nbytes > INT64_MAX - off)
        return LCK_EINVAL;
    if (nbytes == 0)
        return LCK_OK;
    if (crcs == NULL)
        return LCK_EINVAL;
    unsigned char *buffer = malloc(nbytes < block ? nbytes : block);
    if (buffer == NULL)
        return LCK_ENOMEM;
    int32_t status = LCK_OK;
    for (uint64_t index = 0, at = 0; at < nbytes; index++, at += block) {
        uint64_t n = nbytes - at < block ? nbytes - at : block;
        uint64_t over = emulate_read(off + at, n);
        status = read_pool(fd, extents, count, buffer, n, off + at);
        if (LCK_UNLIKELY(over != 0))
            emulate_wait(over);
        uint32_t seed = lck_block_seed(uuid_lo, uuid_hi, tensor, generation, index);
        if (status == LCK_OK && (lck_crc32c(buffer, n) ^ seed) != crcs[index])
            status = LCK_ECHECKSUM;
        if (status != LCK_OK) {
            if (bad != NULL)
                *bad = index;
            break;
        }
        if (dst != NULL)
            memcpy((unsigned char *)dst + at, buffer, n);
    }
    free(buffer);
    return status;
}
