/* copy_x86.c: streaming copies with the checksum computed on the registers that are stored.
 *
 * Each loop loads a vector, pins it in its register (a second load could return other bytes), stores it past the
 * caches, and folds it into the checksum. Folding: if 128 bits A of the message stand D bits before 128 bits B, the
 * checksum does not change if A is removed and A * x^D mod P is added (xor) to B. In the reflected domain a carry-less
 * product of 64-bit halves is shifted by one bit, so the powers are smaller by 1. After the last fold one stride is
 * left, whose checksum equals the checksum of all bytes. The crc32 instruction computes it. This takes only a few dozen
 * instructions per block, so there are no constants for folding the stride further. */
#include "internal.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define SSE42 __attribute__((target("sse4.2")))
#define AVX2 __attribute__((target("avx2,pclmul,sse4.2")))
#define AVX2V __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,vpclmulqdq,avx2,pclmul,sse4.2")))

#define PIN(v) __asm__ __volatile__("" : "+v"(v))
#define PIN_X(v) __asm__ __volatile__("" : "+x"(v)) /* the constraint letter v exists only with AVX-512 */

enum { AVX2_STRIDE = 128, AVX512_STRIDE = 256, CRC64_STRIDE = 64 }; /* bytes per round of a loop */

/* Fold constants: [0] multiplies the low 64 bits of a vector, and [1] the high 64 bits. The bits are reflected, so the
 * low bits come first in the message, and need the higher power of x. */
static uint64_t fold_avx2[2], fold_avx512[2], fold64_stride[2], fold64_vector[2];

static void fold_constants(uint64_t *fold, uint32_t stride)
{
    uint32_t bits = stride * 8;
    fold[0] = (uint64_t)crc32c_xpow(bits + 64 - 1) << 32;
    fold[1] = (uint64_t)crc32c_xpow(bits - 1) << 32;
}

static void fold64_constants(uint64_t *fold, uint32_t stride)
{
    uint32_t bits = stride * 8;
    fold[0] = crc64_xpow(bits + 64 - 1);
    fold[1] = crc64_xpow(bits - 1);
}

void kernel_x86_init(void)
{
    fold_constants(fold_avx2, AVX2_STRIDE);
    fold_constants(fold_avx512, AVX512_STRIDE);
    fold64_constants(fold64_stride, CRC64_STRIDE);
    fold64_constants(fold64_vector, 16);
}

/* ---- sse2 -------------------------------------------------------------------------------------------- */

INLINE void sse2_words(uint64_t words[8], unsigned char *to, const unsigned char *from, bool store)
{
    for (int i = 0; i < 4; i++) {
        __m128i v = _mm_loadu_si128((const __m128i *)(const void *)(from + 16 * i));
        PIN_X(v);
        if (store)
            _mm_stream_si128((__m128i *)(void *)(to + 16 * i), v);
        words[2 * i] = (uint64_t)_mm_cvtsi128_si64(v);
        words[2 * i + 1] = (uint64_t)_mm_cvtsi128_si64(_mm_unpackhi_epi64(v, v));
    }
}

static uint32_t sse2_copy(uint32_t state, void *dst, const void *src, size_t nbytes)
{
    unsigned char *to = dst;
    const unsigned char *from = src;
    for (size_t at = 0; at < nbytes; at += LCK_LINE) {
        uint64_t words[8];
        sse2_words(words, to + at, from + at, true);
        state = crc32c_update(state, words, LCK_LINE);
    }
    return state;
}

const struct kernel kernel_sse2 = {"sse2", sse2_copy, crc32c_update, crc64_update, true};

/* ---- sse2 with the crc32 instruction ------------------------------------------------------------------- */

SSE42 INLINE uint32_t crc_words(uint32_t state, const uint64_t *words, int count)
{
    uint64_t crc = state;
    for (int i = 0; i < count; i++)
        crc = _mm_crc32_u64(crc, words[i]);
    return (uint32_t)crc;
}

SSE42 INLINE uint32_t sse42_lines(uint32_t state, unsigned char *to, const unsigned char *from, size_t nbytes,
                                  bool store)
{
    for (size_t at = 0; at < nbytes; at += LCK_LINE) {
        uint64_t words[8];
        sse2_words(words, to + at, from + at, store);
        state = crc_words(state, words, 8);
    }
    return state;
}

SSE42 static uint32_t sse42_copy(uint32_t state, void *dst, const void *src, size_t nbytes)
{
    return sse42_lines(state, dst, src, nbytes, true);
}

SSE42 static uint32_t sse42_crc(uint32_t state, const void *src, size_t nbytes)
{
    unsigned char none[1];
    return sse42_lines(state, none, src, nbytes, false);
}

const struct kernel kernel_sse42 = {"sse2", sse42_copy, sse42_crc, crc64_update, true};

