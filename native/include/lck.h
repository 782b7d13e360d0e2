/* lck.h: the whole native interface of lightck.
 *
 * The native library copies and checksums tensors, orders stores with fences, commits checkpoints, and verifies
 * what it reads. It knows nothing of torch, Python or CUDA; Python code handles names, dtypes and layers.
 *
 * This header is the one source for the C compiler and for cffi (everything between the CFFI markers), so it
 * holds only fixed-width integers, plain structs and opaque handles: no callbacks, no varargs, no macros that
 * cffi cannot parse. Every function returns LCK_OK (0) or a negative LCK_E... status unless it says otherwise.
 * Functions may be called from any thread without the GIL. In a forked child each function that takes a handle
 * returns LCK_EFORK and touches nothing: the mapping does not exist there (MADV_DONTFORK).
 */
#ifndef LCK_H
#define LCK_H

#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default) /* the library is built with -fvisibility=hidden */
#endif

/* CFFI_BEGIN */

/* ---- status ------------------------------------------------------------------------------------------ */

enum {
    LCK_OK = 0,
    LCK_EINVAL = -1,     /* an argument is out of range; nothing was done */
    LCK_ENOMEM = -2,
    LCK_ESYS = -3,       /* a system call failed; lck_last_errno() on this thread returns its errno */
    LCK_EFORK = -4,      /* called in a forked child */
    LCK_ETIMEDOUT = -5,
    LCK_EBUSY = -6,      /* no free job entry */
    LCK_ECHECKSUM = -7,  /* a block does not match its checksum */
    LCK_ESHORT = -8,     /* the file ended early */
    LCK_EDROPPED = -9,   /* the job was dropped before it committed */
    LCK_ESTATE = -10,    /* the job is not in a state that allows this call, or the ticket is unknown */
    LCK_EMISSING = -11   /* a library (libpmemobj, GNU OpenMP) is missing or too old */
};

/* Incremented whenever a prototype or struct below changes; Python refuses a library with another number. */
enum { LCK_ABI_VERSION = 18 };

uint32_t lck_abi_version(void);
/* sizeof of a struct by id (0 lck_copy, 1 lck_commit, 2 lck_job_info, 3 lck_event, 4 lck_extent, 5 lck_read,
 * 6 lck_span), 0 for another id. */
uint32_t lck_sizeof(uint32_t id);
/* errno of the last LCK_ESYS that this thread saw. */
int32_t lck_last_errno(void);

/* ---- processor dispatch ------------------------------------------------------------------------------ */

/* The kernel set in use: "portable", "sse2", "avx2" or "avx512". */
const char *lck_isa_name(void);
/* Choose a kernel set by name, or "auto" for the best one. LCK_EINVAL if unknown or not supported here. The variants
 * for processors with less, "avx2-narrow" (no VPCLMULQDQ) and "sse2-table" (no SSE4.2), can be chosen for tests;
 * lck_isa_name then still says "avx2" or "sse2". */
int32_t lck_isa_set(const char *name);
/* The instruction that writes lines back: "clwb", "clflushopt", "clflush" (every x86-64), or "none". */
const char *lck_write_back_name(void);
/* Choose it by name, or "auto" for the best one. LCK_EINVAL if unknown or not supported here. For tests. */
int32_t lck_write_back_set(const char *name);

/* ---- checksums --------------------------------------------------------------------------------------- */

/* CRC-32C (Castagnoli, reflected, init and final xor ~0: "123456789" -> 0xE3069283). */
uint32_t lck_crc32c(const void *data, uint64_t nbytes);
/* CRC-64/XZ (ECMA-182 reflected, init and final xor ~0: "123456789" -> 0x995DC9BBDF1939FA); `crc` is the value
 * returned for the bytes before these, 0 at the start. For metadata. */
