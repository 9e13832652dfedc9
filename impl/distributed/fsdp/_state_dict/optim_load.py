"""An optimizer's state that was saved by names and in unsharded shapes, as the optimizer of a sharded model loads it.

First everything is looked through, without its elements where another rank has them: what cannot be loaded raises on
all ranks before anything moves. Then each flat parameter gets its rank's part. What is loaded shares no memory with
what was given.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._state_dict.agreeing import reported_by_all
from impl.distributed.fsdp._state_dict.optim_flat import TensorForm, form_of, own_copy
from impl.distributed.fsdp._state_dict.optim_keys import (
    Key,
    NamedHandle,
    Names,
    Source,
    StateDict,
    Stepped,
    flattened_groups,
    is_stepped_unsharded,
)
from impl.distributed.fsdp._state_dict.optim_shard import (
    FlatParamLoad,
    Scatter,
    full_tensor_of,
    is_in_parts,
    unsharded_of,
)
from impl.distributed.fsdp._state_dict.packing import dtype_of, shape_of


class OptimStateLoading:
    """One state dict on its way into an optimizer, on one rank.

    Args:
        model: whose parameters the optimizer steps.
        wrappers: every FullyShardedDataParallel at and below it.
        source: of what the optimizer steps.
        given: the state dict; with `rank0_only` that of the group's first rank counts alone.
        keeper: an optimizer whose state dict has names for keys, and states for parameters of which a rank has nothing.
        agrees: tell other ranks what is wrong; without, they need not take part unless tensors move.
    """

    def __init__(  # noqa: PLR0913  what torch's functions take
        self,
        model: nn.Module,
        wrappers: Sequence[Wrapper],
        source: Source,
        given: Any,
        *,
        rank0_only: bool = False,
        keeper: Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
        agrees: bool = True,
    ) -> None:
        self._names = Names(model, wrappers)
        self._device: torch.device = wrappers[0].compute_device
        self._source = source
        self._keeper = keeper
        self._group = group
        self._rank0_only = rank0_only
        self._agrees = agrees
        self._given = given if not rank0_only or dist.get_rank(group) == 0 else {}
        self._forms: Any = _announced(self._given, group) if rank0_only else self._given
        self._flats: dict[NamedHandle, FlatParamLoad] = {}
        self._key_of: dict[nn.Parameter, Key] = {}
        self._groups: list[StateDict] | None = None

    @torch.no_grad()
    def run(self) -> StateDict:
        """
        Raises:
            ValueError, KeyError, RuntimeError: the state dict does not fit the model or the optimizer.
        Collectives: over the group, if rank 0's counts alone or ranks agree, one of objects each; where tensors are on
            other ranks, those that bring this rank's part.
        """
        problem: Exception | None = None
        try:
            self._check()
        except Exception as error:
            problem = error
        scatters: dict[NamedHandle, Scatter] = {}
        if self._agrees:
            moves = self._moves() if problem is None else []
            reported = (moves, [one.handle.rank for one in self._names.handles])
            by_rank = reported_by_all(problem, self._group, reported)
            self._refuse_different_moves([moves for moves, _ in by_rank])
            if self._rank0_only:
                owners = zip(*(owned for _, owned in by_rank), strict=True)
                scatters = {
                    one: Scatter(self._group, owned)
                    for one, owned in zip(self._names.handles, owners, strict=True)
                }
        elif problem is not None:
            raise problem
        return self._loaded(scatters)

    def _check(self) -> None:
        """Look through everything that may be wrong."""
        if not self._rank0_only and "state" not in self._forms:
            raise ValueError(
                '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict'
            )
        state: dict[Any, Any] = self._forms["state"]
        for one, by_index in self._states_of_handles().items():
            if not one.handle.use_orig_params and not any(by_index.values()):
                raise RuntimeError(
                    f"The state of {_as_torch_says(one.names)} is empty. This should happen when use_orig_params=True."
                )
            self._flats[one] = FlatParamLoad(one, by_index)
            self._flats[one].check()
        keyed = self._names.keyed(self._source, self._keeper is not None)
        self._key_of = {parameter: key for key, parameter in keyed.items()}
        if self._rank0_only and (moves := self._moves()):
            raise ValueError(
                f"rank0_only loads what the first rank has unsharded, but it has rows of {moves[:2]}"
            )
        numbers = [key for key in state if not isinstance(key, str)]
        if numbers:
            raise ValueError(
                f"the state has the keys {numbers[:3]}, but is loaded by parameters' names; "
                "FullyShardedDataParallel.rekey_optim_state_dict(…, OptimStateKeyType.PARAM_NAME, …) makes names of "
                "the numbers of an unwrapped model's optimizer"
            )
        if "param_groups" in self._forms:
            keys = {
                name: self._key_of[parameter]
                for parameter, stepped in self._names.stepped.items()
                if parameter in self._key_of
                for name in stepped.names
            }
            self._groups = flattened_groups(self._forms["param_groups"], keys)

    def _states_of_handles(self) -> dict[NamedHandle, dict[int, StateDict]]:
        """What is to be sharded over the ranks."""
        found: dict[NamedHandle, dict[int, StateDict]] = {}
        for stepped in self._names.stepped.values():
            one = stepped.within
            for name in stepped.names:
                if one is not None and not is_stepped_unsharded(one) and name in self._forms["state"]:
                    found.setdefault(one, {})[one.names.index(name)] = self._values[name]
        return found

    @property
    def _values(self) -> dict[Any, Any]:
        """The states with the elements of their tensors, where this rank has them."""
        return self._given["state"] if self._given else self._forms["state"]

    def _moves(self) -> list[Any]:
        """What other ranks must have some rows of, too."""
        return sorted(
            (key, name, type(value).__name__, tuple(shape_of(value)), str(dtype_of(value)))
            for key, state in self._values.items()
            if isinstance(state, dict)
            for name, value in state.items()
            if is_in_parts(value)
        )

    def _refuse_different_moves(self, by_rank: Sequence[list[Any]]) -> None:
        first = by_rank[0]
        for rank, moves in enumerate(by_rank):
            if moves != first:
                lacked = [one for one in first if one not in moves]
                added = [one for one in moves if one not in first]
                raise RuntimeError(
                    f"the optimizer's state dicts differ between ranks: rank 0 has {lacked[:2]}, rank {rank} has "
                    f"{added[:2]} in their place; load parts that were saved together. Nothing was changed on any rank"
                )

    # Assembling

    def _loaded(self, scatters: dict[NamedHandle, Scatter]) -> StateDict:
        sharded = {one: load.sharded(scatters.get(one)) for one, load in self._flats.items()}
        state: dict[Any, Any] = self._forms["state"]
        result: dict[Any, Any] = {}
        known: set[str] = set()
        for parameter, stepped in self._names.stepped.items():
            if not any(name in state for name in stepped.names):
                continue
            known.update(stepped.names)
            found = self._state_of(parameter, stepped, sharded)
            if found is not None:
                result[self._key_of.get(parameter, stepped.names)] = found
        for key, form in state.items():
            if key not in known:
                result[key] = tree_map(self._fetched, form, self._values[key])
        return {"state": result} if self._groups is None else {"state": result, "param_groups": self._groups}

    def _state_of(
        self, parameter: nn.Parameter, stepped: Stepped, sharded: dict[NamedHandle, dict[int, StateDict]]
    ) -> StateDict | None:
        """None where nothing of the parameter is this rank's."""
        one = stepped.within
        if one is None or is_stepped_unsharded(one):
            values = self._values[stepped.name]
            if one is not None and one.handle.param_infos[stepped.index].parallel is not None:
                values = tree_map_only(DTensor, partial(unsharded_of, one=one, index=stepped.index), values)
            found = tree_map(self._fetched, self._forms["state"][stepped.name], values)
        else:
            found = sharded[one].get(stepped.index)
        if found or one is None:
            return found
        if self._keeper is None:
            return None
        kept = self._keeper.state.get(parameter)
        if kept is None:
            warnings.warn(
                f"optim_state[{_as_torch_says(stepped.names)}] is not on rank{one.wrapper.rank}.",
                stacklevel=6,
            )
        return copy.deepcopy(kept)

    def _fetched(self, form: Any, value: Any) -> Any:
        """A value that each rank has all of, in memory of its own."""
        if isinstance(form, TensorForm):
            if not isinstance(value, Tensor):
                value = torch.empty(form.shape, dtype=form.dtype, device=self._device)
            mine = value.detach().to(self._device, copy=True)
            dist.broadcast(mine, group=self._group, group_src=0)
            return mine
        return own_copy(full_tensor_of(value, self._device)) if isinstance(value, Tensor) else value


def _as_torch_says(names: Sequence[str]) -> str:
    return f"_OptimStateKey(unflat_param_names={tuple(names)}, is_fsdp_managed=True)"


def _announced(given: Any, group: dist.ProcessGroup | None) -> Any:
    """What the group's first rank has, on all ranks, without the elements of tensors."""
    announced = [tree_map(form_of, given)]
    dist.broadcast_object_list(announced, group=group, group_src=0)
    return announced[0]


def load_together(optim: Optimizer, state_dict: StateDict, group: dist.ProcessGroup | None) -> None:
    """Have the optimizer load what was made for it, on all ranks or, if one raises, on none."""
    kept = {"state": optim.state, "param_groups": optim.param_groups}
    problem: Exception | None = None
    try:
        optim.load_state_dict(state_dict)
    except Exception as error:
        problem = error
    try:
        reported_by_all(problem, group)
    except Exception:
        vars(optim).update(kept)
        raise
