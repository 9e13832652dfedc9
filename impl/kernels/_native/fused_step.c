/* One update of many parameters from gradients that are still scaled; a gradient is read once and left as it is. */

#include "lists.h"

enum rule { ADAM, SGD, ADAGRAD };

struct settings {
    int64_t rule;
    double lr, weight_decay, eps;
    double beta1, beta2;        /* Adam */
    double momentum, dampening; /* SGD */
    double lr_decay;            /* Adagrad */
    int64_t maximize, decoupled, nesterov, first;
};

enum { STATES = 3 };

struct update {
    struct settings settings;
    float factor; /* that gradients are multiplied by */
    struct list params, grads, states[STATES], copies;
    const float *const *steps; /* of each tensor, this update counted; null where the rule does not count */
};

struct job {
    struct chunks chunks;
    const struct update *update;
};

/* f32 elements of one place; a rule takes the states that it has. */
struct block {
    int64_t n;
    float *params, *grads, *states[STATES];
};

/* What the number of a tensor's updates makes of the learning rate. */
struct pace {
    double step;
    float size;
    float root; /* Adam's correction of the root of the squares */
};

INLINE struct pace pace_of(const struct settings *s, double step)
{
    if (s->rule == ADAM)
        return (struct pace){step, s->lr / (1 - pow(s->beta1, step)), sqrt(1 - pow(s->beta2, step))};
    if (s->rule == ADAGRAD)
        return (struct pace){step, s->lr / (1 + (step - 1) * s->lr_decay), 1};
    return (struct pace){step, s->lr, 1};
}

INLINE void adam(const struct settings *s, struct block b, struct pace pace)
{
    float *restrict p = b.params, *restrict g = b.grads;
    float *restrict mean = b.states[0], *restrict square = b.states[1], *restrict largest = b.states[2];
    const float decay = s->weight_decay, lr_decay = s->lr * s->weight_decay, eps = s->eps;
    const float to_grad = 1 - s->beta1, to_mean = s->beta1, beta2 = s->beta2, to_square = 1 - s->beta2;

    if (decay != 0 && s->decoupled)
        for (int64_t i = 0; i < b.n; i++)
            p[i] -= p[i] * lr_decay;
    else if (decay != 0)
        for (int64_t i = 0; i < b.n; i++)
            g[i] += p[i] * decay;
    /* From the end that is nearer: with beta1 = 0 the mean is the gradient to the bit. */
    if (to_grad < 0.5f)
        for (int64_t i = 0; i < b.n; i++)
            mean[i] += to_grad * (g[i] - mean[i]);
    else
        for (int64_t i = 0; i < b.n; i++)
            mean[i] = g[i] - (g[i] - mean[i]) * to_mean;
    for (int64_t i = 0; i < b.n; i++)
        square[i] = square[i] * beta2 + to_square * g[i] * g[i];
    if (largest)
        for (int64_t i = 0; i < b.n; i++)
            largest[i] = square[i] > largest[i] || square[i] != square[i] ? square[i] : largest[i];
    const float *under_root = largest ? largest : square;
    for (int64_t i = 0; i < b.n; i++)
        p[i] -= pace.size * mean[i] / (sqrtf(under_root[i]) / pace.root + eps);
}

INLINE void sgd(const struct settings *s, struct block b, struct pace pace)
{
    float *restrict p = b.params, *restrict g = b.grads, *restrict mean = b.states[0];
    const float decay = s->weight_decay, momentum = s->momentum, undamped = 1 - s->dampening;

    if (decay != 0)
        for (int64_t i = 0; i < b.n; i++)
            g[i] += p[i] * decay;
    if (mean) {
        if (s->first)
            memcpy(mean, g, (size_t)b.n * sizeof *g);
        else
            for (int64_t i = 0; i < b.n; i++)
                mean[i] = mean[i] * momentum + g[i] * undamped;
        if (s->nesterov)
            for (int64_t i = 0; i < b.n; i++)
                g[i] += mean[i] * momentum;
    }
    const float *direction = mean && !s->nesterov ? mean : g;
    for (int64_t i = 0; i < b.n; i++)
        p[i] -= direction[i] * pace.size;
}

INLINE void adagrad(const struct settings *s, struct block b, struct pace pace)
{
    float *restrict p = b.params, *restrict g = b.grads, *restrict sum = b.states[0];
    const float decay = s->weight_decay, eps = s->eps;

    if (decay != 0)
        for (int64_t i = 0; i < b.n; i++)
            g[i] += p[i] * decay;
    for (int64_t i = 0; i < b.n; i++)
        sum[i] += g[i] * g[i];
    for (int64_t i = 0; i < b.n; i++)
        p[i] -= pace.size * g[i] / (sqrtf(sum[i]) + eps);
}

INLINE void update_block(const struct update *u, struct pace pace, int64_t tensor, int64_t start, int64_t n)
{
    float params[BLOCK], grads[BLOCK], states[STATES][BLOCK];
    struct block b = {n, opened(params, u->params, tensor, start, n), grads, {0}};
    for (int state = 0; state < STATES; state++)
        b.states[state] = opened(states[state], u->states[state], tensor, start, n);
    widen(grads, at(u->grads, tensor, start), u->grads.dtype, n);
    const float factor = u->settings.maximize ? -u->factor : u->factor;
    for (int64_t i = 0; i < n; i++)
        grads[i] *= factor;

    if (u->settings.rule == ADAM)
        adam(&u->settings, b, pace);
    else if (u->settings.rule == SGD)
        sgd(&u->settings, b, pace);
    else
        adagrad(&u->settings, b, pace);

    put_back(u->params, b.params, tensor, start, n);
    for (int state = 0; state < STATES; state++)
        put_back(u->states[state], b.states[state], tensor, start, n);
    if (u->copies.tensors)
        narrow(at(u->copies, tensor, start), b.params, u->copies.dtype, n);
}

FOR_EACH_CPU static void update_chunks(void *given)
{
    struct job *job = given;
    const struct update *u = job->update;
    struct pace pace = pace_of(&u->settings, 1);
    for (struct chunk mine = {0}; take(&job->chunks, &mine);) {
        if (u->steps && *u->steps[mine.tensor] != pace.step)
            pace = pace_of(&u->settings, *u->steps[mine.tensor]);
        for (int64_t start = mine.start; start < mine.stop; start += BLOCK) {
            const int64_t n = mine.stop - start < BLOCK ? mine.stop - start : BLOCK;
            update_block(u, pace, mine.tensor, start, n);
        }
    }
}

/* Update parameters, states and copies. No tensor that is written may share memory with another one. */
void tandem_fused_step(
    region *parallel, int64_t threads, int64_t count, const int64_t *numels, const struct update *update)
{
    struct job job = {{count, numels, 0}, update};
    in_parallel(parallel, threads, update_chunks, &job);
}