uint64_t lck_crc64(uint64_t crc, const void *data, uint64_t nbytes);
/* lck_crc32c of every block of `block` bytes (the last may be shorter) into out[ceil(nbytes / block)]. */
int32_t lck_crc32c_blocks(const void *data, uint64_t nbytes, uint64_t block, uint32_t *out);
/* lck_crc32c of `count` blocks, each by its own address and length, into out[count]. */
int32_t lck_crc32c_each(const uint64_t *addresses, const uint64_t *nbytes, uint64_t count, uint32_t *out);
/* lck_crc32c of the 8-byte words at these indices, one after the other. `data` needs no alignment. */
uint32_t lck_crc32c_words(const void *data, const int64_t *numbers, uint64_t count);
/* lck_crc32c of a sample: one 8-byte word, always the same, of each of `words` equal parts of the data (all words if it
 * has fewer), and the bytes after its last whole word. `size`: bytes of a floating-point element (2, 4 or 8), whose
 * negative zeros count as zeros; 0 for other data. */
uint32_t lck_crc32c_spread(const void *data, uint64_t nbytes, uint64_t size, uint64_t words);
/* The seed that is xored onto the CRC-32C of block `index` before it is stored. It depends on pool, tensor, block and
 * the generation in which the bytes were written (docs/format.md, "Block checksums"). */
uint32_t lck_block_seed(uint64_t uuid_lo, uint64_t uuid_hi, uint64_t tensor, uint64_t generation, uint64_t index);

/* ---- extents ----------------------------------------------------------------------------------------- */

/* A run of a pool's bytes in its file. A pool is an array of extents: offsets in the pool count through them in order,
 * wherever they are in the file. A plain file has one extent; a PMDK pool has one per arena. */
typedef struct lck_extent {
    uint64_t off;     /* from the start of the file */
    uint64_t nbytes;  /* not 0 */
} lck_extent;

/* ---- medium: the choke point ------------------------------------------------------------------------- */

/* Every byte that lightck writes into a pool goes through the functions of this section. They can record what
 * they do (lck_trace_...) and fail or kill on request (lck_fault, lck_kill). If a page of the mapping is missing (the
 * file was truncated, the medium failed), the SIGBUS of the store is caught: from then on every copy and every sync of
 * this medium returns LCK_ESYS with EIO. The first lck_medium_open of a process installs the handler, which passes all
 * other SIGBUS on to the previous handler. */

typedef struct lck_medium lck_medium;

enum {
    LCK_TIER_CACHE = 0,  /* tmpfs and the like: stores survive the process; flush is a no-op, sync is sfence */
    LCK_TIER_DISK = 1,   /* page cache over a disk: sync is sfence + fdatasync */
    LCK_TIER_PM = 2,     /* persistent memory (ADR), mapped with MAP_SYNC: flush writes lines back, sync is sfence */
    LCK_TIER_PM_EADR = 3, /* the same with the caches in the persistence domain: flush is a no-op, sync is sfence */
    LCK_TIER_PM_EMULATED = 4 /* does what LCK_TIER_PM does, on any file, for tests; no more durable than that file */
};

/* Allocate huge pages for a range of a new file in which nothing is allocated yet, on up to 8 threads. `off` is a
 * multiple of 2 MiB. The file is extended to the end of the range. Returns the number of bytes in huge pages: 0 if the
 * file is not on tmpfs or the kernel has no huge pages now. */
uint64_t lck_huge(int32_t fd, uint64_t off, uint64_t nbytes, uint32_t threads);
/* Write zeros over the first nbytes of a new file whose space is allocated. Used on persistent memory before the
 * file is mapped: otherwise the first store to each page would convert an extent and wait for the file system's
 * journal. */
int32_t lck_prewrite(int32_t fd, uint64_t nbytes);

/* Map these extents of fd back to back (shared, read and write, MADV_DONTFORK, MADV_DONTDUMP). The address is a
 * multiple of 2 MiB, so that huge pages fit. A character device (device-dax) must have one extent, in multiples of the
 * device's alignment, and the kernel chooses the address. LCK_EINVAL if an offset, or a length other than the last, is
 * not a multiple of the page size; LCK_ESHORT if the file is shorter; LCK_ESYS with EOPNOTSUPP if the tier needs
 * MAP_SYNC and it is not granted, with ENOTSUP if the processor cannot write cache lines back as the tier needs.
 * The fd is duplicated (O_CLOEXEC) for fdatasync on LCK_TIER_DISK and is not needed afterwards. */
