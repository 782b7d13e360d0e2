/* pmdk.c: PMDK's libpmemobj, loaded at run time, as the container of a pool: create, open, allocate a root object and a
 * few large objects, close. While lightck writes a pool, libpmemobj is not called: medium.c writes the bytes. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"

#if !defined(MAP_FIXED_NOREPLACE)
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* ---- libpmemobj, as its manual pages declare it ------------------------------------------------------- */

struct oid {
    uint64_t pool_uuid_lo, off;
};

enum { LOG_THRESHOLD = 0, LOG_LEVEL_ERROR = 2 };

typedef int constructor_fn(void *pool, void *ptr, void *arg);
typedef void log_fn(int level, const char *file, unsigned line, const char *function, const char *message);

static struct {
    const char *(*check_version)(unsigned major, unsigned minor);
    void *(*create)(const char *path, const char *layout, size_t nbytes, mode_t mode);
    void *(*open)(const char *path, const char *layout);
    void (*close)(void *pool);
    struct oid (*root)(void *pool, size_t nbytes);
    int (*alloc)(void *pool, struct oid *place, size_t nbytes, uint64_t type, constructor_fn *make, void *arg);
    void (*persist)(void *pool, const void *address, size_t nbytes);
    int (*ctl_set)(void *pool, const char *name, void *value);
    const char *(*errormsg)(void);
    /* NULL in releases before 2.1. */
    int (*log_set_function)(log_fn *function);
    int (*log_set_threshold)(int threshold, int level);
} api;

enum { API_MAJOR = 2, API_MINOR = 4 }; /* the interface of release 1.12.1, which all later releases keep */

/* ---- messages ----------------------------------------------------------------------------------------- */

static _Thread_local char message[512];

const char *lck_pmdk_message(void) { return message; }

static int32_t missing(const char *why)
{
    snprintf(message, sizeof message, "%s", why != NULL ? why : "unknown error");
    return LCK_EMISSING;
}

/* Store the reason of a failed call of libpmemobj, and return its status. Call this right after the failed call. */
static int32_t failed(void)
{
    int error = errno != 0 ? errno : EIO;
    const char *why = api.errormsg();
    snprintf(message, sizeof message, "%s", why != NULL && why[0] != '\0' ? why : strerror(error));
    return status_sys(error);
}

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[4096];
static size_t log_used;

/* libpmemobj calls this function on any thread while it holds locks of its own, so the text is only stored. Text that
 * does not fit into log_text is lost. */
static void keep_log(int level, const char *file, unsigned line, const char *function, const char *text)
{
    (void)level;
    (void)file;
    (void)line;
    (void)function;
    pthread_mutex_lock(&log_lock);
    size_t left = sizeof log_text - log_used;
    int n = text == NULL ? 0 : snprintf(log_text + log_used, left, "%s\n", text);
    if (n > 0 && (size_t)n < left)
        log_used += (size_t)n;
    log_text[log_used] = '\0';
    pthread_mutex_unlock(&log_lock);
}

uint64_t lck_pmdk_log(char *out, uint64_t nbytes)
{
    if (out == NULL || nbytes == 0)
        return 0;
    pthread_mutex_lock(&log_lock);
    size_t n = log_used < nbytes ? log_used : nbytes;
    memcpy(out, log_text, n);
    log_used = 0;
    pthread_mutex_unlock(&log_lock);
    return n;
}

/* ---- loading ------------------------------------------------------------------------------------------ */

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static bool loaded;

/* ISO C has no cast from an object pointer to a function pointer; POSIX promises that the bytes are the same. */
static bool resolve(void *library, const char *name, void *slot)
{
    void *symbol = dlsym(library, name);
    memcpy(slot, &symbol, sizeof symbol);
    return symbol != NULL;
}

static bool resolve_all(void *library)
{
    resolve(library, "pmemobj_log_set_function", &api.log_set_function);
    resolve(library, "pmemobj_log_set_threshold", &api.log_set_threshold);
    return resolve(library, "pmemobj_check_version", &api.check_version) &&
           resolve(library, "pmemobj_create", &api.create) && resolve(library, "pmemobj_open", &api.open) &&
           resolve(library, "pmemobj_close", &api.close) && resolve(library, "pmemobj_root", &api.root) &&
           resolve(library, "pmemobj_alloc", &api.alloc) && resolve(library, "pmemobj_persist", &api.persist) &&
           resolve(library, "pmemobj_ctl_set", &api.ctl_set) && resolve(library, "pmemobj_errormsg", &api.errormsg);
}

/* Since release 2.1, libpmemobj writes to stderr and syslog unless a log function is set. */
static void route_log(void)
{
    if (api.log_set_function == NULL || api.log_set_threshold == NULL)
        return;
    if (api.log_set_function(keep_log) != 0 || api.log_set_threshold(LOG_THRESHOLD, LOG_LEVEL_ERROR) != 0)
        keep_log(0, NULL, 0, NULL, "libpmemobj does not let its messages be redirected");
}

/* The library is never unloaded: its destructors would run on an arbitrary thread. */
static int32_t load(const char *name)
{
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL || !resolve_all(library))
        return missing(dlerror());
    const char *why = api.check_version(API_MAJOR, API_MINOR);
    if (why != NULL)
        return missing(why);
    route_log();
    return LCK_OK;
}

