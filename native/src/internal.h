/* internal.h: what the files of the native library share. Nothing here is exported (-fvisibility=hidden). */
#ifndef LCK_INTERNAL_H
#define LCK_INTERNAL_H

#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>
#include <unistd.h>

#include "lck.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the pool format is little-endian and this library stores native integers"
#endif

#define LCK_LIKELY(x) __builtin_expect(!!(x), 1)
#define LCK_UNLIKELY(x) __builtin_expect(!!(x), 0)

enum { LCK_LINE = 64 }; /* bytes of a cache line, and of a slot header and a commit record */
#define LCK_MAX_BLOCK ((uint64_t)1 << 20)

/* ---- status.c ---------------------------------------------------------------------------------------- */

int32_t status_sys(int error); /* stores the errno for lck_last_errno; always returns LCK_ESYS */

/* ---- crc.c ------------------------------------------------------------------------------------------- */

void crc_init(void);
/* The CRC-32C register (the checksum without its initial and final inversion) after these bytes. `state`: the register
 * before them. */
uint32_t crc32c_update(uint32_t state, const void *data, size_t nbytes);
/* x^n modulo the CRC-32C polynomial, reflected (x^0 is bit 31). */
uint32_t crc32c_xpow(uint32_t n);
/* The register of CRC-64/XZ after these bytes, and x^n modulo its polynomial, reflected (x^0 is bit 63). */
uint64_t crc64_update(uint64_t state, const void *data, size_t nbytes);
uint64_t crc64_xpow(uint32_t n);

/* ---- kernels: copy.c, copy_portable.c, copy_x86.c, cpu.c ---------------------------------------------- */

/* The functions of a kernel set work on whole cache lines: dst is a multiple of 64 (src need not be), and so is nbytes.
 * `state` is the register of crc32c_update, and its new value is returned. Each source byte is loaded once, so the
 * checksum covers exactly the stored bytes, even if the source changes while it is read. */
struct kernel {
    const char *name;
    uint32_t (*copy)(uint32_t state, void *dst, const void *src, size_t nbytes);
    uint32_t (*crc)(uint32_t state, const void *src, size_t nbytes);
    uint64_t (*crc64)(uint64_t state, const void *src, size_t nbytes); /* any number of bytes, at any address */
    bool streams; /* copy bypasses the caches: its lines need a fence, but no write-back */
};

extern const struct kernel kernel_portable;

const struct kernel *kernel_current(void);
/* Copy any number of bytes to any address; returns their lck_crc32c. */
uint32_t kernel_copy(const struct kernel *kernel, void *dst, const void *src, size_t nbytes);

#if defined(__x86_64__)
extern const struct kernel kernel_sse2;   /* baseline: table checksum */
extern const struct kernel kernel_sse42;  /* crc32 instruction; its name is "sse2" too */
extern const struct kernel kernel_avx2;
extern const struct kernel kernel_avx2v; /* VPCLMULQDQ, as on Zen 3; its name is "avx2" too */
extern const struct kernel kernel_avx512;
void kernel_x86_init(void);
#endif

/* ---- cpu.c: ordering and write-back ------------------------------------------------------------------- */

bool cpu_can_write_back(void);
void cpu_write_back(const void *start, size_t nbytes);
void cpu_fence(void);

/* ---- fault.c ----------------------------------------------------------------------------------------- */

enum kill_site { KILL_HEADER, KILL_BLOCK, KILL_MANIFEST, KILL_SEALED, KILL_BODY, KILL_WORD, KILL_ACK, KILL_SITES };

int32_t fault_take(uint32_t op); /* the errno with which this call of the operation must fail, or 0 */
void kill_point(enum kill_site site); /* called at a passing of the site; does not return if it must kill the process */

/* ---- guard.c ----------------------------------------------------------------------------------------- */

/* The caller calls sigsetjmp(guard.back, 0) and then guard_enter. If an access of this thread to the range causes
 * SIGBUS before guard_leave, sigsetjmp returns a second time, with 1, and the guard is left. The caller must hold no
 * lock between guard_enter and guard_leave. The argument 0 means that sigsetjmp does not save the signal mask, because
 * that would cost a system call for each store. The handler restores the mask instead. */
struct guard {
    sigjmp_buf back;
    uintptr_t start;
    uint64_t nbytes;
};

