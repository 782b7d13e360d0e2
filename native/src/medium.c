/* medium.c: the choke point. Every byte that enters a pool passes through one of the medium_... functions. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "internal.h"

#if !defined(MAP_SHARED_VALIDATE)
#define MAP_SHARED_VALIDATE 0x03
#endif
#if !defined(MAP_SYNC)
#define MAP_SYNC 0x080000
#endif

/* ---- open and close ---------------------------------------------------------------------------------- */

static bool file_too_short(int fd, const lck_extent *extents, uint64_t count)
{
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
        return false;
    for (uint64_t i = 0; i < count; i++)
        if (extents[i].off + extents[i].nbytes > (uint64_t)st.st_size)
            return true;
    return false;
}

static bool whole_pages(const lck_extent *extents, uint64_t count)
{
    uint64_t page_mask = (uint64_t)sysconf(_SC_PAGESIZE) - 1;
    for (uint64_t i = 0; i < count; i++)
        if ((extents[i].off & page_mask) != 0 || (i + 1 < count && (extents[i].nbytes & page_mask) != 0))
            return false;
    return true;
}

static bool writes_back(uint32_t kind) { return kind == LCK_MEDIUM_PM || kind == LCK_MEDIUM_PM_EMULATED; }

/* On persistent memory MAP_SYNC makes the file system's metadata durable before a page can be stored to. Without
 * MAP_SYNC, medium_sync would not make stores durable. With MAP_SHARED_VALIDATE, mmap fails if the kernel does not
 * grant MAP_SYNC. */
static int map_flags(uint32_t kind)
{
    bool synced = kind == LCK_MEDIUM_PM || kind == LCK_MEDIUM_PM_EADR;
    return synced ? MAP_SHARED_VALIDATE | MAP_SYNC : MAP_SHARED;
}

static void *map_at(void *address, int fd, const lck_extent *extent, uint32_t kind)
{
    return mmap(address, extent->nbytes, PROT_READ | PROT_WRITE, MAP_FIXED | map_flags(kind), fd, (off_t)extent->off);
}

/* Keep the mapping out of forked children, which could otherwise write into the pool of their parent. */
static int32_t keep_from_children(void *address, uint64_t nbytes)
{
    if (madvise(address, nbytes, MADV_DONTFORK) != 0)
        return status_sys(errno);
    (void)madvise(address, nbytes, MADV_DONTDUMP);
    return LCK_OK;
}

/* A device-dax mapping must have an address that is a multiple of the device's alignment (up to 1 GiB), so the kernel
 * chooses the address. */
static int32_t map_device(lck_medium *medium, int fd, const lck_extent *extents, uint64_t count)
{
    if (count != 1)
        return LCK_EINVAL;
    void *base = mmap(NULL, extents->nbytes, PROT_READ | PROT_WRITE, map_flags(medium->kind), fd, (off_t)extents->off);
    if (base == MAP_FAILED)
        return status_sys(errno);
    medium->base = base;
    medium->reserved = extents->nbytes;
    return keep_from_children(base, extents->nbytes);
}

static int32_t map_extents(lck_medium *medium, int fd, const lck_extent *extents, uint64_t count)
{
    struct stat st;
    if (fstat(fd, &st) == 0 && S_ISCHR(st.st_mode))
        return map_device(medium, fd, extents, count);
    uint64_t page_mask = (uint64_t)sysconf(_SC_PAGESIZE) - 1, at = 0;
    uint64_t nbytes = (medium->nbytes + page_mask) & ~page_mask;
    unsigned char *base = huge_reserve(nbytes);
    if (base == MAP_FAILED)
        return status_sys(errno);
    medium->base = base; /* from here on release() unmaps the whole reservation, also after an error below */
    medium->reserved = nbytes;
    for (uint64_t i = 0; i < count; at += extents[i].nbytes, i++) {
        if (map_at(base + at, fd, &extents[i], medium->kind) == MAP_FAILED)
            return status_sys(errno);
        int32_t status = keep_from_children(base + at, extents[i].nbytes);
        if (status != LCK_OK)
            return status;
    }
    return LCK_OK;
}

