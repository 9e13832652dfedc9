"""A rank's shard of a flat parameter: parameters of one unit with the same dtype and `requires_grad`, concatenated.

The optimizer steps the shard, or the user's own parameters, which are views of it. Gradients and states of optimizers
have the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._flat_param import FlatParameter
from impl.distributed.fsdp._layout.flat_buffer import view_into
from impl.distributed.fsdp._layout.flat_slots import FlatLayout, Piece, split_sizes
from impl.distributed.fsdp._params.config import Config
from impl.distributed.fsdp._params.param_registration import ManagedParam, ParamInfo, note_replaced
from impl.kernels import keep_for_current_stream


class FlatParamHandle:
    """Flat parameter of a unit: values that this rank keeps, and the places of parameters in them.

    Args:
        managed: parameters of one dtype and one `requires_grad`, on one device.
        layout: positions of the parameters in the buffer of all elements.
        rank: rank in the group that this buffer is sharded over.
        config: settings of the unit. If it offloads, the shard is on the CPU.
        device: device of the buffer, and of the shard unless it is offloaded.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        layout: FlatLayout,
        rank: int,
        config: Config,
        device: torch.device,
    ) -> None:
        self.param_infos: list[ParamInfo] = [param.info for param in managed]
        self.layout = layout
        self.rank = rank
        self.device = device
        self.offloads = config.offloads
        self.pins = config.offloads and device.type != "cpu"
        self.use_orig_params = config.use_orig_params
        self._policy_compute_dtype = config.precision.param_dtype
        self._policy_reduce_dtype = config.precision.reduce_dtype or self._policy_compute_dtype
        self.pieces: list[Piece | None] = [layout.piece(slot, rank) for slot in layout.slots]
        self._section_sizes, self._section_of_piece = split_sizes(self.pieces, layout.shard_numel)
        params = [param.parameter for param in managed]
        # The user's own parameters, which become views of the shard.
        self.parameters = params if self.use_orig_params else []
        # Gradient hooks of the parameters that `flat_param` replaces, which are not kept themselves.
        self.replaced_hooks = [] if self.use_orig_params else [param._backward_hooks for param in params]
        for param in managed:
            if not self.use_orig_params or param.parameter is not param.original:
                note_replaced(param.original, param.info.name, self)
        with torch.no_grad():
            shard = self._shard_of([p.data for p in params])
        requires_grad = any(p.requires_grad for p in params)
        self.flat_param = FlatParameter(shard.to("cpu") if self.offloads else shard, requires_grad)
        self.flat_param._fqns = tuple(info.name for info in self.param_infos)
        # Addresses and dtype as last set here. If the current ones differ, the user has changed them.
        self._shard_address = 0
        self._param_addresses: list[int] = []
        self._known_dtype = self.dtype

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

    def set_param_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype that the optimizer steps in. The dtypes to compute and reduce in stay the same.

        The shard may have been cast already. The unsharded buffers follow at the next gather.
        """
        self._policy_compute_dtype = self._policy_compute_dtype or self._known_dtype
        self._policy_reduce_dtype = self._policy_reduce_dtype or self._known_dtype
        if self.dtype is not dtype:
            self.flat_param.data = self.flat_param.data.to(dtype)

    def wants_grad(self, index: int) -> bool:
        return self.stepped[index if self.use_orig_params else 0].requires_grad

    # Positions

    def global_shape(self, index: int) -> torch.Size:
        """Return the shape of a parameter. If it is a DTensor, its slot has the shape of the local tensor."""
        parallel = self.param_infos[index].parallel
        return parallel.shape if parallel else torch.Size(self.layout.slots[index].shape)

    def pieces_of(self, flat_shard: Tensor) -> list[Tensor | None]:
        """Split a tensor that is laid out like the shard into each parameter's piece, None if this rank has none."""
        if not self.is_sharded:
            return [*self.views_of(flat_shard)]
        sections = flat_shard.split_with_sizes(self._section_sizes)
        return [None if index is None else sections[index] for index in self._section_of_piece]

    def views_of(self, buffer: Tensor) -> list[Tensor]:
        """Return tensors with the parameters' shapes over a buffer of all elements.

        DTensors have their local shapes.
        """
        return [view_into(buffer, slot) for slot in self.layout.slots]

    def wrap_locals(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return views like those of `views_of`, with DTensors for parameters that are DTensors."""
        return [info.wrap_local(view) for info, view in zip(self.param_infos, views, strict=True)]

    def _shard_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a copy of this rank's shard of the flattened tensors."""
        unsharded = tensors[0].new_zeros(self.layout.padded_numel)
        for tensor, slot in zip(tensors, self.layout.slots, strict=True):
            unsharded[slot.start : slot.stop].copy_(_in_memory_order(tensor))
        if not self.is_sharded:
            return unsharded
        width = self.layout.shard_numel
        return unsharded[self.rank * width : (self.rank + 1) * width].clone()

    # Memory

    def pin(self) -> None:
        """Move a shard on the CPU to pinned memory if `device` is an accelerator."""
        shard = self.flat_param.data
        if self.pins and shard.is_cpu and not shard.is_pinned():
            self.flat_param.data = shard.pin_memory()

    def point_params_into_shard(self) -> None:
        """Make the user's parameters views of the shard: 1-D pieces, or unsharded views if nothing is sharded."""
        shard = self.flat_param.data
        nothing = shard.new_empty(0)
        views = [nothing if piece is None else piece for piece in self.pieces_of(shard)]
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self._param_addresses = [_address_of(view) for view in views]

    def has_moved(self) -> bool:
        """Return whether the user gave other memory to the shard or to a parameter."""
        return self.flat_param.data_ptr() != self._shard_address or self._param_addresses != [
            _address_of(p) for p in self.parameters
        ]

    @torch.no_grad()
    def changed_shard(self) -> Tensor:
        """Return a shard with the values of parameters whose memory or whose object the user replaced.

        Raises:
            RuntimeError: a tensor has another shape than this rank's piece.
        """
        shape = tuple(self.flat_param.shape)
        if shape != (self.layout.shard_numel,):
            raise RuntimeError(
                f"the flat parameter with {self.param_infos[0].name} was given {shape} elements, but this rank "
                f"keeps {self.layout.shard_numel}; change unsharded parameters inside summon_full_params()"
            )
        # The caller replaces these tensors.
        keep_for_current_stream([self.flat_param.data, *[param.data for param in self.parameters]])
        if not self.use_orig_params:
            return self.flat_param.data.contiguous()
        # A copy, because the user may assign the previous memory again.
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
        return shard


def _in_memory_order(tensor: Tensor) -> Tensor:
    dense = torch.empty_like(tensor).copy_(tensor)
    return dense.as_strided((dense.numel(),), (1,))


def _address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, or of its storage if it is empty, so that all ranks see a change."""
    return tensor.data_ptr() or tensor.untyped_storage()._cdata
