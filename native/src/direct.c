/* direct.c: write large blocks of a checkpoint past the page cache (O_DIRECT), from buffers in huge pages.
 *
 * A store through the mapping costs a page fault, a dirty page and its write-back. A direct write costs one copy into a
 * buffer that is used again and again, and the disk reads directly from that buffer.
 *
 * The rest of a pool is still stored through the mapping, and others read the file through the page cache. The kernel
 * keeps both in step: before a direct write it writes back and drops the cached pages of the range, and afterwards it
 * drops what was read in between. The second drop fails for a page that is dirty again. The cached unit is a folio,
 * which may have up to 2 MiB: a store to a neighbouring page makes the whole folio dirty, with old bytes of the range.
 * So a direct write and a store never run at once in the same window of 2 MiB of the file (range_enter). */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "internal.h"

#define WINDOW HUGE_PAGE /* the largest folio of a file, with pages of 4 KiB */

#if !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25
#endif

/* ---- ranges -------------------------------------------------------------------------------------------- */

static bool in_conflict(const struct direct *direct, const struct direct_range *range)
{
    for (const struct direct_range *other = direct->ranges; other != NULL; other = other->next)
        if (other->is_store != range->is_store && other->from < range->to && range->from < other->to)
            return true;
    return false;
}

/* A copy thread of idle priority may have entered the range for which this thread waits, or hold the lock. Until this
 * thread goes on, the copy threads run at normal priority. */
static void lock_ranges(struct direct *direct)
{
    if (LCK_LIKELY(pthread_mutex_trylock(&direct->lock) == 0))
        return;
    engine_raise_priority(direct->engine);
    pthread_mutex_lock(&direct->lock);
    engine_restore_priority(direct->engine);
}

static void wait_for_ranges(struct direct *direct, const struct direct_range *range)
{
    engine_raise_priority(direct->engine);
    while (in_conflict(direct, range))
        pthread_cond_wait(&direct->left, &direct->lock);
    engine_restore_priority(direct->engine);
}

void range_enter(struct direct *direct, struct direct_range *range, uint64_t off, uint64_t nbytes, bool is_store)
{
    uint64_t from = direct->file_off + off, to = from + nbytes;
    range->from = from & ~(WINDOW - 1);
    range->to = (to + WINDOW - 1) & ~(WINDOW - 1);
    range->is_store = is_store;
    lock_ranges(direct);
    if (LCK_UNLIKELY(in_conflict(direct, range)))
        wait_for_ranges(direct, range);
    range->next = direct->ranges;
    direct->ranges = range;
    pthread_mutex_unlock(&direct->lock);
}

void range_leave(struct direct *direct, struct direct_range *range)
{
    cpu_fence(); /* a store past the caches must have arrived before the kernel reads the page for another thread */
    lock_ranges(direct);
    struct direct_range **link = &direct->ranges;
    while (*link != range)
        link = &(*link)->next;
    *link = range->next;
    pthread_cond_broadcast(&direct->left);
    pthread_mutex_unlock(&direct->lock);
}

/* ---- buffers ------------------------------------------------------------------------------------------- */

/* The buffer is one huge page if the kernel grants one, else many small pages: the disk then gets many short runs,
 * which costs processor time. A forked child does not inherit the buffer. NULL if memory is short. */
static struct direct_buffer *new_buffer(void)
{
    struct direct_buffer *buffer = malloc(sizeof *buffer);
    void *bytes = buffer == NULL ? MAP_FAILED : huge_reserve(HUGE_PAGE);
    if (bytes == MAP_FAILED) {
        free(buffer);
        return NULL;
    }
    buffer->bytes = bytes;
    if (mprotect(bytes, HUGE_PAGE, PROT_READ | PROT_WRITE) != 0 || madvise(bytes, HUGE_PAGE, MADV_DONTFORK) != 0) {
        munmap(bytes, HUGE_PAGE);
        free(buffer);
        return NULL;
    }
    (void)madvise(bytes, HUGE_PAGE, MADV_HUGEPAGE);
    (void)madvise(bytes, HUGE_PAGE, MADV_DONTDUMP);
    for (uint64_t at = 0; at < HUGE_PAGE; at += DIRECT_PAGE)
        ((volatile unsigned char *)buffer->bytes)[at] = 0;
    (void)madvise(bytes, HUGE_PAGE, MADV_COLLAPSE); /* where huge pages are not given at a fault */
    return buffer;
}

