/* read.c: reads that are verified against checksums. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"

static int32_t read_all(int fd, unsigned char *buffer, uint64_t nbytes, uint64_t off)
{
    if (fd == LCK_MEMORY) {
        memcpy(buffer, (const void *)(uintptr_t)off, nbytes);
        return LCK_OK;
    }
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

/* Read nbytes at offset `off` of the pool into the buffer, from one or several extents. */
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

int32_t lck_map(int32_t fd, uint64_t nbytes, const void **out)
{
    if (nbytes == 0 || out == NULL)
        return LCK_EINVAL;
    void *address = mmap(NULL, nbytes, PROT_READ, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED)
        return status_sys(errno);
    (void)madvise(address, nbytes, MADV_DONTDUMP);
    *out = address;
    return LCK_OK;
}

int32_t lck_unmap(const void *address, uint64_t nbytes)
{
    return munmap((void *)(uintptr_t)address, nbytes) == 0 ? LCK_OK : status_sys(errno);
}

/* Set *found to the bytes of a block: in place if they are mapped and contiguous, else read into the buffer. */
static int32_t find_bytes(const struct read_from *from, uint64_t off, uint64_t n, unsigned char *buffer,
                           const unsigned char **found)
{
    uint64_t inside, i = extents_find(from->extents, from->count, off, &inside);
    if (from->fd == LCK_MEMORY && i < from->count && n <= from->extents[i].nbytes - inside) {
        *found = (const unsigned char *)(uintptr_t)(from->extents[i].off + inside);
        return LCK_OK;
    }
    *found = buffer;
    return read_pool(from->fd, from->extents, from->count, buffer, n, off);
}

/* Store a block to dst past the caches, and return its checksum; dst NULL: only compute the checksum. Each byte is
 * loaded once, so the stored bytes are the verified ones, even if another process writes to the medium meanwhile. */
static uint32_t take_block(unsigned char *dst, const unsigned char *bytes, uint64_t n)
{
    return dst == NULL ? lck_crc32c(bytes, n) : kernel_copy(kernel_current(), dst, bytes, n);
}

int32_t read_block(const struct read_from *from, const lck_read *what, uint64_t index, unsigned char *buffer)
{
    uint64_t at = index * from->block;
    uint64_t left = what->nbytes - at, n = left < from->block ? left : from->block;
    uint64_t ends_at = emulate_read(what->off + at, n);
    unsigned char *dst = what->dst == 0 ? NULL : (unsigned char *)(uintptr_t)what->dst + at;
    const unsigned char *bytes;
    int32_t status = find_bytes(from, what->off + at, n, buffer, &bytes);
    if (LCK_UNLIKELY(ends_at != 0))
        emulate_wait(ends_at);
    if (status != LCK_OK)
        return status;
    uint32_t seed = lck_block_seed(from->uuid_lo, from->uuid_hi, what->tensor, what->generation,
                                   what->first + index);
    if ((take_block(dst, bytes, n) ^ seed) == ((const uint32_t *)(uintptr_t)what->crcs)[index])
        return LCK_OK;
    if (dst != NULL)
        memset(dst, LCK_REFUSED, n);
    return LCK_ECHECKSUM;
}

int32_t read_check(const struct read_from *from)
{
    uint64_t total;
    if (extents_total(from->extents, from->count, &total) != LCK_OK)
        return LCK_EINVAL;
    return from->block == 0 || from->block > LCK_MAX_BLOCK ? LCK_EINVAL : LCK_OK;
}

int32_t read_check_one(const lck_read *what)
{
    if (what->off > INT64_MAX || what->nbytes > INT64_MAX - what->off)
        return LCK_EINVAL;
    return what->nbytes > 0 && what->crcs == 0 ? LCK_EINVAL : LCK_OK;
}

int32_t lck_read_verified(int32_t fd, const lck_extent *extents, uint64_t count, uint64_t off, void *dst,
                          uint64_t nbytes, uint64_t block, const uint32_t *crcs, uint64_t uuid_lo, uint64_t uuid_hi,
                          uint64_t tensor, uint64_t generation, uint64_t *bad)
{
    const struct read_from from = {fd, extents, count, block, uuid_lo, uuid_hi};
    const lck_read what = {off, (uint64_t)(uintptr_t)dst, nbytes, (uint64_t)(uintptr_t)crcs, tensor, generation, 0};
    if (read_check(&from) != LCK_OK || read_check_one(&what) != LCK_OK)
        return LCK_EINVAL;
    if (nbytes == 0)
        return LCK_OK;
    unsigned char *buffer = malloc(nbytes < block ? nbytes : block);
    if (buffer == NULL)
        return LCK_ENOMEM;
    int32_t status = LCK_OK;
    for (uint64_t index = 0; status == LCK_OK && index < blocks_of(nbytes, block); index++) {
        status = read_block(&from, &what, index, buffer);
        if (status != LCK_OK && bad != NULL)
            *bad = index;
    }
    cpu_fence();
    free(buffer);
    return status;
}