/* ---- avx2: 32-byte streams, 128-bit folds ---------------------------------------------------------------- */

AVX2 INLINE __m256i avx2_load(unsigned char *to, const unsigned char *from, bool store)
{
    __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)from);
    PIN_X(v);
    if (store)
        _mm256_stream_si256((__m256i *)(void *)to, v);
    return v;
}

AVX2 INLINE __m128i avx2_fold(__m128i acc, __m128i k, __m128i data)
{
    __m128i low = _mm_clmulepi64_si128(acc, k, 0x00);
    __m128i high = _mm_clmulepi64_si128(acc, k, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, data), high);
}

/* The CRC-64/XZ of metadata. One vector is left after the folds, and the tables compute its checksum. */
AVX2 static uint64_t folded_crc64(uint64_t state, const void *src, size_t nbytes)
{
    const unsigned char *from = src;
    size_t strides = nbytes & ~(size_t)(CRC64_STRIDE - 1);
    if (strides == 0)
        return crc64_update(state, from, nbytes);
    const __m128i k = _mm_loadu_si128((const __m128i *)(const void *)fold64_stride);
    const __m128i k_vector = _mm_loadu_si128((const __m128i *)(const void *)fold64_vector);
    __m128i acc[4];
    for (int i = 0; i < 4; i++)
        acc[i] = _mm_loadu_si128((const __m128i *)(const void *)(from + 16 * i));
    acc[0] = _mm_xor_si128(acc[0], _mm_cvtsi64_si128((long long)state));
    for (size_t at = CRC64_STRIDE; at < strides; at += CRC64_STRIDE) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            acc[i] = avx2_fold(acc[i], k, _mm_loadu_si128((const __m128i *)(const void *)(from + at + 16 * i)));
    }
    for (int i = 1; i < 4; i++)
        acc[0] = avx2_fold(acc[0], k_vector, acc[i]);
    uint64_t left[2];
    _mm_storeu_si128((__m128i *)(void *)left, acc[0]);
    return crc64_update(crc64_update(0, left, sizeof left), from + strides, nbytes - strides);
}

/* nbytes is a multiple of AVX2_STRIDE and not 0. */
AVX2 INLINE uint32_t avx2_strides(uint32_t state, unsigned char *to, const unsigned char *from, size_t nbytes,
                                  bool store)
{
    const __m128i k = _mm_loadu_si128((const __m128i *)(const void *)fold_avx2);
    __m128i acc[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m256i v = avx2_load(to + 32 * i, from + 32 * i, store);
        acc[2 * i] = _mm256_castsi256_si128(v);
        acc[2 * i + 1] = _mm256_extracti128_si256(v, 1);
    }
    acc[0] = _mm_xor_si128(acc[0], _mm_cvtsi32_si128((int)state));
    for (size_t at = AVX2_STRIDE; at < nbytes; at += AVX2_STRIDE) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m256i v = avx2_load(to + at + 32 * i, from + at + 32 * i, store);
            acc[2 * i] = avx2_fold(acc[2 * i], k, _mm256_castsi256_si128(v));
            acc[2 * i + 1] = avx2_fold(acc[2 * i + 1], k, _mm256_extracti128_si256(v, 1));
        }
    }
    uint64_t left[AVX2_STRIDE / 8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        _mm_storeu_si128((__m128i *)(void *)(left + 2 * i), acc[i]);
    return crc_words(0, left, AVX2_STRIDE / 8);
}

AVX2 INLINE uint32_t avx2_lines(uint32_t state, unsigned char *to, const unsigned char *from, size_t nbytes,
                                bool store)
{
    size_t strides = nbytes & ~(size_t)(AVX2_STRIDE - 1);
    if (strides > 0)
        state = avx2_strides(state, to, from, strides, store);
    for (size_t at = strides; at < nbytes; at += LCK_LINE) {
        uint64_t words[8];
        for (int i = 0; i < 2; i++) {
            __m256i v = avx2_load(to + at + 32 * i, from + at + 32 * i, store);
            _mm256_storeu_si256((__m256i *)(void *)(words + 4 * i), v);
        }
        state = crc_words(state, words, 8);
    }
    return state;
}

AVX2 static uint32_t avx2_copy(uint32_t state, void *dst, const void *src, size_t nbytes)
{
    return avx2_lines(state, dst, src, nbytes, true);
}

AVX2 static uint32_t avx2_crc(uint32_t state, const void *src, size_t nbytes)
{
    unsigned char none[1];
    return avx2_lines(state, none, src, nbytes, false);
}

const struct kernel kernel_avx2 = {"avx2", avx2_copy, avx2_crc, folded_crc64, true};

/* ---- avx2 with VPCLMULQDQ: two 128-bit folds at once ------------------------------------------------------- */

