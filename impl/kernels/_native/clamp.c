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

FOR_EACH_CPU static void clamp_chunks(void *job)
{
    struct clamping *all = job;
    const float low = all->low, high = all->high;
    float buffer[BLOCK];
    for (struct chunk mine = {0}; take(&all->chunks, &mine);) {
        for (int64_t start = mine.start; start < mine.stop; start += BLOCK) {
            const int64_t n = block_at(&mine, start);
            float *values = opened(buffer, all->list, mine.tensor, start, n);
            for (int64_t i = 0; i < n; i++) {
                const float raised = values[i] < low ? low : values[i];
                values[i] = raised > high ? high : raised;
            }
            put_back(all->list, values, mine.tensor, start, n);
        }
    }
}

void tandem_clamp(
    region *parallel, int64_t threads, int64_t count, const int64_t *numels, struct list list, double low, double high)
{
    struct clamping job = {{threads, count, numels, 0}, list, held((float)low, list.dtype), held((float)high, list.dtype)};
    in_parallel(parallel, threads, clamp_chunks, &job);
}
