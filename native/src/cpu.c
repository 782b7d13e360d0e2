/* cpu.c: what this processor can do, chosen once at load; write-back and fence. */
#include <string.h>

#include "internal.h"

static _Atomic(const struct kernel *) current = &kernel_portable;

const struct kernel *kernel_current(void) { return atomic_load_explicit(&current, memory_order_relaxed); }

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

typedef void write_back_fn(const unsigned char *line, const unsigned char *end);

static void back_clflush(const unsigned char *line, const unsigned char *end)
{
    for (; line < end; line += LCK_LINE)
        _mm_clflush(line);
}

__attribute__((target("clflushopt"))) static void back_clflushopt(const unsigned char *line, const unsigned char *end)
{
    for (; line < end; line += LCK_LINE)
        _mm_clflushopt((void *)(uintptr_t)line);
}

__attribute__((target("clwb"))) static void back_clwb(const unsigned char *line, const unsigned char *end)
{
    for (; line < end; line += LCK_LINE)
        _mm_clwb((void *)(uintptr_t)line);
}

static write_back_fn *write_back = back_clflush;

/* Both work on any processor state; only the instructions must exist (leaf 7). */
static void choose_write_back(void)
{
    unsigned a, b = 0, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return;
    if (b & 1u << 24)
        write_back = back_clwb;
    else if (b & 1u << 23)
        write_back = back_clflushopt;
}

enum { SSE42 = 1, AVX2 = 2, WIDE = 4, AVX512 = 8 };

static unsigned features;

/* __builtin_cpu_supports also asks the operating system (xgetbv) for the vector registers. */
static void find_features(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2"))
        features |= SSE42;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("pclmul"))
        features |= AVX2;
    if (__builtin_cpu_supports("vpclmulqdq"))
        features |= WIDE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        features |= AVX512;
}

/* Best first. The names with a dash reach what a better processor would pass over: for tests. */
static const struct choice {
    const char *name;
    const struct kernel *kernel;
    unsigned needs;
} choices[] = {
    {"avx512", &kernel_avx512, SSE42 | AVX2 | WIDE | AVX512},
    {"avx2", &kernel_avx2v, SSE42 | AVX2 | WIDE},
    {"avx2", &kernel_avx2, SSE42 | AVX2},
    {"avx2-narrow", &kernel_avx2, SSE42 | AVX2},
    {"sse2", &kernel_sse42, SSE42},
    {"sse2", &kernel_sse2, 0},
    {"sse2-table", &kernel_sse2, 0},
    {"portable", &kernel_portable, 0},
};

static const struct kernel *choose(const char *name)
{
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        if ((choices[i].needs & ~features) == 0 &&
            (strcmp(name, "auto") == 0 || strcmp(name, choices[i].name) == 0))
            return choices[i].kernel;
    return NULL;
}

static void machine_init(void)
{
    find_features();
    kernel_x86_init();
    choose_write_back();
}

bool cpu_can_write_back(void) { return true; }

void cpu_write_back(const void *start, size_t nbytes)
{
    uintptr_t first = (uintptr_t)start & ~(uintptr_t)(LCK_LINE - 1);
    write_back((const unsigned char *)first, (const unsigned char *)start + nbytes);
}

void cpu_fence(void) { _mm_sfence(); }

int32_t lck_has_clwb(void) { return write_back == back_clwb; }

#else

static const struct kernel *choose(const char *name)
{
    return strcmp(name, "auto") == 0 || strcmp(name, "portable") == 0 ? &kernel_portable : NULL;
}

static void machine_init(void) {}

bool cpu_can_write_back(void) { return false; }

void cpu_write_back(const void *start, size_t nbytes)
{
    (void)start;
    (void)nbytes;
}

void cpu_fence(void) { atomic_thread_fence(memory_order_seq_cst); }

int32_t lck_has_clwb(void) { return 0; }

#endif

/* At load, before any thread can call in: the tables need no locks afterwards. */
__attribute__((constructor)) static void library_init(void)
{
    crc_init();
    machine_init();
    atomic_store(&current, choose("auto"));
}

const char *lck_isa_name(void) { return kernel_current()->name; }

int32_t lck_isa_set(const char *name)
{
    if (name == NULL)
        return LCK_EINVAL;
    const struct kernel *kernel = choose(name);
    if (kernel == NULL)
        return LCK_EINVAL;
    atomic_store(&current, kernel);
    return LCK_OK;
}
