"""Models sharded by fully_shard, and calls of their methods between forwards and backwards."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.fully_shard_calls import ROOT, UnitCall
from conformance.distributed.fsdp.scenes.fully_shard_training import Sharding

UNITS = ("root", "leaves", "groups", "nested", "list")


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
