"""Collection of an optimizer's state with the names and shapes that the parameters had before wrapping.

Tensors in the shape of a stepped parameter are sharded like it. Every rank has all other values, such as numbers.
First all ranks exchange descriptions (name, shape and dtype), so that all of them issue the same collectives or raise
the same error. Then the tensors are exchanged.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.distributed.fsdp._comm.desync.collective_order import allow_saving, named_ranks
from impl.distributed.fsdp._comm.desync.monitor import GATHERED, OF_STATES
from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._state_dict.optim_flat_save import FlatParamState, OptimSaveOptions, RankStates
from impl.distributed.fsdp._state_dict.optim_keys import (
    ParamNames,
    ParamSource,
    StateDict,
    Stepped,
    is_keyed_by_name,
    is_stepped_unsharded,
    unflattened_groups,
)
from impl.distributed.fsdp._state_dict.optim_values import describe_state, hides_tensors, offload

_Key = tuple[str, ...]
_CURE = "use sharding_strategy=NO_SHARD with use_orig_params=True for this optimizer"


@torch.no_grad()
@allow_saving()
def collect_state_dict(  # noqa: PLR0913  arguments of torch's functions
    model: nn.Module,
    wrappers: Sequence[Wrapper],
    source: ParamSource,
    state_dict: StateDict,
    options: OptimSaveOptions,
    group: dist.ProcessGroup | None,
) -> StateDict:
    """Return an optimizer's state dict in the form of `options`, empty on ranks that get none.

    Raises:
        RuntimeError: a rank lacks states that others have, or issues another collective.
        ValueError: a tensor of a state has another shape than its stepped parameter. All ranks raise these errors.
        AssertionError: ranks have different values of a number.
    Collectives: one of objects over `group`; then for each flat parameter a gather or an all-gather for each tensor of
        a state, or one all-to-all for all of them, depending on `options`.
    """
    names = ParamNames(model, wrappers)
    by_key = names.keyed(source, is_keyed_by_name(state_dict))
    states_by_key: dict[Any, StateDict] = state_dict["state"]
    own_states = {
        names.of(parameter): states_by_key[key] for key, parameter in by_key.items() if key in states_by_key
    }
    _record_save(wrappers[0], group)
    reported = _states_of_all(own_states, group)
    merges = wrappers[0]._use_orig_params
    keys = _merged_keys(reported, names) if merges else _first_ranks_keys(reported)
    destination = dist.get_global_rank(group or _world(), 0)
    is_returned = not (options.is_full and options.rank0_only) or dist.get_rank() == destination
    states: dict[str, StateDict] = {}
    for named in dict.fromkeys(names.handle_of[key[0]] for key in keys if key[0] in names.handle_of):
        states.update(FlatParamState(named, own_states, reported).collect(options, destination))
    for stepped, state in own_states.items():
        if stepped.named_handle is None:
            states[stepped.name] = offload(state) if options.offloads else copy.copy(state)
    if not is_returned:
        return {}
    result: StateDict = {"state": {name: states[name] for key in keys for name in key if name in states}}
    for key, state in states_by_key.items():
        if key not in by_key and key not in states:
            _warn_of_unknown(key)
            result["state"][key] = state
    if "param_groups" in state_dict:
        result["param_groups"] = unflattened_groups(state_dict["param_groups"], by_key, names)
    return result


def _record_save(wrapper: Wrapper, group: dist.ProcessGroup | None) -> None:
    """Record the save in the groups whose ranks all take part. One replica may save on its own."""
    saving = {*named_ranks(group or _world())}
    for rank_group, order_checker in wrapper._groups.order_checkers.items():
        if saving.issuperset(named_ranks(rank_group)):
            entry = f"{GATHERED} the names {OF_STATES}"
            order_checker.note(entry, rank_group, wrapper.compute_device, awaits_all=True)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _warn_of_unknown(key: object) -> None:
    warnings.warn(
        f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy everything to the returned "
        "state_dict. In most cases, this is a user-defined state that is not associated with any particular parameter. "
        "Another possible case is this state is managed by TorchRec. Otherwise, there may  be a mismatched assumption "
        "of optim_state_dict of this mode.",
        stacklevel=5,
    )


# Descriptions of all ranks' states


def _states_of_all(own_states: dict[Stepped, StateDict], group: dist.ProcessGroup | None) -> list[RankStates]:
    """Return the descriptions of all ranks' states.

    Raises:
        ValueError: a rank has a state that cannot be saved.
    """
    reported = RankStates(
        dist.get_rank(),
        {stepped.names: describe_state(state) for stepped, state in own_states.items()},
        [problem for stepped, state in own_states.items() for problem in _problems_of(stepped, state)],
    )
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, reported, group=group)
    problems = [f"rank {states.rank}: {problem}" for states in by_rank for problem in states.problems]
    if problems:
        raise ValueError("\n".join(problems))
    return by_rank


def _problems_of(stepped: Stepped, state: StateDict) -> Iterable[str]:
    """Yield the problems of tensors that are not sharded like their parameter, as text."""
    named = stepped.named_handle
    if named is None or is_stepped_unsharded(named):
        return
    piece = named.handle.pieces[stepped.index]
    owned = (piece.numel if piece else 0) if named.handle.use_orig_params else named.handle.layout.shard_numel
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.numel() != owned:
            yield (
                f"{name!r} of {', '.join(stepped.names)} has the shape {tuple(value.shape)}, but the piece of the "
                f"parameter that the rank steps has {owned} elements; state of another shape cannot be assigned to "
                f"parameters, {_CURE}"
            )
        elif hides_tensors(value):
            yield (
                f"{name!r} of {', '.join(stepped.names)} is a {type(value).__name__} with tensors in it, which may "
                f"belong to the rank's shard only; keep each tensor under its own name, or {_CURE}"
            )


def _merged_keys(reported: Sequence[RankStates], names: ParamNames) -> list[_Key]:
    """Return the keys that any rank has. Parameters that no unit manages come first, then the units' in order.

    With `use_orig_params`, a rank with an empty piece of a parameter has no state of the parameter.

    Raises:
        RuntimeError: some trained parameters of a unit have a state, and some with elements have none.
    """
    all_keys = sorted({key for states in reported for key in states.descriptions})
    by_unit: dict[Any, list[_Key]] = {}
    for key in all_keys:
        if key[0] in names.handle_of:
            by_unit.setdefault(names.handle_of[key[0]].wrapper, []).append(key)
    for wrapper, keys in by_unit.items():
        _check_complete(wrapper, {name for key in keys for name in key}, names)
    managed = [key for keys in by_unit.values() for key in keys]
    return [key for key in all_keys if key[0] not in names.handle_of] + managed


def _check_complete(wrapper: Wrapper, present: set[str], names: ParamNames) -> None:
    handles = [named for named in names.handles if named.wrapper is wrapper]
    for named in handles:
        for index, name in enumerate(named.names):
            needs_state = named.handle.wants_grad(index) and named.handle.layout.slots[index].numel > 0
            if needs_state and name not in present:
                raise RuntimeError(
                    f"{name} is not in the optimizer state. The FSDPParamInfo has the param keys "
                    f"{sorted(name for other in handles for name in other.names)} while the optimizer has the param "
                    f"keys {sorted(present)}."
                )


def _first_ranks_keys(reported: Sequence[RankStates]) -> list[_Key]:
    """Return the first rank's keys. Without `use_orig_params`, every rank steps a shard of each flat parameter.

    Raises:
        RuntimeError: a rank lacks some of them.
    """
    keys = [*reported[0].descriptions]
    missing = {
        rank: [key for key in keys if key not in states.descriptions] for rank, states in enumerate(reported)
    }
    if any(missing.values()):
        lines = "".join(
            f"\nRank {rank} is missing states for the parameters: {missing_keys}"
            for rank, missing_keys in missing.items()
            if missing_keys
        )
        raise RuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but "
            f"some ranks are missing some of those states{lines}"
        )
    return keys
