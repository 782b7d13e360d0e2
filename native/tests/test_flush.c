/* Which instructions write cache lines back and fence. They are counted by single-stepping through a child process. */
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include "check.h"

enum { SIZE = 1 << 20, LINES = 5 };

#if defined(__x86_64__)

#include <sys/user.h>

struct counts {
    int clwb, clflushopt, clflush, sfence;
};

/* Count an instruction. clflush is 0F AE /7 with a memory operand, clflushopt is 66 0F AE /7, clwb is 66 0F AE /6, and
 * sfence is 0F AE F8. Other prefixes (REX, segment) may precede 0F. */
static void count(struct counts *counts, const unsigned char *code)
{
    int at = 0, wide = 0;
    while (at < 4 && (code[at] == 0x66 || code[at] == 0x3e || (code[at] & 0xf0) == 0x40))
        wide |= code[at++] == 0x66;
    if (code[at] != 0x0f || code[at + 1] != 0xae)
        return;
    unsigned char modrm = code[at + 2];
    int is_memory = modrm >> 6 != 3, reg = modrm >> 3 & 7;
    counts->sfence += modrm == 0xf8;
    counts->clwb += is_memory && wide && reg == 6;
    counts->clflushopt += is_memory && wide && reg == 7;
    counts->clflush += is_memory && !wide && reg == 7;
}

static void count_here(struct counts *counts, pid_t child)
{
    struct user_regs_struct registers;
    CHECK_EQ(ptrace(PTRACE_GETREGS, child, NULL, &registers), 0);
    unsigned char code[8];
    long word = ptrace(PTRACE_PEEKTEXT, child, registers.rip, NULL);
    memcpy(code, &word, sizeof code);
    count(counts, code);
}

/* Count the instructions between the two SIGSTOPs that the child sends to itself. */
static struct counts trace(pid_t child)
{
    struct counts counts = {0, 0, 0, 0};
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    for (;;) {
        count_here(&counts, child);
        CHECK_EQ(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL), 0);
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK(WIFSTOPPED(status));
        if (WSTOPSIG(status) == SIGSTOP)
            break;
        CHECK_EQ(WSTOPSIG(status), SIGTRAP);
    }
    CHECK_EQ(kill(child, SIGKILL), 0);
    CHECK_EQ(waitpid(child, &status, 0), child);
    return counts;
}

/* Count the instructions of a store to LINES cache lines (two of them in part), of its flush, and of a sync. */
static struct counts flush_and_sync(uint32_t kind, int fd, const char *instruction)
{
    static unsigned char data[LINES * 64 - 64];
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_EQ(lck_write_back_set(instruction), LCK_OK);
        CHECK(strcmp(instruction, "auto") == 0 || strcmp(lck_write_back_name(), instruction) == 0);
        lck_medium *medium = open_medium(fd, SIZE, kind);
        CHECK_EQ(ptrace(PTRACE_TRACEME, 0, NULL, NULL), 0);
        raise(SIGSTOP);
        int32_t status = lck_m_store(medium, 32, data, sizeof data);
        if (status == LCK_OK)
            status = lck_m_flush(medium, 32, sizeof data);
        if (status == LCK_OK)
            status = lck_m_sync(medium);
        raise(status == LCK_OK ? SIGSTOP : SIGABRT);
        _exit(1);
    }
    return trace(child);
}

static void expect(struct counts found, int clwb, int clflushopt, int clflush)
{
    CHECK_EQ(found.clwb, clwb);
    CHECK_EQ(found.clflushopt, clflushopt);
    CHECK_EQ(found.clflush, clflush);
    CHECK(found.sfence >= 1);
}

static void check_kinds(const char *folder)
{
    int fd = open_memory(SIZE);
    expect(flush_and_sync(LCK_MEDIUM_CACHE, fd, "auto"), 0, 0, 0);
    expect(flush_and_sync(LCK_MEDIUM_DISK, fd, "auto"), 0, 0, 0);
    const char *best = lck_write_back_name();
    for (int i = 0; i < 3; i++) {
        const char *name = (const char *[]){"clwb", "clflushopt", "clflush"}[i];
        if (lck_write_back_set(name) != LCK_OK) {
            printf("this processor has no %s\n", name);
            continue;
        }
        expect(flush_and_sync(LCK_MEDIUM_PM_EMULATED, fd, name), i == 0 ? LINES : 0, i == 1 ? LINES : 0,
               i == 2 ? LINES : 0);
    }
    close(fd);
    if (folder == NULL)
        return;
    fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    CHECK_EQ(posix_fallocate(fd, 0, SIZE), 0);
    struct counts found = flush_and_sync(LCK_MEDIUM_PM, fd, "auto");
    CHECK_EQ(found.clwb + found.clflushopt + found.clflush, LINES);
    CHECK_EQ(strcmp(best, "clwb") == 0, found.clwb == LINES);
    expect(flush_and_sync(LCK_MEDIUM_PM_EADR, fd, "auto"), 0, 0, 0);
    close(fd);
    printf("persistent memory in %s: %s\n", folder, best);
}

#else

static void check_kinds(const char *folder)
{
    (void)folder;
    CHECK(strcmp(lck_write_back_name(), "none") == 0);
}

#endif

static void check_names(void)
{
    CHECK_EQ(lck_write_back_set("movnti"), LCK_EINVAL);
    CHECK_EQ(lck_write_back_set(NULL), LCK_EINVAL);
    CHECK_EQ(lck_write_back_set("auto"), LCK_OK);
}

/* On a file without MAP_SYNC the kinds with persistent memory are refused. */
static void check_refusal(void)
{
    int fd = open_memory(SIZE);
    lck_medium *medium = NULL;
    for (uint32_t kind = LCK_MEDIUM_PM; kind <= LCK_MEDIUM_PM_EADR; kind++) {
        CHECK_EQ(lck_medium_open(fd, &(const lck_extent){0, SIZE}, 1, kind, &medium), LCK_ESYS);
        CHECK(lck_last_errno() == EOPNOTSUPP || lck_last_errno() == ENOTSUP);
        CHECK(medium == NULL);
    }
    close(fd);
}

int main(int argc, char **argv)
{
    check_names();
    check_refusal();
    check_kinds(argc > 1 ? argv[1] : NULL); /* a folder on a file system with DAX, if the machine has one */
    return 0;
}
