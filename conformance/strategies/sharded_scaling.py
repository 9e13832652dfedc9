"""Plans for ranks with a sharded scaler, in which both libraries must do the same.

Known faults of torch are left out, each of which is a deviation. With torch, optimizers that skip steps themselves
decide by their own rank, cannot be unscaled before, and do not mix with other optimizers under one scaler.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.scaler_programs import ScalerCall, ScalerProgram
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import AMP_AWARE, PLAIN

_BAD = (math.inf, -math.inf, math.nan)
# Optimizers of every supported torch version. Adagrad(fused=True) came later.
SKIPPING_FOR_THEMSELVES = tuple(kind for kind in AMP_AWARE if kind != "fused adagrad")
SCALES = st.sampled_from([0.5, 1.0, 3.0, 24.0])
_DTYPES = st.sampled_from([torch.float32] * 3 + [torch.bfloat16, torch.float64, torch.float16, None])
_NUMBERS = {
    "growth_factor": st.sampled_from([1.5, 2.0, 4.0]),
    "backoff_factor": st.sampled_from([0.5, 0.25]),
    "growth_interval": st.integers(1, 3),
}

# The shards of a rank without gradients.
BARE = (Gradient((2,), None),)


def part(rank: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Gradient, ...]:
    """Return a rank's shards of four parameters in two groups.

    One is empty, and one has no gradient. Shapes differ by rank.
    """
    first = 10 * rank + seed
    return (
        Gradient((3 + rank,), dtype, seed=first + 1),
        Gradient((0,), dtype, seed=first + 2),
        Gradient((2, 3), None),
        Gradient((5,), dtype, seed=first + 3),
    )


def parts(world_size: int, *, bare: tuple[int, ...] = (), optimizers: int = 1, **more: Any) -> Any:
    """Return every rank's shards for each of several optimizers. The ranks in `bare` have no gradients."""
    return tuple(
        tuple(BARE if rank in bare else part(rank, seed=100 * which, **more) for which in range(optimizers))
        for rank in range(world_size)
    )


def one_bad(rank: int, world_size: int, value: float | None = math.inf) -> tuple[float | None, ...]:
    """Return values for the last gradient element of every rank: `value` on one rank, None on the others."""
    return tuple(value if number == rank else None for number in range(world_size))


def iteration(
    grad_outcomes: tuple[float | None, ...] | None = None, *, which: int = 0, unscale: bool = False
) -> tuple[ScalerCall, ...]:
    """Return the calls of one iteration: zero_grad, backward, unscale_ if `unscale`, step and update."""
    return (
        ScalerCall("zero_grad", which),
        ScalerCall("backward", which, grad_outcomes),
        *((ScalerCall("unscale_", which),) if unscale else ()),
        ScalerCall("step", which),
        ScalerCall("update", which),
    )


def iterations(
    *grad_outcomes: tuple[float | None, ...] | None, unscale: bool = False
) -> tuple[ScalerCall, ...]:
    """Return the calls of one iteration for each of `grad_outcomes`."""
    return tuple(call for outcomes in grad_outcomes for call in iteration(outcomes, unscale=unscale))


@st.composite
def _gradients(draw: st.DrawFn) -> tuple[Gradient, ...]:
    return tuple(
        Gradient(
            shape=draw(st.sampled_from([(), (0,), (1,), (7,), (3, 4), (33,)])),
            dtype=draw(_DTYPES),
            seed=draw(st.integers(0, 2**16)),
        )
        for _ in range(draw(st.integers(1, 5)))
    )


