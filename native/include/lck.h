/* lck.h: the whole native interface of lightck.
 *
 * The native library copies and checksums tensors, orders stores with fences, commits checkpoints, and verifies
 * what it reads. It does not depend on torch, Python or CUDA; Python code handles names, dtypes and layers.
 *
 * The C compiler reads this header, and cffi reads what is between the CFFI markers. So the header contains only
 * fixed-width integers, plain structs and opaque handles: no callbacks, no varargs, no macros that cffi cannot parse.
 * A function that returns int32_t returns LCK_OK (0) or a negative LCK_E... status, unless its comment says otherwise.
 * Functions can be called from any thread without the GIL. In a forked child, each function that returns a status and
 * takes a handle (except lck_pmdk_forked) returns LCK_EFORK, and accesses no mapping, because the child has none
 * (MADV_DONTFORK).
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
    LCK_EBUSY = -6,      /* no free entry, for a job or for a mapping to populate */
    LCK_ECHECKSUM = -7,  /* a block does not match its checksum */
    LCK_ESHORT = -8,     /* the file ended early */
    LCK_EDROPPED = -9,   /* the job was dropped before it committed */
    LCK_ESTATE = -10,    /* the state of job, medium or library forbids this call, or the ticket is unknown */
    LCK_EMISSING = -11   /* a library (libpmemobj, GNU OpenMP) is missing or too old */
};

/* Incremented whenever a prototype or struct below changes. Python refuses a library with another number. */
enum { LCK_ABI_VERSION = 21 };

uint32_t lck_abi_version(void);
/* sizeof of a struct by id (0 lck_copy, 1 lck_commit, 2 lck_job_info, 3 lck_event, 4 lck_extent, 5 lck_read,
 * 6 lck_span), 0 for another id. */
uint32_t lck_sizeof(uint32_t id);
/* errno of the last LCK_ESYS that was returned on this thread. */
int32_t lck_last_errno(void);

/* ---- processor dispatch ------------------------------------------------------------------------------ */

/* The kernel set in use: "portable", "sse2", "avx2" or "avx512". */
const char *lck_isa_name(void);
/* Choose a kernel set by name, or "auto" for the best one. LCK_EINVAL if the name is unknown or this processor does not
 * support the set. Tests can also choose the variants for lesser processors, "avx2-narrow" (without VPCLMULQDQ) and
 * "sse2-table" (without SSE4.2); lck_isa_name then returns "avx2" or "sse2". */
int32_t lck_isa_set(const char *name);
/* The instruction that writes cache lines back: "clwb", "clflushopt", "clflush" (on every x86-64), or "none". */
const char *lck_write_back_name(void);
/* Choose the instruction that writes cache lines back, by name, or "auto" for the best one. LCK_EINVAL if the name is
 * unknown or this processor does not support the instruction. For tests. */
int32_t lck_write_back_set(const char *name);

/* ---- checksums --------------------------------------------------------------------------------------- */

/* CRC-32C (Castagnoli, reflected, init and final xor ~0: "123456789" -> 0xE3069283). */
uint32_t lck_crc32c(const void *data, uint64_t nbytes);
/* CRC-64/XZ (ECMA-182 reflected, init and final xor ~0: "123456789" -> 0x995DC9BBDF1939FA) of metadata. `crc`: the
 * value returned for the bytes before `data`; 0 if there are none. */
uint64_t lck_crc64(uint64_t crc, const void *data, uint64_t nbytes);
/* lck_crc32c of every block of `block` bytes (the last block may be shorter) into out[ceil(nbytes / block)]. */
int32_t lck_crc32c_blocks(const void *data, uint64_t nbytes, uint64_t block, uint32_t *out);
/* lck_crc32c of `count` runs of bytes into out[count]; run i has nbytes[i] bytes at addresses[i]. */
int32_t lck_crc32c_each(const uint64_t *addresses, const uint64_t *nbytes, uint64_t count, uint32_t *out);
/* lck_crc32c of `count` 8-byte words of `data`, as if they lay one after the other. numbers[i] is the index in `data`
 * of the i-th of these words. `data` needs no alignment. */
