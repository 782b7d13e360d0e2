/* The choke point: ranges, kinds of media, traces, faults and kills; a forked child cannot use the medium. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#include "check.h"

enum { SIZE = 1 << 20 };

static void check_ranges(void)
{
    int fd = open_memory(SIZE);
    lck_medium *none = NULL;
    const lck_extent whole = {0, SIZE}, longer = {0, SIZE + 1}, nothing = {0, 0}, odd = {100, 4096};
    const lck_extent behind = {SIZE, 4096}, endless[] = {{0, INT64_MAX}, {4096, INT64_MAX - 4096}};
    const lck_extent torn[] = {{0, 100}, {4096, 4096}};
    CHECK_EQ(lck_medium_open(fd, &longer, 1, LCK_MEDIUM_CACHE, &none), LCK_ESHORT);
    CHECK_EQ(lck_medium_open(fd, &behind, 1, LCK_MEDIUM_CACHE, &none), LCK_ESHORT);
    CHECK_EQ(lck_medium_open(fd, &nothing, 1, LCK_MEDIUM_CACHE, &none), LCK_EINVAL);
    CHECK_EQ(lck_medium_open(fd, &odd, 1, LCK_MEDIUM_CACHE, &none), LCK_EINVAL);
    CHECK_EQ(lck_medium_open(fd, torn, 2, LCK_MEDIUM_CACHE, &none), LCK_EINVAL);
    CHECK_EQ(lck_medium_open(fd, endless, 2, LCK_MEDIUM_CACHE, &none), LCK_EINVAL);
    CHECK_EQ(lck_medium_open(fd, &whole, 0, LCK_MEDIUM_CACHE, &none), LCK_EINVAL);
    CHECK_EQ(lck_medium_open(fd, NULL, 1, LCK_MEDIUM_CACHE, &none), LCK_EINVAL);
    CHECK_EQ(lck_medium_open(fd, &whole, 1, 5, &none), LCK_EINVAL);
    CHECK_EQ(lck_medium_open(-1, &whole, 1, LCK_MEDIUM_CACHE, &none), LCK_EINVAL);
    CHECK_EQ(lck_medium_open(9999, &whole, 1, LCK_MEDIUM_CACHE, &none), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), EBADF);
    CHECK(none == NULL);
    lck_medium *medium = open_medium(fd, SIZE, LCK_MEDIUM_CACHE);
    CHECK_EQ(lck_medium_size(medium), SIZE);
    CHECK(lck_medium_address(medium) != 0);
    CHECK_EQ(lck_medium_address(NULL), 0);
    CHECK_EQ(lck_m_store(medium, SIZE - 3, "abcd", 4), LCK_EINVAL);
    CHECK_EQ(lck_m_store(medium, UINT64_MAX, "abcd", 4), LCK_EINVAL);
    CHECK_EQ(lck_m_store(medium, SIZE, "", 0), LCK_OK);
    CHECK_EQ(lck_m_store(medium, 0, NULL, 1), LCK_EINVAL);
    CHECK_EQ(lck_m_copy(medium, 4, "abcd", UINT64_MAX, NULL), LCK_EINVAL);
    CHECK_EQ(lck_m_store8(medium, 4, 1), LCK_EINVAL);
    CHECK_EQ(lck_m_store8(medium, SIZE - 8, 1), LCK_OK);
    CHECK_EQ(lck_m_flush(medium, 1, SIZE), LCK_EINVAL);
    CHECK_EQ(lck_m_commit_record(medium, 32, "x"), LCK_EINVAL);
    CHECK_EQ(lck_m_store(NULL, 0, "", 0), LCK_EINVAL);
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    CHECK_EQ(lck_medium_close(NULL), LCK_EINVAL);
    close(fd);
}

/* Extents that lie apart and out of order in the file are one pool; the bytes between them do not change. */
static void check_extents(void)
{
    const lck_extent parts[] = {{40960, 8192}, {4096, 4096}, {65536, 5000}};
    static unsigned char data[17288], file[SIZE], expected[SIZE];
    int fd = open_memory(SIZE);
    lck_medium *medium = NULL;
    CHECK_EQ(lck_medium_open(fd, parts, 3, LCK_MEDIUM_CACHE, &medium), LCK_OK);
    CHECK_EQ(lck_medium_size(medium), sizeof data);
    fill_random(data, sizeof data, 3);
    CHECK_EQ(lck_m_copy(medium, 0, data, sizeof data, NULL), LCK_OK);
    CHECK_EQ(lck_m_store(medium, sizeof data - 4, "abcde", 5), LCK_EINVAL);
    CHECK_EQ(lck_m_store(medium, 8190, "abcd", 4), LCK_OK); /* across the end of an extent */
    memcpy(data + 8190, "abcd", 4);
    CHECK_EQ(lck_m_sync(medium), LCK_OK);
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    memcpy(expected + 40960, data, 8192);
    memcpy(expected + 4096, data + 8192, 4096);
    memcpy(expected + 65536, data + 12288, 5000);
    read_back(fd, file, SIZE, 0);
    CHECK(memcmp(file, expected, SIZE) == 0);
    close(fd);
}

