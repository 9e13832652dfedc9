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
    float *params, *states[STATES];
    const float *grads; /* scaled still */
    float factor;       /* what they are multiplied by; negative to maximize */
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

enum decay { NONE, OF_GRADIENT, OF_PARAMETER };

/* Constant where it is called, so that the loop has no branches. */
INLINE void adam_as(const struct settings *s, struct block b, struct pace pace, enum decay decay, bool amsgrad)
{
    float *restrict p = b.params, *restrict mean = b.states[0], *restrict square = b.states[1];
    float *restrict largest = b.states[2];
    const float *restrict grads = b.grads;
    const float factor = b.factor, rate = decay == OF_PARAMETER ? s->lr * s->weight_decay : s->weight_decay;
    const float to_grad = 1 - s->beta1, to_mean = s->beta1, beta2 = s->beta2, to_square = 1 - s->beta2;
    const float eps = s->eps, size = pace.size, root = pace.root;
    const bool is_near = to_grad < 0.5f;

    for (int64_t i = 0; i < b.n; i++) {
        float param = p[i], grad = grads[i] * factor;
        if (decay == OF_PARAMETER)
            param -= param * rate;
        if (decay == OF_GRADIENT)
            grad += param * rate;
        /* From the end that is nearer: with beta1 = 0 the mean is the gradient to the bit. */
        const float near = mean[i] + to_grad * (grad - mean[i]), far = grad - (grad - mean[i]) * to_mean;
        const float moment = is_near ? near : far;
        float under_root = square[i] * beta2 + to_square * grad * grad;
        mean[i] = moment;
        square[i] = under_root;
        if (amsgrad) {
            under_root = under_root > largest[i] || under_root != under_root ? under_root : largest[i];
            largest[i] = under_root;
        }
        p[i] = param - size * moment / (sqrtf(under_root) / root + eps);
    }
}

INLINE void adam(const struct settings *s, struct block b, struct pace pace)
{
    const enum decay decay = s->weight_decay == 0 ? NONE : s->decoupled ? OF_PARAMETER : OF_GRADIENT;
    const bool amsgrad = b.states[2];
    if (decay == NONE && amsgrad)
        adam_as(s, b, pace, NONE, true);
    else if (decay == NONE)
        adam_as(s, b, pace, NONE, false);
    else if (decay == OF_GRADIENT && amsgrad)
        adam_as(s, b, pace, OF_GRADIENT, true);
    else if (decay == OF_GRADIENT)
        adam_as(s, b, pace, OF_GRADIENT, false);
    else if (amsgrad)
        adam_as(s, b, pace, OF_PARAMETER, true);
    else
        adam_as(s, b, pace, OF_PARAMETER, false);
}

INLINE void sgd_as(const struct settings *s, struct block b, struct pace pace, bool decays, bool has_mean, bool nesterov)
{
    float *restrict p = b.params, *restrict mean = b.states[0];
    const float *restrict grads = b.grads;
    const float factor = b.factor, decay = s->weight_decay, size = pace.size;
    const float momentum = s->momentum, undamped = 1 - s->dampening;
    const bool is_first = s->first;

    for (int64_t i = 0; i < b.n; i++) {
        float grad = grads[i] * factor;
        if (decays)
            grad += p[i] * decay;
        if (has_mean) {
            const float moment = is_first ? grad : mean[i] * momentum + grad * undamped;
            mean[i] = moment;
            grad = nesterov ? grad + moment * momentum : moment;
        }
        p[i] -= grad * size;
    }
}

INLINE void sgd(const struct settings *s, struct block b, struct pace pace)
{
    const bool decays = s->weight_decay != 0;
    if (!b.states[0] && decays)
        sgd_as(s, b, pace, true, false, false);
    else if (!b.states[0])
        sgd_as(s, b, pace, false, false, false);
    else if (s->nesterov && decays)
        sgd_as(s, b, pace, true, true, true);
    else if (s->nesterov)
        sgd_as(s, b, pace, false, true, true);
    else if (decays)
        sgd_as(s, b, pace, true, true, false);
    else
        sgd_as(s, b, pace, false, true, false);
}

INLINE void adagrad_as(const struct settings *s, struct block b, struct pace pace, bool decays)
{
    float *restrict p = b.params, *restrict sum = b.states[0];
    const float *restrict grads = b.grads;
    const float factor = b.factor, decay = s->weight_decay, eps = s->eps, size = pace.size;

    for (int64_t i = 0; i < b.n; i++) {
        float grad = grads[i] * factor;
        if (decays)
            grad += p[i] * decay;
        const float total = sum[i] + grad * grad;
        sum[i] = total;
        p[i] -= size * grad / (sqrtf(total) + eps);
    }
}

INLINE void adagrad(const struct settings *s, struct block b, struct pace pace)
{
    if (s->weight_decay != 0)
        adagrad_as(s, b, pace, true);
    else
        adagrad_as(s, b, pace, false);
}

INLINE void update_block(const struct update *u, struct pace pace, int64_t tensor, int64_t start, int64_t n)
{
    float params[BLOCK], grads[BLOCK], states[STATES][BLOCK];
    struct block b = {.n = n, .params = opened(params, u->params, tensor, start, n)};
    for (int state = 0; state < STATES; state++)
        b.states[state] = opened(states[state], u->states[state], tensor, start, n);
    b.grads = opened(grads, u->grads, tensor, start, n);
    b.factor = u->settings.maximize ? -u->factor : u->factor;

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
            const int64_t n = block_at(&mine, start);
            update_block(u, pace, mine.tensor, start, n);
        }
    }
}

/* Update parameters, states and copies. No tensor that is written may share memory with another one. */
void tandem_fused_step(
    region *parallel, int64_t threads, int64_t count, const int64_t *numels, const struct update *update)
{
    struct job job = {{threads, count, numels, 0}, update};
    in_parallel(parallel, threads, update_chunks, &job);
}