int32_t lck_medium_open(int32_t fd, const lck_extent *extents, uint64_t count, uint32_t tier, lck_medium **out);
/* Unmap and free; frees its trace. No job may be running on it. In a forked child: frees nothing. */
int32_t lck_medium_close(lck_medium *medium);
uint64_t lck_medium_size(const lck_medium *medium);
/* Address of its first byte, for a device that writes into it directly (LCK_PLACED); 0 if the medium is not usable. */
uint64_t lck_medium_address(const lck_medium *medium);

/* Ordinary store of nbytes at offset off. */
int32_t lck_m_store(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes);
/* One atomic 8-byte store (off is 8-aligned; compiled as a single store). */
int32_t lck_m_store8(lck_medium *medium, uint64_t off, uint64_t value);
/* Non-temporal copy of nbytes; *crc (may be NULL) becomes lck_crc32c of exactly the bytes that were stored,
 * computed on the registers that are being streamed: the source is read once. Partial cache lines at both ends are
 * stored through the caches and flushed. The copy is ordered only after a fence on this thread. */
int32_t lck_m_copy(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes, uint32_t *crc);
/* Write the lines of [off, off + nbytes) back. Executed on LCK_TIER_PM (and _EMULATED) only; recorded always. */
int32_t lck_m_flush(lck_medium *medium, uint64_t off, uint64_t nbytes);
/* Order this thread's stores and flushes (sfence). Says nothing about other threads. */
int32_t lck_m_fence(lck_medium *medium);
/* Make everything that this thread flushed, and on LCK_TIER_DISK everything that any thread stored, durable. */
int32_t lck_m_sync(lck_medium *medium);
/* A mark in the trace. */
enum { LCK_MARK_BEGIN = 1, LCK_MARK_ACK = 2, LCK_MARK_USER = 3 };
int32_t lck_m_mark(lck_medium *medium, uint32_t mark, uint64_t value);

/* Write one 64-byte commit record at off: body (bytes 8..63), flush, fence, then its first 8 bytes as one atomic
 * store, flush, sync. For records that no job writes (adoption). Passes the kill sites "body", "word", "ack". */
int32_t lck_m_commit_record(lck_medium *medium, uint64_t off, const void *record);

/* -- trace -- */

enum { LCK_EV_STORE = 1, LCK_EV_COPY = 2, LCK_EV_FLUSH = 3, LCK_EV_FENCE = 4, LCK_EV_SYNC = 5, LCK_EV_MARK = 6 };

typedef struct lck_event {
    uint64_t seq;      /* position in the trace, from 0 */
    uint32_t kind;     /* LCK_EV_... */
    uint32_t thread;   /* small number of the thread that did it */
    uint64_t off;      /* STORE, COPY, FLUSH: offset in the medium; MARK: the mark */
    uint64_t nbytes;   /* STORE, COPY, FLUSH: length; MARK: its value */
    uint64_t data;     /* STORE, COPY: offset of the stored bytes in the trace's data; else 0 */
} lck_event;

/* Start recording (drops an older trace), stop, and read. Recording keeps a copy of all stored bytes: for tests. A
 * COPY is followed by a FLUSH of each part of it that went through the caches. LCK_ENOMEM from the stop: events are
 * missing. */
int32_t lck_trace_start(lck_medium *medium);
int32_t lck_trace_stop(lck_medium *medium);
uint64_t lck_trace_count(const lck_medium *medium);
int32_t lck_trace_event(const lck_medium *medium, uint64_t index, lck_event *out);
/* The stored bytes of all events, one after the other. To be called after the stop; valid until the next start or
 * close. */
const void *lck_trace_data(const lck_medium *medium, uint64_t *nbytes);

/* -- faults, process-wide, for tests and campaigns -- */

enum { LCK_OP_COPY = 1, LCK_OP_SYNC = 2 };
/* Make the nth (from 1) call of this operation from now on fail with LCK_ESYS and this errno, once; nth 0: none. */
int32_t lck_fault(uint32_t op, uint64_t nth, int32_t error);
/* Raise SIGKILL at the nth (from 1) passing of a site; nth 0: none. Sites, in the order of a checkpoint:
 * "header" (slot invalidated), "block" (a payload block copied), "manifest" (manifest stored, not synced),
 * "sealed" (payload and manifest synced), "body" (body of the commit record stored), "word" (commit record complete,
 * not synced), "ack" (commit record synced). LCK_EINVAL for another name. */