static void check_disk(void)
{
    FILE *file = tmpfile();
    CHECK(file != NULL);
    CHECK_EQ(ftruncate(fileno(file), SIZE), 0);
    lck_medium *medium = open_medium(fileno(file), SIZE, LCK_MEDIUM_DISK);
    CHECK_EQ(lck_m_copy(medium, 4096, "0123456789", 10, NULL), LCK_OK);
    CHECK_EQ(lck_m_sync(medium), LCK_OK);
    char got[10];
    read_back(fileno(file), got, 10, 4096);
    CHECK(memcmp(got, "0123456789", 10) == 0);
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    fclose(file);
}

/* Address of the mapping of `name` with this many bytes, according to procfs; 0 if there is none. */
static uint64_t address_of(const char *name, uint64_t nbytes)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    char line[512];
    uint64_t found = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long start, end;
        if (strstr(line, name) != NULL && sscanf(line, "%lx-%lx", &start, &end) == 2 && end - start == nbytes)
            found = start;
    }
    fclose(maps);
    return found;
}

/* Bytes of private address space that is reserved without access. */
static uint64_t reserved(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    char line[512];
    uint64_t nbytes = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long start, end;
        if (strstr(line, " ---p ") != NULL && sscanf(line, "%lx-%lx", &start, &end) == 2)
            nbytes += end - start;
    }
    fclose(maps);
    return nbytes;
}

/* Huge pages need an aligned address. The address space that was reserved around the mapping is unmapped again. */
static void check_alignment(void)
{
    const uint64_t huge = 2 << 20;
    for (uint64_t nbytes = huge - 4096; nbytes <= 4 * huge + 4096; nbytes += huge - 4096) {
        int fd = open_memory(nbytes);
        uint64_t before = reserved();
        lck_medium *medium = open_medium(fd, nbytes, LCK_MEDIUM_CACHE);
        uint64_t start = address_of("lck-test", nbytes);
        CHECK(start != 0);
        CHECK(nbytes < huge || start % huge == 0);
        CHECK_EQ(lck_m_store(medium, nbytes - 1, "z", 1), LCK_OK);
        CHECK(reserved() <= before);
        CHECK_EQ(lck_medium_close(medium), LCK_OK);
        CHECK(reserved() <= before);
        close(fd);
    }
    int fd = open_memory(4 * huge); /* a mapping that fails leaves no reservation behind */
    uint64_t before = reserved();
    lck_medium *medium = NULL;
    CHECK_EQ(lck_medium_open(fd, &(const lck_extent){0, 4 * huge}, 1, LCK_MEDIUM_PM_EADR, &medium), LCK_ESYS);
    CHECK(reserved() <= before);
    close(fd);
}

