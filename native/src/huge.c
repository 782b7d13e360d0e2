/* huge.c: huge pages: address space that they fit into, and a new file on tmpfs that has them.
 *
 * In small pages a read costs as much again for finding each page as for its bytes. The kernel gives tmpfs huge ones by
 * a mount option that hardly anybody sets, or where it is asked page by page, since 6.1 (MADV_COLLAPSE): the first bytes
 * of each are allocated, and the rest is collapsed around them. It has to be done before anything is in the file: the
 * kernel locks the page meanwhile, and whoever stores to it would wait.
 *
 * An optimisation: where it fails the file has small pages from there on. No byte is stored: the mapping is read-only. */
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include "internal.h"

#if !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25
#endif

#define IS_TMPFS 0x01021994
/* One call of madvise: each makes all processors hand over pages that they hold back. */
#define WINDOW ((uint64_t)64 << 20)
enum { HUGE_THREADS = 8 };

void *huge_reserve(uint64_t nbytes)
{
    unsigned char *space = mmap(NULL, nbytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED)
        return MAP_FAILED;
    uint64_t before = (HUGE_PAGE - ((uintptr_t)space & (HUGE_PAGE - 1))) & (HUGE_PAGE - 1);
    if (before > 0)
        munmap(space, before);
    munmap(space + before + nbytes, HUGE_PAGE - before);
    return space + before;
}

struct making {
    int fd;
    unsigned char *view;
    uint64_t nbytes;
    _Atomic uint64_t next, made;
};

static bool make_window(struct making *making, uint64_t from, uint64_t to)
{
    for (uint64_t at = from; at < to; at += HUGE_PAGE)
        if (fallocate(making->fd, 0, (off_t)at, 1) != 0)
            return false;
    return madvise(making->view + from, to - from, MADV_COLLAPSE) == 0;
}

/* Where one window fails (memory is short of huge pages, the kernel does not know how) the others are not tried. */
static void *make_windows(void *argument)
{
    struct making *making = argument;
    for (;;) {
        uint64_t from = atomic_fetch_add(&making->next, WINDOW);
        if (from >= making->nbytes)
            return NULL;
        uint64_t left = making->nbytes - from, nbytes = left < WINDOW ? left : WINDOW;
        if (!make_window(making, from, from + nbytes)) {
            atomic_store(&making->next, making->nbytes);
            return NULL;
        }
        atomic_fetch_add(&making->made, nbytes);
    }
}

static void make_all(struct making *making, uint32_t threads)
{
    pthread_t others[HUGE_THREADS];
    uint32_t started = 0;
    uint64_t windows = blocks_of(making->nbytes, WINDOW);
    while (started + 1 < threads && started + 1 < windows && started < HUGE_THREADS &&
           pthread_create(&others[started], NULL, make_windows, making) == 0)
        started++;
    make_windows(making);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
}

static bool is_tmpfs(int fd)
{
    struct statfs fs;
    return fstatfs(fd, &fs) == 0 && fs.f_type == IS_TMPFS;
}

uint64_t lck_huge(int32_t fd, uint64_t nbytes, uint32_t threads)
{
    struct making making = {.fd = fd, .nbytes = nbytes & ~(HUGE_PAGE - 1)};
    if (making.nbytes == 0 || nbytes > INT64_MAX || !is_tmpfs(fd) || ftruncate(fd, (off_t)nbytes) != 0)
        return 0;
    making.view = huge_reserve(making.nbytes);
    if (making.view == MAP_FAILED)
        return 0;
    if (mmap(making.view, making.nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED)
        make_all(&making, threads);
    munmap(making.view, making.nbytes);
    return atomic_load(&making.made);
}