AVX2V INLINE __m256i avx2v_fold(__m256i acc, __m256i k, __m256i data)
{
    __m256i low = _mm256_clmulepi64_epi128(acc, k, 0x00);
    __m256i high = _mm256_clmulepi64_epi128(acc, k, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, data), high);
}

/* nbytes is a multiple of AVX2_STRIDE and not 0. */
AVX2V INLINE uint32_t avx2v_strides(uint32_t state, unsigned char *to, const unsigned char *from, size_t nbytes,
                                    bool store)
{
    const __m256i k = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)fold_avx2));
    __m256i acc[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        acc[i] = avx2_load(to + 32 * i, from + 32 * i, store);
    acc[0] = _mm256_xor_si256(acc[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)state)));
    for (size_t at = AVX2_STRIDE; at < nbytes; at += AVX2_STRIDE) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            acc[i] = avx2v_fold(acc[i], k, avx2_load(to + at + 32 * i, from + at + 32 * i, store));
    }
    uint64_t left[AVX2_STRIDE / 8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        _mm256_storeu_si256((__m256i *)(void *)(left + 4 * i), acc[i]);
    return crc_words(0, left, AVX2_STRIDE / 8);
}

AVX2V static uint32_t avx2v_copy(uint32_t state, void *dst, const void *src, size_t nbytes)
{
    size_t strides = nbytes & ~(size_t)(AVX2_STRIDE - 1);
    if (strides > 0)
        state = avx2v_strides(state, dst, src, strides, true);
    return avx2_lines(state, (unsigned char *)dst + strides, (const unsigned char *)src + strides, nbytes - strides,
                      true);
}

AVX2V static uint32_t avx2v_crc(uint32_t state, const void *src, size_t nbytes)
{
    unsigned char none[1];
    size_t strides = nbytes & ~(size_t)(AVX2_STRIDE - 1);
    if (strides > 0)
        state = avx2v_strides(state, none, src, strides, false);
    return avx2_lines(state, none, (const unsigned char *)src + strides, nbytes - strides, false);
}

const struct kernel kernel_avx2v = {"avx2", avx2v_copy, avx2v_crc, folded_crc64, true};

/* ---- avx512: 64-byte streams, four 128-bit folds at once --------------------------------------------------- */

AVX512 INLINE __m512i avx512_load(unsigned char *to, const unsigned char *from, bool store)
{
    __m512i v = _mm512_loadu_si512(from);
    PIN(v);
    if (store)
        _mm512_stream_si512((void *)to, v);
    return v;
}

AVX512 INLINE __m512i avx512_fold(__m512i acc, __m512i k, __m512i data)
{
    __m512i low = _mm512_clmulepi64_epi128(acc, k, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(acc, k, 0x11);
    return _mm512_ternarylogic_epi64(low, high, data, 0x96); /* xor of the three */
}

/* nbytes is a multiple of AVX512_STRIDE and not 0. */
AVX512 INLINE uint32_t avx512_strides(uint32_t state, unsigned char *to, const unsigned char *from, size_t nbytes,
                                      bool store)
{
    const __m512i k = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)fold_avx512));
    __m512i acc[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        acc[i] = avx512_load(to + 64 * i, from + 64 * i, store);
    acc[0] = _mm512_xor_si512(acc[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    for (size_t at = AVX512_STRIDE; at < nbytes; at += AVX512_STRIDE) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            acc[i] = avx512_fold(acc[i], k, avx512_load(to + at + 64 * i, from + at + 64 * i, store));
    }
    uint64_t left[AVX512_STRIDE / 8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        _mm512_storeu_si512(left + 8 * i, acc[i]);
    return crc_words(0, left, AVX512_STRIDE / 8);
}

AVX512 INLINE uint32_t avx512_lines(uint32_t state, unsigned char *to, const unsigned char *from, size_t nbytes,
                                    bool store)
{
    size_t strides = nbytes & ~(size_t)(AVX512_STRIDE - 1);
    if (strides > 0)
        state = avx512_strides(state, to, from, strides, store);
    for (size_t at = strides; at < nbytes; at += LCK_LINE) {
        uint64_t words[8];
        _mm512_storeu_si512(words, avx512_load(to + at, from + at, store));
        state = crc_words(state, words, 8);
    }
    return state;
}

AVX512 static uint32_t avx512_copy(uint32_t state, void *dst, const void *src, size_t nbytes)
{
    return avx512_lines(state, dst, src, nbytes, true);
}

AVX512 static uint32_t avx512_crc(uint32_t state, const void *src, size_t nbytes)
{
    unsigned char none[1];
    return avx512_lines(state, none, src, nbytes, false);
}

const struct kernel kernel_avx512 = {"avx512", avx512_copy, avx512_crc, folded_crc64, true};

#endif
