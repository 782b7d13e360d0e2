/* guard.c: if a store to a missing mapped page (the file was truncated, the medium failed) causes SIGBUS, the store
 * fails and the process continues. Any other SIGBUS is passed to the previous handler. */
#include <pthread.h>
#include <signal.h>
#include <ucontext.h>

#include "internal.h"

/* The guard that this thread has entered, or NULL. Initial-exec, because a signal handler must not allocate a
 * thread-local variable. */
static _Thread_local struct guard *volatile entered __attribute__((tls_model("initial-exec")));
static struct sigaction before; /* the previous handler */
static pthread_once_t once = PTHREAD_ONCE_INIT;

void guard_enter(struct guard *guard, const void *start, uint64_t nbytes)
{
    guard->start = (uintptr_t)start;
    guard->nbytes = nbytes;
    atomic_signal_fence(memory_order_seq_cst);
    entered = guard;
    atomic_signal_fence(memory_order_seq_cst);
}

void guard_leave(void)
{
    atomic_signal_fence(memory_order_seq_cst);
    entered = NULL;
}

/* Do what would have happened without this handler. */
static void pass_on(int number, siginfo_t *info, void *context)
{
    if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else if (info->si_code > 0) { /* a fault: it occurs again when this handler returns, and ends the process */
        signal(number, SIG_DFL);
    } else if (before.sa_handler == SIG_DFL) { /* the signal was sent by kill() */
        signal(number, SIG_DFL);
        raise(number); /* delivered when this handler returns, and ends the process */
    }
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    struct guard *guard = entered;
    if (guard != NULL && info->si_code > 0 && (uintptr_t)info->si_addr - guard->start < guard->nbytes) {
        entered = NULL;
        pthread_sigmask(SIG_SETMASK, &((ucontext_t *)context)->uc_sigmask, NULL); /* siglongjmp does not restore it */
        siglongjmp(guard->back, 1);
    }
    pass_on(number, info, context);
}

static void install(void)
{
    struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    (void)sigaction(SIGBUS, &ours, &before);
}

void guard_init(void) { (void)pthread_once(&once, install); }