static void check_prewrite(void)
{
    FILE *file = tmpfile();
    CHECK(file != NULL);
    uint64_t nbytes = (2 << 20) + 4097;
    CHECK_EQ(posix_fallocate(fileno(file), 0, (off_t)nbytes), 0);
    CHECK_EQ(pwrite(fileno(file), "kept", 4, (off_t)nbytes), 4);
    CHECK_EQ(pwrite(fileno(file), "gone", 4, (off_t)nbytes - 4), 4);
    CHECK_EQ(lck_prewrite(fileno(file), nbytes), LCK_OK);
    char got[8];
    read_back(fileno(file), got, 8, nbytes - 4);
    CHECK(memcmp(got, "\0\0\0\0kept", 8) == 0);
    CHECK_EQ(lck_prewrite(-1, 1), LCK_EINVAL);
    CHECK_EQ(lck_prewrite(9999, 1), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), EBADF);
    fclose(file);
}

static void check_bytes_around(int fd, uint64_t at)
{
    char got[8];
    CHECK_EQ(pwrite(fd, "kept", 4, (off_t)at - 2), 4);
    read_back(fd, got, 8, at - 4);
    CHECK(memcmp(got, "\0\0kept\0\0", 8) == 0);
}

/* A memfd is a file on tmpfs on every machine. The kernel decides whether it gets huge pages. */
static void check_huge(void)
{
    uint64_t huge = 2 << 20, part = 96 * huge, nbytes = part + 5 * huge + 4096; /* enough for more than one thread */
    for (uint32_t threads = 1; threads <= 16; threads += 15) {
        int fd = memfd_create("huge", MFD_CLOEXEC);
        CHECK(lck_huge(fd, 0, part, threads) <= part);
        uint64_t made = lck_huge(fd, part, nbytes - part, threads);
        CHECK(made == 0 || made == 5 * huge);
        CHECK_EQ(posix_fallocate(fd, 0, (off_t)nbytes), 0);
        CHECK_EQ(lseek(fd, 0, SEEK_END), nbytes);
        check_bytes_around(fd, huge);
        check_bytes_around(fd, part);
        check_bytes_around(fd, nbytes - huge);
        close(fd);
    }
    FILE *file = fopen("/proc/self/exe", "rb");
    CHECK(file != NULL);
    CHECK_EQ(lck_huge(fileno(file), 0, nbytes, 1), 0); /* a file that is not on tmpfs */
    fclose(file);
    CHECK_EQ(lck_huge(-1, 0, nbytes, 1), 0);
    int empty = memfd_create("empty", MFD_CLOEXEC);
    CHECK_EQ(lck_huge(empty, 0, huge - 1, 1), 0);
    CHECK_EQ(lck_huge(empty, 4096, huge, 1), 0);
    CHECK_EQ(lck_huge(empty, INT64_MAX - 1, huge, 1), 0);
    CHECK_EQ(lck_huge(empty, 2 * huge, INT64_MAX, 1), 0);
    CHECK_EQ(lseek(empty, 0, SEEK_END), 0);
    close(empty);
}

static lck_event event(const lck_medium *medium, uint64_t index)
{
    lck_event out;
    CHECK_EQ(lck_trace_event(medium, index, &out), LCK_OK);
    CHECK_EQ(out.seq, index);
    return out;
}

static void expect(const lck_medium *medium, uint64_t index, uint32_t kind, uint64_t off, uint64_t nbytes)
{
    lck_event found = event(medium, index);
    CHECK_EQ(found.kind, kind);
    CHECK_EQ(found.off, off);
    CHECK_EQ(found.nbytes, nbytes);
}

static void expect_data(const lck_medium *medium, uint64_t index, const void *data)
{
    lck_event found = event(medium, index);
    uint64_t nbytes = 0;
    const unsigned char *all = lck_trace_data(medium, &nbytes);
    CHECK(found.data + found.nbytes <= nbytes);
    CHECK(memcmp(all + found.data, data, found.nbytes) == 0);
}

