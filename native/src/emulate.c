/* emulate.c: emulate the speed of another memory, for benches and tests on ordinary machines. A medium slower than
 * the emulated memory does not become faster, and durability does not change.
 *
 * A bucket contains the time at which the emulated memory is free again. A transfer begins at that time, or now if that
 * time is past. The transfer sets the bucket's time to the end of the transfer, and its thread waits for that end. So
 * threads share the bandwidth, and a pause does not make later transfers faster. */
#include <errno.h>
#include <time.h>

#include "internal.h"

/* Waits of less than this spin, because a sleep would take much longer than requested. */
#define SPIN_NS ((uint64_t)50 * 1000)

static struct {
    _Atomic uint64_t write_bps, read_bps, fence_ns, unit;
} profile;

static struct bucket reads;

int32_t lck_emulate(uint64_t write_bps, uint64_t read_bps, uint64_t fence_ns, uint64_t unit)
{
    if ((unit & (unit - 1)) != 0 || unit > LCK_MAX_BLOCK || fence_ns > LCK_EMULATED_FENCE_MAX)
        return LCK_EINVAL;
    atomic_store(&profile.write_bps, write_bps);
    atomic_store(&profile.read_bps, read_bps);
    atomic_store(&profile.fence_ns, fence_ns);
    atomic_store(&profile.unit, unit);
    return LCK_OK;
}

void emulate_open(struct emulated_speed *speed)
{
    speed->write_bps = atomic_load(&profile.write_bps);
    speed->fence_ns = atomic_load(&profile.fence_ns);
    speed->unit = atomic_load(&profile.unit);
    atomic_store(&speed->writes.free_at, 0);
}

/* ---- buckets ----------------------------------------------------------------------------------------- */

/* Reserve a transfer of nbytes that begins at the time `now` or later. Returns the time of its end. */
uint64_t bucket_take(struct bucket *bucket, uint64_t now, uint64_t nbytes, uint64_t bps)
{
    uint64_t duration = (uint64_t)((double)nbytes * 1e9 / (double)bps);
    uint64_t free_at = atomic_load(&bucket->free_at), end;
    do
        end = (free_at > now ? free_at : now) + duration;
    while (!atomic_compare_exchange_weak(&bucket->free_at, &free_at, end));
    return end;
}

/* The number of bytes in the whole units that a transfer touches. */
uint64_t whole_units(uint64_t off, uint64_t nbytes, uint64_t unit)
{
    if (unit == 0 || nbytes == 0)
        return nbytes;
    uint64_t first = off & ~(unit - 1), end = (off + nbytes + unit - 1) & ~(unit - 1);
    return end - first;
}

/* ---- time -------------------------------------------------------------------------------------------- */

static void spin_until(uint64_t time)
{
    while (clock_ns() < time) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

void emulate_wait(uint64_t time)
{
    uint64_t now = clock_ns();
    if (now + SPIN_NS < time) {
        uint64_t wake = time - SPIN_NS;
        struct timespec at = {.tv_sec = (time_t)(wake / 1000000000u), .tv_nsec = (long)(wake % 1000000000u)};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
            continue;
    }
    spin_until(time);
}

uint64_t emulate_write(struct emulated_speed *speed, uint64_t off, uint64_t nbytes)
{
    return bucket_take(&speed->writes, clock_ns(), whole_units(off, nbytes, speed->unit), speed->write_bps);
}

void emulate_fence(const struct emulated_speed *speed) { emulate_wait(clock_ns() + speed->fence_ns); }

uint64_t emulate_read(uint64_t off, uint64_t nbytes)
{
    uint64_t bps = atomic_load_explicit(&profile.read_bps, memory_order_relaxed);
    if (LCK_LIKELY(bps == 0))
        return 0;
    return bucket_take(&reads, clock_ns(), whole_units(off, nbytes, atomic_load(&profile.unit)), bps);
}
