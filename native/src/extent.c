/* extent.c: file extents: where the bytes of a pool lie in its file. */
#include "internal.h"

int32_t extents_total(const lck_extent *extents, uint64_t count, uint64_t *nbytes)
{
    uint64_t total = 0;
    if (extents == NULL || count == 0)
        return LCK_EINVAL;
    for (uint64_t i = 0; i < count; i++) {
        const lck_extent *e = &extents[i];
        if (e->nbytes == 0 || e->off > INT64_MAX || e->nbytes > INT64_MAX - e->off || e->nbytes > INT64_MAX - total)
            return LCK_EINVAL;
        total += e->nbytes;
    }
    *nbytes = total;
    return LCK_OK;
}

uint64_t extents_find(const lck_extent *extents, uint64_t count, uint64_t off, uint64_t *inside)
{
    uint64_t i = 0;
    for (; i < count && off >= extents[i].nbytes; i++)
        off -= extents[i].nbytes;
    *inside = off;
    return i;
}
