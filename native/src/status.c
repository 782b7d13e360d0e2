/* status.c: status codes, and the numbers by which Python detects a library with another interface. */
#include "internal.h"

static _Thread_local int32_t last_errno;

int32_t status_sys(int error)
{
    last_errno = error;
    return LCK_ESYS;
}

int32_t lck_last_errno(void) { return last_errno; }

uint32_t lck_abi_version(void) { return LCK_ABI_VERSION; }

uint32_t lck_sizeof(uint32_t id)
{
    switch (id) {
    case 0: return (uint32_t)sizeof(lck_copy);
    case 1: return (uint32_t)sizeof(lck_commit);
    case 2: return (uint32_t)sizeof(lck_job_info);
    case 3: return (uint32_t)sizeof(lck_event);
    case 4: return (uint32_t)sizeof(lck_extent);
    case 5: return (uint32_t)sizeof(lck_read);
    case 6: return (uint32_t)sizeof(lck_span);
    default: return 0;
    }
}

/* cffi computes the layout of these structs from the header. The compiler computes the same layout, because the structs
 * have no padding. */
_Static_assert(sizeof(lck_copy) == 40, "lck_copy");
_Static_assert(sizeof(lck_commit) == 144, "lck_commit");
_Static_assert(sizeof(lck_job_info) == 40, "lck_job_info");
_Static_assert(sizeof(lck_event) == 40, "lck_event");
_Static_assert(sizeof(lck_extent) == 16, "lck_extent");
_Static_assert(sizeof(lck_span) == 64, "lck_span");