void guard_init(void); /* installs the handler, once per process */
void guard_enter(struct guard *guard, const void *start, uint64_t nbytes);
void guard_leave(void);

/* ---- trace.c ----------------------------------------------------------------------------------------- */

struct trace {
    _Atomic bool on;
    pthread_mutex_t lock; /* guards all fields below */
    bool lost;            /* there was no memory for an event, so the trace is incomplete */
    lck_event *events;
    uint64_t count, capacity;
    unsigned char *data;
    uint64_t data_used, data_capacity;
};

void trace_init(struct trace *trace);
void trace_free(struct trace *trace);
void trace_record(struct trace *trace, uint32_t kind, uint64_t off, uint64_t nbytes, const void *stored);

static inline bool trace_on(struct trace *trace)
{
    return LCK_UNLIKELY(atomic_load_explicit(&trace->on, memory_order_relaxed));
}

/* ---- extent.c ---------------------------------------------------------------------------------------- */

/* Set *nbytes to the total length of the extents. LCK_EINVAL if they are impossible. */
int32_t extents_total(const lck_extent *extents, uint64_t count, uint64_t *nbytes);
/* The index of the extent that contains the pool offset off; *inside becomes the offset in that extent. Returns count
 * if no extent contains off. */
uint64_t extents_find(const lck_extent *extents, uint64_t count, uint64_t off, uint64_t *inside);

/* ---- read.c ------------------------------------------------------------------------------------------ */

/* The pool that is read from. */
struct read_from {
    int fd;
    const lck_extent *extents;
    uint64_t count, block, uuid_lo, uuid_hi;
};

/* LCK_EINVAL for invalid arguments. */
int32_t read_check(const struct read_from *from);
int32_t read_check_one(const lck_read *what);
/* Read and verify block `index` of a read. `buffer` has room for a block of this read: at least
 * min(from->block, what->nbytes) bytes. If the block does not match its checksum, none of its bytes stay in dst. The
 * caller fences afterwards. */
int32_t read_block(const struct read_from *from, const lck_read *what, uint64_t index, unsigned char *buffer);

/* ---- emulate.c --------------------------------------------------------------------------------------- */

struct bucket {
    _Atomic uint64_t free_at; /* value of clock_ns() at which the emulated memory is free again */
};

/* The speed that a medium emulates; all 0 for none. */
struct emulated_speed {
    uint64_t write_bps, fence_ns, unit;
    struct bucket writes;
};

void emulate_open(struct emulated_speed *speed);
/* Reserve a transfer that begins now. Returns the time of its end (clock_ns); emulate_read returns 0 if reads are not
 * emulated. */
uint64_t emulate_write(struct emulated_speed *speed, uint64_t off, uint64_t nbytes);
uint64_t emulate_read(uint64_t off, uint64_t nbytes);
void emulate_wait(uint64_t time); /* until clock_ns() is at least time */
void emulate_fence(const struct emulated_speed *speed);
uint64_t bucket_take(struct bucket *bucket, uint64_t now, uint64_t nbytes, uint64_t bps);
uint64_t whole_units(uint64_t off, uint64_t nbytes, uint64_t unit);

/* ---- huge.c ------------------------------------------------------------------------------------------ */

#define HUGE_PAGE ((uint64_t)2 << 20) /* bytes of a huge page */

/* Reserve address space without memory, aligned to a huge page. Extents that lie apart in a file are mapped into it
 * back to back, and the alignment permits huge pages. Returns MAP_FAILED on failure, with errno. */
void *huge_reserve(uint64_t nbytes);

/* ---- direct.c ---------------------------------------------------------------------------------------- */

#define DIRECT_PAGE ((uint64_t)4096) /* offsets and lengths of direct writes are multiples of it */

/* A run of whole windows (of 2 MiB, see direct.c) of the file, in which a direct write or a store is under way. It lies
 * on the stack of its thread. */
struct direct_range {
    struct direct_range *next;
    uint64_t from, to; /* offsets in the file */
    bool is_store;
};

struct direct_buffer {
    struct direct_buffer *next;
    unsigned char *bytes; /* HUGE_PAGE of them */
};