uint32_t lck_crc32c_words(const void *data, const int64_t *numbers, uint64_t count);
/* lck_crc32c of a sample of the data. The data is divided into `words` equal parts, and the sample has one 8-byte word
 * of each part, always the same word for the same nbytes. If the data has at most `words` whole words, the sample has
 * all of them. The bytes after the last whole word are always in the sample. `size`: bytes of a floating-point element
 * (2, 4 or 8), in which negative zeros count as zeros; 0 for other data. */
uint32_t lck_crc32c_spread(const void *data, uint64_t nbytes, uint64_t size, uint64_t words);
/* The seed that is xored onto the CRC-32C of block `index` before it is stored. It depends on pool, tensor, block and
 * the generation in which the bytes were written (docs/format.md, "Block checksums"). */
uint32_t lck_block_seed(uint64_t uuid_lo, uint64_t uuid_hi, uint64_t tensor, uint64_t generation, uint64_t index);

/* ---- shuffled elements ------------------------------------------------------------------------------- */

/* Reorder the bytes of an array: the first bytes of all its elements come first, then all second bytes, and so on. With
 * `bits`, in blocks of 64 KiB, the bits are reordered too: the lowest bits of all first bytes, then the next bits
 * (docs/format.md, "Compressed objects"). Such bytes compress better. `width`: bytes of an element: 1, 2, 4 or 8; else
 * LCK_EINVAL. `out` has `nbytes` bytes too, and does not overlap `data`; neither needs an alignment. */
int32_t lck_shuffle(void *out, const void *data, uint64_t nbytes, uint32_t width, int32_t bits);
/* The reverse of lck_shuffle. */
int32_t lck_unshuffle(void *out, const void *data, uint64_t nbytes, uint32_t width, int32_t bits);

/* ---- extents ----------------------------------------------------------------------------------------- */

/* A run of a pool's bytes in its file. A pool is an array of extents: their bytes, in the order of the array, are
 * the bytes of the pool, wherever each extent lies in the file. A plain file has one extent. A PMDK pool has one for
 * each of its arenas, which are large objects of libpmemobj (docs/format.md). */
typedef struct lck_extent {
    uint64_t off;     /* from the start of the file */
    uint64_t nbytes;  /* not 0 */
} lck_extent;

/* ---- medium: the choke point ------------------------------------------------------------------------- */

/* Every byte that lightck writes into a pool goes through the functions of this section. Their operations can be
 * recorded (lck_trace_...), and tests can make them fail or kill the process (lck_fault, lck_kill). If a page of the
 * mapping is missing (the file was truncated, the medium failed), a store causes SIGBUS, which is caught. Afterwards
 * every copy and every sync of this medium returns LCK_ESYS with EIO. The first lck_medium_open of a process installs
 * the handler, which passes every other SIGBUS to the previous handler. */

typedef struct lck_medium lck_medium;

enum {
    LCK_MEDIUM_CACHE = 0,  /* tmpfs and the like: stores survive the process; flush is a no-op, sync is sfence */
    LCK_MEDIUM_DISK = 1,   /* page cache over a disk: flush is a no-op, sync is sfence + fdatasync */
    LCK_MEDIUM_PM = 2,     /* persistent memory (ADR), mapped with MAP_SYNC: flush writes lines back, sync is sfence */
    LCK_MEDIUM_PM_EADR = 3, /* persistent memory (eADR), mapped with MAP_SYNC: flush is a no-op, sync is sfence */
    LCK_MEDIUM_PM_EMULATED = 4 /* for tests: flushes and syncs as LCK_MEDIUM_PM, on any file, without MAP_SYNC */
};

/* Allocate huge pages for a range of a new file in which nothing is allocated yet. `off` is a multiple of 2 MiB.
 * `threads`: maximum number of threads, the calling one included; at most 8 are used. On tmpfs the file is extended
 * to the end of a range of 2 MiB or more. Returns the number of bytes in huge pages: 0 if the file is not on tmpfs or
 * the kernel grants no huge page. */
uint64_t lck_huge(int32_t fd, uint64_t off, uint64_t nbytes, uint32_t threads);
/* Write zeros over the first nbytes of a new file whose space is allocated. Used on persistent memory before the file
 * is mapped. Otherwise the first store to each page would wait for the file system's journal, because the file system
 * must record that the page's space is written. */
int32_t lck_prewrite(int32_t fd, uint64_t nbytes);