static int32_t duplicate_fd(lck_medium *medium, int fd)
{
    if (medium->kind != LCK_MEDIUM_DISK)
        return LCK_OK;
    medium->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return medium->fd >= 0 ? LCK_OK : status_sys(errno);
}

static void release(lck_medium *medium)
{
    direct_close(medium);
    if (medium->base != NULL)
        munmap(medium->base, medium->reserved);
    if (medium->fd >= 0)
        close(medium->fd);
    trace_free(&medium->trace);
    free(medium);
}

int32_t lck_medium_open(int32_t fd, const lck_extent *extents, uint64_t count, uint32_t kind, lck_medium **out)
{
    uint64_t nbytes;
    if (fd < 0 || kind > LCK_MEDIUM_PM_EMULATED || out == NULL || extents_total(extents, count, &nbytes) != LCK_OK)
        return LCK_EINVAL;
    if (!whole_pages(extents, count))
        return LCK_EINVAL;
    if (writes_back(kind) && !cpu_can_write_back())
        return status_sys(ENOTSUP);
    if (file_too_short(fd, extents, count))
        return LCK_ESHORT;
    lck_medium *medium = calloc(1, sizeof *medium);
    if (medium == NULL)
        return LCK_ENOMEM;
    medium->nbytes = nbytes;
    medium->kind = kind;
    medium->file_off = count == 1 ? extents->off : LCK_SCATTERED;
    medium->fd = -1;
    medium->pid = getpid();
    guard_init();
    trace_init(&medium->trace);
    emulate_open(&medium->speed);
    int32_t status = duplicate_fd(medium, fd);
    if (status == LCK_OK)
        status = map_extents(medium, fd, extents, count);
    if (status != LCK_OK) {
        release(medium);
        return status;
    }
    *out = medium;
    return LCK_OK;
}

int32_t lck_medium_close(lck_medium *medium)
{
    int32_t status = medium_check(medium);
    if (status == LCK_OK)
        release(medium);
    return status;
}

uint64_t lck_medium_size(const lck_medium *medium) { return medium_check(medium) == LCK_OK ? medium->nbytes : 0; }

uint64_t lck_medium_address(const lck_medium *medium)
{
    return medium_check(medium) == LCK_OK ? (uint64_t)(uintptr_t)medium->base : 0;
}

/* ---- operations -------------------------------------------------------------------------------------- */

/* Mark the medium as lost after a store that hit a missing page and is incomplete. The checkpoint of that store never
 * commits, because every later copy and sync of the medium fails. */
static void lose(lck_medium *medium) { atomic_store(&medium->lost, true); }

static bool is_lost(lck_medium *medium) { return LCK_UNLIKELY(atomic_load(&medium->lost)); }

/* Every store of this file through the mapping lies between these two calls, which keep it apart from direct writes. A
 * guard is entered and left between them, so that after SIGBUS the range is left too. */
static void begin_store(lck_medium *medium, struct direct_range *range, uint64_t off, uint64_t nbytes)
{
    if (LCK_UNLIKELY(medium->direct != NULL))
        range_enter(medium->direct, range, off, nbytes, true);
}

static void end_store(lck_medium *medium, struct direct_range *range)
{
    if (LCK_UNLIKELY(medium->direct != NULL))
        range_leave(medium->direct, range);
}

/* Returns false, and marks the medium as lost, if a page is missing. The other ..._guarded functions also do so; those
 * that return a checksum then return 0. */
static bool store_guarded(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes)
{
    struct guard guard;
    if (sigsetjmp(guard.back, 0) != 0) {
        lose(medium);
        return false;
    }
    guard_enter(&guard, medium->base, medium->nbytes);
    memcpy(medium->base + off, src, nbytes);
    guard_leave();
    return true;
}

