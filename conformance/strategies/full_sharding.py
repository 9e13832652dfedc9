"""Models sharded by fully_shard and their training: every option that the ranks of one machine support."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.fully_shard_calls import ROOT, UnitCall
from conformance.distributed.fsdp.scenes.fully_shard_training import ShardedTraining, Sharding
from conformance.distributed.fsdp.scenes.module_trees import FORMS, INPUT_FORMS
from conformance.judge.surface import torch_version
from conformance.strategies.modules import KINDS, module_trees
from conformance.strategies.sharding import steps, without_stale_gradients

UNITS = ("root", "leaves", "groups", "nested", "list")
_BEFORES = ("", "eval", "no_grad", "freeze", "thaw")
_ORDERS = ("in turn", "together", "no_sync", "unfinished")
# Modules without parameters are units as well.
_KINDS = (*KINDS, "bare", "counted")
# fully_shard of torch 2.11 finds no tensors in dataclasses, so a unit that returns one takes no part in backward.
_UNSEEN_FORMS = ("dataclass",) if torch_version() == "2.11" else ()
_FORMS, _INPUT_FORMS = (
    tuple(form for form in forms if form not in _UNSEEN_FORMS) for forms in (FORMS, INPUT_FORMS)
)
# Until 2.13, torch leaves several modules that form one unit unsharded if only some of them run again.
_CLOSES_LISTS = torch_version() not in ("2.11", "2.12")


@st.composite
def shardings(
    draw: st.DrawFn,
    *,
    units: tuple[str, ...] = UNITS,
    ranks: tuple[str, ...] = ("default", "mesh"),
    reshards: tuple[bool | int | None, ...] = (None, True, False),
    **fixed: Any,
) -> Sharding:
    """Draw a sharding. `fixed` are fields that are not drawn."""
    drawn = {"units": units, "ranks": ranks, "reshard_after_forward": reshards}
    return Sharding(**{name: draw(st.sampled_from(values)) for name, values in drawn.items()}, **fixed)


@st.composite
def sharded_trainings(
    draw: st.DrawFn,
    *,
    dtype: torch.dtype = torch.float64,
    tree: dict[str, Any] | None = None,
    befores: tuple[str, ...] = _BEFORES,
    **sharding: Any,
) -> ShardedTraining:
    drawn = draw(shardings(**sharding))
    frozen = ("none", "none", "first", "all")
    options = {
        "frozen": frozen,
        "kinds": _KINDS,
        "forms": _FORMS,
        "input_forms": _INPUT_FORMS,
        **(tree or {}),
    }
    trees = module_trees(dtype=dtype, **options)
    if drawn.units == "list" and not _CLOSES_LISTS:
        trees = trees.filter(lambda tree: all(group.calls == 1 for group in tree.body.groups()))
    schedule = st.lists(steps(_ORDERS, befores), min_size=2, max_size=3)
    return ShardedTraining(draw(trees), drawn, without_stale_gradients(draw(schedule)))


def _calls_of(method: str, **values: Any) -> st.SearchStrategy[UnitCall]:
    units = st.sampled_from([ROOT, ROOT, *range(ROOT)])
    arguments = {name: st.sampled_from(choices) for name, choices in values.items()}
    return st.builds(UnitCall, st.just(method), units, st.fixed_dictionaries(arguments))


_TRAINING = st.sampled_from(
    [UnitCall(name) for name in ("forward", "forward", "evaluate", "backward", "backward", "step_of_shards")]
)
_BOTH = (True, False)
_SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("unshard", {}),
    ("unshard", {"async_op": _BOTH}),
    ("reshard", {}),
    ("set_requires_gradient_sync", {"requires_gradient_sync": _BOTH, "recurse": _BOTH}),
    ("set_is_last_backward", {"is_last_backward": _BOTH}),
    ("set_reshard_after_forward", {"reshard_after_forward": _BOTH, "recurse": _BOTH}),
    ("set_reshard_after_backward", {"reshard_after_backward": _BOTH, "recurse": _BOTH}),
    ("set_reduce_scatter_unused_params", {"reduce_scatter_unused_params": _BOTH, "recurse": _BOTH}),
    ("set_modules_to_forward_prefetch", {"modules": ([1], [2, 3], [])}),
    ("set_modules_to_backward_prefetch", {"modules": ([1, 0], [2], [])}),
)
_OTHERS = st.sampled_from([UnitCall("wait"), UnitCall("state_dict"), UnitCall("load"), UnitCall("skip", 1)])


def programs(reference: type, world_size: int) -> st.SearchStrategy[tuple[Sharding, list[UnitCall]]]:
    """Draw a sharding, and calls of a model's methods among forwards and backwards that end with a full step.

    `reference` is torch's FSDPModule. Methods that its version lacks are not called.
    """
    # On a single rank, torch divides twice: test_divide_factor_applies_once_on_single_rank.
    factors = (1.0, 2.0, 3.0) if world_size > 1 else (1.0,)
    methods = [_calls_of(name, **values) for name, values in _SETTINGS if hasattr(reference, name)]
    settings = st.one_of(*methods, _OTHERS, _calls_of("set_gradient_divide_factor", factor=factors))
    ending = [UnitCall("forward"), UnitCall("backward"), UnitCall("step_of_shards")]
    # A flat `one_of` would draw each method as often as all training calls together.
    call = st.sampled_from([_TRAINING, _TRAINING, settings]).flatmap(lambda kind: kind)
    calls = st.lists(call, max_size=12).filter(_is_right_in_torch)
    return st.tuples(shardings(units=("leaves",)), calls.map(lambda drawn: [*drawn, *ending]))


def _is_right_in_torch(calls: list[UnitCall]) -> bool:
    """Return whether torch computes with the current weights, each backward with those of its forward.

    torch does not in these cases:
        A unit is prefetched that has already run and awaits no backward: deviation fully_shard.unsharded_over_a_step.
        Parameters are loaded during an all-gather.
        Parameters are loaded between a forward and its backward: deviation fsdp.graphs_of_former_weights.
    """
    names_earlier = is_in_flight = awaits_backward = False
    for call in calls:
        if call.name == "evaluate" and names_earlier:
            return False
        if call.name == "load" and (is_in_flight or awaits_backward):
            return False
        if call.name == "set_modules_to_forward_prefetch" and call.unit != ROOT:
            names_earlier |= any(number < call.unit for number in call.arguments["modules"])
        if call.name in ("unshard", "forward", "evaluate"):
            is_async = bool(call.arguments.get("async_op"))
            is_in_flight = is_async or (is_in_flight and call.name == "unshard")
        if call.name in ("forward", "backward"):
            awaits_backward = call.name == "forward"
    return True


def policies() -> st.SearchStrategy[dict[str, Any]]:
    """Draw arguments of MixedPrecisionPolicy, most often with low precision and casts."""
    low, full = torch.bfloat16, torch.float32
    return st.fixed_dictionaries(
        {
            "param_dtype": st.sampled_from([low, low, full, None]),
            "reduce_dtype": st.sampled_from([None, full, low]),
            "output_dtype": st.sampled_from([None, full, low]),
            "cast_forward_inputs": st.sampled_from([True, True, False]),
        }
    )
