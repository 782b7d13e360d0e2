/* interpose.c: system calls that fail on request. Loaded with LD_PRELOAD, and idle until it is armed.
 *
 * A call counts where it is about a file in one folder (by its path, or by what its descriptor is open on), or where
 * liblck.so makes it: so neither torch nor the interpreter at large is disturbed. Both the Python side and the C side
 * of lightck come through here, since Python calls the C library too. Not for programs that are not under test. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SHORT = -1 }; /* instead of an errno: the call transfers less than it was asked for */

#define CALLS(X)                                                                                                      \
    X(open) X(posix_fallocate) X(fallocate) X(ftruncate) X(mmap) X(read) X(pread) X(write) X(pwrite) X(fsync)         \
    X(fdatasync) X(msync) X(rename) X(link) X(unlink) X(mkdir) X(stat) X(fstat) X(fchmod) X(statfs) X(fstatvfs)       \
    X(fcntl) X(madvise) X(pthread_create) X(malloc) X(calloc) X(realloc)

enum call {
#define AS_ENUM(name) CALL_##name,
    CALLS(AS_ENUM)
#undef AS_ENUM
        N_CALLS
};

static const char *const names[N_CALLS] = {
#define AS_NAME(name) #name,
    CALLS(AS_NAME)
#undef AS_NAME
};

static _Atomic uint64_t counts[N_CALLS];
static atomic_bool active;
static _Atomic int armed = N_CALLS;
static _Atomic uint64_t armed_at, armed_left, failed;
static _Atomic int armed_error;
static char folder[4096];
static size_t folder_nbytes;
static uintptr_t core_low, core_high, python_low, python_high;

/* ---- whose calls count -------------------------------------------------------------------------------- */

static int note_object(struct dl_phdr_info *info, size_t nbytes, void *arg)
{
    (void)nbytes;
    (void)arg;
    bool core = strstr(info->dlpi_name, "liblck.so") != NULL;
    bool python = strstr(info->dlpi_name, "libpython") != NULL || info->dlpi_name[0] == '\0';
    for (int i = 0; (core || python) && i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD || (info->dlpi_phdr[i].p_flags & PF_X) == 0)
            continue;
        uintptr_t low = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, high = low + info->dlpi_phdr[i].p_memsz;
        if (core) {
            core_low = low;
            core_high = high;
        } else if (python_low == 0 || info->dlpi_name[0] != '\0') {
            python_low = low;
            python_high = high;
        }
    }
    return 0;
}

static bool by_core(void *caller) { return (uintptr_t)caller >= core_low && (uintptr_t)caller < core_high; }

static bool by_python(void *caller) { return (uintptr_t)caller >= python_low && (uintptr_t)caller < python_high; }

static bool inside(const char *path)
{
    return path != NULL && strncmp(path, folder, folder_nbytes) == 0 &&
           (path[folder_nbytes] == '\0' || path[folder_nbytes] == '/');
}

static bool is_on_descriptor(int fd)
{
    char link[32], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (n <= 0)
        return false;
    path[n] = '\0';
    return inside(path);
}

static bool about_fd(int fd)
{
    int before = errno;
    bool is_about = fd >= 0 && is_on_descriptor(fd);
    errno = before;
    return is_about;
}

/* libpmemobj opens its pool as /proc/self/fd/N. */
static bool about_path(const char *path)
{
    int fd;
    return inside(path) || (path != NULL && sscanf(path, "/proc/self/fd/%d", &fd) == 1 && about_fd(fd));
}

/* ---- counting and striking ---------------------------------------------------------------------------- */

static int strike(enum call call)
{
    uint64_t n = atomic_fetch_add(&counts[call], 1) + 1;
    if ((int)call != atomic_load(&armed) || n < atomic_load(&armed_at))
        return 0;
    uint64_t left = atomic_load(&armed_left);
    while (left != 0)
        if (atomic_compare_exchange_weak(&armed_left, &left, left - 1)) {
            atomic_fetch_add(&failed, 1);
            return atomic_load(&armed_error);
        }
    return 0;
}