static bool store8_guarded(lck_medium *medium, uint64_t off, uint64_t value)
{
    struct guard guard;
    if (sigsetjmp(guard.back, 0) != 0) {
        lose(medium);
        return false;
    }
    guard_enter(&guard, medium->base, medium->nbytes);
    __atomic_store_n((uint64_t *)(void *)(medium->base + off), value, __ATOMIC_RELEASE);
    guard_leave();
    return true;
}

void medium_store(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes)
{
    struct direct_range range;
    if (nbytes == 0)
        return;
    begin_store(medium, &range, off, nbytes);
    bool stored = store_guarded(medium, off, src, nbytes);
    end_store(medium, &range);
    if (stored && trace_on(&medium->trace))
        trace_record(&medium->trace, LCK_EV_STORE, off, nbytes, src);
}

void medium_store8(lck_medium *medium, uint64_t off, uint64_t value)
{
    struct direct_range range;
    begin_store(medium, &range, off, 8);
    bool stored = store8_guarded(medium, off, value);
    end_store(medium, &range);
    if (stored && trace_on(&medium->trace))
        trace_record(&medium->trace, LCK_EV_STORE, off, 8, &value);
}

static void write_back(lck_medium *medium, uint64_t off, uint64_t nbytes)
{
    struct guard guard;
    if (sigsetjmp(guard.back, 0) != 0) {
        lose(medium);
        return;
    }
    guard_enter(&guard, medium->base, medium->nbytes);
    cpu_write_back(medium->base + off, nbytes);
    guard_leave();
}

void medium_flush(lck_medium *medium, uint64_t off, uint64_t nbytes)
{
    if (nbytes == 0)
        return;
    if (writes_back(medium->kind))
        write_back(medium, off, nbytes);
    if (trace_on(&medium->trace))
        trace_record(&medium->trace, LCK_EV_FLUSH, off, nbytes, NULL);
}

/* Flush the copied lines that went through the caches: all lines if the kernel set does not stream, else the partial
 * lines at both ends. */
static void flush_copied(lck_medium *medium, const struct kernel *kernel, uint64_t off, uint64_t nbytes)
{
    uint64_t end = off + nbytes;
    uint64_t first_whole = (off + LCK_LINE - 1) & ~(uint64_t)(LCK_LINE - 1);
    uint64_t last_whole = end & ~(uint64_t)(LCK_LINE - 1);
    if (!kernel->streams || first_whole > last_whole) {
        medium_flush(medium, off, nbytes);
        return;
    }
    medium_flush(medium, off, first_whole - off);
    medium_flush(medium, last_whole, end - last_whole);
}

static uint32_t copy_guarded(lck_medium *medium, const struct kernel *kernel, uint64_t off, const void *src,
                             uint64_t nbytes)
{
    struct guard guard;
    if (sigsetjmp(guard.back, 0) != 0) {
        lose(medium);
        return 0;
    }
    guard_enter(&guard, medium->base, medium->nbytes);
    uint32_t sum = kernel_copy(kernel, medium->base + off, src, nbytes);
    guard_leave();
    return sum;
}

static uint32_t copy_through_mapping(lck_medium *medium, const struct kernel *kernel, uint64_t off, const void *src,
                                     uint64_t nbytes)
{
    struct direct_range range;
    if (nbytes == 0)
        return lck_crc32c(NULL, 0);
    begin_store(medium, &range, off, nbytes);
    uint32_t sum = copy_guarded(medium, kernel, off, src, nbytes);
    end_store(medium, &range);
    return sum;
}

static uint32_t sum_guarded(lck_medium *medium, uint64_t off, uint64_t nbytes)
{
    struct guard guard;
    if (sigsetjmp(guard.back, 0) != 0) {
        lose(medium);
        return 0;
    }
    guard_enter(&guard, medium->base, medium->nbytes);
    uint32_t sum = lck_crc32c(medium->base + off, nbytes);
    guard_leave();
    return sum;
}

/* src NULL: a device has stored the bytes into memory or caches. Then the bytes are read for the checksum, and all
 * their cache lines are written back, as after a store. The trace gets a STORE event only here, after the device has
 * stored. That does no harm, because no thread reads the slot in between. */
