/* check.h: functions and macros of the C tests. A failed check ends the program with status 1. */
#ifndef LCK_TEST_CHECK_H
#define LCK_TEST_CHECK_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "lck.h"

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s: not so: %s\n", __FILE__, __LINE__, __func__, #condition);            \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

#define CHECK_EQ(left, right)                                                                                \
    do {                                                                                                     \
        long long left_ = (long long)(left), right_ = (long long)(right);                                    \
        if (left_ != right_) {                                                                               \
            fprintf(stderr, "%s:%d: %s: %s is %lld, not %lld\n", __FILE__, __LINE__, __func__, #left, left_,   \
                    right_);                                                                                 \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static inline uint64_t random64(uint64_t *state)
{
    uint64_t x = (*state += 0x9E3779B97F4A7C15u);
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static inline void fill_random(void *data, size_t nbytes, uint64_t seed)
{
    unsigned char *p = data;
    for (size_t i = 0; i < nbytes; i += 8) {
        uint64_t x = random64(&seed);
        memcpy(p + i, &x, nbytes - i < 8 ? nbytes - i : 8);
    }
}

static inline int open_memory(uint64_t nbytes)
{
    int fd = memfd_create("lck-test", MFD_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQ(ftruncate(fd, (off_t)nbytes), 0);
    return fd;
}

static inline lck_medium *open_medium(int fd, uint64_t nbytes, uint32_t kind)
{
    lck_medium *medium = NULL;
    const lck_extent whole = {0, nbytes};
    int32_t status = lck_medium_open(fd, &whole, 1, kind, &medium);
    if (kind == LCK_MEDIUM_PM_EMULATED && status == LCK_ESYS && lck_last_errno() == ENOTSUP) /* no write-back */
        status = lck_medium_open(fd, &whole, 1, LCK_MEDIUM_CACHE, &medium);
    CHECK_EQ(status, LCK_OK);
    return medium;
}

static inline void read_back(int fd, void *data, size_t nbytes, uint64_t off)
{
    CHECK_EQ(pread(fd, data, nbytes, (off_t)off), nbytes);
}

#endif