static void check_trace(void)
{
    static unsigned char source[1000], line[64];
    fill_random(source, sizeof source, 5);
    fill_random(line, sizeof line, 6);
    int fd = open_memory(SIZE);
    lck_medium *medium = open_medium(fd, SIZE, LCK_MEDIUM_PM_EMULATED);
    CHECK_EQ(lck_isa_set("sse2") == LCK_OK || lck_isa_set("portable") == LCK_OK, 1);
    int streams = strcmp(lck_isa_name(), "portable") != 0;
    CHECK_EQ(lck_m_store(medium, 0, "before", 6), LCK_OK); /* not recorded */
    CHECK_EQ(lck_trace_count(medium), 0);
    CHECK_EQ(lck_trace_start(medium), LCK_OK);
    CHECK_EQ(lck_m_mark(medium, LCK_MARK_USER, 42), LCK_OK);
    CHECK_EQ(lck_m_store(medium, 10, "abc", 3), LCK_OK);
    CHECK_EQ(lck_m_commit_record(medium, 8192, line), LCK_OK);
    expect(medium, 0, LCK_EV_MARK, LCK_MARK_USER, 42);
    expect(medium, 1, LCK_EV_STORE, 10, 3);
    expect_data(medium, 1, "abc");
    expect(medium, 2, LCK_EV_STORE, 8200, 56);
    expect_data(medium, 2, line + 8);
    expect(medium, 3, LCK_EV_FLUSH, 8200, 56);
    expect(medium, 4, LCK_EV_FENCE, 0, 0);
    expect(medium, 5, LCK_EV_STORE, 8192, 8);
    expect_data(medium, 5, line);
    expect(medium, 6, LCK_EV_FLUSH, 8192, 8);
    expect(medium, 7, LCK_EV_SYNC, 0, 0);
    CHECK_EQ(lck_m_copy(medium, 4096 + 60, source, 1000, NULL), LCK_OK);
    expect(medium, 8, LCK_EV_COPY, 4156, 1000);
    expect_data(medium, 8, source);
    if (streams) { /* the partial lines at both ends: [4156, 4160) and [5120, 5156) */
        expect(medium, 9, LCK_EV_FLUSH, 4156, 4);
        expect(medium, 10, LCK_EV_FLUSH, 5120, 36);
    } else {
        expect(medium, 9, LCK_EV_FLUSH, 4156, 1000);
    }
    CHECK_EQ(lck_trace_count(medium), streams ? 11 : 10);
    CHECK_EQ(lck_trace_stop(medium), LCK_OK);
    CHECK_EQ(lck_m_fence(medium), LCK_OK);
    CHECK_EQ(lck_trace_count(medium), streams ? 11 : 10);
    lck_event out;
    CHECK_EQ(lck_trace_event(medium, 11, &out), LCK_EINVAL);
    CHECK_EQ(lck_trace_start(medium), LCK_OK);
    CHECK_EQ(lck_trace_count(medium), 0);
    CHECK_EQ(lck_m_copy(medium, 4096 + 10, source, 20, NULL), LCK_OK); /* inside one line */
    expect(medium, 1, LCK_EV_FLUSH, 4106, 20);
    CHECK_EQ(lck_trace_count(medium), 2);
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    CHECK_EQ(lck_isa_set("auto"), LCK_OK);
    close(fd);
}

static void check_faults(void)
{
    int fd = open_memory(SIZE);
    lck_medium *medium = open_medium(fd, SIZE, LCK_MEDIUM_CACHE);
    CHECK_EQ(lck_fault(LCK_OP_COPY, 2, EIO), LCK_OK);
    CHECK_EQ(lck_m_copy(medium, 0, "a", 1, NULL), LCK_OK);
    CHECK_EQ(lck_m_copy(medium, 0, "b", 1, NULL), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), EIO);
    CHECK_EQ(lck_m_copy(medium, 1, "c", 1, NULL), LCK_OK);
    char got[2];
    read_back(fd, got, 2, 0);
    CHECK(memcmp(got, "ac", 2) == 0);
    CHECK_EQ(lck_fault(LCK_OP_SYNC, 1, ENOSPC), LCK_OK);
    CHECK_EQ(lck_m_sync(medium), LCK_ESYS);
    CHECK_EQ(lck_last_errno(), ENOSPC);
    CHECK_EQ(lck_m_sync(medium), LCK_OK);
    CHECK_EQ(lck_fault(LCK_OP_SYNC, 1, EIO), LCK_OK);
    CHECK_EQ(lck_fault(LCK_OP_SYNC, 0, 0), LCK_OK);
    CHECK_EQ(lck_m_sync(medium), LCK_OK);
    CHECK_EQ(lck_fault(3, 1, EIO), LCK_EINVAL);
    CHECK_EQ(lck_fault(LCK_OP_COPY, 1, 0), LCK_EINVAL);
    CHECK_EQ(lck_kill("nowhere", 1), LCK_EINVAL);
    CHECK_EQ(lck_kill(NULL, 1), LCK_EINVAL);
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    close(fd);
}

