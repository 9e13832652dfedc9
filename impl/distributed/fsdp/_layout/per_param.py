"""Layout of fully_shard: each parameter is a DTensor, and a group is gathered in one buffer.

W = ranks that the group is sharded over, S = elements of one rank's shards in a collective, padding included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from impl._names import describe_names
from impl.distributed.fsdp._comm.choosing import fills_rows
from impl.distributed.fsdp._comm.collectives import Reduction
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.cast_shards import CastShards
from impl.distributed.fsdp._layout.dtensor_gradients import DTensorGradients
from impl.distributed.fsdp._layout.gather_extension import GatherExtension, has_extension
from impl.distributed.fsdp._layout.grad_dtypes import accumulation_dtype, promoted
from impl.distributed.fsdp._layout.group_options import GroupOptions
from impl.distributed.fsdp._layout.masters import Masters
from impl.distributed.fsdp._layout.sharded_param import ShardedParam, leading_view
from impl.distributed.fsdp._layout.substitutes import Substitute, unsharded_substitute
from impl.distributed.fsdp._layout.unsharded_params import UnshardedParams, versions_of
from impl.distributed.fsdp._params.autograd import runs_backward
from impl.distributed.fsdp._params.param_group import AllGatherRequest, describe_dtypes
from impl.distributed.fsdp._params.param_registration import ParamInfo, ParamLocation, ParamRegistration
from impl.distributed.fsdp._params.policies import OffloadPolicy, ParamPrecision, offloads, pins
from impl.distributed.fsdp._params.user_warnings import warn_user
from impl.kernels import keep_for_current_stream, to_device


class DTensorGroup:
    """Group of parameters that are sharded as DTensors.

    Args:
        params: sharded parameters. Those that are trained have one dtype.
        groups: the ranks to shard over and to replicate over.
        device: compute device.
        offload_policy: a CPUOffloadPolicy keeps parameters, gradients and optimizer states on the CPU.
        post_forward_mesh: a mesh of two dimensions if fewer ranks gather for a backward: those of the second one.
    """

    # DTensors have their mesh, and `Module.to` swaps them, which torch refuses if a weak reference to one exists.
    is_tracked = False

    def __init__(  # noqa: PLR0913  called once
        self,
        params: Sequence[ShardedParam],
        groups: Groups,
        options: GroupOptions,
        device: torch.device,
        offload_policy: OffloadPolicy,
        post_forward_mesh: DeviceMesh | None,
    ) -> None:
        self.params = list(params)
        self.process_groups = groups
        self.options = options
        self.device = device
        self.offloads = offloads(offload_policy)
        self.pins = device.type != "cpu" and pins(offload_policy)
        self.syncs = True
        self.reduction = Reduction(groups, self._describe_settings)
        self.gradients = DTensorGradients(self)
        self.names = [param.name for param in params]
        self._registration = ParamRegistration(self.param_infos, as_parameters=True)
        self._have_extensions = [has_extension(param) for param in params]
        self.unsharded_params: UnshardedParams | None = None
        self.shard_casts = CastShards()
        self._post_forward_mesh = post_forward_mesh
        # Post-forward shards, which this rank keeps of unsharded parameters, and the parameters that modules have then.
        self._post_forward_shards: list[Tensor] = []
        self._post_forward_params: list[nn.Parameter] = []
        self._substitutes: dict[int, Substitute] = {}  # parameter index -> tensor
        self.masters = Masters(self.params, options.precision.master_dtype)
        self._checked_index = -1  # parameter whose `.data` was checked last
        self.uses_unsharded_views = False
        self.pin()
        self.use_sharded_views()

    # Dtypes

    @property
    def dtype(self) -> torch.dtype:
        trained = (param.dtype for param in self.params if param.sharded.requires_grad)
        return next(trained, self.params[0].dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        own = self.dtype
        # A real dtype would drop the imaginary part.
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
        """Return the dtype that `param` computes in. Integer parameters keep their own."""
        param_dtype = self.options.precision.param_dtype
        return param_dtype if param_dtype is not None and param.dtype.is_floating_point else param.dtype

    def _grad_dtype_of(self, param: ShardedParam) -> torch.dtype | None:
        return accumulation_dtype(param.sharded, self.options.precision, self._dtype_of(param))

    def _describe_settings(self) -> str:
        dims = [f"{param.name} as Shard({param.dim})" for param in self.params if param.dim]
        return ", ".join([*describe_dtypes(self), *dims])

    # Times at which it is unsharded

    def keeps_after_forward(self, is_outermost: bool, awaits_backward: bool) -> bool:
        del awaits_backward
        if runs_backward():  # a recomputed forward, whose backward needs the parameters
            return True
        reshards = self.options.reshards_after_forward
        return is_outermost if reshards is None else not reshards

    def frees_in_backward(self) -> bool:
        return self.options.reshards_after_backward

    # Changes by the user

    def write_back_changes(self) -> bool:
        replaced = self._registration.replacements_of(self._expected_tensors())
        if self._has_views_put_back(replaced):
            self._registration.register(self._expected_tensors())
            replaced = []
        for index in {index for index, _ in replaced}:
            self.params[index].check_places(self._expected_tensors()[index])
        self._record_substitutes(replaced)
        if self.uses_unsharded_views or self._post_forward_shards:
            return False
        was_changed = False
        for index, tensor in replaced:
            if isinstance(tensor, nn.Parameter):
                self.params[index].replace(tensor)
                was_changed = True
        self._warn_of_assigned_data()
        if was_changed:
            # A load assigns another tensor at each place of a tied parameter.
            self._registration.register(self._with_substitutes(self._expected_tensors()))
        unsharded = self.unsharded_params
        if was_changed and unsharded is not None:
            unsharded.use_grad_dtypes([self._grad_dtype_of(param) for param in self.params])
        if was_changed or (self.pins and unsharded is not None and unsharded.has_other_shards()):
            self.pin()
        return was_changed

    def _warn_of_assigned_data(self) -> None:
        # The check takes 0.4 µs, so each gather for a forward looks at one parameter, in turn.
        if runs_backward():
            return
        self._checked_index = (self._checked_index + 1) % len(self.params)
        if not self.params[self._checked_index].take_assigned_data():
            return
        others = [param for param in self.params if param.take_assigned_data()]
        names = [param.name for param in (self.params[self._checked_index], *others)]
        warn_user(
            f"the .data of {describe_names(names)} was assigned, which does not change the values of a DTensor; use "
            "parameter.copy_(value) under torch.no_grad()"
        )

    def restore_sharded(self, module: nn.Module) -> list[str]:
        """Register sharded parameters again that a load has replaced in `module` by unsharded ones.

        Return the attributes that had them.
        """
        pairs = zip(self.params, self._expected_tensors(), strict=True)
        places = [
            (place, tensor)
            for param, tensor in pairs
            for place in param.info.locations
            if place.module is module
        ]
        attributes: list[str] = []
        for place, tensor in places:
            now = getattr(module, place.attribute, None)
            if now is not tensor and isinstance(now, nn.Parameter) and not isinstance(now, DTensor):
                setattr(module, place.attribute, tensor)
                attributes.append(place.attribute)
        return attributes

    def _expected_tensors(self) -> Sequence[nn.Parameter]:
        """Return the tensors that modules have now unless the user replaced them."""
        if not self.uses_unsharded_views:
            return self._post_forward_params or self.stepped
        assert self.unsharded_params is not None
        return self.unsharded_params.views

    def _has_views_put_back(self, replaced: Iterable[tuple[int, Tensor | None]]) -> bool:
        """Return whether functional_call began while the group was unsharded, and ended after it was resharded."""
        unsharded = self.unsharded_params
        if self.uses_unsharded_views or unsharded is None:
            return False
        return any(tensor is unsharded.views[index] for index, tensor in replaced)

    def _record_substitutes(self, replaced: Iterable[tuple[int, Tensor | None]]) -> None:
        before, self._substitutes = self._substitutes, {}
        for index, tensor in replaced:
            # A parameter instead of a sharded one is assigned, and stays.
            if tensor is None or (isinstance(tensor, nn.Parameter) and not self.uses_unsharded_views):
                continue
            # Several units may unshard this group in one forward.
            if index in before and tensor is before[index].unsharded:
                self._substitutes[index] = before[index]
            else:
                self._substitutes[index] = Substitute(tensor, None)

    def pin(self) -> None:
        """Move shards on the CPU to pinned memory if the policy asks for it. Call again after they were replaced."""
        for param in self.params if self.pins else ():
            shard = param.local
            # An empty tensor is never pinned, and a new shard would count as written to on this rank only.
            if shard.is_cpu and shard.numel() and not shard.is_pinned():
                param.local = shard.pin_memory()

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
            AssertionError: trained parameters have several dtypes.
        """
        self.masters.check()
        dtypes = {param.dtype for param in self.params if param.sharded.requires_grad}
        if len(dtypes) > 1:
            raise AssertionError(f"FSDP expects uniform original parameter dtype but got {dtypes}")

    # All-gathers

    def unsharded(self, dtype: torch.dtype) -> UnshardedParams:
        del dtype
        param_dtype = self.options.precision.param_dtype
        dtypes = [param.sharded.dtype for param in self.params]
        if param_dtype is not None:  # integers keep their own dtype
            dtypes = [param_dtype if own.is_floating_point else own for own in dtypes]
        unsharded = self.unsharded_params
        if unsharded is None or unsharded.dtypes != dtypes:
            with torch.inference_mode(False), torch.no_grad():
                if unsharded is not None:
                    unsharded.is_invalidated = True
                    self.gradients.set_unreduced_aside()
                extensions = [
                    GatherExtension(param, self.device, self.options.policy) if extends else None
                    for param, extends in zip(self.params, self._have_extensions, strict=True)
                ]
                grad_dtypes = [self._grad_dtype_of(param) for param in self.params]
                unsharded = self.unsharded_params = UnshardedParams(
                    self.params, dtypes, self.device, extensions, grad_dtypes
                )
        return unsharded

    def cast_shards(self, params: Collection[int]) -> dict[int, Tensor]:
        # The user's extensions get the shards themselves.
        if not self.offloads or any(self._have_extensions):
            return {}
        casts: dict[int, Tensor] = {}
        for index, param in enumerate(self.params):
            dtype = self._dtype_of(param)
            if id(param.sharded) in params and dtype.itemsize < param.dtype.itemsize:
                casts[id(param.sharded)] = self.shard_casts.memory(index, param.local, dtype, pins=self.pins)
        return casts

    def record_cast_shards(self, params: Collection[int]) -> None:
        written = [index for index, param in enumerate(self.params) if id(param.sharded) in params]
        self.shard_casts.record(written, versions_of(self.params))

    def _inputs(self, unsharded: UnshardedParams, *, reads_casts: bool) -> list[Tensor]:
        """Return this rank's inputs of a gather of shards, for each run."""
        inputs = unsharded.inputs()
        for index in self.shard_casts.current(lambda: versions_of(self.params)) if reads_casts else ():
            cast = self.shard_casts.tensors[index]
            if cast.dtype is unsharded.dtypes[index]:
                inputs[index] = cast
        return inputs

    def begin_gather(self, dtype: torch.dtype, *, reads_casts: bool) -> AllGatherRequest | None:
        self.masters.check()
        unsharded = self.unsharded(dtype)
        is_post_forward = bool(self._post_forward_shards) and unsharded.is_filled()
        over = self.process_groups.post_forward if is_post_forward else self.process_groups.shard
        if is_post_forward:
            inputs = self._post_forward_shards
        else:
            inputs = self._inputs(unsharded, reads_casts=reads_casts)
            # If this gather fails, these older shards would be taken for the values that are recorded below.
            self.discard_post_forward_shards()
        unsharded.allocate()
        written = unsharded.record_filled()
        if self.offloads:
            inputs = [to_device(shard, self.device) for shard in inputs]
        if over is None:
            for shard, (_, run) in zip(inputs, unsharded.runs, strict=True):
                leading_view(run, shard.shape).copy_(shard)
            unsharded.complete()
            return None
        request = self._pack(over, inputs, unsharded)._replace(written=written)
        custom = self.options.custom_all_gather
        if custom is None:
            return request
        custom(output_tensor=request.output, input_tensor=request.shard, group=over, async_op=False)
        self.end_gather(request)
        return None

    def _pack(
        self, over: dist.ProcessGroup, inputs: Sequence[Tensor], unsharded: UnshardedParams
    ) -> AllGatherRequest:
        packing = unsharded.packing(over.size())
        custom = self.options.custom_all_gather
        if packing.is_bytes:  # a piece may begin inside an element
            pairs = zip(inputs, unsharded.runs, strict=True)
            inputs = [shard.to(run.dtype).reshape(-1).view(torch.uint8) for shard, (_, run) in pairs]
        on_host = self.device.type == "cpu"
        if custom is None and fills_rows(
            self.process_groups.collectives[over], packing.nbytes, len(packing.rows), on_host
        ):
            rows = unsharded.rows(over.size(), is_post_forward=over is self.process_groups.post_forward)
            local = [
                leading_view(row[over.rank()], shard.shape) for row, shard in zip(rows, inputs, strict=True)
            ]
            torch._foreach_copy_(local, list(inputs))
            return AllGatherRequest(over, packing.output, packing.output, (), rows)
        if custom is None:
            packing.allocate()
            output = packing.output
        else:
            numel = over.size() * packing.total
            output = custom.allocate((numel,), dtype=packing.dtype, device=self.device)
        local = output[over.rank() * packing.total :][: packing.total]
        pieces, padding = packing.parts(local, inputs, is_own=custom is None)
        # A check for nan sees the padding too, and a custom collective may quantise it with the rest.
        if padding:
            torch._foreach_zero_(padding)
        torch._foreach_copy_(pieces, list(inputs))
        return AllGatherRequest(over, output, local, ())

    def end_gather(self, request: AllGatherRequest) -> None:
        unsharded, ranks = self.unsharded_params, request.over.size()
        assert unsharded is not None
        if not request.rows:
            is_post_forward = request.over is self.process_groups.post_forward
            unsharded.fill_rows(request.output, ranks, is_post_forward=is_post_forward)
            unsharded.packing(ranks).free()
        unsharded.complete()

    # Tensors that modules see

    def use_unsharded_views(self, dtype: torch.dtype) -> UnshardedParams:
        unsharded = self.unsharded_params or self.unsharded(dtype)
        unsharded.share_requires_grad(self._post_forward_params)
        unsharded.record_trainable()
        unsharded.keep_extension_tensors()
        if not self.uses_unsharded_views or self._substitutes:
            self._registration.register(self._unsharded_tensors(unsharded.views))
            self.uses_unsharded_views = True
            self._free_post_forward_shards()
        return unsharded

    def _unsharded_tensors(self, views: Sequence[Tensor]) -> list[Tensor]:
        tensors, param_dtype = list(views), self.options.precision.param_dtype
        for index, (original, unsharded) in self._substitutes.items():
            if unsharded is None:
                unsharded = unsharded_substitute(original, self.params[index], self.device, param_dtype)  # noqa: PLW2901
                self._substitutes[index] = Substitute(original, unsharded)
            tensors[index] = unsharded
        return tensors

    def use_kept_views(self) -> None:
        if self._substitutes:
            self._registration.register(self._with_substitutes(self._expected_tensors()))

    def _with_substitutes(self, expected: Sequence[Tensor]) -> list[Tensor]:
        """Return `expected`, with the user's tensor instead where a module still has a substitute."""
        tensors = list(expected)
        for index, tensor in self._registration.registered() if self._substitutes else ():
            if (substitute := self._substitutes.get(index)) is not None and substitute.matches(tensor):
                tensors[index] = substitute.original
        # The originals are remembered, because an evaluation registers the group's tensors twice after its forward.
        self._substitutes = {
            index: Substitute(used.original, None) for index, used in self._substitutes.items()
        }
        return tensors

    def use_sharded_views(self, *, after_forward: bool = False) -> None:
        if self.unsharded_params is not None:
            self.unsharded_params.share_requires_grad(self._post_forward_params)
        shards = self._new_post_forward_shards() if after_forward else []
        self._free_post_forward_shards()
        self._post_forward_shards = shards
        if shards and self._post_forward_mesh is not None:
            self._post_forward_params = [
                param.post_forward_param(shard, self._post_forward_mesh)
                for param, shard in zip(self.params, shards, strict=True)
            ]
        self.uses_unsharded_views = False
        self._registration.register(self._with_substitutes(self._expected_tensors()))

    def _new_post_forward_shards(self) -> list[Tensor]:
        unsharded, over = self.unsharded_params, self.process_groups.post_forward
        is_partly = type(self.options.reshards_after_forward) is int
        # The tensor of an extension cannot be split.
        if not is_partly or over is None or unsharded is None or any(self._have_extensions):
            return []
        return [param.post_forward_shard(run, over.rank(), over.size()) for param, run in unsharded.runs]

    def _free_post_forward_shards(self) -> None:
        """Free the post-forward shards. The current stream has waited for the last gather of them."""
        keep_for_current_stream(self._post_forward_shards)
        self._post_forward_shards, self._post_forward_params = [], []

    def register_at(self, param: ShardedParam, locations: tuple[ParamLocation, ...]) -> None:
        """Register the parameter in other modules that share it. The group must be sharded."""
        param.info = replace(param.info, locations=(*param.info.locations, *locations))
        self._registration = ParamRegistration(self.param_infos, as_parameters=True)
        self.use_sharded_views()

    def discard_post_forward_shards(self) -> None:
        """Register the shards in the modules again, so that the next gather reads them."""
        if self._post_forward_shards:
            self.use_sharded_views()

    def swap_unsharded(self, other: UnshardedParams | None) -> UnshardedParams | None:
        previous, self.unsharded_params = self.unsharded_params, other
        return previous

    def free(self) -> None:
        if self.unsharded_params is not None and not self.options.keeps_storage:
            self.unsharded_params.free()
