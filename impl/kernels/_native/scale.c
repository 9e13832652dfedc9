/* Lists of tensors multiplied in place by one factor; a product is rounded once. */

#include "lists.h"

struct scaling {
    struct chunks chunks;
    struct list list;
    float factor;
};

INLINE void scale_elements(void *elements, int64_t n, float factor, enum dtype dtype)
{
    for (int64_t i = 0; i < n; i++)
        set_element(elements, i, element(elements, i, dtype) * factor, dtype);
}

FOR_EACH_CPU static void scale_chunks(void *job)
{
    struct scaling *all = job;
    const float factor = all->factor;
    float buffer[BLOCK];
    for (struct chunk mine = {0}; take(&all->chunks, &mine);) {
        for (int64_t start = mine.start; start < mine.stop; start += BLOCK) {
            const int64_t n = block_at(&mine, start);
            if (all->list.dtype == BF16) {
                scale_elements(at(all->list, mine.tensor, start), n, factor, BF16);
                continue;
            }
            float *values = opened(buffer, all->list, mine.tensor, start, n);
            scale_elements(values, n, factor, F32);
            put_back(all->list, values, mine.tensor, start, n);
        }
    }
}

void tandem_scale(
    region *parallel, int64_t threads, int64_t power, int64_t count, const int64_t *numels, struct list list, float factor)
{
    struct scaling job = {{threads, power, count, numels, 0}, list, factor};
    in_parallel(parallel, threads, scale_chunks, &job);
}
