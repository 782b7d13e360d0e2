/* engine.c: the workers, from their start to their end. */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>

#include "internal.h"

enum { PROCESSORS = 1 << 16 }; /* processor numbers are below this */

/* A thread that parks increments its counter before the kernel compares `pulse`. The functions engine_pulse and
 * engine_pulse_job change `pulse` before they read the counters. So either the parking thread sees the change, or it is
 * woken. */
void engine_pulse(lck_engine *engine)
{
    atomic_fetch_add(&engine->pulse, 1);
    if (atomic_load(&engine->sleepers) != 0 || atomic_load(&engine->idle_workers) != 0)
        unpark_all(&engine->pulse);
}

/* A worker can seal a job once it is copied and released. One thread may finish the copies while another releases the
 * job. Each of the two looks for work after its own change, so the thread whose change comes last finds the job. */
void engine_pulse_job(lck_engine *engine)
{
    atomic_fetch_add(&engine->pulse, 1);
    if (atomic_load(&engine->sleepers) != 0 || (atomic_load(&engine->idle_workers) != 0 && work_for_a_worker(engine)))
        unpark_all(&engine->pulse);
}

static void park_counted(lck_engine *engine, _Atomic uint32_t *counter, uint32_t seen, uint64_t timeout_ns)
{
    atomic_fetch_add(counter, 1);
    park(&engine->pulse, seen, timeout_ns);
    atomic_fetch_sub(counter, 1);
}

void engine_park(lck_engine *engine, uint32_t seen, uint64_t timeout_ns)
{
    park_counted(engine, &engine->sleepers, seen, timeout_ns);
}

/* At idle priority workers use only processor time that the training does not use. */
static void become_idle(void)
{
#if defined(__linux__)
    const struct sched_param none = {0};
    if (sched_setscheduler(0, SCHED_IDLE, &none) != 0)
        (void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 19);
#endif
}

/* Set the workers' scheduling policy. Returns false if the system refuses it for at least one worker, whose policy then
 * stays unchanged: raising the priority needs CAP_SYS_NICE or a sufficient RLIMIT_NICE. */
static bool set_idle(lck_engine *engine, bool idle)
{
#if defined(__linux__)
    const struct sched_param none = {0};
    bool done = true;
    for (uint32_t i = 0; i < engine->threads; i++)
        done = pthread_setschedparam(engine->workers[i], idle ? SCHED_IDLE : SCHED_OTHER, &none) == 0 && done;
    return done;
#else
    (void)engine;
    (void)idle;
    return false;
#endif
}

void engine_raise_priority(lck_engine *engine)
{
    if (atomic_fetch_add(&engine->urgent_waiters, 1) == 0 && !atomic_load(&engine->cannot_raise_priority) &&
        !set_idle(engine, false))
        atomic_store(&engine->cannot_raise_priority, true);
}

void engine_restore_priority(lck_engine *engine)
{
    if (atomic_fetch_sub(&engine->urgent_waiters, 1) == 1 && !atomic_load(&engine->cannot_raise_priority))
        (void)set_idle(engine, true);
}

static void *work(void *arg)
{
    lck_engine *engine = arg;
    become_idle();
    for (;;) {
        uint32_t seen = atomic_load(&engine->pulse);
        if (work_once(engine, UINT64_MAX, ROLE_WORKER))
            continue;
        if (atomic_load(&engine->stop))
            return NULL;
        if (!populate_step(engine))
            park_counted(engine, &engine->idle_workers, seen, PARK_FOREVER);
    }
}

static void name_worker(pthread_t thread, uint32_t number)
{
#if defined(__linux__)
    char name[16];
    snprintf(name, sizeof name, "lightck-copy-%u", number % 100);
    (void)pthread_setname_np(thread, name);
#else
    (void)thread;
    (void)number;
#endif
}

#if defined(__linux__)
static int32_t place_workers(lck_engine *engine, const cpu_set_t *set, size_t nbytes)
{
    int error = 0;
    for (uint32_t i = 0; error == 0 && i < engine->threads; i++)
        error = pthread_setaffinity_np(engine->workers[i], nbytes, set);
    return error == 0 ? LCK_OK : status_sys(error);
}
#endif