int32_t lck_kill(const char *site, uint64_t nth);

/* -- the speed of another memory, process-wide, for benches and tests -- */

enum { LCK_EMULATED_FENCE_MAX = 1000000000 }; /* ns */
/* Emulate a memory: copies into media that are opened from now on, and all verified reads, take at least as long as on
 * that memory. write_bps, read_bps: its bandwidth in bytes per second (0: no limit). fence_ns: the time of each fence
 * and sync. unit: bytes of the smallest transfer, a power of two, at most 1 MiB: part of a unit takes as long as a
 * whole one (0: no units). All threads share the bandwidth; each medium has the write bandwidth for itself, and all
 * reads share one read bandwidth. CPU time of stalls is not emulated. Media that are open already are not affected. */
int32_t lck_emulate(uint64_t write_bps, uint64_t read_bps, uint64_t fence_ns, uint64_t unit);

/* ---- engine: background copies and the commit -------------------------------------------------------- */

typedef struct lck_engine lck_engine;

/* Start threads (1 to 64) workers, named lightck-copy-0, -1, ... They block all signals but SIGBUS. They run at idle
 * priority (SCHED_IDLE, else nice 19). While a caller of lck_job_wait or lck_job_drop can only wait for them, they run
 * at normal priority, if the system permits it. */
int32_t lck_engine_open(uint32_t threads, lck_engine **out);
/* Finish jobs that are released, drop the others, join the workers, free. A job that is held and released fails,
 * because nobody can start it any more. */
int32_t lck_engine_close(lck_engine *engine);
/* Bind the workers to these processors (numbers below 65,536). LCK_ESYS if the system refuses: their affinity is then
 * unchanged. */
int32_t lck_engine_run_on(lck_engine *engine, const uint32_t *processors, uint64_t count);
/* Let idle workers touch every page of the mapping (MADV_POPULATE_WRITE in steps), so that the first checkpoints
 * need no page faults. LCK_EBUSY beyond 4 mappings at once. Call lck_engine_quiesce before the medium is closed. */
int32_t lck_engine_populate(lck_engine *engine, lck_medium *medium);
/* Stop populating and wait until no worker touches `medium`. LCK_ESTATE at once, without a wait, if a job on it has
 * not ended. */
int32_t lck_engine_quiesce(lck_engine *engine, lck_medium *medium);
/* Find the GNU OpenMP that the library of this file name uses; that library must be loaded already. LCK_EMISSING if it
 * uses none, or one older than OpenMP 5.0. The first one found is used for the whole process. */
int32_t lck_openmp_find(const char *library);
/* With on != 0: while a job is being copied, waiting OpenMP threads sleep soon instead of spinning, so that the
 * workers get a processor. This needs one more thread, named lightck-openmp, and one more OpenMP thread while a job
 * is copied. It helps only if OpenMP has a thread per processor. LCK_EMISSING without lck_openmp_find; LCK_ESYS if
 * a thread cannot be started, now or in an earlier call. */
int32_t lck_engine_passive(lck_engine *engine, int32_t on);
/* CPU nanoseconds of all of the engine's own threads so far (CLOCK_THREAD_CPUTIME_ID). */
uint64_t lck_engine_cpu_ns(const lck_engine *engine);

enum {
    LCK_NOW = 1,   /* copied by the calling thread inside lck_job_submit, before it returns */
    LCK_PLACED = 2 /* a device stores the bytes at dst: the job computes checksums and writes lines back */
};

/* One tensor (or any run of bytes) to copy into the pool. */
typedef struct lck_copy {
    uint64_t src;        /* address, valid and unchanged until the copies of the job ended; unused with LCK_PLACED */
    uint64_t dst;        /* offset in the medium */
    uint64_t nbytes;     /* 0 is allowed: no block */
    uint64_t tensor;     /* record number, for the checksum seed */
    uint32_t crc_index;  /* its first checksum in the arrays of lck_commit; ceil(nbytes / block) follow */
    uint32_t flags;      /* LCK_NOW, LCK_PLACED */
} lck_copy;