/* Map these extents of fd back to back (shared, read and write, MADV_DONTFORK, MADV_DONTDUMP). The address is a
 * multiple of 2 MiB, so that huge pages fit. A character device (device-dax) must have one extent, whose offset and
 * length are multiples of the device's alignment; the kernel chooses the address.
 * LCK_EINVAL if an offset, or a length other than the last, is not a multiple of the page size. LCK_ESHORT if the file
 * ends before an extent does. LCK_ESYS with EOPNOTSUPP if the kind of medium (LCK_MEDIUM_...) needs MAP_SYNC and the
 * kernel does not grant it, and with ENOTSUP if it needs write-back of cache lines and the processor cannot do it.
 * On LCK_MEDIUM_DISK the fd is duplicated (O_CLOEXEC) for fdatasync, so the caller can close its fd afterwards. */
int32_t lck_medium_open(int32_t fd, const lck_extent *extents, uint64_t count, uint32_t kind, lck_medium **out);
/* Unmap the medium, and free it and its trace. No job may be running on the medium. */
int32_t lck_medium_close(lck_medium *medium);
/* Length in bytes; 0 if the medium is NULL, and in a forked child. */
uint64_t lck_medium_size(const lck_medium *medium);
/* Address of the medium's first byte, for a device that writes into the medium directly (LCK_PLACED). 0 in the cases in
 * which lck_medium_size returns 0. */
uint64_t lck_medium_address(const lck_medium *medium);

/* Ordinary store of nbytes at offset off. */
int32_t lck_m_store(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes);
/* One atomic store of 8 bytes. `off` is a multiple of 8. */
int32_t lck_m_store8(lck_medium *medium, uint64_t off, uint64_t value);
/* Non-temporal copy of nbytes. *crc (crc may be NULL) becomes lck_crc32c of exactly the bytes that were stored: it is
 * computed on the registers that are stored, and the source is read once. Partial cache lines at both ends are stored
 * through the caches and flushed. Only a fence on this thread orders the copy before later stores. */
int32_t lck_m_copy(lck_medium *medium, uint64_t off, const void *src, uint64_t nbytes, uint32_t *crc);
/* Write the cache lines of [off, off + nbytes) back. Executed on LCK_MEDIUM_PM and LCK_MEDIUM_PM_EMULATED only, and
 * recorded in the trace on every kind of medium. */
int32_t lck_m_flush(lck_medium *medium, uint64_t off, uint64_t nbytes);
/* Order this thread's earlier stores and flushes before its later ones (sfence). Other threads are not affected. */
int32_t lck_m_fence(lck_medium *medium);
/* Make durable all stores that this thread has flushed; on LCK_MEDIUM_DISK, all stores of every thread. */
int32_t lck_m_sync(lck_medium *medium);
/* Add a mark to the trace: LCK_MARK_... and a value. lck_job_submit marks BEGIN and a commit marks ACK, both with the
 * generation as the value. */
enum { LCK_MARK_BEGIN = 1, LCK_MARK_ACK = 2, LCK_MARK_USER = 3 };
int32_t lck_m_mark(lck_medium *medium, uint32_t mark, uint64_t value);

/* Write one 64-byte commit record at off: body (bytes 8..63), flush, fence, then the first 8 bytes as one atomic
 * store, flush, sync. `off` is a multiple of 64. For records that no job writes (adoptions). Passes the kill sites
 * "body", "word" and "ack". */
int32_t lck_m_commit_record(lck_medium *medium, uint64_t off, const void *record);

/* -- trace -- */

enum { LCK_EV_STORE = 1, LCK_EV_COPY = 2, LCK_EV_FLUSH = 3, LCK_EV_FENCE = 4, LCK_EV_SYNC = 5, LCK_EV_MARK = 6 };

typedef struct lck_event {
    uint64_t seq;      /* position in the trace, from 0 */
    uint32_t kind;     /* LCK_EV_... */
    uint32_t thread;   /* threads are numbered from 0, in the order of their first events */
    uint64_t off;      /* STORE, COPY, FLUSH: offset in the medium; MARK: LCK_MARK_...; else 0 */
    uint64_t nbytes;   /* STORE, COPY, FLUSH: length; MARK: the value of the mark; else 0 */
    uint64_t data;     /* STORE, COPY: offset of the stored bytes in lck_trace_data; else 0 */
} lck_event;