int32_t medium_copy(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes, uint32_t *crc)
{
    int32_t error = fault_take(LCK_OP_COPY);
    if (LCK_UNLIKELY(error != 0))
        return status_sys(error);
    uint64_t ends_at = LCK_UNLIKELY(medium->speed.write_bps != 0) ? emulate_write(&medium->speed, off, nbytes) : 0;
    const struct kernel *kernel = kernel_current();
    uint32_t sum = src == NULL ? sum_guarded(medium, off, nbytes)
                               : copy_through_mapping(medium, kernel, off, src, nbytes);
    if (is_lost(medium))
        return status_sys(EIO);
    if (crc != NULL)
        *crc = sum;
    if (nbytes == 0)
        return LCK_OK;
    if (trace_on(&medium->trace))
        trace_record(&medium->trace, src == NULL ? LCK_EV_STORE : LCK_EV_COPY, off, nbytes, medium->base + off);
    if (src == NULL)
        medium_flush(medium, off, nbytes);
    else
        flush_copied(medium, kernel, off, nbytes);
    if (LCK_UNLIKELY(ends_at != 0))
        emulate_wait(ends_at);
    return LCK_OK;
}

/* Copy into the buffer, and write from there: whole pages past the page cache, the bytes before and after them through
 * the mapping. The checksum covers the bytes of the buffer, which are those that are written. The kernel has taken them
 * when the call returns, so no fence is needed for them. */
static int32_t copy_directly(lck_medium *medium, struct direct_buffer *buffer, uint64_t off, const void *src,
                             uint64_t nbytes, uint32_t *crc)
{
    const struct kernel *kernel = kernel_current();
    uint64_t head, whole = direct_pages(off, nbytes, &head);
    unsigned char *bytes = buffer->bytes + off % DIRECT_PAGE; /* so that whole pages are pages of the buffer too */
    bool refused;
    *crc = kernel_copy(kernel, bytes, src, nbytes);
    cpu_fence(); /* the disk reads the buffer */
    int32_t status = direct_write(medium, off + head, bytes + head, whole, &refused);
    if (status != LCK_OK)
        return status;
    if (refused)
        head = nbytes, whole = 0;
    (void)copy_through_mapping(medium, kernel, off, bytes, head);
    (void)copy_through_mapping(medium, kernel, off + head + whole, bytes + head + whole, nbytes - head - whole);
    if (is_lost(medium))
        return status_sys(EIO);
    if (trace_on(&medium->trace))
        trace_record(&medium->trace, LCK_EV_COPY, off, nbytes, bytes);
    return LCK_OK;
}

int32_t medium_copy_background(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes, uint32_t *crc)
{
    struct direct_buffer *buffer = direct_fits(medium, off, nbytes) ? direct_take(medium->direct) : NULL;
    if (buffer == NULL)
        return medium_copy(medium, off, src, nbytes, crc);
    int32_t error = fault_take(LCK_OP_COPY);
    uint64_t ends_at = LCK_UNLIKELY(medium->speed.write_bps != 0) ? emulate_write(&medium->speed, off, nbytes) : 0;
    int32_t status = error != 0 ? status_sys(error) : copy_directly(medium, buffer, off, src, nbytes, crc);
    direct_give(medium->direct, buffer);
    if (LCK_UNLIKELY(ends_at != 0))
        emulate_wait(ends_at);
    return status;
}

static void fence(lck_medium *medium)
{
    cpu_fence();
    if (LCK_UNLIKELY(medium->speed.fence_ns != 0))
        emulate_fence(&medium->speed);
}

void medium_fence(lck_medium *medium)
{
    fence(medium);
    if (trace_on(&medium->trace))
        trace_record(&medium->trace, LCK_EV_FENCE, 0, 0, NULL);
}

/* fdatasync is never repeated, not even after EINTR, because the second call may succeed although the first has lost
 * pages. */