static bool is_active(void) { return atomic_load_explicit(&active, memory_order_relaxed); }

/* Count calls about this folder, which need not exist, from now on. */
EXPORT void lckf_start(const char *path)
{
    snprintf(folder, sizeof folder, "%s", path);
    folder_nbytes = strlen(folder);
    dl_iterate_phdr(note_object, NULL);
    for (int i = 0; i < N_CALLS; i++)
        atomic_store(&counts[i], 0);
    atomic_store(&failed, 0);
    atomic_store(&active, true);
}

/* Fail `times` calls, from the nth on. */
EXPORT int lckf_arm(const char *name, uint64_t nth, uint64_t times, int error)
{
    for (int i = 0; i < N_CALLS; i++)
        if (strcmp(name, names[i]) == 0) {
            atomic_store(&armed_at, nth);
            atomic_store(&armed_left, times);
            atomic_store(&armed_error, error);
            atomic_store(&armed, i);
            return 0;
        }
    return -1;
}

EXPORT void lckf_stop(void)
{
    atomic_store(&active, false);
    atomic_store(&armed, N_CALLS);
}

EXPORT uint64_t lckf_failed(void) { return atomic_load(&failed); }

EXPORT const char *lckf_name(int call) { return call >= 0 && call < N_CALLS ? names[call] : NULL; }

EXPORT uint64_t lckf_count(int call) { return atomic_load(&counts[call]); }

/* ---- the calls ---------------------------------------------------------------------------------------- */

