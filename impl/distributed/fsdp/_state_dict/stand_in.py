"""Stand-ins that modules contain instead of their parameters while their unit is saved or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._params.param_registration import ShardedPlaceholder
from impl.distributed.fsdp._params.tensor_parallel import ParallelLayout


class StandIn(ShardedPlaceholder):
    """Tensor with a parameter's shape and no elements. It keeps a value that is copied into it as its `source`."""

    source: Any
    owner: Any  # the save or load of a unit that has created it
    parallel: ParallelLayout | None = None  # set if the parameter is a DTensor

    @classmethod
    def create(
        cls, like: Tensor, name: str, *, device: torch.device, owner: object, source: object = None
    ) -> StandIn:
        """Return a stand-in.

        Args:
            like: tensor with the shape, the dtype and requires_grad; may be a meta tensor.
        """
        stand_in = super().of(like, name, device=device)
        stand_in._is_param = True  # modules register it
        stand_in.owner = owner
        stand_in.source = source
        return stand_in

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALIASES and isinstance(args[0], StandIn):
            return args[0]
        if func in _WRITES and isinstance(args[0], StandIn):
            args[0].keep(args[1])
            return args[0]
        if func is Tensor.module_load and isinstance(args[0], StandIn):
            return args[0]._swap_for(args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _swap_for(self, value: object) -> StandIn:
        """Return another stand-in that keeps the value, for modules that swap tensors instead of copying."""
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        stand_in = StandIn.create(like, self._name, device=self.device, owner=self.owner)
        stand_in.parallel = self.parallel
        stand_in.keep(value)
        return stand_in

    def keep(self, value: Any) -> None:
        """Keep the value as source, or this rank's piece of it if it is an object that a lazy loader reads when copied.

        Raises:
            TypeError: the value is sharded over ranks and an unsharded tensor is expected, or the reverse.
            NotImplementedError: the value is a meta tensor.
        """
        if self.parallel is not None and not isinstance(value, (StandIn, DTensor)):
            raise TypeError(
                f"expected a DTensor for {self._name}, laid out over {self.parallel.mesh}, but got a "
                f"{type(value).__name__}; convert an unsharded tensor by torch.distributed.tensor.distribute_tensor"
            )
        if not isinstance(value, Tensor):
            # Keep only a piece, because the unsharded values of all parameters may not fit into memory.
            unsharded = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="cpu")
            self.source = self.owner.piece_of(unsharded.copy_(value), self._name)
            return
        if isinstance(value, (ShardedTensor, DTensor)) and self.parallel is None:
            raise TypeError(
                f"expected an unsharded tensor for {self._name} but got a {type(value).__name__}; load it with "
                "SHARDED_STATE_DICT"
            )
        if value.is_meta and not isinstance(value, StandIn):
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        self.source = value.source if isinstance(value, StandIn) else value


_data: Any = Tensor.data
_ALIASES = (Tensor.detach, _data.__get__)
_WRITES = (Tensor.copy_, _data.__set__)


def stand_ins_for(handle: FlatParamGroup, owner: object, sources: Sequence[object] = ()) -> list[StandIn]:
    """Return a stand-in for each parameter of a flat parameter."""
    stand_ins: list[StandIn] = []
    for index, slot in enumerate(handle.layout.slots):
        parallel = handle.param_infos[index].parallel
        like = torch.empty_strided(
            handle.global_shape(index),
            parallel.stride if parallel else slot.stride,
            dtype=handle.dtype,
            device="meta",
            requires_grad=handle.wants_grad(index),
        )
        source = sources[index] if sources else None
        stand_ins.append(StandIn.create(like, slot.name, device=handle.device, owner=owner, source=source))
        stand_ins[-1].parallel = parallel
    return stand_ins