/* There are as many buffers as threads have copied at the same time. */
struct direct_buffer *direct_take(struct direct *direct)
{
    lock_ranges(direct);
    struct direct_buffer *buffer = direct->free;
    if (buffer != NULL)
        direct->free = buffer->next;
    pthread_mutex_unlock(&direct->lock);
    return buffer != NULL ? buffer : new_buffer();
}

void direct_give(struct direct *direct, struct direct_buffer *buffer)
{
    lock_ranges(direct);
    buffer->next = direct->free;
    direct->free = buffer;
    pthread_mutex_unlock(&direct->lock);
}

/* ---- writes -------------------------------------------------------------------------------------------- */

uint64_t direct_pages(uint64_t off, uint64_t nbytes, uint64_t *head)
{
    *head = (DIRECT_PAGE - off % DIRECT_PAGE) % DIRECT_PAGE;
    return *head < nbytes ? (nbytes - *head) & ~(DIRECT_PAGE - 1) : 0;
}

/* The last page of the medium is always stored through the mapping. So if another process truncates the file, no direct
 * write can make it as long again, and the next sync sees that it is too short (direct_is_short). */
bool direct_fits(const lck_medium *medium, uint64_t off, uint64_t nbytes)
{
    uint64_t head;
    const struct direct *direct = medium->direct;
    return direct != NULL && atomic_load_explicit(&direct->on, memory_order_relaxed) &&
           direct_pages(off, nbytes, &head) >= direct->nbytes_min && nbytes + DIRECT_PAGE <= HUGE_PAGE &&
           off + nbytes + DIRECT_PAGE <= medium->nbytes;
}

/* Write whole pages. A write that the kernel made in part is continued at the last whole page. Returns an errno, or
 * 0. */
static int write_pages(const struct direct *direct, const unsigned char *bytes, uint64_t off, uint64_t nbytes)
{
    for (uint64_t at = 0; at < nbytes;) {
        ssize_t wrote = pwrite(direct->fd, bytes + at, nbytes - at, (off_t)(direct->file_off + off + at));
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0)
            return errno;
        uint64_t whole = (uint64_t)wrote & ~(DIRECT_PAGE - 1);
        if (whole == 0)
            return EIO;
        at += whole;
    }
    return 0;
}

/* Whether the kernel refuses direct writes to this file as such, so that the page cache must be used instead. EFBIG:
 * ulimit -f forbids a write at this offset, but no store to the mapping. */
static bool refuses(int error)
{
    return error == EINVAL || error == EOPNOTSUPP || error == EFBIG;
}

int32_t direct_write(lck_medium *medium, uint64_t off, const unsigned char *bytes, uint64_t nbytes, bool *refused)
{
    struct direct *direct = medium->direct;
    struct direct_range range;
    range_enter(direct, &range, off, nbytes, false);
    int error = write_pages(direct, bytes, off, nbytes);
    range_leave(direct, &range);
    *refused = refuses(error);
    if (*refused) {
        atomic_store(&direct->error, error);
        atomic_store(&direct->on, false);
        return LCK_OK;
    }
    if (error != 0)
        return status_sys(error);
    atomic_fetch_add_explicit(&direct->nbytes, nbytes, memory_order_relaxed);
    return LCK_OK;
}

bool direct_is_short(const lck_medium *medium)
{
    struct stat st;
    const struct direct *direct = medium->direct;
    return direct != NULL && fstat(direct->fd, &st) == 0 &&
           (uint64_t)st.st_size < direct->file_off + medium->nbytes;
}

/* ---- open and close ------------------------------------------------------------------------------------ */

#if defined(__linux__) && defined(SYS_statx)

#include <linux/stat.h>

