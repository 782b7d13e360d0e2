/* fault.c: inject failures and kills for tests. While disarmed, each check costs one relaxed load. */
#include <signal.h>
#include <string.h>

#include "internal.h"

struct countdown {
    _Atomic uint64_t left; /* n: the nth passing from now on triggers; 0: disarmed */
    _Atomic int32_t error; /* the errno of an injected failure */
};

static struct countdown faults[LCK_OP_SYNC + 1];
static struct countdown kills[KILL_SITES];

static const char *const site_names[KILL_SITES] = {
    [KILL_HEADER] = "header", [KILL_BLOCK] = "block", [KILL_MANIFEST] = "manifest", [KILL_SEALED] = "sealed",
    [KILL_BODY] = "body",     [KILL_WORD] = "word",   [KILL_ACK] = "ack",
};

/* Count one passing. Returns true for the passing that triggers. Only one passing triggers, even if several
 * threads pass at once. */
static bool triggers(struct countdown *countdown)
{
    uint64_t left = atomic_load_explicit(&countdown->left, memory_order_relaxed);
    while (LCK_UNLIKELY(left != 0))
        if (atomic_compare_exchange_weak(&countdown->left, &left, left - 1))
            return left == 1;
    return false;
}

int32_t fault_take(uint32_t op) { return triggers(&faults[op]) ? atomic_load(&faults[op].error) : 0; }

void kill_point(enum kill_site site)
{
    if (!triggers(&kills[site]))
        return;
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

int32_t lck_fault(uint32_t op, uint64_t nth, int32_t error)
{
    if ((op != LCK_OP_COPY && op != LCK_OP_SYNC) || (nth != 0 && error <= 0))
        return LCK_EINVAL;
    atomic_store(&faults[op].left, 0);
    atomic_store(&faults[op].error, error);
    atomic_store(&faults[op].left, nth);
    return LCK_OK;
}

int32_t lck_kill(const char *site, uint64_t nth)
{
    for (int i = 0; site != NULL && i < KILL_SITES; i++)
        if (strcmp(site, site_names[i]) == 0) {
            atomic_store(&kills[i].left, nth);
            return LCK_OK;
        }
    return LCK_EINVAL;
}
