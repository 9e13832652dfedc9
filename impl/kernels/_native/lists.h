/* Lists of tensors, walked by several threads a chunk at a time, and elements as f32. */

#ifndef TANDEM_LISTS_H
#define TANDEM_LISTS_H

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Compiled once for each level of the instruction set; the loader picks one. Products and sums are never contracted
   (setup: -ffp-contract=off), so every level gives the same bits, but for what a nan carries. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum {
    BLOCK = 1 << 9, /* elements that stay in the first-level cache while they are worked on */
    LINE = 64,      /* bytes that memory gives at once */
    LANES = 32,     /* partial sums of a chunk's squares */
};

enum dtype { F32, BF16, F16 };

static const int64_t BYTES[] = {[F32] = 4, [BF16] = 2, [F16] = 2};

struct list {
    char *const *tensors; /* addresses of the first elements; null: there is no such list */
    int64_t dtype;
};

/* --- chunks, which threads take in turn */

struct chunks {
    int64_t threads;
    int64_t power; /* of two, that a chunk's elements are */
    int64_t count; /* of tensors */
    const int64_t *numels;
    _Atomic int64_t next;
};

INLINE int64_t chunks_in(const struct chunks *all, int64_t tensor)
{
    return (all->numels[tensor] + ((int64_t)1 << all->power) - 1) >> all->power;
}

struct chunk {
    int64_t number; /* among all */
    int64_t first;  /* number of its tensor's first */
    int64_t tensor, start, stop;
};

/* The next chunk that nobody has, later than `mine`; false if all are taken. */
INLINE bool take(struct chunks *all, struct chunk *mine)
{
    mine->number = atomic_fetch_add_explicit(&all->next, 1, memory_order_relaxed);
    for (; mine->tensor < all->count; mine->tensor++) {
        const int64_t chunks = chunks_in(all, mine->tensor);
        if (mine->number < mine->first + chunks) {
            const int64_t numel = all->numels[mine->tensor], length = (int64_t)1 << all->power;
            mine->start = (mine->number - mine->first) * length;
            mine->stop = mine->start + length < numel ? mine->start + length : numel;
            return true;
        }
        mine->first += chunks;
    }
    return false;
}

/* Elements of the chunk's block that begins at `start`. */
INLINE int64_t block_at(const struct chunk *mine, int64_t start)
{
    return mine->stop - start < BLOCK ? mine->stop - start : BLOCK;
}

/* A parallel region of the OpenMP runtime that torch has loaded, so that both share its threads. */
typedef void region(void (*work)(void *), void *job, unsigned threads, unsigned flags);

static inline void in_parallel(region *parallel, int64_t threads, void (*work)(void *), void *job)
{
    if (threads > 1)
        parallel(work, job, (unsigned)threads, 0);
    else
        work(job);
}

/* --- elements: narrow ones are worked on in f32 and rounded to nearest, ties to even */

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float from_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