/* What a medium needs for direct writes. */
struct direct {
    lck_engine *engine;     /* whose threads write directly; it may be closed when none of them does any more */
    int fd;                 /* the file, opened with O_DIRECT */
    uint64_t file_off;      /* offset of the medium in the file */
    uint64_t nbytes_min;    /* shorter blocks are stored through the mapping */
    _Atomic bool on;        /* false after the kernel has refused a direct write */
    _Atomic int32_t error;  /* the errno with which it refused, else 0 */
    _Atomic uint64_t nbytes; /* bytes written directly so far */
    pthread_mutex_t lock;   /* guards the fields below */
    pthread_cond_t left;    /* a range was left */
    struct direct_range *ranges;
    struct direct_buffer *free;
};

/* A store (is_store) waits until no direct write is under way in the windows of these bytes, and a direct write until
 * no store is. The range keeps the other kind out until range_leave. A thread enters one range at a time. */
void range_enter(struct direct *direct, struct direct_range *range, uint64_t off, uint64_t nbytes, bool is_store);
void range_leave(struct direct *direct, struct direct_range *range);
/* The bytes of whole pages in [off, off + nbytes); *head: how many bytes lie before the first of these pages. */
uint64_t direct_pages(uint64_t off, uint64_t nbytes, uint64_t *head);
/* Whether the whole pages of these bytes of the medium may be written directly. */
bool direct_fits(const lck_medium *medium, uint64_t off, uint64_t nbytes);
struct direct_buffer *direct_take(struct direct *direct); /* NULL if memory is short */
void direct_give(struct direct *direct, struct direct_buffer *buffer);
/* Write whole pages from a buffer. *refused: the kernel takes no direct writes to this file; it may have written a part
 * of these pages. All later blocks are then stored through the mapping. */
int32_t direct_write(lck_medium *medium, uint64_t off, const unsigned char *bytes, uint64_t nbytes, bool *refused);
bool direct_is_short(const lck_medium *medium); /* whether the file was truncated */
void direct_close(lck_medium *medium);

/* ---- medium.c ---------------------------------------------------------------------------------------- */

#define LCK_SCATTERED UINT64_MAX

struct lck_medium {
    unsigned char *base;
    uint64_t nbytes;
    uint64_t reserved; /* bytes of address space at base, in whole pages */
    uint32_t kind; /* LCK_MEDIUM_... */
    uint64_t file_off; /* offset in the file; LCK_SCATTERED if the medium has several extents */
    struct direct *direct; /* NULL: all bytes are stored through the mapping */
    int fd;    /* for fdatasync; -1 if this kind of medium needs none */
    pid_t pid; /* the process in which the mapping exists */
    _Atomic bool lost; /* a store hit a missing page: every later copy and sync fails */
    struct trace trace;
    struct emulated_speed speed;
};

/* The functions lck_m_... without checks, for callers that have checked handle and range. medium_copy also accepts
 * src NULL: a device has stored the bytes. medium_copy_background: a copy without LCK_NOW, which may go past the page
 * cache; src is not NULL. */
void medium_store(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes);
void medium_store8(lck_medium *medium, uint64_t off, uint64_t value);
int32_t medium_copy(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes, uint32_t *crc);
int32_t medium_copy_background(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes, uint32_t *crc);
void medium_flush(lck_medium *medium, uint64_t off, uint64_t nbytes);
void medium_fence(lck_medium *medium);
int32_t medium_sync(lck_medium *medium);
void medium_mark(lck_medium *medium, uint32_t mark, uint64_t value);
int32_t medium_commit_record(lck_medium *medium, uint64_t off, const void *record);

static inline int32_t medium_check(const lck_medium *medium)
{
    if (medium == NULL)
        return LCK_EINVAL;
    return medium->pid == getpid() ? LCK_OK : LCK_EFORK;
}

static inline bool medium_holds(const lck_medium *medium, uint64_t off, uint64_t nbytes)
{
    return off <= medium->nbytes && nbytes <= medium->nbytes - off;
}

/* ---- park.c ------------------------------------------------------------------------------------------ */

#define PARK_FOREVER UINT64_MAX
/* Sleep while *word == seen, at most timeout_ns nanoseconds. May return early. */
void park(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns);
void unpark_all(_Atomic uint32_t *word); /* wake all threads that are parked on this word */
uint64_t clock_ns(void); /* monotonic */

/* ---- engine ------------------------------------------------------------------------------------------ */

enum { ENGINE_THREADS = 64, ENGINE_POPULATES = 4 };

