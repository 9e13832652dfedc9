"""How a model is sharded by fully_shard and trained: every option that ranks of one machine can take."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from conformance.distributed.fsdp.fully_shard_calls import ROOT, Call
from conformance.distributed.fsdp.fully_shard_calls import UNITS as UNITS_IN_A_ROW
from conformance.distributed.fsdp.fully_shard_cases import ShardedTraining, Sharding
from conformance.strategies.modules import KINDS, module_trees
from conformance.strategies.sharding import steps, without_stale_gradients

UNITS = ("root", "leaves", "groups", "nested", "list")
_FREEZING = ("", "eval", "no_grad", "freeze", "thaw")
_ORDERS = ("in turn", "together", "no_sync", "unfinished")
# What has no parameters is a unit as well.
_KINDS = (*KINDS, "bare", "counted")
# Without statistics over a batch, which need more than low precision has.
KINDS_IN_LOW_PRECISION = ("affine", "linear", "lookup", "scaled", "tied", "idle", "bare")


@st.composite
def shardings(
    draw: st.DrawFn,
    *,
    units: tuple[str, ...] = UNITS,
    ranks: tuple[str, ...] = ("default", "mesh"),
    reshards: tuple[bool | int | None, ...] = (None, True, False),
    **given: Any,
) -> Sharding:
    """`given` are fields that are not drawn."""
    drawn = {"units": units, "ranks": ranks, "reshard_after_forward": reshards}
    return Sharding(**{name: draw(st.sampled_from(values)) for name, values in drawn.items()}, **given)


@st.composite
def sharded_trainings(
    draw: st.DrawFn,
    *,
    dtype: torch.dtype = torch.float64,
    tree: dict[str, Any] | None = None,
    orders: tuple[str, ...] = _ORDERS,
    **sharding: Any,
) -> ShardedTraining:
    drawn = draw(shardings(**sharding))
    frozen = ("none", "none", "first", "all")
    trees = module_trees(dtype=dtype, **{"frozen": frozen, "kinds": _KINDS, **(tree or {})})
    schedule = st.lists(steps(orders, _FREEZING), min_size=2, max_size=3)
    return ShardedTraining(draw(trees), drawn, without_stale_gradients(draw(schedule)))


def _calls_of(method: str, **values: Any) -> st.SearchStrategy[Call]:
    units = st.sampled_from([ROOT, ROOT, *range(UNITS_IN_A_ROW)])
    given = {name: st.sampled_from(each) for name, each in values.items()}
    return st.builds(Call, st.just(method), units, st.fixed_dictionaries(given))


_TRAINING = st.sampled_from(
    [Call(name) for name in ("forward", "forward", "look", "backward", "backward", "step")]
)
_BOTH = (True, False)
_SETTINGS = (
    _calls_of("unshard"),
    _calls_of("unshard", async_op=_BOTH),
    _calls_of("reshard"),
    _calls_of("set_requires_gradient_sync", requires_gradient_sync=_BOTH, recurse=_BOTH),
    _calls_of("set_is_last_backward", is_last_backward=_BOTH),
    _calls_of("set_reshard_after_forward", reshard_after_forward=_BOTH, recurse=_BOTH),
    _calls_of("set_reshard_after_backward", reshard_after_backward=_BOTH, recurse=_BOTH),
    _calls_of("set_reduce_scatter_unused_params", reduce_scatter_unused_params=_BOTH, recurse=_BOTH),
    _calls_of("set_modules_to_forward_prefetch", modules=([1], [2, 3], [])),
    _calls_of("set_modules_to_backward_prefetch", modules=([1, 0], [2], [])),
    st.sampled_from([Call("wait"), Call("state_dict"), Call("load"), Call("skip a unit", 1)]),
)


def programs(factors: tuple[float, ...]) -> st.SearchStrategy[tuple[Sharding, list[Call]]]:
    """A model, and calls of its methods among forwards and backwards, which end with a whole step."""
    settings = st.one_of(*_SETTINGS, _calls_of("set_gradient_divide_factor", factor=factors))
    ending = [Call("forward"), Call("backward"), Call("step")]
    calls = st.lists(st.one_of(_TRAINING, _TRAINING, settings), max_size=12)
    return st.tuples(shardings(units=("leaves",)), calls.map(lambda drawn: [*drawn, *ending]))


def policies() -> st.SearchStrategy[dict[str, Any]]:
    """What MixedPrecisionPolicy is made of; left out means the default."""
    dtypes = st.sampled_from([torch.bfloat16, torch.float32])
    return st.fixed_dictionaries(
        {},
        optional={
            "param_dtype": dtypes,
            "reduce_dtype": dtypes,
            "output_dtype": dtypes,
            "cast_forward_inputs": st.booleans(),
        },
    )