int32_t lck_engine_run_on(lck_engine *engine, const uint32_t *processors, uint64_t count)
{
    int32_t status = engine_check(engine);
    if (status != LCK_OK)
        return status;
    uint32_t last = 0;
    for (uint64_t i = 0; i < count; i++)
        last = processors[i] > last ? processors[i] : last;
    if (count == 0 || last >= PROCESSORS)
        return LCK_EINVAL;
#if defined(__linux__)
    cpu_set_t *set = CPU_ALLOC(last + 1);
    if (set == NULL)
        return LCK_ENOMEM;
    size_t nbytes = CPU_ALLOC_SIZE(last + 1);
    CPU_ZERO_S(nbytes, set);
    for (uint64_t i = 0; i < count; i++)
        CPU_SET_S(processors[i], nbytes, set);
    status = place_workers(engine, set, nbytes);
    CPU_FREE(set);
    return status;
#else
    return status_sys(ENOSYS);
#endif
}

/* The workers block signals, because a signal handler of the program must not run on a thread that may get no processor
 * for seconds. */
static int32_t start_workers(lck_engine *engine, uint32_t threads)
{
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS); /* a fault while SIGBUS is blocked would end the process: see guard.c */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    while (error == 0 && engine->threads < threads) {
        error = pthread_create(&engine->workers[engine->threads], NULL, work, engine);
        if (error == 0) {
            name_worker(engine->workers[engine->threads], engine->threads);
            engine->threads++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error == 0 ? LCK_OK : status_sys(error);
}

static void stop_workers(lck_engine *engine)
{
    atomic_store(&engine->stop, true);
    engine_pulse(engine);
    for (uint32_t i = 0; i < engine->threads; i++)
        pthread_join(engine->workers[i], NULL);
    openmp_stop(engine);
}

static void release(lck_engine *engine)
{
    for (int i = 0; i < LCK_JOBS_MAX; i++) {
        free(engine->jobs[i].copies);
        free(engine->jobs[i].ends);
    }
    free(atomic_load(&engine->spans));
    pthread_mutex_destroy(&engine->submit_lock);
    free(engine);
}

int32_t lck_engine_open(uint32_t threads, lck_engine **out)
{
    if (threads == 0 || threads > ENGINE_THREADS || out == NULL)
        return LCK_EINVAL;
    lck_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return LCK_ENOMEM;
    engine->pid = getpid();
    pthread_mutex_init(&engine->submit_lock, NULL);
    int32_t status = start_workers(engine, threads);
    if (status != LCK_OK) {
        stop_workers(engine);
        release(engine);
        return status;
    }
    *out = engine;
    return LCK_OK;
}

static void fail_held(lck_engine *engine, uint64_t ticket)
{
    struct job *job = job_find(engine, ticket);
    if (job == NULL)
        return;
    if (atomic_load(&job->held)) {
        job_fail(job, LCK_ESTATE);
        work_skip_rest(engine, job, ticket);
    }
    job_leave(job);
}

/* First end the jobs that are not released, because a released job cannot commit before all earlier jobs have ended. */
static void end_jobs(lck_engine *engine)
{
    for (int i = 0; i < LCK_JOBS_MAX; i++) {
        uint64_t ticket = word_ticket(atomic_load(&engine->jobs[i].word));
        if (ticket != 0)
            (void)lck_job_drop(engine, ticket);
        fail_held(engine, ticket);
    }
    for (int i = 0; i < LCK_JOBS_MAX; i++) {
        uint64_t ticket = word_ticket(atomic_load(&engine->jobs[i].word));
        while (ticket != 0 && lck_job_wait(engine, ticket, LCK_JOB_COMMITTED, UINT32_MAX) == LCK_ETIMEDOUT)
            continue;
    }
}

int32_t lck_engine_close(lck_engine *engine)
{
    int32_t status = engine_check(engine);
    if (status != LCK_OK)
        return status;
    end_jobs(engine);
    stop_workers(engine);
    release(engine);
    return LCK_OK;
}

static uint64_t cpu_ns(pthread_t thread)
{
    clockid_t clock;
    struct timespec used;
    if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &used) != 0)
        return 0;
    return (uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec;
}

uint64_t lck_engine_cpu_ns(const lck_engine *engine)
{
    if (engine_check(engine) != LCK_OK)
        return 0;
    uint64_t sum = atomic_load(&engine->has_team_thread) ? cpu_ns(engine->team_thread) : 0;
    for (uint32_t i = 0; i < engine->threads; i++)
        sum += cpu_ns(engine->workers[i]);
    return sum;
}