/* Phases of a job: those of the interface, and internal ones. */
enum phase {
    PHASE_FREE = 0,
    PHASE_COPYING = LCK_JOB_COPYING,
    PHASE_COPIED = LCK_JOB_COPIED,
    PHASE_COMMITTED = LCK_JOB_COMMITTED,
    PHASE_FAILED = LCK_JOB_FAILED,
    PHASE_DROPPED = LCK_JOB_DROPPED,
    PHASE_BUILDING = 6, /* being submitted: only the submitting thread accesses it, and later jobs cannot commit */
    PHASE_SEALING = 7   /* one thread writes manifest and commit record */
};

enum verdict { VERDICT_OPEN, VERDICT_RELEASED, VERDICT_DROPPED };

/* Job entries are a fixed array of the engine. `word` contains ticket and phase together, so that one load returns a
 * consistent pair. A thread that accesses another field of an entry, except for a hint in work.c, first increments
 * `users` and then checks `word` again (job_enter). A submitting thread first sets PHASE_BUILDING and then
 * re-initialises the entry only if `users` is 0. All these accesses are sequentially consistent, so at least one of the
 * two threads sees what the other wrote. */
struct job {
    _Atomic uint64_t word; /* ticket << 4 | phase; 0: free */
    _Atomic uint32_t users;    /* number of threads that have entered the entry (job_enter) and not left it yet */
    _Atomic uint32_t waiters;  /* number of waiting threads that will seal this job and all earlier ones */
    _Atomic uint32_t verdict;  /* enum verdict */
    _Atomic bool held;         /* the sources are not complete: no block may be claimed yet */
    _Atomic uint64_t failure;  /* errno << 32 | (uint32) status of the first failure; 0: none */
    _Atomic uint64_t next;     /* number of the first block that is not claimed */
    _Atomic uint64_t done;     /* number of blocks that are copied and fenced, or skipped */
    _Atomic uint64_t nbytes, nbytes_helped, blocks;
    /* Written in PHASE_BUILDING only. Later jobs reuse the arrays, so that no memory is allocated per checkpoint. */
    lck_medium *medium;
    lck_commit commit;
    lck_copy *copies;          /* the queued copies */
    uint64_t *ends;            /* ends[i]: number of blocks of copies 0..i */
    uint64_t count, capacity;  /* of the arrays copies and ends: items in use, items allocated */
    uint64_t total;            /* number of queued blocks */
};

/* A mapping whose pages are being touched. A thread first increments `users` and then checks `medium` again, for the
 * same reason as in struct job. */
struct populate {
    _Atomic(lck_medium *) medium;
    _Atomic(lck_medium *) owner; /* the last value of `medium` other than NULL; only compared, never dereferenced */
    _Atomic uint32_t users;
    _Atomic uint64_t next; /* offset of the first page that is not touched yet */
};

struct lck_engine {
    pid_t pid;
    uint32_t threads;
    /* `pulse` is incremented after every change that a parked thread may wait for. `idle_workers` counts the parked
     * workers, and `sleepers` all other parked threads: if no thread is parked, no system call is made. */
    _Atomic uint32_t pulse;
    _Atomic uint32_t idle_workers;
    _Atomic uint32_t sleepers;
    _Atomic bool stop;
    _Atomic uint32_t urgent_waiters; /* threads between engine_raise_priority and engine_restore_priority */
    _Atomic bool cannot_raise_priority; /* the system once refused to raise it: not tried again */
    _Atomic bool passive; /* OpenMP's threads must wait passively while a job is copied: openmp.c */
    _Atomic bool spans_on;
    _Atomic(struct span_queue *) spans; /* made at the first start; freed with the engine */
    pthread_mutex_t submit_lock; /* for the order of tickets; callers of the library take it, and never a worker */
    uint64_t tickets; /* the last ticket */
    struct job jobs[LCK_JOBS_MAX];
    struct populate populates[ENGINE_POPULATES];
    pthread_t workers[ENGINE_THREADS];
    pthread_t team_thread;        /* the thread lightck-openmp, which makes and ends an OpenMP team: openmp.c */
    _Atomic bool has_team_thread; /* it was started; it need not have an OpenMP team now */
    _Atomic bool no_room;         /* no further OpenMP thread could be started: not tried again */
};

static inline int32_t engine_check(const lck_engine *engine)
{
    if (engine == NULL)
        return LCK_EINVAL;
    return engine->pid == getpid() ? LCK_OK : LCK_EFORK;
}

