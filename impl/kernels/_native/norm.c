/* The sum of squares of lists of tensors, read once; inf or nan in them is inf or nan in it. */

#include "lists.h"

enum { LANES = 16 };

struct squares {
    struct chunks chunks;
    struct list list;
    double *sums; /* one a chunk, so that their order does not depend on the threads */
};

FOR_EACH_CPU static void sum_chunks(void *job)
{
    struct squares *all = job;
    float buffer[BLOCK];
    for (struct chunk mine = {0}; take(&all->chunks, &mine);) {
        double lanes[LANES] = {0}, sum = 0;
        for (int64_t start = mine.start; start < mine.stop; start += BLOCK) {
            const int64_t n = block_at(&mine, start), whole = n - n % LANES;
            fetch_ahead(all->list, &all->chunks, &mine, start, n);
            const float *values = opened(buffer, all->list, mine.tensor, start, n);
            for (int64_t i = 0; i < whole; i += LANES)
                for (int64_t lane = 0; lane < LANES; lane++)
                    lanes[lane] += (double)values[i + lane] * values[i + lane];
            for (int64_t i = whole; i < n; i++)
                lanes[i - whole] += (double)values[i] * values[i];
        }
        for (int64_t lane = 0; lane < LANES; lane++)
            sum += lanes[lane];
        all->sums[mine.number] = sum;
    }
}

/* `sums` has room for a number a chunk. */
double tandem_sum_of_squares(
    region *parallel, int64_t threads, int64_t count, const int64_t *numels, struct list list, double *sums)
{
    struct squares job = {{threads, count, numels, 0}, list, sums};
    in_parallel(parallel, threads, sum_chunks, &job);
    double sum = 0;
    for (int64_t tensor = 0; tensor < count; tensor++)
        for (int64_t start = 0; start < numels[tensor]; start += CHUNK)
            sum += *sums++;
    return sum;
}
