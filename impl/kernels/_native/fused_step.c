/* One update of many parameters from gradients that are still scaled; a gradient is read once and left as it is. */

#include "lists.h"

/* What the loader asks for first, so that it never calls a library that was built from other sources. */
int64_t tandem_interface(void) { return 7; }

enum rule { ADAM, SGD, ADAGRAD };

/* Named and ordered as in impl/kernels/rules.py. */
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
    struct list params, grads, states[STATES], low_precision_params;
    const float *const *steps; /* of each tensor, this update counted; null where the rule does not count */
    /* Parameters and states from before the update, which it saves, or begins from if `restores`; or no lists. */
    struct list before[1 + STATES];
    int64_t restores;
    double *sums; /* of the gradients' squares, one a chunk; null: they are not taken */
};

struct job {
    struct chunks chunks;
    const struct update *update;
};

/* Elements of one place; a rule takes the states that it has. */
struct block {
    int64_t n;
    void *params, *states[STATES];
    const void *grads; /* scaled still */
    float factor;      /* what they are multiplied by; negative to maximize */
};

/* What the number of a tensor's updates makes of the learning rate. */
struct pace {
    double step;
    float size;
    float to_root; /* Adam's correction of the root of the squares, by which it is multiplied */
};

INLINE struct pace pace_of(const struct settings *s, double step)
{
    if (s->rule == ADAM)
        return (struct pace){step, s->lr / (1 - pow(s->beta1, step)), 1 / sqrt(1 - pow(s->beta2, step))};
    if (s->rule == ADAGRAD)
        return (struct pace){step, s->lr / (1 + (step - 1) * s->lr_decay), 1};
    return (struct pace){step, s->lr, 1};
}

enum decay { NONE, OF_GRADIENT, OF_PARAMETER };

/* What follows the pace is constant where it is called, so that the loop has no branches. */
INLINE void adam_as(
    const struct settings *s, struct block b, struct pace pace, enum dtype dtype, enum dtype stored, enum decay decay,
    bool amsgrad)
{
    void *restrict params = b.params, *restrict means = b.states[0], *restrict squares = b.states[1];
    void *restrict largest = b.states[2];
    const void *restrict grads = b.grads;
    const float factor = b.factor, rate = decay == OF_PARAMETER ? s->lr * s->weight_decay : s->weight_decay;
    const float to_grad = 1 - s->beta1, to_mean = s->beta1, beta2 = s->beta2, to_square = 1 - s->beta2;
    const float eps = s->eps, size = pace.size, to_root = pace.to_root;
    const bool is_near = to_grad < 0.5f;

    for (int64_t i = 0; i < b.n; i++) {
        const float mean = element(means, i, stored);
        float param = element(params, i, dtype), grad = element(grads, i, dtype) * factor;
        if (decay == OF_PARAMETER)
            param -= param * rate;
        if (decay == OF_GRADIENT)
            grad += param * rate;
        /* From the end that is nearer: with beta1 = 0 the mean is the gradient to the bit. */
        const float near = mean + to_grad * (grad - mean), far = grad - (grad - mean) * to_mean;
        const float moment = is_near ? near : far;
        float under_root = element(squares, i, stored) * beta2 + to_square * grad * grad;
        set_element(means, i, moment, stored);
        set_element(squares, i, under_root, stored);
        if (amsgrad) {
            const float before = element(largest, i, stored);
            under_root = under_root > before || under_root != under_root ? under_root : before;
            set_element(largest, i, under_root, stored);
        }
        set_element(params, i, param - size * moment / (sqrtf(under_root) * to_root + eps), dtype);
    }
}

