/* A libpmemobj of release 2.1 for tests of the binding: it logs, knows the settings of that release, and writes every
 * call to $FAKE_PMEMOBJ_CALLS. Its pools hold nothing: whoever reads one finds the bytes of the file. */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

struct oid {
    uint64_t pool_uuid_lo, off;
};

typedef void log_fn(int level, const char *file, unsigned line, const char *function, const char *message);

static log_fn *log_function;
static size_t mapped;
static char error[200];

static void note(const char *text)
{
    FILE *out = fopen(getenv("FAKE_PMEMOBJ_CALLS"), "a");
    fprintf(out, "%s\n", text);
    fclose(out);
}

static const char *asked(const char *what)
{
    const char *wanted = getenv("FAKE_PMEMOBJ_FAILS");
    return wanted != NULL && strncmp(wanted, what, strlen(what)) == 0 ? wanted + strlen(what) + 1 : NULL;
}

static void say(int level, const char *text)
{
    if (log_function != NULL)
        log_function(level, "obj.c", 1, "fake", text);
    else
        fprintf(stderr, "%s\n", text);
}

/* "open:EAGAIN reason": the call fails so. */
static void *fail(const char *how)
{
    errno = (int)strtol(how, (char **)&how, 10);
    snprintf(error, sizeof error, "%s", how + 1);
    say(2, error);
    return NULL;
}

EXPORTED const char *pmemobj_check_version(unsigned major, unsigned minor)
{
    return major == 2 && minor <= 4 && asked("version") == NULL ? NULL : "libpmemobj minor version mismatch";
}

EXPORTED const char *pmemobj_errormsg(void) { return error; }

EXPORTED int pmemobj_ctl_set(void *pool, const char *name, void *value)
{
    char text[200];
    snprintf(text, sizeof text, "ctl_set %s %s %d", pool == NULL ? "all" : "one", name, *(int *)value);
    note(text);
    return 0;
}

static void *map(const char *path)
{
    int fd = open(path, O_RDWR);
    struct stat st;
    fstat(fd, &st);
    mapped = (size_t)st.st_size;
    void *found = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return found;
}

EXPORTED void *pmemobj_create(const char *path, const char *layout, size_t nbytes, mode_t mode)
{
    (void)nbytes;
    (void)mode;
    note("create");
    if (asked("create") != NULL)
        return fail(asked("create"));
    unsigned char *pool = map(path);
    const uint32_t head[4] = {6, 1, 2, 0};
    const uint64_t root = 4 << 20, root_nbytes = 4096;
    memcpy(pool, "PMEMOBJ", 8);
    memcpy(pool + 8, head, sizeof head);
    memcpy(pool + 4096, layout, strlen(layout));
    memcpy(pool + 6144, &root, 8);
    memcpy(pool + 6160, &root_nbytes, 8);
    return pool;
}

EXPORTED void *pmemobj_open(const char *path, const char *layout)
{
    (void)layout;
    note("open");
    say(2, "something to say about this pool");
    if (asked("open") != NULL)
        return fail(asked("open"));
    return map(path);
}

EXPORTED void pmemobj_close(void *pool)
{
    note("close");
    munmap(pool, mapped);
}

EXPORTED struct oid pmemobj_root(void *pool, size_t nbytes)
{
    (void)pool;
    (void)nbytes;
    note("root");
    return (struct oid){7, 4 << 20};
}

EXPORTED int pmemobj_alloc(void *pool, struct oid *place, size_t nbytes, uint64_t type, void *make, void *arg)
{
    (void)pool;
    (void)nbytes;
    (void)type;
    (void)make;
    (void)arg;
    note("alloc");
    if (asked("alloc") != NULL) {
        fail(asked("alloc"));
        return -1;
    }
    *place = (struct oid){7, (4 << 20) + 8192};
    return 0;
}

EXPORTED void pmemobj_persist(void *pool, const void *address, size_t nbytes)
{
    (void)pool;
    (void)address;
    (void)nbytes;
    note("persist");
}

EXPORTED int pmemobj_log_set_function(log_fn *function)
{
    log_function = function;
    note("log_set_function");
    return 0;
}

EXPORTED int pmemobj_log_set_threshold(int threshold, int level)
{
    char text[200];
    snprintf(text, sizeof text, "log_set_threshold %d %d", threshold, level);
    note(text);
    return 0;
}
