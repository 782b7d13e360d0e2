/* prewrite.c: write zeros over allocated space before a pool is mapped. The zeros are not made durable. */
#include <errno.h>
#include <stdlib.h>

#include "internal.h"

enum { STEP = 1 << 20 };

static int32_t write_all(int fd, const unsigned char *zeros, uint64_t nbytes)
{
    for (uint64_t at = 0; at < nbytes;) {
        uint64_t left = nbytes - at;
        ssize_t wrote = pwrite(fd, zeros, left < STEP ? left : STEP, (off_t)at);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return status_sys(wrote < 0 ? errno : EIO);
        at += (uint64_t)wrote;
    }
    return LCK_OK;
}

int32_t lck_prewrite(int32_t fd, uint64_t nbytes)
{
    if (fd < 0 || nbytes > INT64_MAX)
        return LCK_EINVAL;
    unsigned char *zeros = calloc(1, STEP);
    if (zeros == NULL)
        return LCK_ENOMEM;
    int32_t status = write_all(fd, zeros, nbytes);
    free(zeros);
    return status;
}