@st.composite
def plans(draw: st.DrawFn, world_size: int) -> ScalerProgram:
    """Draw a sequence of calls that all ranks make, on one to three optimizers under one scaler."""
    kinds = draw(st.sampled_from([PLAIN, SKIPPING_FOR_THEMSELVES]))
    optimizers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    ranks = tuple(tuple(draw(_gradients()) for _ in optimizers) for _ in range(world_size))
    # Gradients share one dtype, because torch's fused optimizers reject others.
    ranks = tuple(
        tuple(
            _in_one_dtype(gradients) if kind in SKIPPING_FOR_THEMSELVES else gradients
            for gradients, kind in zip(rank, optimizers, strict=True)
        )
        for rank in ranks
    )
    calls: list[ScalerCall] = []
    for _ in range(draw(st.integers(3, 6))):
        calls += draw(_block(ranks, tuple(optimizers)))
    options = {"init_scale": draw(SCALES), "enabled": draw(st.sampled_from([True] * 9 + [False]))}
    options |= draw(st.fixed_dictionaries({}, optional=_NUMBERS))
    return ScalerProgram(ranks, tuple(calls), tuple(optimizers), options=options)


def _in_one_dtype(gradients: tuple[Gradient, ...]) -> tuple[Gradient, ...]:
    return tuple(dataclasses.replace(g, dtype=g.dtype and torch.float32) for g in gradients)


@st.composite
def _block(draw: st.DrawFn, ranks: tuple[Any, ...], optimizers: tuple[str, ...]) -> list[ScalerCall]:
    which = draw(st.integers(0, len(optimizers) - 1))
    kind = draw(st.sampled_from(["iteration"] * 6 + ["scale", "set", "load", "resume", "new scale", "any"]))
    match kind:
        case "iteration":
            return draw(_iteration(ranks, optimizers))
        case "scale":
            value = draw(st.sampled_from([1.0, -2.5, math.inf]))
            nested = draw(st.booleans())
            tensor = torch.tensor([value, 1.0])
            return [ScalerCall("scale", which, [tensor, (tensor,)] if nested else tensor)]
        case "set":
            return [ScalerCall("set", which, draw(st.fixed_dictionaries({}, optional=_NUMBERS)))]
        case "load":
            state = {
                "scale": draw(SCALES),
                "growth_factor": 2.0,
                "backoff_factor": 0.5,
                "growth_interval": 2,
                "_growth_tracker": draw(st.integers(0, 1)),
            }
            # Load only after the first scale, because loading into a scaler without a scale is covered by a clause of
            # GradScaler.
            return [ScalerCall("scale", which, torch.ones(())), ScalerCall("load_state_dict", which, state)]
        case "resume":
            return [ScalerCall("resume", which)]
        case "new scale":
            new = draw(SCALES)
            return [
                ScalerCall(
                    "update", which, draw(st.sampled_from([new, torch.tensor(new), torch.tensor([new])]))
                )
            ]
    # Draw calls in a wrong order, which raise on all ranks alike or on none.
    names = ["zero_grad", "backward", "step", "update", "step"]
    if optimizers[which] in PLAIN:
        names += ["unscale_", "unscale_"]
    return [ScalerCall(name, which) for name in draw(st.lists(st.sampled_from(names), max_size=6))]


@st.composite
def _iteration(draw: st.DrawFn, ranks: tuple[Any, ...], optimizers: tuple[str, ...]) -> list[ScalerCall]:
    """Draw an iteration: one or two backwards and a step for each optimizer, then an update."""
    calls: list[ScalerCall] = []
    for which, kind in enumerate(optimizers):
        grad_outcome = st.sampled_from([None, None, *_BAD])
        grad_outcomes = tuple(draw(grad_outcome) for _ in ranks)
        if kind in SKIPPING_FOR_THEMSELVES:
            shows = all(rank[which][-1].dtype is not None and rank[which][-1].numel for rank in ranks)
            grad_outcomes = (math.inf if shows and draw(st.booleans()) else None,) * len(ranks)
        calls += [ScalerCall("zero_grad", which), ScalerCall("backward", which, grad_outcomes)]
        if draw(st.booleans()):
            calls.append(ScalerCall("backward", which))
    for which, kind in enumerate(optimizers):
        if kind in PLAIN and draw(st.booleans()):
            calls.append(ScalerCall("unscale_", which))
    calls += [ScalerCall("step", which) for which in draw(st.permutations(range(len(optimizers))))]
    return [*calls, ScalerCall("update")]