enum {
    /* A partial job copies some tensors of a checkpoint before the others are known (eager copies, device transfers).
     * It writes neither manifest nor commit record, and ends as LCK_JOB_COMMITTED when its copies are fenced and it is
     * released. A later job of the same generation commits the checkpoint. The later job fails (LCK_ESTATE) if a
     * failed or dropped partial job of that generation still has an entry (lck_job_forget frees it). */
    LCK_PART = 1,
    LCK_FOLLOWS = 2, /* not the first job of its generation: the slot's header is written already */
    LCK_HELD = 4     /* the sources are not complete yet: nothing is copied before lck_job_start */
};

/* What is needed to commit a checkpoint. lck_job_submit copies this struct; the memory at image and raw_crcs must stay
 * valid until the job has ended. */
typedef struct lck_commit {
    uint64_t header_off;        /* slot header in the medium: 64 bytes, invalidated first (see lck_job_submit) */
    uint64_t manifest_off;      /* where the manifest goes in the medium */
    uint64_t record_off;        /* where the commit record goes */
    uint64_t image;             /* address of the manifest's bytes; the engine writes the block checksums into it */
    uint64_t image_nbytes;
    uint64_t crcs_off;          /* offset in the image of the u32 array of seeded block checksums, 4-aligned */
    uint64_t crcs_count;        /* its length */
    uint64_t raw_crcs;          /* address of a u32 array of the same length for the unseeded CRC-32Cs, or 0 */
    uint64_t block;             /* bytes per checksum block, a multiple of 256, at most 1 MiB */
    uint64_t uuid_lo, uuid_hi;  /* pool uuid as two little-endian words: checks and seeds */
    uint64_t origin_lo, origin_hi; /* uuid that seeds the block checksums */
    uint64_t generation;
    uint64_t incarnation;
    uint64_t step;
    uint32_t slot;
    uint32_t manifest_index;    /* 0 or 1 */
    uint32_t flags;             /* LCK_PART, LCK_FOLLOWS, LCK_HELD */
    uint32_t zero;
} lck_commit;

enum {
    LCK_JOB_COPYING = 1,
    LCK_JOB_COPIED = 2,     /* all bytes are copied, and each copying thread fenced its own; not committed yet */
    LCK_JOB_COMMITTED = 3,  /* the commit record is durable; a partial job has none (LCK_PART) */
    LCK_JOB_FAILED = 4,
    LCK_JOB_DROPPED = 5
};

typedef struct lck_job_info {
    uint32_t state;          /* LCK_JOB_... */
    int32_t status;          /* LCK_OK or why it failed */
    int32_t error;           /* errno of an LCK_ESYS, else 0 */
    uint32_t released;
    uint64_t nbytes;         /* payload and manifest bytes stored */
    uint64_t nbytes_helped;  /* of these, copied by threads inside lck_job_wait */
    uint64_t blocks;
} lck_job_info;

/* Start a checkpoint. First (not with LCK_FOLLOWS) the trace gets the mark BEGIN(generation), and the slot header
 * {generation, ...} (docs/format.md) is written, flushed and fenced. Then this thread makes the LCK_NOW copies and
 * fences. Then the other copies are queued for the workers. *ticket identifies the job. Jobs on an engine commit in the
 * order in which they were submitted, and no job commits before its lck_job_release. On failure nothing is queued. */
int32_t lck_job_submit(lck_engine *engine, lck_medium *medium, const lck_copy *copies, uint64_t count,
                       const lck_commit *commit, uint64_t *ticket);
/* End the hold of a held job. With outcome LCK_OK its sources are complete, and its copies start. With another outcome
 * the sources will never be complete, and the job fails with that status. Returns LCK_OK also if the copies
 * have begun already; LCK_EDROPPED for a job that was dropped. */
int32_t lck_job_start(lck_engine *engine, uint64_t ticket, int32_t outcome);
/* Allow the commit. A worker or a waiting thread then seals the job (writes manifest and commit record). Returns the
 * failure of a job that has failed. Allowed once per job: LCK_ESTATE after that. */
