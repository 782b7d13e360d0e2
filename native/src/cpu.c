/* cpu.c: detect the processor's features and choose kernels once at load; write-back and fence. */
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

/* Best first: clwb can keep the line in the cache, and clflushopt need not wait for the flush before it. Bits of EBX in
 * CPUID leaf 7 tell whether the processor has clwb and clflushopt, which need no support from the operating system.
 * clflush is part of x86-64. */
static const struct write_back {
    const char *name;
    write_back_fn *lines;
    unsigned bit;
} write_backs[] = {
    {"clwb", back_clwb, 1u << 24},
    {"clflushopt", back_clflushopt, 1u << 23},
    {"clflush", back_clflush, 0},
};

static _Atomic(const struct write_back *) write_back = &write_backs[2];

static const struct write_back *choose_write_back(const char *name)
{
    unsigned a, b = 0, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        b = 0;
    for (size_t i = 0; i < sizeof write_backs / sizeof *write_backs; i++)
        if ((write_backs[i].bit & ~b) == 0 &&
            (strcmp(name, "auto") == 0 || strcmp(name, write_backs[i].name) == 0))
            return &write_backs[i];
    return NULL;
}

enum { SSE42 = 1, AVX2 = 2, WIDE = 4, AVX512 = 8 };

static unsigned features;

/* __builtin_cpu_supports also checks (xgetbv) whether the operating system saves the vector registers. */
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

/* Best first. Names with a dash are for tests: they select a variant even where a better one is supported. */
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
    atomic_store(&write_back, choose_write_back("auto"));
}

bool cpu_can_write_back(void) { return true; }

void cpu_write_back(const void *start, size_t nbytes)
{
    uintptr_t first = (uintptr_t)start & ~(uintptr_t)(LCK_LINE - 1);
    const struct write_back *chosen = atomic_load_explicit(&write_back, memory_order_relaxed);
    chosen->lines((const unsigned char *)first, (const unsigned char *)start + nbytes);
}

void cpu_fence(void) { _mm_sfence(); }

const char *lck_write_back_name(void) { return atomic_load(&write_back)->name; }

int32_t lck_write_back_set(const char *name)
{
    const struct write_back *chosen = name == NULL ? NULL : choose_write_back(name);
    if (chosen == NULL)
        return LCK_EINVAL;
    atomic_store(&write_back, chosen);
    return LCK_OK;
}

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

const char *lck_write_back_name(void) { return "none"; }

int32_t lck_write_back_set(const char *name)
{
    return name != NULL && (strcmp(name, "auto") == 0 || strcmp(name, "none") == 0) ? LCK_OK : LCK_EINVAL;
}

#endif

/* Runs at load, before any thread can call the library, so the tables need no locks. */
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