/* Start recording, and drop an older trace. A trace is for tests: it keeps a copy of all stored bytes. A COPY is
 * followed by a FLUSH of each part of the copy that went through the caches, except if lck_medium_direct applies to the
 * copy: on a disk, a sync alone makes all stores durable. */
int32_t lck_trace_start(lck_medium *medium);
/* Stop recording. LCK_ENOMEM if events are missing because memory was short. */
int32_t lck_trace_stop(lck_medium *medium);
/* Number of recorded events. */
uint64_t lck_trace_count(const lck_medium *medium);
/* Read the event at position `index`. LCK_EINVAL beyond the last one. */
int32_t lck_trace_event(const lck_medium *medium, uint64_t index, lck_event *out);
/* The stored bytes of all events, one after the other; *nbytes (nbytes may be NULL) becomes their number. Call it after
 * lck_trace_stop. The pointer is valid until the next lck_trace_start or lck_medium_close. */
const void *lck_trace_data(const lck_medium *medium, uint64_t *nbytes);

/* -- faults, process-wide, for tests and campaigns -- */

enum { LCK_OP_COPY = 1, LCK_OP_SYNC = 2 };
/* Make the nth later call (counted from 1) of the operation `op` (LCK_OP_...) fail with LCK_ESYS and the errno `error`.
 * nth 0: no call fails. */
int32_t lck_fault(uint32_t op, uint64_t nth, int32_t error);
/* Kill this process with SIGKILL at the nth passing of a site from now on, counted from 1 over all threads. nth 0: do
 * not kill. Sites, in the order in which a checkpoint passes them:
 * "header" (slot invalidated), "block" (a payload block copied), "manifest" (manifest stored, not synced),
 * "sealed" (payload and manifest synced), "body" (body of the commit record stored), "word" (commit record complete,
 * not synced), "ack" (commit record synced). LCK_EINVAL for another name. */
int32_t lck_kill(const char *site, uint64_t nth);

/* -- the speed of another memory, process-wide, for benches and tests -- */

enum { LCK_EMULATED_FENCE_MAX = 1000000000 }; /* maximum of fence_ns */
/* Emulate a memory: copies into media that are opened from now on, and all verified reads, take at least as long as on
 * that memory. write_bps, read_bps: bandwidth in bytes per second (0: no limit). fence_ns: nanoseconds of each fence
 * and each sync. unit: bytes of the smallest transfer, a power of two, at most 1 MiB; part of a unit takes as long as a
 * whole unit (0: no units). Each medium has a write bandwidth of its own, which all threads that write to the medium
 * share. All reads of the process share one read bandwidth. A thread that waits for the emulated memory may sleep,
 * while it would use CPU time on the real one. Media that are open already are not affected. */
int32_t lck_emulate(uint64_t write_bps, uint64_t read_bps, uint64_t fence_ns, uint64_t unit);

/* ---- engine: background copies and the commit -------------------------------------------------------- */

typedef struct lck_engine lck_engine;

/* Open an engine with `threads` workers (1 to 64): threads named lightck-copy-0, lightck-copy-1, ... The workers block
 * all signals except SIGBUS. They run at idle priority (SCHED_IDLE, or nice 19 if that fails). While a caller of
 * lck_job_wait, lck_job_commit or lck_job_drop has nothing to copy itself and waits for the workers, the workers run at
 * normal priority, if the system permits it. They do so too while a thread waits because of direct writes
 * (lck_medium_direct). */
int32_t lck_engine_open(uint32_t threads, lck_engine **out);
/* Finish the jobs that are released, drop the other jobs, join the workers, and free the engine. A job that is held and
 * released fails, because its sources can no longer become complete. */
int32_t lck_engine_close(lck_engine *engine);
/* Bind the workers to these processors (numbers below 65,536). LCK_ESYS if the system refuses: their affinity is then
 * unchanged. */
int32_t lck_engine_run_on(lck_engine *engine, const uint32_t *processors, uint64_t count);
/* Let idle workers touch every page of the mapping (MADV_POPULATE_WRITE in steps), so that the first checkpoints
 * cause no page faults. Returns at once. LCK_EBUSY if 4 mappings are being populated already. Call lck_engine_quiesce
 * before the medium is closed. */
