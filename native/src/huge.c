/* huge.c: huge pages: reserve aligned address space, and allocate huge pages for a new file on tmpfs.
 *
 * With small pages a read spends as much time to find the pages as to copy their bytes. On tmpfs the kernel uses huge
 * pages with a mount option that is rarely set, or since Linux 6.1 on request: the first byte of each huge page is
 * allocated, and madvise(MADV_COLLAPSE) makes the kernel replace its small page by a huge one. This must be done before
 * any thread stores to the file, because the kernel locks a page while it collapses it, and a store to that page would
 * wait.
 *
 * This is an optimisation: after a failure the rest of the file has small pages. The mapping used here is read-only, so
 * nothing is stored through it. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include "internal.h"

void *huge_reserve(uint64_t nbytes)
{
    if (nbytes > SIZE_MAX - HUGE_PAGE) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    unsigned char *space = mmap(NULL, nbytes + HUGE_PAGE, PROT_NONE, flags, -1, 0);
    if (space == MAP_FAILED)
        return MAP_FAILED;
    uint64_t before = (HUGE_PAGE - ((uintptr_t)space & (HUGE_PAGE - 1))) & (HUGE_PAGE - 1);
    if (before > 0)
        munmap(space, before);
    munmap(space + before + nbytes, HUGE_PAGE - before);
    return space + before;
}

#if defined(__linux__)

#include <linux/magic.h>
#include <sys/vfs.h>

#if !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25
#endif

/* Bytes per call of madvise. Few large calls are better, because each makes all processors flush their cached free
 * pages. */
#define WINDOW ((uint64_t)64 << 20)
enum { HUGE_THREADS = 8 }; /* maximum number of threads, the calling one included */

/* A range of the file from `off` on, in whole huge pages, mapped at `view`. next: offset in the range of the first
 * window that is not claimed; done: bytes in huge pages. */
struct range {
    int fd;
    uint64_t off, nbytes;
    unsigned char *view;
    _Atomic uint64_t next, done;
};

static bool allocate_byte(int fd, uint64_t off)
{
    int failed;
    do
        failed = fallocate(fd, 0, (off_t)off, 1);
    while (failed != 0 && errno == EINTR);
    return failed == 0;
}

static bool collapse_window(struct range *range, uint64_t from, uint64_t nbytes)
{
    for (uint64_t at = from; at < from + nbytes; at += HUGE_PAGE)
        if (!allocate_byte(range->fd, range->off + at))
            return false;
    return madvise(range->view + from, nbytes, MADV_COLLAPSE) == 0;
}

/* If one window fails (no huge pages left, an older kernel), the windows that are not claimed yet are not tried. */
static void *claim_windows(void *argument)
{
    struct range *range = argument;
    for (;;) {
        uint64_t from = atomic_fetch_add(&range->next, WINDOW);
        if (from >= range->nbytes)
            return NULL;
        uint64_t left = range->nbytes - from, nbytes = left < WINDOW ? left : WINDOW;
        if (!collapse_window(range, from, nbytes)) {
            atomic_store(&range->next, range->nbytes);
            return NULL;
        }
        atomic_fetch_add(&range->done, nbytes);
    }
}

/* The threads started here block all signals, so that signal handlers run on the program's own threads. */
static void collapse(struct range *range, uint32_t threads)
{
    pthread_t others[HUGE_THREADS];
    uint32_t started = 0;
    uint64_t windows = blocks_of(range->nbytes, WINDOW);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started + 1 < threads && started + 1 < windows && started + 1 < HUGE_THREADS &&
           pthread_create(&others[started], NULL, claim_windows, range) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    claim_windows(range);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
}

static bool is_on_tmpfs(int fd)
{
    struct statfs fs;
    return fstatfs(fd, &fs) == 0 && fs.f_type == TMPFS_MAGIC;
}

uint64_t lck_huge(int32_t fd, uint64_t off, uint64_t nbytes, uint32_t threads)
{
    struct range range = {.fd = fd, .off = off, .nbytes = nbytes & ~(HUGE_PAGE - 1)};
    if (range.nbytes == 0 || off % HUGE_PAGE != 0 || off > INT64_MAX || nbytes > INT64_MAX - off ||
        !is_on_tmpfs(fd))
        return 0;
    if (!allocate_byte(fd, off + nbytes - 1)) /* extends the file */
        return 0;
    range.view = huge_reserve(range.nbytes);
    if (range.view == MAP_FAILED)
        return 0;
    if (mmap(range.view, range.nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, (off_t)off) != MAP_FAILED)
        collapse(&range, threads);
    munmap(range.view, range.nbytes);
    return atomic_load(&range.done);
}

#else

uint64_t lck_huge(int32_t fd, uint64_t off, uint64_t nbytes, uint32_t threads)
{
    (void)fd, (void)off, (void)nbytes, (void)threads;
    return 0;
}

#endif
