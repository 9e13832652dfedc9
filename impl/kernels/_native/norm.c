/* The sum of squares of lists of tensors, read once; inf or nan in them is inf or nan in it. */

#include "lists.h"

enum { LANES = 32 };

struct squares {
    struct chunks chunks;
    struct list list;
    double *sums; /* one a chunk, so that their order does not depend on the threads */
};

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

/* In pairs, of which a processor adds several at once. */
INLINE double sum_of(double *lanes)
{
    for (int64_t half = LANES / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

FOR_EACH_CPU static void sum_chunks(void *job)
{
    struct squares *all = job;
    float buffer[BLOCK];
    for (struct chunk mine = {0}; take(&all->chunks, &mine);) {
        double lanes[LANES] = {0};
        for (int64_t start = mine.start; start < mine.stop; start += BLOCK) {
            const int64_t n = block_at(&mine, start);
            fetch_ahead(all->list, &all->chunks, &mine, start, n);
            if (all->list.dtype == BF16)
                add_squares(lanes, at(all->list, mine.tensor, start), n, BF16);
            else
                add_squares(lanes, opened(buffer, all->list, mine.tensor, start, n), n, F32);
        }
        all->sums[mine.number] = sum_of(lanes);
    }
}

/* `sums` has room for a number a chunk, and `of_tensors` for one a tensor where it is not null. */
double tandem_sum_of_squares(
    region *parallel, int64_t threads, int64_t count, const int64_t *numels, struct list list, double *sums,
    double *of_tensors)
{
    struct squares job = {chunks_of(threads, count, numels), list, sums};
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
