/* spans.c: record when each thread copied and sealed, for traces of a training.
 *
 * Spans go into a bounded queue with a turn number per cell. Any thread that copies or seals is a producer, and there
 * is one consumer at a time. No thread waits. If the queue is full, further spans are counted as dropped. The cause
 * can be a producer of idle priority that lost the processor while it filled a cell. No span overwrites another. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>

#include "internal.h"

struct span_cell {
    _Atomic uint64_t turn; /* p: the cell is free for the span at position p; p + 1: it contains that span */
    lck_span span;
};

struct span_queue {
    uint64_t mask; /* cells - 1 */
    _Atomic uint64_t head; /* next position to be filled */
    _Atomic uint64_t dropped;
    uint64_t tail; /* next position to be taken; only the consumer accesses it */
    struct span_cell cells[];
};

static _Thread_local uint32_t thread_id;

static uint32_t this_thread(void)
{
    if (thread_id == 0)
        thread_id = (uint32_t)syscall(SYS_gettid);
    return thread_id;
}

static uint64_t thread_cpu_ns(void)
{
    struct timespec used;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) != 0)
        return 0;
    return (uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec;
}

/* ---- producers --------------------------------------------------------------------------------------- */

/* Claim the cell of the next position; NULL if it is not free. */
static struct span_cell *claim(struct span_queue *queue, uint64_t *position)
{
    *position = atomic_load(&queue->head);
    for (;;) {
        struct span_cell *cell = &queue->cells[*position & queue->mask];
        uint64_t turn = atomic_load(&cell->turn);
        if (turn == *position) {
            if (atomic_compare_exchange_weak(&queue->head, position, *position + 1))
                return cell;
        } else if (turn < *position) { /* the consumer has not taken the cell's previous span yet */
            return NULL;
        } else {
            *position = atomic_load(&queue->head);
        }
    }
}

void span_start(struct span *span)
{
    span->begin_ns = clock_ns();
    span->cpu_ns = thread_cpu_ns();
}

void span_end(lck_engine *engine, const struct span *span, uint32_t kind, uint64_t generation, uint64_t tensor,
              uint64_t nbytes, bool helped)
{
    struct span_queue *queue = atomic_load(&engine->spans);
    uint64_t position;
    struct span_cell *cell = claim(queue, &position);
    if (cell == NULL) {
        atomic_fetch_add(&queue->dropped, 1);
        return;
    }
    cell->span = (lck_span){.begin_ns = span->begin_ns,
                            .end_ns = clock_ns(),
                            .cpu_ns = thread_cpu_ns() - span->cpu_ns,
                            .generation = generation,
                            .tensor = tensor,
                            .nbytes = nbytes,
                            .kind = kind,
                            .thread = this_thread(),
                            .helped = helped};
    atomic_store(&cell->turn, position + 1);
}

/* ---- the consumer ------------------------------------------------------------------------------------ */

static struct span_queue *queue_new(uint64_t cells)
{
    struct span_queue *queue = calloc(1, sizeof *queue + cells * sizeof queue->cells[0]);
    if (queue == NULL)
        return NULL;
    queue->mask = cells - 1;
    for (uint64_t i = 0; i < cells; i++)
        atomic_store(&queue->cells[i].turn, i);
    return queue;
}

int32_t lck_spans_start(lck_engine *engine, uint64_t cells)
{
    int32_t status = engine_check(engine);
    if (status != LCK_OK)
        return status;
    if (cells < 2 || (cells & (cells - 1)) != 0 || cells > LCK_SPANS_MAX)
        return LCK_EINVAL;
    if (atomic_load(&engine->spans) == NULL) {
        struct span_queue *queue = queue_new(cells);
        if (queue == NULL)
            return LCK_ENOMEM;
        atomic_store(&engine->spans, queue);
    }
    atomic_store(&engine->spans_on, true);
    return LCK_OK;
}

int32_t lck_spans_stop(lck_engine *engine)
{
    int32_t status = engine_check(engine);
    if (status == LCK_OK)
        atomic_store(&engine->spans_on, false);
    return status;
}

int32_t lck_spans_take(lck_engine *engine, lck_span *out, uint64_t most, uint64_t *count, uint64_t *dropped)
{
    int32_t status = engine_check(engine);
    if (status != LCK_OK)
        return status;
    if ((out == NULL && most > 0) || count == NULL || dropped == NULL)
        return LCK_EINVAL;
    *count = *dropped = 0;
    struct span_queue *queue = atomic_load(&engine->spans);
    if (queue == NULL)
        return LCK_OK;
    for (; *count < most; queue->tail++, ++*count) {
        struct span_cell *cell = &queue->cells[queue->tail & queue->mask];
        if (atomic_load(&cell->turn) != queue->tail + 1)
            break;
        out[*count] = cell->span;
        atomic_store(&cell->turn, queue->tail + queue->mask + 1);
    }
    *dropped = atomic_exchange(&queue->dropped, 0);
    return LCK_OK;
}