/* Wake all parked threads after a change. */
void engine_pulse(lck_engine *engine);
/* As engine_pulse, after a change of a job. Parked workers are woken only if there is work for a worker. */
void engine_pulse_job(lck_engine *engine);
void engine_park(lck_engine *engine, uint32_t seen, uint64_t timeout_ns);
/* Between these two calls the workers run at normal priority, because a thread waits for blocks that workers have
 * claimed, or for a range or a lock (direct.c) that a worker may hold. At idle priority the workers might get no
 * processor as long as other threads keep all of them busy. */
void engine_raise_priority(lck_engine *engine);
void engine_restore_priority(lck_engine *engine);

/* -- work.c: what workers and waiting threads do -- */

enum role {
    ROLE_WORKER, /* copies; seals jobs that no waiting thread will seal */
    ROLE_HELPER, /* copies */
    ROLE_SEALER  /* copies and seals */
};

/* Copy one block or seal one job. Jobs with tickets up to `upto` (inclusive) are tried, oldest first. Returns false if
 * there was no work. */
bool work_once(lck_engine *engine, uint64_t upto, enum role role);
bool work_for_a_worker(lck_engine *engine); /* whether work_once may find work for a worker */
/* Copy the blocks of all copies with these flags on the calling thread, and fence. */
int32_t work_copy_now(lck_engine *engine, struct job *job, const lck_copy *copies, uint64_t count, uint32_t flags);
/* Count all unclaimed blocks as done, without copying them. */
void work_skip_rest(lck_engine *engine, struct job *job, uint64_t ticket);
/* If the job is copied and was dropped, end it (PHASE_DROPPED). */
void work_end_dropped(lck_engine *engine, struct job *job, uint64_t ticket);

/* -- entry.c: entries, phases, references -- */

static inline enum phase word_phase(uint64_t word) { return (enum phase)(word & 15); }
static inline uint64_t word_ticket(uint64_t word) { return word >> 4; }
static inline uint64_t word_of(uint64_t ticket, enum phase phase) { return ticket << 4 | (uint64_t)phase; }

static inline bool phase_ended(enum phase phase)
{
    return phase == PHASE_COMMITTED || phase == PHASE_FAILED || phase == PHASE_DROPPED;
}

/* Find a job and enter it: the caller must call job_leave. NULL if the ticket is unknown. */
struct job *job_find(lck_engine *engine, uint64_t ticket);
bool job_enter(struct job *job, uint64_t ticket); /* false: the entry does not have this ticket, do not leave it */
void job_leave(struct job *job);
enum phase job_phase(struct job *job);
/* Change the phase; false if the job is not in phase `from`. */
bool job_move(lck_engine *engine, struct job *job, uint64_t ticket, enum phase from, enum phase to);
void job_fail(struct job *job, int32_t status); /* record a failure of this thread */
int32_t job_failure(struct job *job); /* the status of the failure that job_fail has kept; also sets lck_last_errno */
uint64_t blocks_of(uint64_t nbytes, uint64_t block); /* ceil(nbytes / block) */
/* The index of the item that contains block number `block`: the first i with ends[i] > block. There are `count` items
 * (not 0); ends[i] is the number of blocks of items 0..i. */
uint64_t first_beyond(const uint64_t *ends, uint64_t count, uint64_t block);

/* -- openmp.c -- */

void openmp_stop(lck_engine *engine); /* join the thread `team`; call it after `stop` was set */

/* -- spans.c -- */

struct span {
    uint64_t begin_ns, cpu_ns;
};

void span_start(struct span *span);
void span_end(lck_engine *engine, const struct span *span, uint32_t kind, uint64_t generation, uint64_t tensor,
              uint64_t nbytes, bool helped);

/* Begin a span and return true if recording is on. The caller then calls span_end, except after a failure. */
static inline bool span_begin(lck_engine *engine, struct span *span)
{
    if (LCK_LIKELY(!atomic_load_explicit(&engine->spans_on, memory_order_acquire)))
        return false;
    span_start(span);
    return true;
}

/* -- seal.c, populate.c -- */

void seal_header(lck_medium *medium, const lck_commit *commit);
int32_t seal_job(lck_engine *engine, struct job *job, bool helped);
bool populate_step(lck_engine *engine);

#endif
