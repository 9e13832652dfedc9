"""Loading a state dict into the units of a module: all of it on every rank, or nothing on any.

While `nn.Module.load_state_dict` walks through the modules it meets stand-ins, which have the parameters' shapes and
keep what is copied into them. Neither a shard is written nor a collective issued meanwhile. Then the ranks agree
whether all of them succeeded; only if so, what was kept is written. Buffers, and parameters that no unit manages, are
written in the walk, and put back if it was in vain.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from impl.distributed.fsdp._engine.phase import SHOWN, SHOWN_ON_ALL_RANKS
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._layout.flat_slots import Slot
from impl.distributed.fsdp._params.managed import clean_name, is_managed
from impl.distributed.fsdp._params.tensor_parallel import local_of, root_mesh_of
from impl.distributed.fsdp._state_dict.agreeing import problem_of_any
from impl.distributed.fsdp._state_dict.packing import chunk_in, dtype_of, own_numel, rows_in, shape_of
from impl.distributed.fsdp._state_dict.redistribution import Redistribution, ShardChunk, chunk_of, laid_out_as
from impl.distributed.fsdp._state_dict.saving import WRAPPED, bring_to_rest
from impl.distributed.fsdp._state_dict.stand_in import StandIn, stand_ins_for
from impl.distributed.fsdp.api import ShardedStateDictConfig, StateDictConfig, StateDictType


class LoadableWrapper(Wrapper):
    _loading: StateDictLoading | None = None


class StateDictLoading:
    """One call of `load_state_dict`, as far as it concerns the units below and at a wrapper.

    Args:
        wrappers: these units' FullyShardedDataParallel, the outermost first.
        errors: where a module around the outermost one was asked, what nn.Module will raise.
    """

    def __init__(self, wrappers: Sequence[LoadableWrapper], errors: list[str] | None = None) -> None:
        self.wrappers = list(wrappers)
        self.errors = errors
        self._errors_before = 0 if errors is None else len(errors)
        self._units: dict[Wrapper, UnitLoading] = {}
        self._plain = PlainStates(wrappers[0], [one._unit for one in wrappers])

    def begin(self) -> None:
        for one in self.wrappers:
            one._loading = self

    def is_walked_from(self, wrapper: Wrapper) -> bool:
        """Whether the walk came to this wrapper, the outermost one, from a module around it."""
        return self.errors is not None and wrapper is self.wrappers[0]

    def enter(
        self,
        wrapper: Wrapper,
        kind: StateDictType,
        config: StateDictConfig,
        state_dict: dict[str, Any],
        prefix: str,
    ) -> list[str]:
        """Show stand-ins to the modules of a unit; what its keys hold that no rank could load, in words.

        Raises:
            AssertionError: a key that has to be there is not, or does not hold what it has to.
        """
        unit = self._units[wrapper] = UnitLoading(wrapper, kind, config)
        return unit.begin(state_dict, prefix)

    def leave(self, wrapper: Wrapper) -> None:
        """Have the modules of a unit show what they did before."""
        self._units[wrapper].end()

    def finish(self, problem: str) -> str:
        """Write what was kept if no rank has a problem; else put back what was written. The problem, of any rank.

        Collectives: all-reduces over the units' groups; and what writing takes.
        """
        self._end()
        problem = problem or "\n\t".join(one for unit in self._units.values() for one in unit.unfit())
        given = [one for wrapper in self.wrappers for one in self._given_to(wrapper)]
        try:
            verdict = problem_of_any(self.wrappers, problem, given)
        except BaseException:
            self._plain.put_back()
            raise
        if verdict:
            self._plain.put_back()
        else:
            for unit in self._units.values():
                unit.write()
        return verdict

    def finish_for_outer_module(self) -> None:
        """The same where nn.Module raises; what is missing or unexpected does not count, since it may be allowed to."""
        assert self.errors is not None
        mine = self.errors[self._errors_before :]
        verdict = self.finish("\n\t".join(mine))
        if verdict and not mine:
            self.errors.append(verdict)

    def _end(self) -> None:
        for unit in self._units.values():
            unit.end()
        for one in self.wrappers:
            one._loading = None

    def _given_to(self, wrapper: Wrapper) -> list[tuple[str, str]]:
        """For each parameter what decides on what the ranks send each other."""
        met = self._units.get(wrapper)
        return [
            (f"{slot.name} of {wrapper._unit.name}", met.part_given(handle, index) if met else "nothing")
            for handle in wrapper._unit.param_groups
            for index, slot in enumerate(handle.layout.slots)
        ]

    def abandon(self) -> None:
        """Put everything back, without a word to the other ranks."""
        self._end()
        self._plain.put_back()


@dataclass(frozen=True)
class KeptPart:
    """What a rank keeps of a parameter that nobody holds."""

    shape: torch.Size  # of all of it
    values: Tensor | None  # [numel of the piece]; None: the rank has none of it
    is_meta = False


class UnitLoading:
    """One unit's part in it."""

    def __init__(self, wrapper: Wrapper, kind: StateDictType, config: StateDictConfig) -> None:
        self._wrapper = wrapper
        self._unit = wrapper._unit
        self._kind = kind
        self._config = config
        self._shown = ExitStack()
        self._sources: dict[FlatParamGroup, list[Any]] = {}

    def begin(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        bring_to_rest(self._unit, self._kind)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[prefix + WRAPPED + key.removeprefix(prefix)] = state_dict.pop(key)
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            return self._begin_local(state_dict, prefix)
        problems = []
        if self._kind is StateDictType.SHARDED_STATE_DICT:
            problems = self._hide_parts(state_dict, prefix)
        for handle in self._unit.param_groups:
            self._shown.enter_context(handle.registering(stand_ins_for(handle, self)))
        return problems

    def end(self) -> None:
        """Take what the stand-ins were given; a second time there is nothing to do."""
        if not self._sources:
            self._sources = {handle: _taken(handle) for handle in self._unit.param_groups}
        self._shown.close()

    def unfit(self) -> list[str]:
        """What was put in a parameter's place and cannot be copied from there, in words."""
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            return []
        return [
            f"{handle.layout.slots[index].name}: rank {self._wrapper.rank} was given {_form_of(source)}, but keeps "
            f"{expected}"
            for handle, sources in self._sources.items()
            for index, source in enumerate(sources)
            if source is not None and _form_of(source) != (expected := self._expected_form(handle, index))
        ]

    def _expected_form(self, handle: FlatParamGroup, index: int) -> str:
        slot, parallel = handle.layout.slots[index], handle.param_infos[index].parallel
        if parallel or self._comes_over_whole_mesh():
            return f"a DTensor of shape {tuple(parallel.shape if parallel else slot.shape)}"
        if self._kind is StateDictType.SHARDED_STATE_DICT:
            chunk = chunk_of(slot, self._wrapper._groups.shard_rank, handle.layout.world)
            return f"a tensor of shape {chunk.shape}"
        return f"a tensor of shape {slot.shape}"

    def part_given(self, handle: FlatParamGroup, index: int) -> str:
        if self._kind is StateDictType.LOCAL_STATE_DICT:  # which has one part, of all parameters together
            return "nothing"
        source = self._sources[handle][index]
        if isinstance(source, DTensor):
            return f"a part in {source.dtype} as {source.placements}"
        if self._kind is not StateDictType.SHARDED_STATE_DICT or source is None:
            return "nothing"
        return f"a part in {source.dtype}"

    def _comes_over_whole_mesh(self) -> bool:
        """Whether parts are DTensors over a mesh that this unit's was cut out of."""
        mesh = self._wrapper._device_mesh
        is_sharded = self._kind is StateDictType.SHARDED_STATE_DICT
        return is_sharded and mesh is not None and root_mesh_of(mesh) != mesh

    @torch.no_grad()
    def write(self) -> None:
        for handle, sources in self._sources.items():
            given = [index for index, source in enumerate(sources) if source is not None]
            match self._kind:
                case StateDictType.LOCAL_STATE_DICT:
                    for source in sources:
                        handle.flat_param.detach()[: len(source)].copy_(source)
                case StateDictType.SHARDED_STATE_DICT:
                    self._write_chunks(handle, given, [sources[index] for index in given])
                case _:
                    for index in given:
                        _write_unsharded(handle, index, sources[index])
            if self._unit.phase in SHOWN:
                self._show_written(handle, given)

    def part_of(self, unsharded: Tensor, name: str) -> KeptPart:
        """To be kept for a parameter, by its name."""
        for handle in self._unit.param_groups:
            for index, slot in enumerate(handle.layout.slots):
                if slot.name == name:
                    values = _piece_of(handle, index, unsharded)
                    return KeptPart(unsharded.shape, None if values is None else values.clone())
        raise AssertionError(name)

    # ShardedTensor and DTensor

    def _hide_parts(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Put stand-ins for them into the dict, which nn.Module compares with those that the modules show."""
        problems: list[str] = []
        config = self._config
        uses_dtensor = isinstance(config, ShardedStateDictConfig) and config._use_dtensor
        expected = DTensor if uses_dtensor else ShardedTensor
        for handle, index, name in self._names():
            key = prefix + WRAPPED + name
            if key not in state_dict:
                continue
            value = state_dict[key]
            chunk = chunk_in(value, expected, self._wrapper.rank)
            slot, parallel = handle.layout.slots[index], handle.param_infos[index].parallel
            shape = parallel.shape if parallel else torch.Size(slot.shape)
            problem = self._problem_of(value, chunk, slot, shape)
            problems += [f"{prefix}{name}: {problem}"] if problem else []
            dtype = dtype_of(value)
            part = torch.empty(0, *slot.shape[1:], dtype=dtype) if chunk is None else chunk
            # Before all ranks have agreed to load it, nothing of it is sent.
            source = value if self._comes_over_whole_mesh() else part
            state_dict[key] = self._stand_in(shape, dtype, name, source)
        return problems

    def _problem_of(self, value: Any, chunk: Tensor | None, slot: Slot, shape: torch.Size) -> str:
        groups, mine = (
            self._wrapper._groups,
            f"rank {self._wrapper.rank} of {self._wrapper.world_size} was given",
        )
        if shape_of(value) != shape:
            return f"{mine} {_form_of(value)} but the parameter has the shape {tuple(shape)}"
        if self._comes_over_whole_mesh():
            whole = root_mesh_of(self._wrapper._mesh)
            if value.device_mesh == whole:
                return ""
            return (
                f"{mine} a DTensor over {value.device_mesh} but keeps one over {whole}; what was saved over another "
                "mesh is loaded by torch.distributed.checkpoint"
            )
        expected = chunk_of(slot, groups.shard_rank, groups.shard_size).shape
        actual = (0, *slot.shape[1:]) if chunk is None else tuple(chunk.shape)
        if actual == expected:
            return ""
        return (
            f"{mine} a part of shape {actual} but keeps {expected}; what another number of ranks has saved is loaded "
            "by torch.distributed.checkpoint"
        )

    def _write_chunks(self, handle: FlatParamGroup, given: Sequence[int], chunks: Sequence[Tensor]) -> None:
        held = [
            ShardChunk(index, self._rows_in(handle, index, chunk))
            for index, chunk in zip(given, chunks, strict=True)
        ]
        redistribution = Redistribution(handle.layout, self._wrapper._groups, handle.device, self._unit.name)
        shard = handle.flat_param.detach()
        for index, values in zip(given, redistribution.pieces_from(held), strict=True):
            piece = handle.pieces[index]
            if piece is not None:
                shard.narrow(0, piece.offset, piece.numel).copy_(values)

    def _rows_in(self, handle: FlatParamGroup, index: int, source: Tensor) -> Tensor:
        if not isinstance(source, DTensor):
            return source
        slot, parallel = handle.layout.slots[index], handle.param_infos[index].parallel
        return rows_in(source, slot, self._wrapper._mesh, parallel)

    # Shards

    def _begin_local(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        problems: list[str] = []
        if self._wrapper._use_orig_params:  # torch's dicts have these beside the shards
            for _, _, name in self._names():
                state_dict.pop(prefix + WRAPPED + name, None)
        for name, handle in self._wrapper._named_handles():
            key = prefix + WRAPPED + name
            if key not in state_dict:
                raise AssertionError(
                    "No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters"
                )
            value = state_dict[key]
            if not isinstance(value, ShardedTensor):
                raise AssertionError("Tensors in local_state_dict should be ShardedTensor.")
            problem, shard = self._shard_in(value, handle)
            problems += [f"{prefix}{name}: {problem}"] if problem else []
            self._sources[handle] = [shard]
            shape = handle.flat_param.shape
            state_dict[key] = self._stand_in(shape, dtype_of(value), name)
            self._shown.enter_context(
                handle.registering_flat_param(self._stand_in(shape, handle.dtype, name))
            )
        return problems

    def _shard_in(self, value: ShardedTensor, handle: FlatParamGroup) -> tuple[str, Tensor]:
        rank, layout = self._wrapper._groups.shard_rank, handle.layout
        shards = value.local_shards()
        actual = [
            (one.metadata.shard_offsets[0], one.tensor.numel()) for one in shards if not one.tensor.is_meta
        ]
        numel = own_numel(layout, rank)
        expected = [(rank * layout.shard_numel, numel)] if numel else []
        found = shape_of(value).numel()
        if actual == expected and found == layout.numel:
            return "", shards[0].tensor if shards else handle.flat_param.detach()[:0]
        return (
            f"rank {self._wrapper.rank} of {self._wrapper.world_size} was given (offset, elements) {actual} of "
            f"{found} but keeps {expected} of {layout.numel}; LOCAL_STATE_DICT is loaded by as many "
            "ranks, wrapped alike, as have saved it"
        ), handle.flat_param.detach()[:0]

    # Both

    def _names(self) -> list[tuple[FlatParamGroup, int, str]]:
        """Every name of every parameter, without what wrappers put in."""
        locations = {
            (location.module, location.attribute): (handle, index)
            for handle in self._unit.param_groups
            for index, one in enumerate(handle.param_infos)
            for location in one.locations
        }
        modules = list(self._wrapper._fsdp_wrapped_module.named_modules(remove_duplicate=False))
        prefixes: dict[nn.Module, list[str]] = {}
        for name, module in modules:
            prefixes.setdefault(module, []).append(clean_name(f"{name}.") if name else "")
        return [
            (*found, before + attribute)
            for (module, attribute), found in locations.items()
            for before in prefixes[module]
        ]

    def _stand_in(self, shape: torch.Size, dtype: torch.dtype, name: str, source: Any = None) -> StandIn:
        like = torch.empty(shape, dtype=dtype, device="meta")
        return StandIn.made(like, name, device=self._wrapper.compute_device, owner=self, source=source)

    def _show_written(self, handle: FlatParamGroup, given: Sequence[int]) -> None:
        """Inside `summon_full_params`, have the unsharded parameters be what was loaded."""
        views = handle.views_of(handle.gather_like(handle.flat_param.detach(), self._unit.name))
        if self._unit.summoned or self._unit.phase in SHOWN_ON_ALL_RANKS:
            shown = dict(handle.registered())
            for index in given:
                target = shown[index]
                assert target is not None
                local_of(target.detach()).copy_(views[index])


class PlainStates:
    """Buffers, parameters that no unit manages, and extra states: what nn.Module itself loads, as it was before."""

    def __init__(self, root: nn.Module, units: Sequence[Unit[FlatParamGroup]]) -> None:
        summoned = {
            shown for unit in units for handle in unit.param_groups for _, shown in handle.registered()
        }
        self._tensors: list[tuple[dict[str, Any], str, Tensor, Tensor, int]] = []
        self._extras: list[tuple[nn.Module, Any]] = []
        for module in root.modules():
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if tensor is not None and not is_managed(tensor) and tensor not in summoned:
                        kept = (registry, name, tensor, tensor.detach().clone(), tensor._version)
                        self._tensors.append(kept)
            if _has_extra_state(module):
                self._extras.append((module, copy.deepcopy(module.get_extra_state())))

    @torch.no_grad()
    def put_back(self) -> None:
        for registry, name, tensor, before, version in self._tensors:
            registry[name] = tensor
            if tensor._version != version:
                tensor.copy_(before)
        for module, extra in self._extras:
            module.set_extra_state(extra)


def _has_extra_state(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.get_extra_state is not nn.Module.get_extra_state
        and kind.set_extra_state is not nn.Module.set_extra_state
    )


def _taken(handle: FlatParamGroup) -> list[Any]:
    """For each parameter what is to be loaded into it: what its stand-in has taken, or what was put in its place."""
    found: list[Any] = [None] * len(handle.layout.slots)
    for index, shown in handle.registered():
        source = shown.source if isinstance(shown, StandIn) else shown
        if source is not None:
            found[index] = source
    return found


def _form_of(source: Any) -> str:
    kind = f"a {type(source).__name__}" if isinstance(source, (ShardedTensor, DTensor)) else "a tensor"
    if not isinstance(source, ShardedTensor) and source.is_meta:
        kind = "a meta tensor"
    return f"{kind} of shape {tuple(shape_of(source))}"


def _write_unsharded(handle: FlatParamGroup, index: int, source: Tensor | KeptPart) -> None:
    """Copy this rank's piece of an unsharded parameter into the shard."""
    piece, parallel = handle.pieces[index], handle.param_infos[index].parallel
    if parallel is not None and isinstance(source, DTensor):
        source = parallel.local_part(source)
    values = source.values if isinstance(source, KeptPart) else _piece_of(handle, index, source)
    if piece is not None and values is not None:
        handle.flat_param.detach().narrow(0, piece.offset, piece.numel).copy_(values)


def _piece_of(handle: FlatParamGroup, index: int, unsharded: Tensor) -> Tensor | None:
    """What of an unsharded parameter lies in this rank's shard, [numel of the piece]."""
    slot, piece = handle.layout.slots[index], handle.pieces[index]
    if piece is None:
        return None
    dense = laid_out_as(unsharded.detach(), slot)
    first = handle.rank * handle.layout.shard_numel + piece.offset - slot.start if handle.is_sharded else 0
    return dense.as_strided((slot.numel,), (1,)).narrow(0, first, piece.numel)