INLINE void adam(
    const struct settings *s, struct block b, struct pace pace, enum dtype dtype, enum dtype stored)
{
    const enum decay decay = s->weight_decay == 0 ? NONE : s->decoupled ? OF_PARAMETER : OF_GRADIENT;
    const bool amsgrad = b.states[2];
    if (decay == NONE && amsgrad)
        adam_as(s, b, pace, dtype, stored, NONE, true);
    else if (decay == NONE)
        adam_as(s, b, pace, dtype, stored, NONE, false);
    else if (decay == OF_GRADIENT && amsgrad)
        adam_as(s, b, pace, dtype, stored, OF_GRADIENT, true);
    else if (decay == OF_GRADIENT)
        adam_as(s, b, pace, dtype, stored, OF_GRADIENT, false);
    else if (amsgrad)
        adam_as(s, b, pace, dtype, stored, OF_PARAMETER, true);
    else
        adam_as(s, b, pace, dtype, stored, OF_PARAMETER, false);
}

INLINE void sgd_as(
    const struct settings *s, struct block b, struct pace pace, enum dtype dtype, enum dtype stored, bool decays,
    bool has_mean, bool nesterov)
{
    void *restrict params = b.params, *restrict means = b.states[0];
    const void *restrict grads = b.grads;
    const float factor = b.factor, decay = s->weight_decay, size = pace.size;
    const float momentum = s->momentum, undamped = 1 - s->dampening;
    const bool is_first = s->first;

    for (int64_t i = 0; i < b.n; i++) {
        const float param = element(params, i, dtype);
        float grad = element(grads, i, dtype) * factor;
        if (decays)
            grad += param * decay;
        if (has_mean) {
            const float moment = is_first ? grad : element(means, i, stored) * momentum + grad * undamped;
            set_element(means, i, moment, stored);
            grad = nesterov ? grad + moment * momentum : moment;
        }
        set_element(params, i, param - grad * size, dtype);
    }
}

INLINE void sgd(
    const struct settings *s, struct block b, struct pace pace, enum dtype dtype, enum dtype stored)
{
    const bool decays = s->weight_decay != 0;
    if (!b.states[0] && decays)
        sgd_as(s, b, pace, dtype, stored, true, false, false);
    else if (!b.states[0])
        sgd_as(s, b, pace, dtype, stored, false, false, false);
    else if (s->nesterov && decays)
        sgd_as(s, b, pace, dtype, stored, true, true, true);
    else if (s->nesterov)
        sgd_as(s, b, pace, dtype, stored, false, true, true);
    else if (decays)
        sgd_as(s, b, pace, dtype, stored, true, true, false);
    else
        sgd_as(s, b, pace, dtype, stored, false, true, false);
}

INLINE void adagrad_as(
    const struct settings *s, struct block b, struct pace pace, enum dtype dtype, enum dtype stored, bool decays)
{
    void *restrict params = b.params, *restrict sums = b.states[0];
    const void *restrict grads = b.grads;
    const float factor = b.factor, decay = s->weight_decay, eps = s->eps, size = pace.size;

    for (int64_t i = 0; i < b.n; i++) {
        const float param = element(params, i, dtype);
        float grad = element(grads, i, dtype) * factor;
        if (decays)
            grad += param * decay;
        const float total = element(sums, i, stored) + grad * grad;
        set_element(sums, i, total, stored);
        set_element(params, i, param - size * grad / (sqrtf(total) + eps), dtype);
    }
}

INLINE void adagrad(
    const struct settings *s, struct block b, struct pace pace, enum dtype dtype, enum dtype stored)
{
    if (s->weight_decay != 0)
        adagrad_as(s, b, pace, dtype, stored, true);
    else
        adagrad_as(s, b, pace, dtype, stored, false);
}

INLINE void apply(
    const struct update *u, struct block b, struct pace pace, enum dtype dtype, enum dtype stored)
{
    const struct settings *s = &u->settings;
    b.factor = s->maximize ? -u->factor : u->factor;
    if (s->rule == ADAM)
        adam(s, b, pace, dtype, stored);
    else if (s->rule == SGD)
        sgd(s, b, pace, dtype, stored);
    else
        adagrad(s, b, pace, dtype, stored);
}

/* Past the caches, for copies that nobody reads soon. */
INLINE void stream(char *restrict to, const char *restrict from, int64_t bytes)
{
    int64_t i = 0;
#if defined(__x86_64__)
    if ((uintptr_t)to % sizeof(__m128i) == 0)
        for (; i + (int64_t)sizeof(__m128i) <= bytes; i += sizeof(__m128i))
            _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
#endif
    memcpy(to + i, from + i, (size_t)(bytes - i));
}

