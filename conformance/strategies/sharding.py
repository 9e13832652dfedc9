"""Wrapped models and their training: every setup that a sharding strategy allows, and schedules of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training
from conformance.strategies.modules import module_trees

WRAPS = ("root", "leaves", "groups", "size", "manual")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", None)


@st.composite
def setups(
    draw: st.DrawFn,
    *,
    strategy: str,
    ranks: tuple[str, ...] = ("default", "group", "mesh"),
    shards: int = 1,
    wraps: tuple[str, ...] = WRAPS,
    **fixed: Any,
) -> Setup:
    """Draw a setup. `fixed` are fields that are not drawn."""
    drawn_ranks = draw(st.sampled_from(ranks))
    arguments = {
        "use_orig_params": draw(st.booleans()),
        "forward_prefetch": draw(st.booleans()),
        "limit_all_gathers": draw(st.booleans()),
    }
    return Setup(
        strategy=strategy,
        ranks=drawn_ranks,
        shards=shards,
        wrap=draw(st.sampled_from(wraps)),
        arguments=arguments,
        backward_prefetch=draw(st.sampled_from(_PREFETCHES)),
        **fixed,
    )


def steps(
    orders: tuple[str, ...] = ("in turn", "together", "no_sync"),
    befores: tuple[str, ...] = ("", "eval", "no_grad"),
) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        forwards=st.sampled_from([1, 1, 2, 3]),
        order=st.sampled_from(orders),
        before=st.sampled_from(befores),
        set_to_none=st.booleans(),
    )


@st.composite
def trainings(
    draw: st.DrawFn,
    *,
    schedule: st.SearchStrategy[Step] | None = None,
    dtype: torch.dtype = torch.float64,
    tree: dict[str, Any] | None = None,
    **setup: Any,
) -> Training:
    """Draw a training of at least three steps.

    Modules are frozen as far as the setup allows: in their own units, or by name.
    """
    drawn = draw(setups(**setup))
    frozen, befores = _freezing(drawn)
    schedule = steps(befores=("", "eval", "no_grad", *befores)) if schedule is None else schedule
    return Training(
        tree=draw(module_trees(frozen=frozen, dtype=dtype, **(tree or {}))),
        setup=drawn,
        steps=without_stale_gradients(draw(st.lists(schedule, min_size=3, max_size=4))),
    )


def _freezing(setup: Setup) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the freezing that leaves may have, and the freezing that may happen between steps."""
    if setup.uses_orig_params:
        return ("none", "none", "first", "all"), ("freeze", "thaw")
    if setup.wrap == "leaves":
        return ("none", "none", "all"), ()
    return ("none",), ()


def without_stale_gradients(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Clear gradients to None if the steps freeze or thaw parameters.

    With a gradient of zero, the momentum would still move a frozen parameter.
    """
    freezes = any(step.before in ("freeze", "thaw") for step in steps)
    return tuple(replace(step, set_to_none=step.set_to_none or freezes) for step in steps)
