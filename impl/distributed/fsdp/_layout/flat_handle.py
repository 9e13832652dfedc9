"""Parameters flattened into one buffer: the permanent shard, the temporary unsharded buffer, and module views.

A `FlatParamHandle` holds the parameters of one unit that have one dtype and one `requires_grad`. The optimizer steps
this rank's *shard*. The *unsharded buffer* is storage for all elements. Unsharding fills it, resharding frees it. Its
*views* are the tensors that the forward computes with. They are created once and share its storage as long as the unit
lives, so neither unsharding nor resharding touches a parameter. Modules have these *unsharded views* while the buffer
is live, and *sharded views* otherwise: with `use_orig_params` the user's own parameters, as views of the shard, else a
`ShardedPlaceholder`, which knows its shape and raises if it is read. The registered flat parameter changes with them:
it is another tensor, with all elements in the compute dtype, while modules have unsharded views.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._flat_param import FlatParameter
from impl.distributed.fsdp._layout.flat_buffer import UnshardedBuffer, view_into
from impl.distributed.fsdp._layout.flat_slots import FlatLayout, Piece, split_sizes
from impl.distributed.fsdp._params.param_registration import (
    ManagedParam,
    ParamInfo,
    ParamRegistration,
    ShardedPlaceholder,
    keeping_order,
    note_replaced,
)


class FlatParamHandle:
    """Flat parameter of a unit: the buffer of its parameters, and the views that modules have of it.

    Args:
        managed: parameters of one dtype and one `requires_grad`, on one device.
        layout: positions of the parameters in the buffer.
        rank: rank in the group that the buffer is sharded over.
        compute_dtype: dtype of the unsharded buffer; None: the parameters' own.
        reduce_dtype: dtype of gradient reductions; None: `compute_dtype` or the parameters' own.
        device: device of the unsharded buffer, and of the shard unless it is offloaded.
        offloads: keep the shard on the CPU, in pinned memory if `device` is an accelerator.
        use_orig_params: modules keep the user's parameters, as views of the shard.
    """

    def __init__(  # noqa: PLR0913  called once, by keyword
        self,
        managed: Sequence[ManagedParam],
        layout: FlatLayout,
        rank: int,
        *,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        device: torch.device,
        offloads: bool,
        use_orig_params: bool,
    ) -> None:
        self.param_infos: list[ParamInfo] = [param.info for param in managed]
        self.layout = layout
        self.rank = rank
        self.device = device
        self.offloads = offloads
        self.pins = offloads and device.type != "cpu"
        self.use_orig_params = use_orig_params
        self._policy_compute_dtype = compute_dtype
        self._policy_reduce_dtype = reduce_dtype or compute_dtype
        self.pieces: list[Piece | None] = [layout.piece(slot, rank) for slot in layout.slots]
        self._sizes, self._numbers = split_sizes(self.pieces, layout.shard_numel)
        params = [param.parameter for param in managed]
        # The user's own parameters, which become views of the shard.
        self.parameters = params if use_orig_params else []
        # Otherwise their gradient hooks. Only the dictionaries are kept, because the parameters are to be freed.
        self.earlier_hooks = [] if use_orig_params else [param._backward_hooks for param in params]
        for param in managed:
            if not use_orig_params or param.parameter is not param.original:
                note_replaced(param.original, param.info.name, self)
        with torch.no_grad():
            shard = self._shard_of([p.data for p in params])
        requires_grad = any(p.requires_grad for p in params)
        self.flat_param = FlatParameter(shard.to("cpu") if offloads else shard, requires_grad)
        self.flat_param._fqns = tuple(info.name for info in self.param_infos)
        self._registration = ParamRegistration(self.param_infos, as_parameters=use_orig_params)
        self.sharded_views: list[Tensor] = []
        self.uses_unsharded_views = False
        self._summoned: ParamRegistration | None = None
        self._flat_param_place: tuple[dict[str, Any], str] | None = None
        self._unsharded: dict[torch.dtype, UnshardedBuffer] = {}
        self._address = 0
        self._refreshed_in = self.dtype
        self.refresh()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters, in which the optimizer steps."""
        return self.flat_param.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._policy_compute_dtype or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self._policy_reduce_dtype or self.dtype

    @property
    def is_sharded(self) -> bool:
        return self.layout.world > 1

    @property
    def stepped(self) -> list[nn.Parameter]:
        """Parameters that the optimizer steps."""
        return self.parameters if self.use_orig_params else [self.flat_param]

    @property
    def versions(self) -> list[int]:
        """Version of the flat shard, followed by those of the user's own parameters."""
        return [self.flat_param._version, *[p._version for p in self.parameters]]

    def ignore_writes_since(self, versions: list[int]) -> None:
        """Ignore writes to the user's own parameters since `versions`, because they did not change the shard."""
        for unsharded in self._unsharded.values():
            unsharded.follow_versions(versions, [versions[0], *self.versions[1:]])

    def set_param_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype that the optimizer steps in. The dtypes to compute and reduce in stay the same.

        The shard may have been cast already. The unsharded buffers follow at the next gather.
        """
        self._policy_compute_dtype = self._policy_compute_dtype or self._refreshed_in
        self._policy_reduce_dtype = self._policy_reduce_dtype or self._refreshed_in
        if self.dtype is not dtype:
            self.flat_param.data = self.flat_param.data.to(dtype)

    def wants_grad(self, index: int) -> bool:
        return self.stepped[index if self.use_orig_params else 0].requires_grad

    def refresh(self) -> None:
        """Update addresses and views after the shard was created, moved or cast."""
        shard = self._pinned(self.flat_param.data)
        if shard.data_ptr() != self.flat_param.data_ptr():
            self.flat_param.data = shard
        if self.flat_param.data_ptr() != self._address or self.flat_param.is_meta:
            for unsharded in self._unsharded.values():
                unsharded.is_invalidated = True
            self._unsharded.clear()
        self._address, self._refreshed_in = self.flat_param.data_ptr(), self.dtype
        if self.use_orig_params:
            self.point_params_into_shard()
        else:
            views = self.unsharded(self.compute_dtype).views
            pairs = zip(views, self.layout.slots, strict=True)
            self.sharded_views = [ShardedPlaceholder.of(view, slot.name) for view, slot in pairs]
        self.use_sharded_views()

    def _pinned(self, shard: Tensor) -> Tensor:
        if not self.pins or not shard.is_cpu or shard.is_pinned():
            return shard
        return shard.pin_memory()

    def unsharded(self, dtype: torch.dtype) -> UnshardedBuffer:
        """Return the buffer of a dtype, whether its storage is allocated or not."""
        buffer = self._unsharded.get(dtype)
        if buffer is None:
            shard = self.flat_param.data
            aliases_shard = not self.is_sharded and dtype is self.dtype and shard.device == self.device
            with torch.inference_mode(False):  # the views are used for training too
                buffer = UnshardedBuffer(
                    self.layout,
                    self.param_infos,
                    dtype,
                    self.device,
                    over=shard if aliases_shard else None,
                    shown_sharded=None if self.use_orig_params else self.flat_param,
                )
                buffer.views = [self._as_param(view) for view in buffer.views]
            self._unsharded[dtype] = buffer
        return buffer

    def is_up_to_date(self, dtype: torch.dtype) -> bool:
        """Return whether the buffer has the current values of the shard."""
        unsharded = self.unsharded(dtype)
        return unsharded.aliases_shard or unsharded.is_filled_from(self.versions)

    def use_unsharded_views(self, dtype: torch.dtype) -> UnshardedBuffer:
        """Register the unsharded views in the modules."""
        unsharded = self.unsharded(dtype)
        if unsharded.aliases_shard:
            unsharded.fill_from(self.versions)
        unsharded.set_requires_grad([p.requires_grad for p in self.stepped])
        self._registration.register(unsharded.views)
        if unsharded.flat_param is not None:
            self._register_flat_param(unsharded.flat_param)
        self.uses_unsharded_views = True
        return unsharded

    def use_sharded_views(self, *, after_forward: bool = False) -> None:
        """Register the sharded views in the modules."""
        del after_forward
        self._registration.register(self.sharded_views)
        if self.uses_unsharded_views and not self.use_orig_params:
            self._register_flat_param()
        self.uses_unsharded_views = False

    def swap_unsharded(
        self, other: dict[torch.dtype, UnshardedBuffer] | None
    ) -> dict[torch.dtype, UnshardedBuffer]:
        previous = {dtype: buffer for dtype, buffer in self._unsharded.items() if not buffer.aliases_shard}
        aliases = {dtype: buffer for dtype, buffer in self._unsharded.items() if buffer.aliases_shard}
        self._unsharded = aliases | (other or {})
        return previous

    def free(self) -> None:
        for unsharded in self._unsharded.values():
            unsharded.free()

    def point_params_into_shard(self) -> None:
        """Make the user's parameters views of the shard: 1-D pieces, or unsharded views if nothing is sharded."""
        shard = self.flat_param.data
        nothing = shard.new_empty(0)
        views = [nothing if piece is None else piece for piece in self.pieces_of(shard)]
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self.sharded_views = list(self.parameters)
        self._addresses = [_address_of(view) for view in views]

    def write_back_changes(self) -> bool:
        """Copy tensors that the user assigned to a parameter or to its data into the shard.

        Return whether there were any.

        Raises:
            RuntimeError: a tensor has another shape than this rank's piece, or is not a parameter.
        """
        if not self.use_orig_params:
            return self._write_back_flat_param()
        has_new_params = False
        for index, registered_tensor in (
            self._registration.registered() if not self.uses_unsharded_views else ()
        ):
            if registered_tensor is not None and registered_tensor is not self.parameters[index]:
                if not isinstance(registered_tensor, nn.Parameter):
                    raise self._replacement_error(self.param_infos[index].name)
                self.parameters[index] = registered_tensor
                has_new_params = True
        is_same_memory = self.flat_param.data_ptr() == self._address
        if (
            not has_new_params
            and is_same_memory
            and self._addresses == [_address_of(p) for p in self.parameters]
        ):
            return False
        self._check_shape()
        with torch.no_grad():
            self._copy_parameters_in()
        self.point_params_into_shard()
        return True

    def _write_back_flat_param(self) -> bool:
        for index, registered_tensor in (
            self._registration.registered() if not self.uses_unsharded_views else ()
        ):
            if registered_tensor is not self.sharded_views[index]:
                raise self._replacement_error(self.param_infos[index].name)
        if (
            self._flat_param_place is not None
            and not self.uses_unsharded_views
            and self._flat_param_place[0].get(self._flat_param_place[1]) is not self.flat_param
        ):
            raise self._replacement_error(self._flat_param_place[1])
        data = self.flat_param.data
        if data.data_ptr() == self._address:
            return False
        self._check_shape()
        self._adopt(data.contiguous())
        return True

    def _check_shape(self) -> None:
        shape = tuple(self.flat_param.shape)
        if shape != (self.layout.shard_numel,):
            raise RuntimeError(
                f"the flat parameter with {self.param_infos[0].name} was given {shape} elements, but this rank "
                f"keeps {self.layout.shard_numel}; change unsharded parameters inside summon_full_params()"
            )

    def _adopt(self, shard: Tensor) -> None:
        """Use another shard. Keep the memory of the previous shard unchanged, because the user may assign it again."""
        self.flat_param.data = shard = self._pinned(shard)
        # A change of memory does not increment the version by itself.
        torch.autograd.graph.increment_version(self.flat_param)
        if shard.dtype is not self._refreshed_in:
            self.refresh()
            return
        self._address = shard.data_ptr()
        for unsharded in self._unsharded.values():
            if unsharded.aliases_shard:
                unsharded.alias(shard)

    @staticmethod
    def _replacement_error(name: str) -> RuntimeError:
        return RuntimeError(
            f"{name} was replaced by another tensor (as torch.func.functional_call does for a call), which the ranks "
            "cannot gather; write to parameters in place, unsharded ones inside summon_full_params()"
        )

    def _copy_parameters_in(self) -> None:
        shard = self.flat_param.data.clone()
        for parameter, slot, piece in zip(self.parameters, self.layout.slots, self.pieces, strict=True):
            numel = piece.numel if piece else 0
            actual = parameter.shape if self.is_sharded else torch.Size([parameter.numel()])
            if actual != (numel,):
                error = RuntimeError(
                    "Cannot writeback when the parameter shape changes\n"
                    f"Expects {torch.Size([numel])} but got {actual}"
                )
                error.add_note(f"{slot.name}; change unsharded parameters inside summon_full_params()")
                raise error
            if piece is not None and self.is_sharded:
                shard.narrow(0, piece.offset, numel).copy_(parameter.data)
            elif piece is not None:
                view_into(shard, slot).copy_(parameter.data.reshape(slot.shape))
        self._adopt(shard)

    def registered(self) -> Iterator[tuple[int, Tensor | None]]:
        """Yield the tensors that are registered now, with the indices of their parameters."""
        if self._summoned is not None:
            return self._summoned.registered()
        return self._registration.registered()

    def register_unsharded_params(self, views: Sequence[Tensor]) -> None:
        """Register unsharded parameters in the modules, and unregister the flat parameter.

        Original parameters stay the same objects, unless they are DTensors, which have no 1-D piece.
        """
        pairs = [*enumerate(self.wrap_locals(views))]
        if not self.use_orig_params:
            self._register_instead([nn.Parameter(view, self.wants_grad(index)) for index, view in pairs])
            return
        registered = [*self.parameters]
        for index, view in pairs:
            if self.param_infos[index].parallel is None:
                registered[index].data = view
            else:
                registered[index] = nn.Parameter(view, self.wants_grad(index))
        self._registration.register(registered)

    def register_again(self, parameters: Sequence[Tensor]) -> None:
        """Register unsharded parameters that were registered before."""
        if self.use_orig_params:
            self._registration.register(parameters)
        else:
            self._register_instead(parameters)

    def _register_instead(self, parameters: Sequence[Tensor]) -> None:
        self._unregister_flat_param()
        self._summoned = ParamRegistration(self.param_infos, as_parameters=True)
        self._registration.unregister()
        self._summoned.register(parameters)

    @contextmanager
    def registering(self, parameters: Sequence[Tensor]) -> Generator[None]:
        """Context manager in which `parameters` are registered in the modules, and the flat parameter is not."""
        with keeping_order(self._registries()):
            before = None if self._summoned is None else dict(self._summoned.registered())
            if self.use_orig_params:
                self._registration.register(parameters)
            elif self._summoned is not None:
                self._summoned.register(parameters)
            else:
                self._register_instead(parameters)
            try:
                yield
            finally:
                if self._summoned is not None and before is not None:
                    self._summoned.register([cast("Tensor", before[index]) for index in range(len(before))])
                else:
                    if not self.use_orig_params:
                        self.restore_flat_param()
                    self.use_sharded_views()

    @contextmanager
    def registering_flat_param(self, parameter: Tensor) -> Generator[None]:
        """Context manager in which only `parameter` is registered, as the flat parameter."""
        with keeping_order(self._registries()):
            if self.use_orig_params:
                self._registration.unregister()
            if self._flat_param_place is not None:
                self._flat_param_place[0][self._flat_param_place[1]] = cast("nn.Parameter", parameter)
            try:
                yield
            finally:
                if self.use_orig_params:
                    self._unregister_flat_param()
                    self.use_sharded_views()
                else:
                    self._register_flat_param()

    def _registries(self) -> list[dict[str, Any]]:
        """Return the `_parameters` of each module that has the flat parameter or one of the original parameters."""
        places = [location.module._parameters for info in self.param_infos for location in info.locations]
        if self._flat_param_place is not None:
            places.append(self._flat_param_place[0])
        return [*{id(place): cast("dict[str, Any]", place) for place in places}.values()]

    def restore_flat_param(self) -> None:
        """Undo `register_unsharded_params`."""
        if self._summoned is not None:
            self._summoned.unregister()
            self._summoned = None
        self._register_flat_param()

    @contextmanager
    def changing_flat_param(self, change: Callable[[Tensor], Tensor]) -> Generator[None]:
        """Context manager in which only `flat_param` is registered, and may be moved or cast.

        Raises:
            NotImplementedError: original parameters, which stay the same objects, would move to the meta device.
        """
        if self.use_orig_params and change(self.flat_param.new_empty(0)).is_meta:
            raise NotImplementedError(
                f"{self.param_infos[0].name} stays the same object, since use_orig_params is set, and so cannot be "
                "moved to the meta device; wrap the module without use_orig_params, or delete it"
            )
        with keeping_order(self._registries()):
            if self.use_orig_params:
                self._registration.unregister()
                self._register_flat_param()
            try:
                yield
            finally:
                if self._flat_param_place is not None:
                    self._follow_replacement(*self._flat_param_place)
                if self.use_orig_params:
                    self._unregister_flat_param()
                self.refresh()

    def _follow_replacement(self, home: dict[str, Any], name: str) -> None:
        """Use the new parameter after a move from or to the meta device, which replaces the flat parameter."""
        if home[name] is not self.flat_param:
            names, self.flat_param = (
                self.flat_param._fqns,
                FlatParameter(home[name], home[name].requires_grad),
            )
            self.flat_param._fqns = names
            home[name] = self.flat_param

    def register_flat_param(self, module: nn.Module, name: str) -> None:
        """Set the place of the flat parameter.

        With `use_orig_params` it is only registered while the user's parameters are not.
        """
        self._flat_param_place = (cast("dict[str, Any]", module._parameters), name)
        if not self.use_orig_params:
            self._register_flat_param()

    def _register_flat_param(self, flat_param: FlatParameter | None = None) -> None:
        """Register an unsharded flat parameter, or the sharded one if it is None."""
        if self._flat_param_place is not None:
            registry, name = self._flat_param_place
            registry[name] = self.flat_param if flat_param is None else flat_param

    def _unregister_flat_param(self) -> None:
        if self._flat_param_place is not None:
            self._flat_param_place[0].pop(self._flat_param_place[1], None)

    def pieces_of(self, flat_shard: Tensor) -> list[Tensor | None]:
        """Split a tensor that is laid out like the shard into each parameter's piece, None if this rank has none."""
        if not self.is_sharded:
            return [*self.views_of(flat_shard)]
        pieces = flat_shard.split_with_sizes(self._sizes)
        return [None if number is None else pieces[number] for number in self._numbers]

    def views_of(self, buffer: Tensor) -> list[Tensor]:
        """Return tensors with the parameters' shapes over a buffer of all elements.

        DTensors have their local shapes.
        """
        return [view_into(buffer, slot) for slot in self.layout.slots]

    def wrap_locals(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return views like those of `views_of`, with DTensors for parameters that are DTensors."""
        return [info.wrap_local(view) for info, view in zip(self.param_infos, views, strict=True)]

    def _as_param(self, view: Tensor) -> Tensor:
        return nn.Parameter(view, requires_grad=False) if self.use_orig_params else view

    def _shard_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a copy of this rank's shard of the flattened tensors."""
        unsharded = tensors[0].new_zeros(self.layout.padded_numel)
        for tensor, slot in zip(tensors, self.layout.slots, strict=True):
            unsharded[slot.start : slot.stop].copy_(_in_memory_order(tensor))
        if not self.is_sharded:
            return unsharded
        width = self.layout.shard_numel
        return unsharded[self.rank * width : (self.rank + 1) * width].clone()


def _in_memory_order(tensor: Tensor) -> Tensor:
    dense = torch.empty_like(tensor).copy_(tensor)
    return dense.as_strided((dense.numel(),), (1,))


def _address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, or of its storage if it is empty, so that all ranks see a change."""
    return tensor.data_ptr() or tensor.untyped_storage()._cdata