INLINE uint16_t to_bf16(float value)
{
    const uint32_t bits = bits_of(value);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* By integers, for compilers that know no f16 or do not vectorise it; subnormals hold where f32 ones are flushed. */
INLINE float from_f16(uint16_t half)
{
    const uint32_t magnitude = half & 0x7fff, rebiased = (magnitude << 13) + (112u << 23);
    const uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    const uint32_t bits = magnitude < 0x0400   ? subnormal
                          : magnitude < 0x7c00 ? rebiased
                                               : rebiased + (112u << 23); /* inf and nan */
    return float_of(bits | (uint32_t)(half & 0x8000) << 16);
}

INLINE uint16_t to_f16(float value)
{
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    /* 0.5 is so much larger that the sum is rounded to a multiple of the smallest f16. */
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t rounded = magnitude < 0x38800000   ? subnormal
                             : magnitude < 0x47800000 ? normal
                                                      : special;
    return (uint16_t)(rounded | (bits >> 16 & 0x8000));
}

/* f16 by the instructions that all x86 processors have that have AVX2: eight at a time, the rest by integers. */
#if defined(__x86_64__)
#define HAS_F16C __builtin_cpu_supports("avx2") /* older compilers do not know the name "f16c" here */
#define F16C __attribute__((target("avx,f16c")))
#else
#define HAS_F16C false
#define F16C
#endif

F16C static inline void widen_f16(float *restrict to, const uint16_t *restrict halves, int64_t n)
{
    int64_t i = 0;
#if defined(__x86_64__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
#endif
    for (; i < n; i++)
        to[i] = from_f16(halves[i]);
}

F16C static inline void narrow_f16(uint16_t *restrict to, const float *restrict from, int64_t n)
{
    int64_t i = 0;
#if defined(__x86_64__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        to[i] = to_f16(from[i]);
}

INLINE void widen(float *restrict to, const uint16_t *restrict halves, int64_t dtype, int64_t n)
{
    if (dtype == BF16)
        for (int64_t i = 0; i < n; i++)
            to[i] = from_bf16(halves[i]);
    else if (HAS_F16C)
        widen_f16(to, halves, n);
    else
        for (int64_t i = 0; i < n; i++)
            to[i] = from_f16(halves[i]);
}

INLINE void narrow(void *to, const float *restrict from, int64_t dtype, int64_t n)
{
    uint16_t *restrict halves = to;
    if (dtype == F32)
        memcpy(to, from, (size_t)n * sizeof *from);
    else if (dtype == BF16)
        for (int64_t i = 0; i < n; i++)
            halves[i] = to_bf16(from[i]);
    else if (HAS_F16C)
        narrow_f16(halves, from, n);
    else
        for (int64_t i = 0; i < n; i++)
            halves[i] = to_f16(from[i]);
}

/* Elements in memory, of a dtype that is constant where these are called and whose conversion a loop can hold. */
INLINE float element(const void *from, int64_t i, enum dtype dtype)
{
    return dtype == BF16 ? from_bf16(((const uint16_t *)from)[i]) : ((const float *)from)[i];
}

INLINE void set_element(void *to, int64_t i, float value, enum dtype dtype)
{
    if (dtype == BF16)
        ((uint16_t *)to)[i] = to_bf16(value);
    else
        ((float *)to)[i] = value;
}

INLINE char *at(struct list list, int64_t tensor, int64_t element)
{
    return list.tensors[tensor] + element * BYTES[list.dtype];
}

/* Asks for the block at this place of a later tensor: of short ones, of a chunk each, this thread comes to it next if
   all threads are as fast. They begin where the processor expects none, and are over before it has learned better. */
INLINE void fetch_ahead(struct list list, const struct chunks *all, const struct chunk *mine, int64_t start, int64_t n)
{
    const int64_t later = mine->tensor + all->threads;
    if (later >= all->count || all->numels[later] < start + n)
        return;
    const char *block = at(list, later, start);
    for (int64_t byte = 0; byte < n * BYTES[list.dtype]; byte += LINE)
        __builtin_prefetch(block + byte, 0, 2);
}

/* Elements of a list as f32: in place where they are, else in `buffer`; null if there is no such list. */
INLINE float *opened(float *buffer, struct list list, int64_t tensor, int64_t start, int64_t n)
{
    if (!list.tensors)
        return 0;
    char *from = at(list, tensor, start);
    if (list.dtype == F32)
        return (float *)from;
    widen(buffer, (const uint16_t *)from, list.dtype, n);
    return buffer;
}

/* Adds the squares of a block to the sums of its chunk. */
INLINE void add_squares(double *lanes, const void *elements, int64_t n, enum dtype dtype)
{
    const int64_t whole = n - n % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) {
            const double value = element(elements, i + lane, dtype);
            lanes[lane] += value * value;
        }
    for (int64_t i = whole; i < n; i++) {
        const double value = element(elements, i, dtype);
        lanes[i - whole] += value * value;
    }
}

INLINE void add_squares_at(double *lanes, struct list list, int64_t tensor, int64_t start, int64_t n)
{
    float buffer[BLOCK];
    if (list.dtype == BF16)
        add_squares(lanes, at(list, tensor, start), n, BF16);
    else
        add_squares(lanes, opened(buffer, list, tensor, start, n), n, F32);
}

/* In pairs, of which a processor adds several at once. */
INLINE double sum_of(double *lanes)
{
    for (int64_t half = LANES / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

INLINE void put_back(struct list list, const float *values, int64_t tensor, int64_t start, int64_t n)
{
    if (values && list.dtype != F32)
        narrow(at(list, tensor, start), values, list.dtype, n);
}

#endif