int32_t lck_job_release(lck_engine *engine, uint64_t ticket);
/* Release the job and wait until it has ended, as lck_job_wait with until = 3: this thread seals the job, so that no
 * worker is woken for it. After LCK_ETIMEDOUT the job is released. */
int32_t lck_job_commit(lck_engine *engine, uint64_t ticket, uint32_t timeout_ms);
/* Cancel the checkpoint, before the release only: skip copies that have not begun, wait for running ones. LCK_OK
 * also for a job that has failed (it stays failed). */
int32_t lck_job_drop(lck_engine *engine, uint64_t ticket);
/* Wait, and copy on this thread meanwhile, until the job's state is at least LCK_JOB_COPIED (until = 2) or the job has
 * ended (until = 3, which needs the release: LCK_ESTATE before it). LCK_OK; LCK_ETIMEDOUT after timeout_ms; the failure
 * of a job that failed; LCK_EDROPPED. */
int32_t lck_job_wait(lck_engine *engine, uint64_t ticket, uint32_t until, uint32_t timeout_ms);
int32_t lck_job_info_get(lck_engine *engine, uint64_t ticket, lck_job_info *out);
/* Free the entry of a job that has ended. At most 32 entries exist. */
int32_t lck_job_forget(lck_engine *engine, uint64_t ticket);

/* -- spans: which thread worked on a checkpoint, and when -- */

enum {
    LCK_SPAN_HEADER = 1,   /* the slot header was written and fenced */
    LCK_SPAN_NOW = 2,      /* all LCK_NOW copies of a checkpoint, inside lck_job_submit */
    LCK_SPAN_COPY = 3,     /* one block; of an LCK_NOW copy only if its tensor fills a block */
    LCK_SPAN_MANIFEST = 4, /* the manifest was stored and written back */
    LCK_SPAN_SYNC = 5,     /* payload and manifest were made durable */
    LCK_SPAN_COMMIT_RECORD = 6 /* the commit record was written and made durable */
};

enum { LCK_SPANS_MAX = 1 << 20 };

typedef struct lck_span {
    uint64_t begin_ns, end_ns; /* CLOCK_MONOTONIC */
    uint64_t cpu_ns;           /* CPU time of its thread in between (CLOCK_THREAD_CPUTIME_ID) */
    uint64_t generation;       /* of the checkpoint */
    uint64_t tensor;           /* COPY: its record number */
    uint64_t nbytes;           /* NOW, COPY, MANIFEST: bytes stored */
    uint32_t kind;             /* LCK_SPAN_... */
    uint32_t thread;           /* the kernel's number of the thread */
    uint32_t helped;           /* 1: done by a thread inside lck_job_wait */
    uint32_t zero;
} lck_span;

/* Record spans from now on, in a queue of this many cells (a power of two, at most LCK_SPANS_MAX), which exists
 * until the engine is closed: a later start reuses it. While recording is off, a span costs one load and one
 * branch. */
int32_t lck_spans_start(lck_engine *engine, uint64_t cells);
/* Stop recording; spans that have begun may be added to the queue afterwards. */
int32_t lck_spans_stop(lck_engine *engine);
/* Take up to `most` spans. The spans of one thread come in the order of their ends. *dropped: number of spans that
 * found no free cell since the last call. One caller at a time. */
int32_t lck_spans_take(lck_engine *engine, lck_span *out, uint64_t most, uint64_t *count, uint64_t *dropped);

/* ---- verified reads ---------------------------------------------------------------------------------- */

enum { LCK_MEMORY = -2 };
/* Map the first nbytes of fd for reading (shared, excluded from core dumps). For a device without read(): its bytes are
 * read from the mapping, with LCK_MEMORY. */
int32_t lck_map(int32_t fd, uint64_t nbytes, const void **out);
/* End a mapping of lck_map. */
int32_t lck_unmap(const void *address, uint64_t nbytes);