int32_t lck_engine_populate(lck_engine *engine, lck_medium *medium);
/* Stop populating `medium`, and wait until no worker accesses it. LCK_ESTATE, without a wait, if a job on `medium` has
 * not ended. */
int32_t lck_engine_quiesce(lck_engine *engine, lck_medium *medium);
/* Find the GNU OpenMP that `library` (a file name) uses. `library` must be loaded already. LCK_EMISSING if it uses no
 * GNU OpenMP, or one without OpenMP 5.0. The first GNU OpenMP that is found is used for the whole process: later
 * calls return LCK_OK. */
int32_t lck_openmp_find(const char *library);
/* Switch passive waiting on (on != 0) or off. While it is on and a job is being copied, waiting OpenMP threads sleep
 * soon instead of spinning, so that the workers get a processor. This needs one more thread, named lightck-openmp, and
 * while a job is being copied one more OpenMP thread. Passive waiting helps only if OpenMP has a thread per processor.
 * LCK_EMISSING if lck_openmp_find has found no GNU OpenMP. LCK_ESYS if one of these threads cannot be started now, or
 * could not be started earlier. */
int32_t lck_engine_passive(lck_engine *engine, int32_t on);
/* CPU time of all threads that the engine started, in nanoseconds. 0 in a forked child. */
uint64_t lck_engine_cpu_ns(const lck_engine *engine);

/* On LCK_MEDIUM_DISK: from now on, write the whole pages of background copies past the page cache, if a block has at
 * least nbytes_min (4096 or more) bytes in whole pages. Copies with LCK_NOW, shorter blocks, parts of pages and
 * metadata are still stored through the mapping. A direct write survives what such a store survives, and needs the same
 * sync. `fd`: the medium's file, opened with O_DIRECT; it is duplicated. `engine`: all jobs on this medium are jobs of
 * this engine. Call it before the first job. LCK_ESYS if the file takes no direct writes, with EOPNOTSUPP if its file
 * system says so or the medium has several extents. The medium is then used as before. */
int32_t lck_medium_direct(lck_medium *medium, lck_engine *engine, int32_t fd, uint64_t nbytes_min);
/* Bytes that were written past the page cache so far. */
uint64_t lck_medium_direct_nbytes(const lck_medium *medium);
/* The errno with which the kernel refused a direct write, after which all blocks are stored through the mapping; 0 if
 * it has refused none. (An error of the disk is no refusal: the job fails.) */
int32_t lck_medium_direct_error(const lck_medium *medium);

enum {
    LCK_NOW = 1,   /* the calling thread makes this copy inside lck_job_submit */
    LCK_PLACED = 2 /* a device stores the bytes at dst: the job computes checksums and writes lines back */
};

/* One tensor (or any run of bytes) to copy into the pool. */
typedef struct lck_copy {
    uint64_t src;        /* address, valid and unchanged until the job's copies have ended; unused with LCK_PLACED */
    uint64_t dst;        /* offset in the medium */
    uint64_t nbytes;     /* may be 0 */
    uint64_t tensor;     /* record number, for the checksum seed */
    uint32_t crc_index;  /* index of this tensor's first block checksum, in the arrays of lck_commit */
    uint32_t flags;      /* LCK_NOW, LCK_PLACED */
} lck_copy;

enum {
    /* A partial job copies some tensors of a checkpoint before its other tensors are known (eager copies, transfers).
     * It writes neither manifest nor commit record. It ends as LCK_JOB_COMMITTED when its copies are fenced and it is
     * released. A later job of the same generation commits the checkpoint. The later job fails (LCK_ESTATE) if a
     * partial job of that generation has failed or was dropped and still has an entry (see lck_job_forget). */
    LCK_PART = 1,
    LCK_FOLLOWS = 2, /* not the first job of its generation: the slot's header is written already */
    LCK_HELD = 4     /* the sources are not complete yet: only LCK_NOW copies are made before lck_job_start */
};

/* What is needed to commit a checkpoint. lck_job_submit copies this struct; the memory at image and raw_crcs must stay
 * valid until the job has ended. */