int32_t lck_pmdk_load(const char *name)
{
    if (name == NULL)
        return LCK_EINVAL;
    int32_t status = LCK_OK;
    pthread_mutex_lock(&load_lock);
    if (!loaded)
        status = load(name);
    loaded = status == LCK_OK;
    pthread_mutex_unlock(&load_lock);
    return status;
}

/* ---- pools -------------------------------------------------------------------------------------------- */

struct lck_pmdk {
    unsigned char *pool; /* libpmemobj's handle, which is the address of its mapping of the file */
    uint64_t nbytes;
    pid_t pid;
};

static int32_t check(const lck_pmdk *pmdk)
{
    if (pmdk == NULL)
        return LCK_EINVAL;
    return pmdk->pid == getpid() ? LCK_OK : LCK_EFORK;
}

static int32_t check_place(const lck_pmdk *pmdk, uint64_t off, uint64_t nbytes)
{
    int32_t status = check(pmdk);
    if (status != LCK_OK)
        return status;
    return off <= pmdk->nbytes && nbytes <= pmdk->nbytes - off ? LCK_OK : LCK_EINVAL;
}

/* Keep the mapping out of forked children. The mapping holds libpmemobj's lock on the file, so a child that inherited
 * the mapping would keep the pool locked after its parent has ended. On failure, close the pool. */
static int32_t keep_from_children(lck_pmdk *pmdk)
{
    if (madvise(pmdk->pool, pmdk->nbytes, MADV_DONTFORK) == 0) {
        (void)madvise(pmdk->pool, pmdk->nbytes, MADV_DONTDUMP);
        return LCK_OK;
    }
    int32_t status = status_sys(errno);
    snprintf(message, sizeof message, "its mapping cannot be kept from forked children: %s", strerror(errno));
    api.close(pmdk->pool);
    return status;
}

int32_t lck_pmdk_open(const char *path, const char *layout, uint64_t nbytes, uint32_t create, uint32_t sds,
                      lck_pmdk **out)
{
    if (path == NULL || layout == NULL || nbytes == 0 || out == NULL)
        return LCK_EINVAL;
    if (!loaded)
        return LCK_ESTATE;
    lck_pmdk *pmdk = calloc(1, sizeof *pmdk);
    if (pmdk == NULL)
        return LCK_ENOMEM;
    int shutdown_state = sds != 0;
    errno = 0;
    if (api.ctl_set(NULL, "sds.at_create", &shutdown_state) == 0)
        pmdk->pool = create ? api.create(path, layout, 0, 0600) : api.open(path, layout);
    int32_t status = pmdk->pool == NULL ? failed() : LCK_OK;
    pmdk->nbytes = nbytes & ~((uint64_t)sysconf(_SC_PAGESIZE) - 1);
    pmdk->pid = getpid();
    if (status == LCK_OK)
        status = keep_from_children(pmdk);
    if (status != LCK_OK) {
        free(pmdk);
        return status;
    }
    *out = pmdk;
    return LCK_OK;
}

/* In the child, libpmemobj still has the parent's pool registered under the address of the parent's mapping, where
 * nothing is mapped now. Occupy that address range: if the child opened a pool, libpmemobj could map it there, and
 * refuse it as already open. */
int32_t lck_pmdk_forked(const lck_pmdk *pmdk)
{
    if (pmdk == NULL)
        return LCK_EINVAL;
    if (pmdk->pid == getpid())
        return LCK_ESTATE;
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *kept = mmap(pmdk->pool, pmdk->nbytes, PROT_NONE, kind, -1, 0);
    return kept != MAP_FAILED ? LCK_OK : status_sys(errno);
}

int32_t lck_pmdk_root(lck_pmdk *pmdk, uint64_t nbytes, uint64_t *off)
{
    int32_t status = check(pmdk);
    if (status != LCK_OK)
        return status;
    errno = 0;
    *off = api.root(pmdk->pool, nbytes).off;
    return *off != 0 ? LCK_OK : failed();
}

int32_t lck_pmdk_alloc(lck_pmdk *pmdk, uint64_t place, uint64_t nbytes, uint64_t type)
{
    int32_t status = check_place(pmdk, place, sizeof(struct oid));
    if (status != LCK_OK)
        return status;
    if (place % 8 != 0)
        return LCK_EINVAL;
    struct oid *oid = (struct oid *)(void *)(pmdk->pool + place);
    errno = 0;
    return api.alloc(pmdk->pool, oid, nbytes, type, NULL, NULL) == 0 ? LCK_OK : failed();
}

int32_t lck_pmdk_store(lck_pmdk *pmdk, uint64_t off, const void *src, uint64_t nbytes)
{
    int32_t status = check_place(pmdk, off, nbytes);
    if (status != LCK_OK)
        return status;
    memcpy(pmdk->pool + off, src, nbytes);
    api.persist(pmdk->pool, pmdk->pool + off, nbytes);
    return LCK_OK;
}

int32_t lck_pmdk_close(lck_pmdk *pmdk)
{
    int32_t status = check(pmdk);
    if (status != LCK_OK)
        return status;
    api.close(pmdk->pool);
    free(pmdk);
    return LCK_OK;
}