/* Read nbytes at offset off of a pool in fd into dst, block by block (at most 1 MiB each): pread into a private
 * buffer, then store and verify against crcs[i] (seeded as in lck_block_seed) in one pass. LCK_ECHECKSUM,
 * LCK_ESHORT (the file or the extents end early) or LCK_ESYS at the first bad block: *bad (may be NULL) is its
 * number, blocks before it are in dst, nothing after it is; a block that does not match its checksum is overwritten
 * with bytes LCK_REFUSED, which are NaN in every floating-point format of 16 bits and more. dst NULL: verify only.
 * No medium is needed: recovery maps no file, so a truncated one is an error, not SIGBUS. With fd LCK_MEMORY the
 * offsets of the extents are addresses in this process, from which the blocks are read (a mapped device without
 * read()). */
enum { LCK_REFUSED = 0xFF };
int32_t lck_read_verified(int32_t fd, const lck_extent *extents, uint64_t count, uint64_t off, void *dst,
                          uint64_t nbytes, uint64_t block, const uint32_t *crcs, uint64_t uuid_lo,
                          uint64_t uuid_hi, uint64_t tensor, uint64_t generation, uint64_t *bad);

typedef struct lck_read {
    uint64_t off;         /* in the pool */
    uint64_t dst;         /* address, 0: verify only */
    uint64_t nbytes;
    uint64_t crcs;        /* address of its blocks' checksums, uint32_t each */
    uint64_t tensor, generation;
} lck_read;

/* Execute many verified reads on up to `threads` threads, including this one. The dst of two reads must not overlap. On
 * failure, *bad_read and *bad_block identify the first bad block in the order of the reads; all blocks before it are in
 * dst, and dst holds no block that did not match its checksum. */
int32_t lck_read_many(int32_t fd, const lck_extent *extents, uint64_t count, const lck_read *reads, uint64_t n_reads,
                      uint64_t block, uint64_t uuid_lo, uint64_t uuid_hi, uint32_t threads, uint64_t *bad_read,
                      uint64_t *bad_block);

/* ---- PMDK: libpmemobj as the container of a pool ------------------------------------------------------- */

/* libpmemobj is loaded at run time. These functions make a container, hold it open, and close it; none of them is
 * called while a pool is written or read. A failure is LCK_ESYS with libpmemobj's errno, and lck_pmdk_message has
 * its text. */

typedef struct lck_pmdk lck_pmdk;

/* Load it by name or path; once per process, later calls do nothing. LCK_EMISSING with lck_pmdk_message. */
int32_t lck_pmdk_load(const char *name);
/* The reason of this thread's last failure; valid until its next. */
const char *lck_pmdk_message(void);
/* Take the messages that libpmemobj logged since the last call, as lines of text without a final NUL. Returns their
 * number of bytes. */
uint64_t lck_pmdk_log(char *out, uint64_t nbytes);

/* Open the pool, or (create) make one in an existing file of nbytes zeros, with a mapping that forked children do not
 * inherit. sds: value of libpmemobj's setting for shutdown states; it is global to the process, so callers must take
 * turns. */
int32_t lck_pmdk_open(const char *path, const char *layout, uint64_t nbytes, uint32_t create, uint32_t sds,
                      lck_pmdk **out);
/* Store the file offset of the root object in *off; it is allocated with at least nbytes zeros if there is none. */
int32_t lck_pmdk_root(lck_pmdk *pmdk, uint64_t nbytes, uint64_t *off);
/* Allocate an object, atomically with the 16 bytes at file offset `place` (8-aligned, in another object) that name it
 * from then on: u64 identity of the pool, u64 offset in the file. */
int32_t lck_pmdk_alloc(lck_pmdk *pmdk, uint64_t place, uint64_t nbytes, uint64_t type);
/* Store into an object and make the bytes durable. Used for the root object, before the pool is visible. */
int32_t lck_pmdk_store(lck_pmdk *pmdk, uint64_t off, const void *src, uint64_t nbytes);
int32_t lck_pmdk_close(lck_pmdk *pmdk);
/* To be called in a forked child for each pool that its parent holds: keeps libpmemobj usable there for other pools. */
int32_t lck_pmdk_forked(const lck_pmdk *pmdk);

/* CFFI_END */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
