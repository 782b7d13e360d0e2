/* libpmemobj as a container: it is made, opened again and closed; errors of libpmemobj are reported; a forked child
 * cannot use it. Skipped (status 77) if libpmemobj is not installed, unless LIGHTCK_REQUIRE_PMDK=1. */
#include <errno.h>
#include <sys/wait.h>

#include "check.h"

enum { SIZE = 16 << 20, ROOT = 4096, SKIPPED = 77 };

static const char *layout = "lightck/1";

static int load(void)
{
    const char *name = getenv("LIGHTCK_LIBPMEMOBJ");
    CHECK_EQ(lck_pmdk_load(NULL), LCK_EINVAL);
    CHECK_EQ(lck_pmdk_load("/nowhere/libpmemobj.so"), LCK_EMISSING);
    CHECK(strstr(lck_pmdk_message(), "/nowhere/libpmemobj.so") != NULL);
    lck_pmdk *none = NULL;
    CHECK_EQ(lck_pmdk_open("/nowhere", layout, SIZE, 0, 0, &none), LCK_ESTATE);
    if (lck_pmdk_load(name != NULL ? name : "libpmemobj.so.1") == LCK_OK)
        return 1;
    fprintf(stderr, "no libpmemobj: %s\n", lck_pmdk_message());
    return 0;
}

static int file_of(char *path, size_t nbytes)
{
    int fd = open_memory(SIZE);
    snprintf(path, nbytes, "/proc/self/fd/%d", fd);
    return fd;
}

static void make(const char *path, int fd)
{
    static unsigned char data[100], got[100];
    lck_pmdk *pool = NULL, *second = NULL;
    uint64_t root = 0, object[2];
    CHECK_EQ(lck_pmdk_open(path, layout, SIZE, 1, 0, &pool), LCK_OK);
    CHECK_EQ(lck_pmdk_open(path, layout, SIZE, 0, 0, &second), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), EAGAIN);
    CHECK_EQ(lck_pmdk_root(pool, ROOT, &root), LCK_OK);
    CHECK_EQ(lck_pmdk_alloc(pool, root + 4, 4 << 20, 1), LCK_EINVAL);
    CHECK_EQ(lck_pmdk_alloc(pool, SIZE, 4 << 20, 1), LCK_EINVAL);
    CHECK_EQ(lck_pmdk_alloc(pool, root, 4 << 20, 1), LCK_OK);
    read_back(fd, object, sizeof object, root);
    CHECK(object[1] > root && object[1] < SIZE);
    CHECK_EQ(lck_pmdk_alloc(pool, root + 16, SIZE, 1), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), ENOMEM);
    CHECK(lck_pmdk_message()[0] != '\0');
    fill_random(data, sizeof data, 4);
    CHECK_EQ(lck_pmdk_store(pool, SIZE - 50, data, sizeof data), LCK_EINVAL);
    CHECK_EQ(lck_pmdk_store(pool, root + 64, data, sizeof data), LCK_OK);
    read_back(fd, got, sizeof got, root + 64);
    CHECK(memcmp(got, data, sizeof data) == 0);
    CHECK_EQ(lck_pmdk_close(pool), LCK_OK);
}

static void open_again(const char *path)
{
    lck_pmdk *pool = NULL;
    CHECK_EQ(lck_pmdk_open(path, "other", SIZE, 0, 0, &pool), LCK_ESYS);
    CHECK(strstr(lck_pmdk_message(), "layout") != NULL);
    CHECK(pool == NULL);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(lck_pmdk_open(path, layout, SIZE, 0, 0, &pool), LCK_OK);
        CHECK_EQ(lck_pmdk_forked(pool), LCK_ESTATE);
        CHECK_EQ(lck_pmdk_close(pool), LCK_OK);
    }
}

static void check_fork(const char *path)
{
    lck_pmdk *pool = NULL;
    uint64_t root;
    CHECK_EQ(lck_pmdk_open(path, layout, SIZE, 0, 0, &pool), LCK_OK);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char own[40];
        lck_pmdk *mine = NULL;
        file_of(own, sizeof own);
        CHECK_EQ(lck_pmdk_root(pool, ROOT, &root), LCK_EFORK);
        CHECK_EQ(lck_pmdk_alloc(pool, 0, 1 << 20, 1), LCK_EFORK);
        CHECK_EQ(lck_pmdk_store(pool, 0, "x", 1), LCK_EFORK);
        CHECK_EQ(lck_pmdk_close(pool), LCK_EFORK);
        CHECK_EQ(lck_pmdk_forked(pool), LCK_OK);
        CHECK_EQ(lck_pmdk_open(own, layout, SIZE, 1, 0, &mine), LCK_OK);
        CHECK_EQ(lck_pmdk_close(mine), LCK_OK);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(lck_pmdk_close(pool), LCK_OK);
}

static void check_arguments(const char *path)
{
    lck_pmdk *pool = NULL;
    char text[10];
    CHECK_EQ(lck_pmdk_open(NULL, layout, SIZE, 0, 0, &pool), LCK_EINVAL);
    CHECK_EQ(lck_pmdk_open(path, NULL, SIZE, 0, 0, &pool), LCK_EINVAL);
    CHECK_EQ(lck_pmdk_open(path, layout, 0, 0, 0, &pool), LCK_EINVAL);
    CHECK_EQ(lck_pmdk_open(path, layout, SIZE, 0, 0, NULL), LCK_EINVAL);
    CHECK_EQ(lck_pmdk_close(NULL), LCK_EINVAL);
    CHECK_EQ(lck_pmdk_forked(NULL), LCK_EINVAL);
    CHECK_EQ(lck_pmdk_log(NULL, 10), 0);
    CHECK_EQ(lck_pmdk_log(text, sizeof text), 0); /* libpmemobj has logged nothing */
}

int main(void)
{
    char path[40];
    if (!load()) {
        const char *required = getenv("LIGHTCK_REQUIRE_PMDK");
        return required != NULL && strcmp(required, "1") == 0 ? 1 : SKIPPED;
    }
    int fd = file_of(path, sizeof path);
    make(path, fd);
    open_again(path);
    check_fork(path);
    check_arguments(path);
    close(fd);
    return 0;
}
