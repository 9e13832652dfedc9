"""The layout of fully_shard: each parameter is a DTensor, and those of a group travel side by side in one buffer.

W = ranks that the group is sharded over, S = elements of one rank's part of what travels, padding included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl.distributed.fsdp._comm.choosing import fills_rows
from impl.distributed.fsdp._comm.collectives import Reduction
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.dtensor_gradients import DTensorGradients
from impl.distributed.fsdp._layout.gather_extension import GatherExtension, has_extension
from impl.distributed.fsdp._layout.grad_dtypes import accumulation_dtype, promoted
from impl.distributed.fsdp._layout.group_options import GroupOptions
from impl.distributed.fsdp._layout.sharded_param import ShardedParam, beginning_of
from impl.distributed.fsdp._layout.substitutes import Substitute, unsharded_substitute
from impl.distributed.fsdp._layout.unsharded_params import UnshardedParams
from impl.distributed.fsdp._params.autograd import runs_backward
from impl.distributed.fsdp._params.param_group import Gathering, dtypes_of
from impl.distributed.fsdp._params.param_registration import ParamInfo, ParamLocation, ParamRegistration
from impl.distributed.fsdp._params.policies import OffloadPolicy, ParamPrecision, offloads, pins
from impl.kernels import to_device


class DTensorGroup:
    """
    Args:
        params: already cut; of them those that are trained have one dtype.
        groups: the ranks to shard over and to replicate over.
        device: where it is computed with.
        offload_policy: a CPUOffloadPolicy has parameters, gradients and the optimizer's states lie on the CPU.
        backward_mesh: of two dimensions, where fewer ranks gather for a backward: those of the second.
    """

    is_tracked = False  # DTensors tell who holds them; a module that is moved has to own its parameters alone

    def __init__(  # noqa: PLR0913  what it has, with whom, and where
        self,
        params: Sequence[ShardedParam],
        groups: Groups,
        options: GroupOptions,
        device: torch.device,
        offload_policy: OffloadPolicy,
        backward_mesh: DeviceMesh | None = None,
    ) -> None:
        self.params = list(params)
        self.groups = groups
        self.options = options
        self.device = device
        self.offloads = offloads(offload_policy)
        self.pins = device.type != "cpu" and pins(offload_policy)
        self.syncs = True
        self.reduction = Reduction(groups, self._sharded_with)
        self.gradients = DTensorGradients(self)
        self.names = [param.name for param in params]
        self._registration = ParamRegistration(self.param_infos, as_parameters=True)
        self._extends = [has_extension(param) for param in params]
        self.unsharded_params: UnshardedParams | None = None
        self._backward_mesh = backward_mesh
        self._parts: list[Tensor] = []  # of what was unsharded, that this rank keeps for a backward
        self._substitutes: dict[int, Substitute] = {}  # parameter number: tensor
        self._rounded: dict[ShardedParam, str] = {}  # masters that were cast, and not loaded since
        self.is_shown = False
        self.pin()
        self.use_sharded_views()

    # dtypes

    @property
    def dtype(self) -> torch.dtype:
        trained = (param.dtype for param in self.params if param.sharded.requires_grad)
        return next(trained, self.params[0].dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        own = self.dtype
        # Without their imaginary part they would be others.
        return own if own.is_complex else self.options.precision.param_dtype or own

    @property
    def reduce_dtype(self) -> torch.dtype:
        trained = [param for param in self.params if param.sharded.requires_grad]
        floating = [param for param in self.params if param.dtype.is_floating_point or param.dtype.is_complex]
        return promoted(
            self._grad_dtype_of(param) or self._dtype_of(param)
            for param in trained or floating or self.params
        )

    def precision_of(self, index: int) -> ParamPrecision:
        param = self.params[index]
        reduce_dtype = self._grad_dtype_of(param) or self._dtype_of(param)
        return ParamPrecision(self._dtype_of(param), reduce_dtype, param.dtype)

    @property
    def param_infos(self) -> list[ParamInfo]:
        return [param.info for param in self.params]

    @property
    def stepped(self) -> list[nn.Parameter]:
        return [param.sharded for param in self.params]

    def _dtype_of(self, param: ShardedParam) -> torch.dtype:
        """That it is computed with: integers keep their own."""
        asked = self.options.precision.param_dtype
        return asked if asked is not None and param.dtype.is_floating_point else param.dtype

    def _grad_dtype_of(self, param: ShardedParam) -> torch.dtype | None:
        return accumulation_dtype(param.sharded, self.options.precision, self._dtype_of(param))

    def _sharded_with(self) -> str:
        placed = [f"{param.name} as Shard({param.dim})" for param in self.params if param.dim]
        return ", ".join([*dtypes_of(self), *placed])

    # when it is unsharded

    def keeps_after_forward(self, is_outermost: bool, awaits_backward: bool) -> bool:
        del awaits_backward
        if runs_backward():  # recomputed for it, which will want the parameters
            return True
        reshards = self.options.reshards_after_forward
        return is_outermost if reshards is None else not reshards

    def frees_in_backward(self) -> bool:
        return self.options.reshards_after_backward

    # what the user changes

    def write_back_changes(self) -> bool:
        if self._parts:
            return False
        replaced = self._registration.replaced(self._own_tensors())
        if self._has_views_put_back(replaced):
            self._registration.register(self.stepped)
            replaced = []
        self._note_substitutes(replaced)
        if self.is_shown:
            return False
        was_changed = False
        for index, tensor in replaced:
            if isinstance(tensor, nn.Parameter):
                self.params[index].replace(tensor)
                was_changed = True
        if was_changed and self.unsharded_params is not None:
            self.unsharded_params.use_grad_dtypes([self._grad_dtype_of(param) for param in self.params])
        if was_changed or (self.pins and self._has_other_parts()):
            self.pin()
        return was_changed

    def _own_tensors(self) -> Sequence[nn.Parameter]:
        """Return the tensors that modules have now unless the user replaced them."""
        if not self.is_shown:
            return self.stepped
        assert self.unsharded_params is not None
        return self.unsharded_params.views

    def _has_views_put_back(self, replaced: Iterable[tuple[int, Tensor | None]]) -> bool:
        """Return whether functional_call began while the group was unsharded, and ended after it was resharded."""
        unsharded = self.unsharded_params
        if self.is_shown or unsharded is None:
            return False
        return any(tensor is unsharded.views[index] for index, tensor in replaced)

    def _note_substitutes(self, replaced: Iterable[tuple[int, Tensor | None]]) -> None:
        before, self._substitutes = self._substitutes, {}
        for index, tensor in replaced:
            # A parameter instead of a sharded one is assigned, and stays.
            if tensor is None or (isinstance(tensor, nn.Parameter) and not self.is_shown):
                continue
            # Several units may unshard this group in one forward.
            if index in before and tensor is before[index].unsharded:
                self._substitutes[index] = before[index]
            else:
                self._substitutes[index] = Substitute(tensor, None)

    def _has_other_parts(self) -> bool:
        return self.unsharded_params is not None and self.unsharded_params.has_other_parts()

    def pin(self) -> None:
        """Have what lies on the CPU lie in pinned memory, if the policy asks for it; it may have been replaced."""
        for param in self.params if self.pins else ():
            part = param.local
            # Nothing is never pinned, and another part counts as written to, on this rank alone.
            if part.is_cpu and part.numel() and not part.is_pinned():
                param.local = part.pin_memory()

    def is_up_to_date(self, dtype: torch.dtype) -> bool:
        del dtype
        return self.unsharded_params is not None and self.unsharded_params.is_filled()

    def check_device(self, compute_device: torch.device) -> None:
        del compute_device
        on_meta = [param.name for param in self.params if param.sharded.device.type == "meta"]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, "
                f"but the following were still on meta device: {on_meta}\n"
                "For example, call module.to_empty(device) to materialize to device and "
                "call module.reset_parameters() on each module to initialize values."
            )
        elsewhere = [(p.name, p.sharded.device) for p in self.params if p.sharded.device.type != "cpu"]
        if self.offloads and elsewhere:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
                'For example, load a CPU state dict or call module.to_empty(device="cpu"). '
                f"Found following parameters on non-CPU device: {elsewhere}\n"
            )

    def check_dtypes(self) -> None:
        """Check that masters were not cast and that trained parameters share one dtype.

        Raises:
            RuntimeError: masters were cast.
            AssertionError: what is trained has several dtypes.
        """
        self._refuse_lost_masters()
        dtypes = {param.dtype for param in self.params if param.sharded.requires_grad}
        if len(dtypes) > 1:
            raise AssertionError(f"FSDP expects uniform original parameter dtype but got {dtypes}")

    def note_cast(self) -> None:
        """They may have been: bits that a master has lost do not come back when it is cast again."""
        self._rounded = self._lost_masters() | self._rounded

    def note_loaded(
        self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *, assigned: bool
    ) -> None:
        """A module is about to load; what is loaded into a master that is cast is rounded, unless it replaces it."""
        for param in [*self._rounded]:
            own = (place.attribute for place in param.info.locations if place.module is module)
            is_whole = assigned or param.dtype is self.options.precision.master_dtype
            if is_whole and any(prefix + attribute in state_dict for attribute in own):
                del self._rounded[param]

    def _lost_masters(self) -> dict[ShardedParam, str]:
        master = self.options.precision.master_dtype
        if master is None:
            return {}
        floating = (p for p in self.params if p.dtype.is_floating_point)
        return {p: f"{p.name} ({p.dtype})" for p in floating if p.dtype is not master}

    def _refuse_lost_masters(self) -> None:
        master = self.options.precision.master_dtype
        if master is None:
            return
        lost = self._lost_masters()
        if self._rounded and not lost:
            raise RuntimeError(
                f"{', '.join(self._rounded.values())} were cast, and back to {master}, the master_dtype of the policy, "
                "without the bits that this has rounded away; load them by load_state_dict(), or to go on with what is "
                "left, their own state_dict()"
            )
        if lost:
            raise RuntimeError(
                f"{', '.join(lost.values())} should be {master}, the master_dtype of the policy, but have been cast or "
                f"replaced; call module.to({master}), and where they have been rounded load them again"
            )

    # gathering

    def unsharded(self, dtype: torch.dtype) -> UnshardedParams:
        del dtype
        asked, dtypes = self.options.precision.param_dtype, [param.sharded.dtype for param in self.params]
        if asked is not None:  # integers keep their own
            dtypes = [asked if own.is_floating_point else own for own in dtypes]
        found = self.unsharded_params
        if found is None or found.dtypes != dtypes:
            if found is not None:
                found.is_given_up = True
            with torch.inference_mode(False), torch.no_grad():
                extensions = [
                    GatherExtension(param, self.device, self.options.policy) if extends else None
                    for param, extends in zip(self.params, self._extends, strict=True)
                ]
                grad_dtypes = [self._grad_dtype_of(param) for param in self.params]
                found = self.unsharded_params = UnshardedParams(
                    self.params, dtypes, self.device, extensions, grad_dtypes
                )
        return found

    def begin_gather(self, dtype: torch.dtype) -> Gathering | None:
        self._refuse_lost_masters()
        unsharded = self.unsharded(dtype)
        is_split = bool(self._parts) and unsharded.is_filled()
        over = self.groups.backward if is_split else self.groups.shard
        given = self._parts if is_split else unsharded.inputs()
        if not is_split:
            self.drop_parts()  # which are older, and what is noted as filled now would pass for theirs if this fails
        unsharded.allocate()
        written = unsharded.note_filled()
        if self.offloads:
            given = [to_device(one, self.device) for one in given]
        if over is None:
            for one, (_, run) in zip(given, unsharded.runs, strict=True):
                beginning_of(run, one.shape).copy_(one)
            unsharded.complete()
            return None
        gathering = self._packed(over, given, unsharded)._replace(written=written)
        custom = self.options.all_gather
        if custom is None:
            return gathering
        custom(output_tensor=gathering.output, input_tensor=gathering.mine, group=over, async_op=False)
        self.end_gather(gathering)
        return None

    def _packed(
        self, over: dist.ProcessGroup, given: Sequence[Tensor], unsharded: UnshardedParams
    ) -> Gathering:
        packing = unsharded.packing(over.size())
        custom = self.options.all_gather
        if packing.is_bytes:  # where a piece begins in the middle of an element
            pairs = zip(given, unsharded.runs, strict=True)
            given = [one.to(run.dtype).reshape(-1).view(torch.uint8) for one, (_, run) in pairs]
        on_host = self.device.type == "cpu"
        if custom is None and fills_rows(
            self.groups.collectives[over], packing.nbytes, len(packing.rows), on_host
        ):
            rows = unsharded.rows(over.size(), is_split=over is self.groups.backward)
            mine = [beginning_of(row[over.rank()], one.shape) for row, one in zip(rows, given, strict=True)]
            torch._foreach_copy_(mine, list(given))
            return Gathering(over, packing.output, packing.output, (), rows)
        if custom is None:
            packing.allocate()
            output = packing.output
        else:
            numel = over.size() * packing.total
            output = custom.allocate((numel,), dtype=packing.dtype, device=self.device)
        mine = output[over.rank() * packing.total :][: packing.total]
        if custom is not None:
            mine.zero_()  # padding too is the user's to see, and to quantise with the rest
        pieces = packing.pieces(mine, given, is_own=custom is None)
        torch._foreach_copy_(pieces, list(given))
        return Gathering(over, output, mine, ())

    def end_gather(self, gathering: Gathering) -> None:
        unsharded, ranks = self.unsharded_params, gathering.over.size()
        assert unsharded is not None
        if not gathering.rows:
            unsharded.take(gathering.output, ranks, is_split=gathering.over is self.groups.backward)
            unsharded.packing(ranks).free()
        unsharded.complete()

    # what modules see

    def use_unsharded_views(self, dtype: torch.dtype) -> UnshardedParams:
        unsharded = self.unsharded_params or self.unsharded(dtype)
        unsharded.follow_requires_grad()
        if not self.is_shown or self._substitutes:
            self._registration.register(self._unsharded_tensors(unsharded.views))
            self.is_shown = True
            self._parts = []
        return unsharded

    def _unsharded_tensors(self, views: Sequence[Tensor]) -> list[Tensor]:
        tensors, param_dtype = list(views), self.options.precision.param_dtype
        for index, (original, unsharded) in self._substitutes.items():
            if unsharded is None:
                unsharded = unsharded_substitute(original, self.params[index], self.device, param_dtype)  # noqa: PLW2901
                self._substitutes[index] = Substitute(original, unsharded)
            tensors[index] = unsharded
        return tensors

    def show_kept(self) -> None:
        if self._substitutes:
            self._registration.register(self._with_substitutes(self._own_tensors()))

    def _with_substitutes(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return `own`, with the user's tensor instead where a module still has a substitute."""
        tensors = list(own)
        for index, shown in self._registration.registered() if self._substitutes else ():
            substitute = self._substitutes.get(index)
            if substitute is not None and (shown is substitute.original or shown is substitute.unsharded):
                tensors[index] = substitute.original
        self._substitutes = {
            index: substitute
            for index, substitute in self._substitutes.items()
            if substitute.unsharded is None
        }
        return tensors

    def use_sharded_views(self, *, behind_forward: bool = False) -> None:
        self._parts = self._parts_for_backward() if behind_forward else []
        if self._parts and self._backward_mesh is not None:
            pairs = zip(self.params, self._parts, strict=True)
            self._registration.register(
                [param.shown_for_backward(part, self._backward_mesh) for param, part in pairs]
            )
        else:
            self._registration.register(self._with_substitutes(self.stepped))
        self.is_shown = False

    def _parts_for_backward(self) -> list[Tensor]:
        unsharded, fewer = self.unsharded_params, self.groups.backward
        is_asked = type(self.options.reshards_after_forward) is int
        # What an extension has made cannot be cut.
        if not is_asked or fewer is None or unsharded is None or any(self._extends):
            return []
        return [param.kept_of(run, fewer.rank(), fewer.size()) for param, run in unsharded.runs]

    def show_at(self, param: ShardedParam, locations: tuple[ParamLocation, ...]) -> None:
        """Have other modules, which had the same parameter, see it too; nothing is unsharded."""
        param.info = replace(param.info, locations=(*param.info.locations, *locations))
        self._registration = ParamRegistration(self.param_infos, as_parameters=True)
        self.use_sharded_views()

    def drop_parts(self) -> None:
        """The modules see the shards, and the next gather is of these."""
        if self._parts:
            self.use_sharded_views()

    def leave_unsharded(self) -> None:
        self.unsharded_params = None

    def free(self) -> None:
        if self.unsharded_params is not None and not self.options.keeps_storage:
            self.unsharded_params.free()