INLINE void save_or_restore(const struct update *u, int64_t tensor, int64_t start, int64_t n)
{
    for (int list = 0; list < 1 + STATES; list++) {
        const struct list before = u->before[list], now = list ? u->states[list - 1] : u->params;
        if (!before.tensors)
            continue;
        if (u->restores)
            memcpy(at(now, tensor, start), at(before, tensor, start), (size_t)(n * BYTES[now.dtype]));
        else
            stream(at(before, tensor, start), at(now, tensor, start), n * BYTES[now.dtype]);
    }
}

INLINE void update_opened(const struct update *u, struct pace pace, int64_t tensor, int64_t start, int64_t n)
{
    float params[BLOCK], grads[BLOCK], states[STATES][BLOCK];
    struct block b = {.n = n, .params = opened(params, u->params, tensor, start, n)};
    for (int state = 0; state < STATES; state++)
        b.states[state] = opened(states[state], u->states[state], tensor, start, n);
    b.grads = opened(grads, u->grads, tensor, start, n);
    apply(u, b, pace, F32, F32);
    put_back(u->params, b.params, tensor, start, n);
    for (int state = 0; state < STATES; state++)
        put_back(u->states[state], b.states[state], tensor, start, n);
    if (u->low_precision_params.tensors)
        narrow(at(u->low_precision_params, tensor, start), b.params, u->low_precision_params.dtype, n);
}

/* In place, with bf16 states: while one element is widened or rounded, others are divided. */
INLINE void update_in_place(
    const struct update *u, struct pace pace, int64_t tensor, int64_t start, int64_t n, enum dtype dtype)
{
    struct block b = {.n = n, .params = at(u->params, tensor, start), .grads = at(u->grads, tensor, start)};
    for (int state = 0; state < STATES; state++)
        b.states[state] = u->states[state].tensors ? at(u->states[state], tensor, start) : 0;
    apply(u, b, pace, dtype, BF16);
    if (dtype == F32 && u->low_precision_params.tensors)
        narrow(at(u->low_precision_params, tensor, start), b.params, u->low_precision_params.dtype, n);
}

FOR_EACH_CPU static void update_chunks(void *given)
{
    struct job *job = given;
    const struct update *u = job->update;
    const bool is_bf16 = u->params.dtype == BF16 && u->grads.dtype == BF16 && !u->low_precision_params.tensors;
    const bool has_bf16_states = u->params.dtype == F32 && u->grads.dtype == F32 && u->states[0].dtype == BF16;
    struct pace pace = pace_of(&u->settings, 1);
    for (struct chunk mine = {0}; take(&job->chunks, &mine);) {
        if (u->steps && *u->steps[mine.tensor] != pace.step)
            pace = pace_of(&u->settings, *u->steps[mine.tensor]);
        double lanes[LANES] = {0};
        for (int64_t start = mine.start; start < mine.stop; start += BLOCK) {
            const int64_t n = block_at(&mine, start);
            save_or_restore(u, mine.tensor, start, n);
            if (u->sums)
                add_squares_at(lanes, u->grads, mine.tensor, start, n);
            if (is_bf16)
                update_in_place(u, pace, mine.tensor, start, n, BF16);
            else if (has_bf16_states)
                update_in_place(u, pace, mine.tensor, start, n, F32);
            else
                update_opened(u, pace, mine.tensor, start, n);
        }
        if (u->sums)
            u->sums[mine.number] = sum_of(lanes);
    }
#if defined(__x86_64__)
    _mm_sfence(); /* streamed copies are not ordered with what this thread does next */
#endif
}

/* Update parameters, states and copies. No tensor that is written may share memory with another one. */
void tandem_fused_step(
    region *parallel, int64_t threads, int64_t power, int64_t count, const int64_t *numels,
    const struct update *update)
{
    struct job job = {{threads, power, count, numels, 0}, update};
    in_parallel(parallel, threads, update_chunks, &job);
}