typedef struct lck_commit {
    uint64_t header_off;        /* offset of the slot header in the medium: 64 bytes, written first (lck_job_submit) */
    uint64_t manifest_off;      /* offset of the manifest in the medium */
    uint64_t record_off;        /* offset of the commit record in the medium */
    uint64_t image;             /* address of the manifest's bytes; the engine writes the block checksums into it */
    uint64_t image_nbytes;
    uint64_t crcs_off;          /* offset in the image of the u32 array of seeded block checksums, 4-aligned */
    uint64_t crcs_count;        /* number of checksums in that array */
    uint64_t raw_crcs;          /* address of a u32 array of crcs_count unseeded CRC-32Cs, which is filled; or 0 */
    uint64_t block;             /* bytes per checksum block, a multiple of 256, at most 1 MiB */
    uint64_t uuid_lo, uuid_hi;  /* pool uuid as two little-endian words, for the checksums of metadata */
    uint64_t origin_lo, origin_hi; /* uuid that seeds the block checksums */
    uint64_t generation;
    uint64_t incarnation;
    uint64_t step;
    uint32_t slot;
    uint32_t manifest_index;    /* which of the slot's two manifests is written: 0 or 1 */
    uint32_t flags;             /* LCK_PART, LCK_FOLLOWS, LCK_HELD */
    uint32_t zero;
} lck_commit;

enum {
    LCK_JOB_COPYING = 1,
    LCK_JOB_COPIED = 2,     /* all bytes are copied, and each thread fenced its own copies; not committed yet */
    LCK_JOB_COMMITTED = 3,  /* the commit record is durable. For a partial job: see LCK_PART */
    LCK_JOB_FAILED = 4,
    LCK_JOB_DROPPED = 5
};

/* Maximum number of jobs of an engine. A job counts until lck_job_forget, even when it has ended. */
enum { LCK_JOBS_MAX = 48 };

typedef struct lck_job_info {
    uint32_t state;          /* LCK_JOB_... */
    int32_t status;          /* LCK_OK, or the status of the first failure */
    int32_t error;           /* errno of the first failure if it is LCK_ESYS, else 0 */
    uint32_t released;       /* 1: lck_job_release or lck_job_commit was called; else 0 */
    uint64_t nbytes;         /* bytes of payload and manifest stored so far */
    uint64_t nbytes_helped;  /* how many of nbytes were stored by threads in lck_job_wait or lck_job_commit */
    uint64_t blocks;         /* payload blocks stored so far */
} lck_job_info;

/* Start a checkpoint. First, except with LCK_FOLLOWS, the trace gets the mark LCK_MARK_BEGIN, and the slot header
 * (docs/format.md) is written, flushed and fenced. Then this thread makes the LCK_NOW copies and fences. Then the other
 * copies are queued for the workers. *ticket identifies the job. The jobs of an engine commit in the order in which
 * they were submitted, and no job commits before its release. On failure nothing is queued; LCK_EBUSY if all entries
 * are in use (lck_job_forget). */
int32_t lck_job_submit(lck_engine *engine, lck_medium *medium, const lck_copy *copies, uint64_t count,
                       const lck_commit *commit, uint64_t *ticket);
/* Start or fail a held job (LCK_HELD). outcome LCK_OK: the sources are complete, and the copies start. Another outcome:
 * the sources will never be complete, and the job fails with the outcome as its status. Returns LCK_OK also if the
 * copies have begun already, and LCK_EDROPPED if the job was dropped. */
int32_t lck_job_start(lck_engine *engine, uint64_t ticket, int32_t outcome);
/* Release the job: allow its commit. A worker or a waiting thread then seals the job (writes manifest and commit
 * record). Returns the failure if the job has failed, LCK_EDROPPED if it was dropped, and LCK_ESTATE if it was released
 * before. */
int32_t lck_job_release(lck_engine *engine, uint64_t ticket);
/* Release the job and wait until it has ended, as lck_job_wait with LCK_JOB_COMMITTED. This thread seals the job, so
 * that no worker is woken to do it. After LCK_ETIMEDOUT the job stays released, and a worker seals it. */
int32_t lck_job_commit(lck_engine *engine, uint64_t ticket, uint32_t timeout_ms);
/* Cancel a job that is not released: skip copies that have not begun, and wait for running ones. LCK_ESTATE if the job
 * was released or dropped before. LCK_OK also for a job that has failed, which stays failed. */