#if !defined(STATX_DIOALIGN)
#define STATX_DIOALIGN 0x00002000U
#endif

/* The two fields of struct statx that older headers lack: u32 dio_mem_align, u32 dio_offset_align at byte 0x98. */
enum { DIO_ALIGN_AT = 0x98 };

/* Whether the file system says that this file takes no direct writes whose memory, offset and length are multiples of
 * 4096 bytes. False if it says nothing. */
static bool is_refused_by_statx(int fd)
{
    union {
        struct statx fields;
        uint32_t words[64];
    } st = {0};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) != 0 ||
        (st.fields.stx_mask & STATX_DIOALIGN) == 0)
        return false;
    uint32_t memory = st.words[DIO_ALIGN_AT / 4], offset = st.words[DIO_ALIGN_AT / 4 + 1];
    return memory == 0 || offset == 0 || memory > DIRECT_PAGE || offset > DIRECT_PAGE;
}

#else

static bool is_refused_by_statx(int fd)
{
    (void)fd;
    return false;
}

#endif

/* Read one page directly: 0, or the errno with which the kernel refuses. */
static int try_read(const struct direct *direct)
{
    struct direct_buffer *buffer = new_buffer();
    if (buffer == NULL)
        return ENOMEM;
    int error = pread(direct->fd, buffer->bytes, DIRECT_PAGE, (off_t)direct->file_off) < 0 ? errno : 0;
    munmap(buffer->bytes, HUGE_PAGE);
    free(buffer);
    return error;
}

static int open_direct(lck_medium *medium, struct direct *direct, int fd)
{
    direct->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (direct->fd < 0)
        return errno;
    if ((fcntl(direct->fd, F_GETFL) & O_DIRECT) == 0 || medium->file_off == LCK_SCATTERED ||
        medium->file_off % DIRECT_PAGE != 0 || (uint64_t)sysconf(_SC_PAGESIZE) != DIRECT_PAGE ||
        is_refused_by_statx(direct->fd))
        return EOPNOTSUPP;
    return try_read(direct);
}

void direct_close(lck_medium *medium)
{
    struct direct *direct = medium->direct;
    if (direct == NULL)
        return;
    for (struct direct_buffer *buffer = direct->free; buffer != NULL;) {
        struct direct_buffer *next = buffer->next;
        munmap(buffer->bytes, HUGE_PAGE);
        free(buffer);
        buffer = next;
    }
    if (direct->fd >= 0)
        close(direct->fd);
    pthread_mutex_destroy(&direct->lock);
    pthread_cond_destroy(&direct->left);
    free(direct);
    medium->direct = NULL;
}

int32_t lck_medium_direct(lck_medium *medium, lck_engine *engine, int32_t fd, uint64_t nbytes_min)
{
    int32_t status = engine_check(engine);
    if (status == LCK_OK)
        status = medium_check(medium);
    if (status != LCK_OK)
        return status;
    if (fd < 0 || nbytes_min < DIRECT_PAGE || medium->kind != LCK_MEDIUM_DISK || medium->direct != NULL)
        return LCK_EINVAL;
    struct direct *direct = calloc(1, sizeof *direct);
    if (direct == NULL)
        return LCK_ENOMEM;
    pthread_mutex_init(&direct->lock, NULL);
    pthread_cond_init(&direct->left, NULL);
    direct->engine = engine;
    direct->file_off = medium->file_off;
    direct->nbytes_min = nbytes_min;
    atomic_store(&direct->on, true);
    int error = open_direct(medium, direct, fd);
    medium->direct = direct;
    if (error == 0)
        return LCK_OK;
    direct_close(medium);
    return status_sys(error);
}

uint64_t lck_medium_direct_nbytes(const lck_medium *medium)
{
    if (medium_check(medium) != LCK_OK || medium->direct == NULL)
        return 0;
    return atomic_load_explicit(&medium->direct->nbytes, memory_order_relaxed);
}

int32_t lck_medium_direct_error(const lck_medium *medium)
{
    if (medium_check(medium) != LCK_OK || medium->direct == NULL)
        return 0;
    return atomic_load(&medium->direct->error);
}