/* The function behind ours. */
#define NEXT(name)                                                                                                    \
    static __typeof__(name) *next;                                                                                    \
    if (next == NULL) {                                                                                               \
        void *found = dlsym(RTLD_NEXT, #name);                                                                        \
        memcpy(&next, &found, sizeof next);                                                                           \
    }

#define CALLER __builtin_return_address(0)
#define STRIKE(call, counts_here) (is_active() && (counts_here) ? strike(CALL_##call) : 0)
#define FAIL_WITH(error, value)                                                                                       \
    do {                                                                                                              \
        errno = (error);                                                                                              \
        return (value);                                                                                               \
    } while (0)

static mode_t mode_of(int flags, va_list more)
{
    return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(more, mode_t) : 0;
}

#define OPEN(name)                                                                                                    \
    EXPORT int name(const char *path, int flags, ...)                                                                 \
    {                                                                                                                 \
        NEXT(name)                                                                                                    \
        va_list more;                                                                                                 \
        va_start(more, flags);                                                                                        \
        mode_t mode = mode_of(flags, more);                                                                           \
        va_end(more);                                                                                                 \
        int error = STRIKE(open, about_path(path));                                                                   \
        if (error != 0)                                                                                               \
            FAIL_WITH(error, -1);                                                                                     \
        return next(path, flags, mode);                                                                               \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                  \
    EXPORT int name(int at, const char *path, int flags, ...)                                                         \
    {                                                                                                                 \
        NEXT(name)                                                                                                    \
        va_list more;                                                                                                 \
        va_start(more, flags);                                                                                        \
        mode_t mode = mode_of(flags, more);                                                                           \
        va_end(more);                                                                                                 \
        int error = STRIKE(open, about_path(path));                                                                   \
        if (error != 0)                                                                                               \
            FAIL_WITH(error, -1);                                                                                     \
        return next(at, path, flags, mode);                                                                           \
    }
OPENAT(openat)
OPENAT(openat64)

/* These return the number of the error. */
#define FALLOCATE(name, offset)                                                                                       \
    EXPORT int name(int fd, offset at, offset nbytes)                                                                 \
    {                                                                                                                 \
        NEXT(name)                                                                                                    \
        int error = STRIKE(posix_fallocate, about_fd(fd));                                                            \
        return error != 0 ? error : next(fd, at, nbytes);                                                             \
    }
FALLOCATE(posix_fallocate, off_t)
FALLOCATE(posix_fallocate64, off64_t)

#define ON_FD(name, call, arguments, passed)                                                                          \
    EXPORT int name arguments                                                                                         \
    {                                                                                                                 \
        NEXT(name)                                                                                                    \
        int error = STRIKE(call, about_fd(fd));                                                                       \
        if (error != 0)                                                                                               \
            FAIL_WITH(error, -1);                                                                                     \
        return next passed;                                                                                           \
    }
ON_FD(ftruncate, ftruncate, (int fd, off_t nbytes), (fd, nbytes))
ON_FD(ftruncate64, ftruncate, (int fd, off64_t nbytes), (fd, nbytes))
ON_FD(fallocate, fallocate, (int fd, int mode, off_t at, off_t nbytes), (fd, mode, at, nbytes))
ON_FD(fallocate64, fallocate, (int fd, int mode, off64_t at, off64_t nbytes), (fd, mode, at, nbytes))
ON_FD(fsync, fsync, (int fd), (fd))
ON_FD(fdatasync, fdatasync, (int fd), (fd))
ON_FD(fstat, fstat, (int fd, struct stat *st), (fd, st))
ON_FD(fstat64, fstat, (int fd, struct stat64 *st), (fd, st))
ON_FD(fchmod, fchmod, (int fd, mode_t mode), (fd, mode))
ON_FD(fstatfs, statfs, (int fd, struct statfs *fs), (fd, fs))
ON_FD(fstatvfs, fstatvfs, (int fd, struct statvfs *st), (fd, st))
ON_FD(fstatvfs64, fstatvfs, (int fd, struct statvfs64 *st), (fd, st))

#define ON_PATH(name, call, arguments, passed)                                                                        \
    EXPORT int name arguments                                                                                         \
    {                                                                                                                 \
        NEXT(name)                                                                                                    \
        int error = STRIKE(call, about_path(path));                                                                   \
        if (error != 0)                                                                                               \
            FAIL_WITH(error, -1);                                                                                     \
        return next passed;                                                                                           \
    }
ON_PATH(rename, rename, (const char *path, const char *to), (path, to))
ON_PATH(link, link, (const char *path, const char *to), (path, to))
ON_PATH(unlink, unlink, (const char *path), (path))
ON_PATH(mkdir, mkdir, (const char *path, mode_t mode), (path, mode))
ON_PATH(stat, stat, (const char *path, struct stat *st), (path, st))
ON_PATH(stat64, stat, (const char *path, struct stat64 *st), (path, st))
ON_PATH(lstat, stat, (const char *path, struct stat *st), (path, st))
ON_PATH(lstat64, stat, (const char *path, struct stat64 *st), (path, st))
ON_PATH(statfs, statfs, (const char *path, struct statfs *st), (path, st))

/* fstatat with no folder is what os.stat(follow_symlinks=False) may call. */
EXPORT int fstatat64(int at, const char *path, struct stat64 *st, int flags)
{
    NEXT(fstatat64)
    int error = STRIKE(stat, about_path(path));
    if (error != 0)
        FAIL_WITH(error, -1);
    return next(at, path, st, flags);
}

#define TRANSFER(name, call, arguments, passed, passed_short)                                                         \
    EXPORT ssize_t name arguments                                                                                     \
    {                                                                                                                 \
        NEXT(name)                                                                                                    \
        int error = STRIKE(call, about_fd(fd));                                                                       \
        if (error == SHORT && nbytes > 1)                                                                             \
            return next passed_short;                                                                                 \
        if (error > 0)                                                                                                \
            FAIL_WITH(error, -1);                                                                                     \
        return next passed;                                                                                           \
    }
TRANSFER(read, read, (int fd, void *to, size_t nbytes), (fd, to, nbytes), (fd, to, nbytes / 2))
TRANSFER(pread, pread, (int fd, void *to, size_t nbytes, off_t at), (fd, to, nbytes, at), (fd, to, nbytes / 2, at))
TRANSFER(pread64, pread, (int fd, void *to, size_t nbytes, off64_t at), (fd, to, nbytes, at),
         (fd, to, nbytes / 2, at))
TRANSFER(write, write, (int fd, const void *from, size_t nbytes), (fd, from, nbytes), (fd, from, nbytes / 2))
TRANSFER(pwrite, pwrite, (int fd, const void *from, size_t nbytes, off_t at), (fd, from, nbytes, at),
         (fd, from, nbytes / 2, at))
TRANSFER(pwrite64, pwrite, (int fd, const void *from, size_t nbytes, off64_t at), (fd, from, nbytes, at),
         (fd, from, nbytes / 2, at))

#define MAP(name, offset)                                                                                             \
    EXPORT void *name(void *address, size_t nbytes, int prot, int flags, int fd, offset at)                           \
    {                                                                                                                 \
        NEXT(name)                                                                                                    \
        int error = STRIKE(mmap, fd >= 0 ? about_fd(fd) : by_core(CALLER));                                           \
        if (error != 0)                                                                                               \
            FAIL_WITH(error, MAP_FAILED);                                                                             \
        return next(address, nbytes, prot, flags, fd, at);                                                            \
    }
MAP(mmap, off_t)
MAP(mmap64, off64_t)

EXPORT int madvise(void *address, size_t nbytes, int advice)
{
    NEXT(madvise)
    int error = STRIKE(madvise, by_core(CALLER));
    if (error != 0)
        FAIL_WITH(error, -1);
    return next(address, nbytes, advice);
}

static bool is_mapped_from_folder(uintptr_t address)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[4500];
    bool found = false;
    while (maps != NULL && !found && fgets(line, sizeof line, maps) != NULL) {
        unsigned long low, high;
        char *path = strchr(line, '/');
        found = sscanf(line, "%lx-%lx", &low, &high) == 2 && address >= low && address < high && path != NULL &&
                strncmp(path, folder, folder_nbytes) == 0;
    }
    if (maps != NULL)
        fclose(maps);
    return found;
}

EXPORT int msync(void *address, size_t nbytes, int flags)
{
    NEXT(msync)
    int error = STRIKE(msync, is_mapped_from_folder((uintptr_t)address));
    if (error != 0)
        FAIL_WITH(error, -1);
    return next(address, nbytes, flags);
}

/* The third argument is a number or a pointer; both are passed on as they came. */
#define FCNTL(name)                                                                                                   \
    EXPORT int name(int fd, int command, ...)                                                                         \
    {                                                                                                                 \
        NEXT(name)                                                                                                    \
        va_list more;                                                                                                 \
        va_start(more, command);                                                                                      \
        void *argument = va_arg(more, void *);                                                                        \
        va_end(more);                                                                                                 \
        int error = STRIKE(fcntl, about_fd(fd));                                                                      \
        if (error != 0)                                                                                               \
            FAIL_WITH(error, -1);                                                                                     \
        return next(fd, command, argument);                                                                           \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *argument)
{
    NEXT(pthread_create)
    int error = STRIKE(pthread_create, by_core(CALLER) || by_python(CALLER));
    return error != 0 ? error : next(thread, attributes, work, argument);
}

/* dlsym may allocate, so what is behind these is named directly. */
extern void *__libc_malloc(size_t nbytes);
extern void *__libc_calloc(size_t count, size_t nbytes);
extern void *__libc_realloc(void *old, size_t nbytes);

EXPORT void *malloc(size_t nbytes)
{
    int error = STRIKE(malloc, by_core(CALLER));
    if (error != 0)
        FAIL_WITH(error, NULL);
    return __libc_malloc(nbytes);
}

EXPORT void *calloc(size_t count, size_t nbytes)
{
    int error = STRIKE(calloc, by_core(CALLER));
    if (error != 0)
        FAIL_WITH(error, NULL);
    return __libc_calloc(count, nbytes);
}

EXPORT void *realloc(void *old, size_t nbytes)
{
    int error = STRIKE(realloc, by_core(CALLER));
    if (error != 0)
        FAIL_WITH(error, NULL);
    return __libc_realloc(old, nbytes);
}
