"""An optimizer's state as it is saved: by the names and in the shapes that parameters had before wrapping.

What an optimizer keeps in the shape of what it steps is sharded over the ranks as that is; the rest, numbers and
whatever else, every rank has all of. First all ranks tell each other what they have, by name, shape and dtype, so that
all of them issue the same collectives, or raise the same error; then the tensors move.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.distributed.fsdp._comm.desync.collective_order import named_ranks
from impl.distributed.fsdp._comm.desync.monitor import GATHERED, OF_STATES
from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._state_dict.optim_flat import (
    FlatParamState,
    OptimSaveOptions,
    RankStates,
    forms_of,
    hides_tensors,
    offloaded,
)
from impl.distributed.fsdp._state_dict.optim_keys import (
    Names,
    Source,
    StateDict,
    Stepped,
    is_keyed_by_name,
    is_stepped_unsharded,
    unflattened_groups,
)

_Key = tuple[str, ...]
_CURE = "use sharding_strategy=NO_SHARD with use_orig_params=True for this optimizer"


@torch.no_grad()
def saved(  # noqa: PLR0913  what torch's functions take
    model: nn.Module,
    wrappers: Sequence[Wrapper],
    source: Source,
    state_dict: StateDict,
    options: OptimSaveOptions,
    group: dist.ProcessGroup | None,
) -> StateDict:
    """An optimizer's state dict as `options` say; empty on a rank that is to have none.

    Raises:
        RuntimeError: a rank lacks states that others have, or does something else than to ask for them.
        ValueError: a tensor of a state is not shaped like what the optimizer steps. All of this is raised on all ranks.
        AssertionError: ranks differ in a number that they should all have.
    Collectives: one of objects over `group`; then for each flat parameter, as `options` say, a gather or an all-gather
        for each of the tensors of a state, or one all-to-all for all of them.
    """
    names = Names(model, wrappers)
    keyed = names.keyed(source, is_keyed_by_name(state_dict))
    given: dict[Any, StateDict] = state_dict["state"]
    mine = {names.of(parameter): given[key] for key, parameter in keyed.items() if key in given}
    _note_that_it_saves(wrappers[0], group)
    reported = _states_of_all(mine, group)
    merges = wrappers[0]._use_orig_params
    keys = _merged_keys(reported, names) if merges else _first_ranks_keys(reported)
    destination = dist.get_global_rank(group or _world(), 0)
    is_kept = not (options.is_full and options.rank0_only) or dist.get_rank() == destination
    states: dict[str, StateDict] = {}
    for one in dict.fromkeys(names.handle_of[key[0]] for key in keys if key[0] in names.handle_of):
        states.update(FlatParamState(one, mine, reported).collected(options, destination))
    for stepped, state in mine.items():
        if stepped.within is None:
            states[stepped.name] = offloaded(state) if options.offloads else copy.copy(state)
    if not is_kept:
        return {}
    result: StateDict = {"state": {name: states[name] for key in keys for name in key if name in states}}
    for key, state in given.items():
        if key not in keyed and key not in states:
            _warn_of_unknown(key)
            result["state"][key] = state
    if "param_groups" in state_dict:
        result["param_groups"] = unflattened_groups(state_dict["param_groups"], keyed, names)
    return result


def _note_that_it_saves(wrapper: Wrapper, group: dist.ProcessGroup | None) -> None:
    """To those groups of ranks that all take part: one replica may save alone."""
    saving = {*named_ranks(group or _world())}
    for one, order_checker in wrapper._groups.order_checkers.items():
        if saving.issuperset(named_ranks(one)):
            entry = f"{GATHERED} the names {OF_STATES}"
            order_checker.note(entry, one, wrapper.compute_device, awaits_all=True)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _warn_of_unknown(key: Any) -> None:
    warnings.warn(
        f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy everything to the returned "
        "state_dict. In most cases, this is a user-defined state that is not associated with any particular parameter. "
        "Another possible case is this state is managed by TorchRec. Otherwise, there may  be a mismatched assumption "
        "of optim_state_dict of this mode.",
        stacklevel=5,
    )


# What the ranks have, between them


def _states_of_all(mine: dict[Stepped, StateDict], group: dist.ProcessGroup | None) -> list[RankStates]:
    """
    Raises:
        ValueError: a rank cannot save what it has.
    """
    reported = RankStates(
        dist.get_rank(),
        {stepped.names: forms_of(state) for stepped, state in mine.items()},
        [problem for stepped, state in mine.items() for problem in _problems_of(stepped, state)],
    )
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, reported, group=group)
    problems = [f"rank {one.rank}: {problem}" for one in by_rank for problem in one.problems]
    if problems:
        raise ValueError("\n".join(problems))
    return by_rank


def _problems_of(stepped: Stepped, state: StateDict) -> Iterable[str]:
    """Tensors that do not lie as the parameter does, in words."""
    one = stepped.within
    if one is None or is_stepped_unsharded(one):
        return
    piece = one.handle.pieces[stepped.index]
    owned = (piece.numel if piece else 0) if one.handle.use_orig_params else one.handle.layout.shard_numel
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.numel() != owned:
            yield (
                f"{name!r} of {', '.join(stepped.names)} has the shape {tuple(value.shape)}, but the part of the "
                f"parameter that the rank steps has {owned} elements; state in another shape cannot be told apart by "
                f"parameters, {_CURE}"
            )
        elif hides_tensors(value):
            yield (
                f"{name!r} of {', '.join(stepped.names)} is a {type(value).__name__} with tensors in it, which may be "
                f"of the rank's part alone; keep each tensor under a name of its own, or {_CURE}"
            )


def _merged_keys(reported: Sequence[RankStates], names: Names) -> list[_Key]:
    """With `use_orig_params`: what any rank has, since one whose part of a parameter is empty has no state for it.

    Those that no unit manages come first, then unit by unit.

    Raises:
        RuntimeError: of the parameters of a unit that are trained some have a state and some have none.
    """
    found = sorted({key for one in reported for key in one.forms})
    by_unit: dict[Any, list[_Key]] = {}
    for key in found:
        if key[0] in names.handle_of:
            by_unit.setdefault(names.handle_of[key[0]].wrapper, []).append(key)
    for wrapper, keys in by_unit.items():
        _refuse_missing(wrapper, {name for key in keys for name in key}, names)
    managed = [key for keys in by_unit.values() for key in keys]
    return [key for key in found if key[0] not in names.handle_of] + managed


def _refuse_missing(wrapper: Wrapper, present: set[str], names: Names) -> None:
    handles = [one for one in names.handles if one.wrapper is wrapper]
    for one in handles:
        for index, name in enumerate(one.names):
            if one.handle.wants_grad(index) and name not in present:
                raise RuntimeError(
                    f"{name} is not in the optimizer state. The FSDPParamInfo has the param keys "
                    f"{sorted(name for other in handles for name in other.names)} while the optimizer has the param "
                    f"keys {sorted(present)}."
                )


def _first_ranks_keys(reported: Sequence[RankStates]) -> list[_Key]:
    """Without `use_orig_params`: what the first rank has; every rank steps a part of each flat parameter.

    Raises:
        RuntimeError: a rank lacks some of it.
    """
    keys = [*reported[0].forms]
    missing = {rank: [key for key in keys if key not in one.forms] for rank, one in enumerate(reported)}
    if any(missing.values()):
        lines = "".join(
            f"\nRank {rank} is missing states for the parameters: {lacked}"
            for rank, lacked in missing.items()
            if lacked
        )
        raise RuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but "
            f"some ranks are missing some of those states{lines}"
        )
    return keys