int32_t medium_sync(lck_medium *medium)
{
    fence(medium);
    int32_t error = fault_take(LCK_OP_SYNC);
    if (LCK_UNLIKELY(error != 0))
        return status_sys(error);
    /* The file was truncated. A direct write may have made it longer again, with holes, but never as long as before. */
    if (direct_is_short(medium))
        lose(medium);
    if (medium->kind == LCK_MEDIUM_DISK && fdatasync(medium->fd) != 0)
        return status_sys(errno);
    if (is_lost(medium))
        return status_sys(EIO);
    if (trace_on(&medium->trace))
        trace_record(&medium->trace, LCK_EV_SYNC, 0, 0, NULL);
    return LCK_OK;
}

void medium_mark(lck_medium *medium, uint32_t mark, uint64_t value)
{
    if (trace_on(&medium->trace))
        trace_record(&medium->trace, LCK_EV_MARK, mark, value, NULL);
}

/* The first word makes the record valid, so the word must never become durable before the body. */
int32_t medium_commit_record(lck_medium *medium, uint64_t off, const void *record)
{
    uint64_t word;
    memcpy(&word, record, sizeof word);
    medium_store(medium, off + 8, (const unsigned char *)record + 8, LCK_LINE - 8);
    medium_flush(medium, off + 8, LCK_LINE - 8);
    medium_fence(medium);
    kill_point(KILL_BODY);
    medium_store8(medium, off, word);
    medium_flush(medium, off, 8);
    kill_point(KILL_WORD);
    int32_t status = medium_sync(medium);
    if (status == LCK_OK)
        kill_point(KILL_ACK);
    return status;
}

/* ---- public operations, with checks ------------------------------------------------------------------ */

static int32_t check_range(const lck_medium *medium, uint64_t off, uint64_t nbytes)
{
    int32_t status = medium_check(medium);
    if (status != LCK_OK)
        return status;
    return medium_holds(medium, off, nbytes) ? LCK_OK : LCK_EINVAL;
}

int32_t lck_m_store(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes)
{
    int32_t status = check_range(medium, off, nbytes);
    if (status != LCK_OK)
        return status;
    if (src == NULL && nbytes > 0)
        return LCK_EINVAL;
    medium_store(medium, off, src, nbytes);
    return LCK_OK;
}

int32_t lck_m_store8(lck_medium *medium, uint64_t off, uint64_t value)
{
    int32_t status = check_range(medium, off, 8);
    if (status != LCK_OK)
        return status;
    if (off % 8 != 0)
        return LCK_EINVAL;
    medium_store8(medium, off, value);
    return LCK_OK;
}

int32_t lck_m_copy(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes, uint32_t *crc)
{
    int32_t status = check_range(medium, off, nbytes);
    if (status != LCK_OK)
        return status;
    if (src == NULL && nbytes > 0)
        return LCK_EINVAL;
    return medium_copy(medium, off, src, nbytes, crc);
}

int32_t lck_m_flush(lck_medium *medium, uint64_t off, uint64_t nbytes)
{
    int32_t status = check_range(medium, off, nbytes);
    if (status == LCK_OK)
        medium_flush(medium, off, nbytes);
    return status;
}

int32_t lck_m_fence(lck_medium *medium)
{
    int32_t status = medium_check(medium);
    if (status == LCK_OK)
        medium_fence(medium);
    return status;
}

int32_t lck_m_sync(lck_medium *medium)
{
    int32_t status = medium_check(medium);
    return status == LCK_OK ? medium_sync(medium) : status;
}

int32_t lck_m_mark(lck_medium *medium, uint32_t mark, uint64_t value)
{
    int32_t status = medium_check(medium);
    if (status == LCK_OK)
        medium_mark(medium, mark, value);
    return status;
}

int32_t lck_m_commit_record(lck_medium *medium, uint64_t off, const void *record)
{
    int32_t status = check_range(medium, off, LCK_LINE);
    if (status != LCK_OK)
        return status;
    if (record == NULL || off % LCK_LINE != 0)
        return LCK_EINVAL;
    return medium_commit_record(medium, off, record);
}
