/* A mapping whose pages are missing: stores fail, the process continues, and other SIGBUS is handled as before. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "check.h"

#if defined(__SANITIZE_THREAD__)
enum { TSAN = 1 };
#else
enum { TSAN = 0 };
#endif

enum { SIZE = 1 << 20, PAGE = 4096 };

static lck_medium *open_then_truncate(int *fd, uint32_t kind, off_t left)
{
    *fd = open_memory(SIZE);
    lck_medium *medium = open_medium(*fd, SIZE, kind);
    CHECK_EQ(lck_m_sync(medium), LCK_OK);
    CHECK_EQ(ftruncate(*fd, left), 0);
    return medium;
}

/* After each kind of store to a missing page, the next sync fails, and so does every later sync and copy. */
static void check_each_store(uint32_t kind)
{
    static unsigned char data[3 * PAGE];
    uint32_t crc;
    for (int which = 0; which < 5; which++) {
        if (TSAN && (which == 1 || which == 4)) /* TSan's atomic store faults while TSan holds a lock */
            continue;
        int fd;
        lck_medium *medium = open_then_truncate(&fd, kind, 8 * PAGE);
        CHECK_EQ(lck_m_store(medium, 0, data, 100), LCK_OK);
        CHECK_EQ(lck_m_sync(medium), LCK_OK);
        int32_t status = LCK_OK;
        switch (which) {
        case 0: status = lck_m_store(medium, 9 * PAGE, data, 100); break;
        case 1: status = lck_m_store8(medium, 9 * PAGE, 1); break;
        case 2: CHECK_EQ(lck_m_copy(medium, 7 * PAGE, data, sizeof data, &crc), LCK_ESYS); break;
        case 3: status = lck_m_store(medium, 8 * PAGE - 50, data, 100); break;
        case 4: CHECK_EQ(lck_m_commit_record(medium, 9 * PAGE, data), LCK_ESYS); break;
        }
        CHECK_EQ(status, LCK_OK);
        CHECK_EQ(lck_m_sync(medium), LCK_ESYS);
        CHECK_EQ(lck_last_errno(), EIO);
        CHECK_EQ(lck_m_sync(medium), LCK_ESYS);
        CHECK_EQ(lck_m_copy(medium, 0, data, sizeof data, &crc), LCK_ESYS);
        CHECK_EQ(lck_medium_close(medium), LCK_OK);
        close(fd);
    }
}

/* If a worker's store hits a missing page, its job fails. */
static void check_job(void)
{
    static unsigned char data[SIZE / 2], image[4096];
    int fd;
    lck_medium *medium = open_then_truncate(&fd, LCK_MEDIUM_CACHE, 16 * PAGE);
    lck_engine *engine = NULL;
    CHECK_EQ(lck_engine_open(2, &engine), LCK_OK);
    CHECK_EQ(lck_engine_populate(engine, medium), LCK_OK);
    lck_copy copy = {.src = (uint64_t)(uintptr_t)data, .dst = 32 * PAGE, .nbytes = sizeof data};
    lck_commit commit = {.manifest_off = PAGE, .record_off = 2 * PAGE, .image = (uint64_t)(uintptr_t)image,
                         .image_nbytes = sizeof image, .crcs_off = 128, .crcs_count = sizeof data / PAGE, .block = PAGE,
                         .generation = 1, .incarnation = 1, .step = 1};
    uint64_t ticket = 0;
    CHECK_EQ(lck_job_submit(engine, medium, &copy, 1, &commit, &ticket), LCK_OK);
    CHECK_EQ(lck_job_wait(engine, ticket, LCK_JOB_COPIED, 60000), LCK_ESYS);
    lck_job_info info;
    CHECK_EQ(lck_job_info_get(engine, ticket, &info), LCK_OK);
    CHECK_EQ(info.error, EIO);
    CHECK_EQ(lck_job_forget(engine, ticket), LCK_OK);
    CHECK_EQ(lck_engine_quiesce(engine, medium), LCK_OK);
    CHECK_EQ(lck_engine_close(engine), LCK_OK);
    CHECK_EQ(lck_medium_close(medium), LCK_OK);
    close(fd);
}

/* The wait status of a child that runs `work`. Each `work` below gets a SIGBUS that is not due to a medium's mapping.
 * The SIGBUS must have the same effect as without lightck. */
static int status_of(void (*work)(void))
{
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGBUS, SIG_DFL);
        work();
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    return status;
}

static volatile unsigned char *gone_page(void)
{
    int fd = open_memory(PAGE);
    unsigned char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(page != MAP_FAILED);
    CHECK_EQ(ftruncate(fd, 0), 0);
    return page;
}

static void other_fault(void)
{
    lck_medium_close(open_medium(open_memory(SIZE), SIZE, LCK_MEDIUM_CACHE));
    *gone_page() = 1;
}

static void other_source(void)
{
    lck_m_copy(open_medium(open_memory(SIZE), SIZE, LCK_MEDIUM_CACHE), 0, (const void *)(uintptr_t)gone_page(), PAGE,
               NULL);
}

static void sent(void)
{
    lck_medium_close(open_medium(open_memory(SIZE), SIZE, LCK_MEDIUM_CACHE));
    raise(SIGBUS);
}

static sigjmp_buf theirs;

static void their_handler(int number)
{
    (void)number;
    siglongjmp(theirs, 1);
}

static void handled_by_them(void)
{
    signal(SIGBUS, their_handler);
    lck_medium_close(open_medium(open_memory(SIZE), SIZE, LCK_MEDIUM_CACHE));
    if (sigsetjmp(theirs, 1) != 0)
        _exit(7);
    *gone_page() = 1;
}

int main(void)
{
    /* These checks run before this process opens a medium, so that each child installs the handler itself. */
    CHECK_EQ(WTERMSIG(status_of(other_fault)), SIGBUS);
    CHECK_EQ(WTERMSIG(status_of(other_source)), SIGBUS);
    CHECK_EQ(WTERMSIG(status_of(sent)), SIGBUS);
    CHECK_EQ(WEXITSTATUS(status_of(handled_by_them)), 7);
    check_each_store(LCK_MEDIUM_CACHE);
    check_each_store(LCK_MEDIUM_DISK);
    check_each_store(LCK_MEDIUM_PM_EMULATED);
    check_job();
    return 0;
}
