/* openmp.c: make OpenMP's threads wait passively while checkpoints are copied.
 *
 * A thread of GNU OpenMP that waits for its team spins for some milliseconds before it sleeps. While it spins, no copy
 * thread of idle priority gets this processor. libgomp has a rule (do_spin, in its config/linux/wait.h): while libgomp
 * manages more threads than there are processors, a waiting thread spins only a hundred rounds. To trigger this rule
 * while a job is being copied, a thread of this file owns an OpenMP team of two threads, which computes nothing. The
 * results of the training, and the number of threads that compute them, do not change. (A child that is forked
 * meanwhile inherits libgomp's higher count of threads, so its threads sleep a little sooner.) */
#include "internal.h"

#if defined(__linux__)

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

enum {
    TEAM = 2, /* threads of the team, the calling one included */
    PAUSE_SOFT = 1, /* omp_pause_soft of OpenMP 5.0 */
    NAP_NS = 20000,
    NAPS = 100000, /* maximum number of naps: 2 seconds, or more if other threads keep the processor busy */
};

typedef void parallel_fn(void (*work)(void *), void *arg, unsigned threads, unsigned flags);
typedef int pause_fn(int kind);

static pthread_mutex_t find_lock = PTHREAD_MUTEX_INITIALIZER;
/* Written once, before the first thread that reads it starts. */
static struct {
    parallel_fn *parallel;
    pause_fn *pause; /* ends the team of the calling thread, and no other team */
} api;

/* Look up a symbol in the GNU OpenMP that `library` uses (a process may contain several GNU OpenMPs). NULL if `library`
 * uses none. */
static void *symbol(void *library, const char *name)
{
    Dl_info info;
    void *found = dlsym(library, name);
    bool gnu = found != NULL && dladdr(found, &info) != 0 && info.dli_fname != NULL &&
               strstr(info.dli_fname, "libgomp") != NULL;
    return gnu ? found : NULL; /* other OpenMP libraries have functions of these names, but not the rule of do_spin */
}

static bool find(const char *library)
{
    void *handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
    if (handle == NULL)
        return false;
    parallel_fn *parallel = (parallel_fn *)symbol(handle, "GOMP_parallel");
    pause_fn *pause_own = (pause_fn *)symbol(handle, "omp_pause_resource_all");
    bool found = parallel != NULL && pause_own != NULL;
    if (found) {
        api.parallel = parallel;
        api.pause = pause_own;
    } else {
        dlclose(handle);
    }
    return found; /* if found, the handle stays open, so that the library stays loaded */
}

int32_t lck_openmp_find(const char *library)
{
    if (library == NULL)
        return LCK_EINVAL;
    pthread_mutex_lock(&find_lock);
    bool found = api.parallel != NULL || find(library);
    pthread_mutex_unlock(&find_lock);
    return found ? LCK_OK : LCK_EMISSING;
}

static bool copies_under_way(lck_engine *engine)
{
    bool copying = false;
    for (int i = 0; !copying && i < LCK_JOBS_MAX; i++)
        copying = word_phase(atomic_load(&engine->jobs[i].word)) == PHASE_COPYING;
    return copying;
}

static void nothing(void *arg) { (void)arg; }

struct probe {
    pthread_mutex_t *end; /* locked until the thread may end */
    pid_t tid;
};

static void *probe(void *arg)
{
    struct probe *mine = arg;
    mine->tid = (pid_t)syscall(SYS_gettid);
    pthread_mutex_lock(mine->end);
    pthread_mutex_unlock(mine->end);
    return NULL;
}

/* Wait until the kernel has removed a joined thread, because the thread counts against limits until then. False if the
 * thread is still there after NAPS. */
static bool wait_until_removed(pid_t tid)
{
    const struct timespec nap = {.tv_nsec = NAP_NS};
    bool there = syscall(SYS_tgkill, getpid(), tid, 0) == 0;
    for (int i = 0; there && i < NAPS; i++) {
        nanosleep(&nap, NULL);
        there = syscall(SYS_tgkill, getpid(), tid, 0) == 0;
    }
    return !there;
}

/* Whether libgomp can start a thread. It needs one for the team, and ends the process if it cannot start one (a limit
 * on threads or memory). So this function starts two threads at once: one as a test, and one as a margin. */
static bool room_for_a_thread(void)
{
    pthread_mutex_t end = PTHREAD_MUTEX_INITIALIZER;
    struct probe probes[2] = {{.end = &end}, {.end = &end}};
    pthread_t threads[2];
    int started = 0, gone = 0;
    pthread_mutex_lock(&end);
    while (started < 2 && pthread_create(&threads[started], NULL, probe, &probes[started]) == 0)
        started++;
    pthread_mutex_unlock(&end);
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
        gone += wait_until_removed(probes[i].tid);
    }
    pthread_mutex_destroy(&end);
    return gone == 2;
}

static bool make_team(void)
{
    bool room = room_for_a_thread();
    if (room)
        api.parallel(nothing, NULL, TEAM, 0);
    return room;
}

/* The thread lightck-openmp. It runs at normal priority, because at idle priority it would make the team too late. It
 * never copies. */
static void *keep_team(void *arg)
{
    lck_engine *engine = arg;
    /* This thread gets its name before it makes the team, because the team's other thread inherits the name. */
    (void)pthread_setname_np(pthread_self(), "lightck-openmp");
    for (bool kept = false;;) {
        uint32_t seen = atomic_load(&engine->pulse);
        bool stop = atomic_load(&engine->stop);
        bool wanted = !stop && atomic_load(&engine->passive) && copies_under_way(engine);
        if (kept && !wanted)
            (void)api.pause(PAUSE_SOFT);
        if (stop)
            return NULL;
        if (wanted && !kept && !make_team()) {
            atomic_store(&engine->no_room, true);
            atomic_store(&engine->passive, wanted = false);
        }
        kept = wanted;
        engine_park(engine, seen, PARK_FOREVER);
    }
}

static int32_t start(lck_engine *engine)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&engine->team_thread, NULL, keep_team, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return status_sys(error);
    atomic_store(&engine->has_team_thread, true);
    return LCK_OK;
}

int32_t lck_engine_passive(lck_engine *engine, int32_t on)
{
    int32_t status = engine_check(engine);
    if (status != LCK_OK)
        return status;
    if (on != 0 && api.parallel == NULL)
        return LCK_EMISSING;
    if (on != 0 && atomic_load(&engine->no_room))
        return status_sys(EAGAIN);
    pthread_mutex_lock(&engine->submit_lock);
    if (on != 0 && !atomic_load(&engine->has_team_thread))
        status = start(engine);
    pthread_mutex_unlock(&engine->submit_lock);
    if (status == LCK_OK && atomic_exchange(&engine->passive, on != 0) != (on != 0))
        engine_pulse(engine);
    return status;
}

void openmp_stop(lck_engine *engine)
{
    if (atomic_load(&engine->has_team_thread))
        pthread_join(engine->team_thread, NULL);
}

#else

int32_t lck_openmp_find(const char *library) { return library == NULL ? LCK_EINVAL : LCK_EMISSING; }

int32_t lck_engine_passive(lck_engine *engine, int32_t on)
{
    int32_t status = engine_check(engine);
    return status == LCK_OK && on != 0 ? LCK_EMISSING : status;
}

void openmp_stop(lck_engine *engine) { (void)engine; }

#endif
