/* Lists of tensors clamped in place, read and written once; nan stays nan, and a zero keeps its sign. */

#include "lists.h"

struct clamping {
    struct chunks chunks;
    struct list list;
    float low, high;
};

/* A bound as the tensors' dtype holds it. */
static float held(float bound, int64_t dtype)
{
    uint16_t half;
    if (dtype == F32)
        return bound;
    narrow(&half, &bound, dtype, 1);
    widen(&bound, &half, dtype, 1);
    return bound;
}

INLINE void clamp_elements(void *elements, int64_t n, float low, float high, enum dtype dtype)
{
    for (int64_t i = 0; i < n; i++) {
        const float value = element(elements, i, dtype), raised = value < low ? low : value;
        set_element(elements, i, raised > high ? high : raised, dtype);
    }
}

FOR_EACH_CPU static void clamp_chunks(void *job)
{
    struct clamping *all = job;
    const float low = all->low, high = all->high;
    float buffer[BLOCK];
    for (struct chunk mine = {0}; take(&all->chunks, &mine);) {
        for (int64_t start = mine.start; start < mine.stop; start += BLOCK) {
            const int64_t n = block_at(&mine, start);
            if (all->list.dtype == BF16) {
                clamp_elements(at(all->list, mine.tensor, start), n, low, high, BF16);
                continue;
            }
            float *values = opened(buffer, all->list, mine.tensor, start, n);
            clamp_elements(values, n, low, high, F32);
            put_back(all->list, values, mine.tensor, start, n);
        }
    }
}

void tandem_clamp(
    region *parallel, int64_t threads, int64_t power, int64_t count, const int64_t *numels, struct list list, double low, double high)
{
    struct clamping job = {
        {threads, power, count, numels, 0}, list, held((float)low, list.dtype), held((float)high, list.dtype)};
    in_parallel(parallel, threads, clamp_chunks, &job);
}