/* A process stores two commit records ("lines"), and is killed at `site` in the second one. Set got[64] to the bytes of
 * this second record. */
static void line_killed_at(const char *site, unsigned char *got)
{
    unsigned char line[64];
    memset(line, 0x11, sizeof line);
    int fd = open_memory(SIZE);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        lck_medium *medium = open_medium(fd, SIZE, LCK_MEDIUM_CACHE);
        CHECK_EQ(lck_kill(site, 2), LCK_OK);
        CHECK_EQ(lck_m_commit_record(medium, 0, line), LCK_OK);
        lck_m_commit_record(medium, 4096, line);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    read_back(fd, got, 64, 0);
    CHECK(memcmp(got, line, 64) == 0);
    read_back(fd, got, 64, 4096);
    close(fd);
}

static void check_kills(void)
{
    unsigned char got[64];
    line_killed_at("body", got);
    CHECK(got[0] == 0 && got[7] == 0 && got[8] == 0x11 && got[63] == 0x11);
    line_killed_at("word", got);
    CHECK(got[0] == 0x11 && got[7] == 0x11 && got[63] == 0x11);
    line_killed_at("ack", got);
    CHECK(got[0] == 0x11);
}

static void check_fork(void)
{
    int fd = open_memory(SIZE);
    lck_medium *medium = open_medium(fd, SIZE, LCK_MEDIUM_CACHE);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_EQ(lck_m_store(medium, 0, "x", 1), LCK_EFORK);
        CHECK_EQ(lck_m_store8(medium, 0, 1), LCK_EFORK);
        CHECK_EQ(lck_m_copy(medium, 0, "x", 1, NULL), LCK_EFORK);
        CHECK_EQ(lck_m_flush(medium, 0, 1), LCK_EFORK);
        CHECK_EQ(lck_m_fence(medium), LCK_EFORK);
        CHECK_EQ(lck_m_sync(medium), LCK_EFORK);
        CHECK_EQ(lck_m_mark(medium, 3, 1), LCK_EFORK);
        CHECK_EQ(lck_m_commit_record(medium, 0, "x"), LCK_EFORK);
        CHECK_EQ(lck_trace_start(medium), LCK_EFORK);
        CHECK_EQ(lck_trace_stop(medium), LCK_EFORK);
        CHECK_EQ(lck_trace_count(medium), 0);
        CHECK_EQ(lck_medium_size(medium), 0);
        CHECK_EQ(lck_medium_address(medium), 0);
        CHECK_EQ(lck_medium_close(medium), LCK_EFORK);
        lck_medium *own = open_medium(fd, SIZE, LCK_MEDIUM_CACHE);
        CHECK_EQ(lck_m_store(own, 5, "y", 1), LCK_OK);
        CHECK_EQ(lck_medium_close(own), LCK_OK);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    char got;
    read_back(fd, &got, 1, 5);
    CHECK_EQ(got, 'y');
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    close(fd);
}

int main(void)
{
    check_ranges();
    check_extents();
    check_disk();
    check_alignment();
    check_prewrite();
    check_huge();
    check_trace();
    check_faults();
    check_kills();
    check_fork();
    return 0;
}