int32_t lck_job_drop(lck_engine *engine, uint64_t ticket);
/* Wait, and copy on this thread meanwhile, until all bytes of the job are copied (until = LCK_JOB_COPIED) or the job
 * has ended (until = LCK_JOB_COMMITTED). Returns LCK_OK when the job has reached `until`, LCK_ETIMEDOUT after
 * timeout_ms, the failure if the job has failed, and LCK_EDROPPED if it was dropped. LCK_ESTATE if until is
 * LCK_JOB_COMMITTED and the job is not released. */
int32_t lck_job_wait(lck_engine *engine, uint64_t ticket, uint32_t until, uint32_t timeout_ms);
int32_t lck_job_info_get(lck_engine *engine, uint64_t ticket, lck_job_info *out);
/* Free the entry of a job that has ended. At most LCK_JOBS_MAX entries exist. */
int32_t lck_job_forget(lck_engine *engine, uint64_t ticket);

/* -- spans: which thread worked on a checkpoint, and when -- */

enum {
    LCK_SPAN_HEADER = 1,   /* the slot header was written and fenced */
    LCK_SPAN_NOW = 2,      /* all LCK_NOW copies of a job, inside lck_job_submit */
    LCK_SPAN_COPY = 3,     /* one block was copied; LCK_NOW copies have such spans only if their tensor fills a block */
    LCK_SPAN_MANIFEST = 4, /* the manifest was stored and written back */
    LCK_SPAN_SYNC = 5,     /* payload and manifest were made durable */
    LCK_SPAN_COMMIT_RECORD = 6 /* the commit record was written and made durable */
};

enum { LCK_SPANS_MAX = 1 << 20 };

typedef struct lck_span {
    uint64_t begin_ns, end_ns; /* CLOCK_MONOTONIC */
    uint64_t cpu_ns;           /* CPU time of the thread between begin and end (CLOCK_THREAD_CPUTIME_ID) */
    uint64_t generation;       /* of the checkpoint */
    uint64_t tensor;           /* COPY: record number of the tensor; else 0 */
    uint64_t nbytes;           /* bytes stored; SYNC: 0 */
    uint32_t kind;             /* LCK_SPAN_... */
    uint32_t thread;           /* the kernel's thread id */
    uint32_t helped;           /* 1: the thread was inside lck_job_wait or lck_job_commit; else 0 */
    uint32_t zero;
} lck_span;

/* Record spans from now on, in a queue of `cells` spans (a power of two from 2 to LCK_SPANS_MAX). The queue exists
 * until the engine is closed: a later call uses the same queue, and `cells` has no effect then. While recording is off,
 * a span costs one load and one branch. */
int32_t lck_spans_start(lck_engine *engine, uint64_t cells);
/* Stop recording; spans that have begun may be added to the queue afterwards. */
int32_t lck_spans_stop(lck_engine *engine);
/* Take up to `most` spans out of the queue into out; *count becomes their number. The spans of one thread come in the
 * order of their ends. *dropped becomes the number of spans that found no free cell since the last call. Only one
 * thread at a time may call this function. */
int32_t lck_spans_take(lck_engine *engine, lck_span *out, uint64_t most, uint64_t *count, uint64_t *dropped);

/* ---- verified reads ---------------------------------------------------------------------------------- */

enum { LCK_MEMORY = -2 }; /* instead of a descriptor: read from memory, see lck_read_verified */
/* Map the first nbytes of fd for reading (shared, excluded from core dumps), and store the address in *out. For a
 * device without read(), whose bytes are read from the mapping (LCK_MEMORY). */
int32_t lck_map(int32_t fd, uint64_t nbytes, const void **out);
/* End a mapping of lck_map. */
int32_t lck_unmap(const void *address, uint64_t nbytes);

/* Read nbytes at offset off of a pool in fd into dst, in blocks of `block` bytes (at most 1 MiB): pread block i into a
 * private buffer, then store it and verify it against crcs[i] (seeded as in lck_block_seed) in one pass. dst NULL: only
 * verify.
 * Returns at the first bad block: LCK_ECHECKSUM, LCK_ESHORT (the file or the extents end early) or LCK_ESYS. *bad (bad
 * may be NULL) is then the number of that block, from 0; dst contains the blocks before it and no later one. A block
 * that does not match its checksum is overwritten with bytes LCK_REFUSED, which are NaN in every floating-point format
 * of 16 bits and more.
 * No medium is needed: recovery maps no file, so a truncated file causes an error and not a SIGBUS. With fd LCK_MEMORY
 * (a mapped device) the offsets of the extents are addresses in this process, from which the blocks are read. */
