/* The sum of squares of lists of tensors, read once; inf or nan in them is inf or nan in it. */

#include "lists.h"

struct squares {
    struct chunks chunks;
    struct list list;
    double *sums; /* one a chunk, so that their order does not depend on the threads */
    const char *known; /* whether the sums of a tensor are known; null: of none */
};

FOR_EACH_CPU static void sum_chunks(void *job)
{
    struct squares *all = job;
    for (struct chunk mine = {0}; take(&all->chunks, &mine);) {
        if (all->known && all->known[mine.tensor])
            continue;
        double lanes[LANES] = {0};
        for (int64_t start = mine.start; start < mine.stop; start += BLOCK) {
            const int64_t n = block_at(&mine, start);
            fetch_ahead(all->list, &all->chunks, &mine, start, n);
            add_squares_at(lanes, all->list, mine.tensor, start, n);
        }
        all->sums[mine.number] = sum_of(lanes);
    }
}

/* `sums` has room for a number a chunk, and those of `known` tensors. `of_tensors` has room for one a tensor where it is
   not null. */
double tandem_sum_of_squares(
    region *parallel, int64_t threads, int64_t power, int64_t count, const int64_t *numels, struct list list,
    double *sums, double *of_tensors, const char *known)
{
    struct squares job = {{threads, power, count, numels, 0}, list, sums, known};
    in_parallel(parallel, threads, sum_chunks, &job);
    double sum = 0;
    for (int64_t tensor = 0; tensor < count; tensor++) {
        double of_tensor = 0;
        for (int64_t left = chunks_in(&job.chunks, tensor); left > 0; left--) {
            of_tensor += *sums;
            sum += *sums++;
        }
        if (of_tensors)
            of_tensors[tensor] = of_tensor;
    }
    return sum;
}
