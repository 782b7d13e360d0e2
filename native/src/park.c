/* park.c: sleep until a word changes. No lock is used, because a thread of idle priority that held a lock could block
 * the training as long as the processor is busy. */
#include <limits.h>
#include <time.h>

#include "internal.h"

uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct timespec timespec_of(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
}

#if defined(__linux__)

#include <linux/futex.h>
#include <sys/syscall.h>

void park(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
    struct timespec limit = timespec_of(timeout_ns);
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, timeout_ns == PARK_FOREVER ? NULL : &limit, NULL, 0);
}

void unpark_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

#else

enum { POLL_NS = 200000 };

void park(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
    struct timespec nap = timespec_of(timeout_ns < POLL_NS ? timeout_ns : POLL_NS);
    if (atomic_load(word) == seen)
        nanosleep(&nap, NULL);
}

void unpark_all(_Atomic uint32_t *word) { (void)word; }

#endif