enum { LCK_REFUSED = 0xFF };
int32_t lck_read_verified(int32_t fd, const lck_extent *extents, uint64_t count, uint64_t off, void *dst,
                          uint64_t nbytes, uint64_t block, const uint32_t *crcs, uint64_t uuid_lo,
                          uint64_t uuid_hi, uint64_t tensor, uint64_t generation, uint64_t *bad);

typedef struct lck_read {
    uint64_t off;         /* in the pool */
    uint64_t dst;         /* address; 0: only verify */
    uint64_t nbytes;
    uint64_t crcs;        /* address of the blocks' checksums, uint32_t each */
    uint64_t tensor, generation; /* of the record, for the checksum seed */
    uint64_t first;       /* number of the first of these blocks in its tensor, for the checksum seed */
} lck_read;

/* Execute n_reads verified reads on up to `threads` threads (at most 17), the calling one included. The dst of two
 * reads must not overlap. On failure, *bad_read and *bad_block (numbers from 0) identify the first bad block in the
 * order of the reads. Then all blocks before it have been read, and no dst contains a block that did not match its
 * checksum. */
int32_t lck_read_many(int32_t fd, const lck_extent *extents, uint64_t count, const lck_read *reads, uint64_t n_reads,
                      uint64_t block, uint64_t uuid_lo, uint64_t uuid_hi, uint32_t threads, uint64_t *bad_read,
                      uint64_t *bad_block);

/* ---- PMDK: libpmemobj as the container of a pool ------------------------------------------------------- */

/* libpmemobj is loaded at run time. These functions make, open and close a container. None of them is called while a
 * pool is written or read. If libpmemobj fails, they return LCK_ESYS with libpmemobj's errno, and lck_pmdk_message
 * returns the reason. */

typedef struct lck_pmdk lck_pmdk;

/* Load libpmemobj by name or path. After a success, later calls do nothing. LCK_EMISSING if it cannot be loaded or is
 * too old; lck_pmdk_message then returns the reason. */
int32_t lck_pmdk_load(const char *name);
/* The reason of the last failure on this thread; valid until the thread's next failure. */
const char *lck_pmdk_message(void);
/* Take the messages that libpmemobj has logged since the last call, as lines of text without a final NUL. Text beyond
 * nbytes is lost. Returns the number of bytes in out. */
uint64_t lck_pmdk_log(char *out, uint64_t nbytes);

/* Open a pool with a mapping that forked children do not inherit. nbytes: the size of the file. create != 0: first make
 * the pool, in an existing file of zeros. sds: the value of libpmemobj's setting sds.at_create (shutdown states). The
 * setting is global to the process, so only one thread at a time may call this function. LCK_ESTATE before
 * lck_pmdk_load has succeeded. */
int32_t lck_pmdk_open(const char *path, const char *layout, uint64_t nbytes, uint32_t create, uint32_t sds,
                      lck_pmdk **out);
/* Store the file offset of the root object in *off. If the pool has no root object, one of at least nbytes zeros is
 * allocated. */
int32_t lck_pmdk_root(lck_pmdk *pmdk, uint64_t nbytes, uint64_t *off);
/* Allocate an object of nbytes and this PMDK type number. Atomically with the allocation, the 16 bytes at file offset
 * `place` (a multiple of 8, in another object) become the reference to the object: u64 identity of the pool, u64 offset
 * of the object in the file. */
int32_t lck_pmdk_alloc(lck_pmdk *pmdk, uint64_t place, uint64_t nbytes, uint64_t type);
/* Store into an object and make the bytes durable. Used for the root object, before the pool's file is at its path. */
int32_t lck_pmdk_store(lck_pmdk *pmdk, uint64_t off, const void *src, uint64_t nbytes);
int32_t lck_pmdk_close(lck_pmdk *pmdk);
/* Call this in a forked child for each pool that the parent has open. It keeps libpmemobj usable for other pools in the
 * child. LCK_ESTATE in the process that opened the pool. */
int32_t lck_pmdk_forked(const lck_pmdk *pmdk);

/* CFFI_END */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
