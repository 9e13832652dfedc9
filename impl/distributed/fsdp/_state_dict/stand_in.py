"""What modules are shown for their parameters while their unit is saved or loaded."""

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
    """Has a parameter's shape and no elements; what is copied into it, it keeps as its `source`."""

    source: Any
    owner: Any  # who made it
    parallel: ParallelLayout | None = None  # of a DTensor

    @classmethod
    def made(
        cls, like: Tensor, name: str, *, device: torch.device, owner: Any, source: Any = None
    ) -> StandIn:
        """
        Args:
            like: has the shape, the dtype and requires_grad; may be a meta tensor.
        """
        made = super().of(like, name, device=device)
        made._is_param = True  # so that modules register it
        made.owner = owner
        made.source = source
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALIASES and isinstance(args[0], StandIn):
            return args[0]
        if func in _WRITES and isinstance(args[0], StandIn):
            args[0].keep(args[1])
            return args[0]
        if func is Tensor.module_load and isinstance(args[0], StandIn):
            return args[0]._exchanged_for(args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _exchanged_for(self, given: Any) -> StandIn:
        """Where modules swap tensors rather than copy: another one that has kept what is given."""
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        made = StandIn.made(like, self._name, device=self.device, owner=self.owner)
        made.parallel = self.parallel
        made.keep(given)
        return made

    def keep(self, given: Any) -> None:
        """Of what is no tensor and becomes one where one is needed, as lazy loaders hand out, the owner keeps a part.

        Raises:
            TypeError: it is sharded over ranks, where an unsharded tensor is expected, or the other way round.
            NotImplementedError: it has no values.
        """
        if self.parallel is not None and not isinstance(given, (StandIn, DTensor)):
            raise TypeError(
                f"expected a DTensor for {self._name}, laid out over {self.parallel.mesh}, but got a "
                f"{type(given).__name__}; torch.distributed.tensor.distribute_tensor makes one of an unsharded tensor"
            )
        if not isinstance(given, Tensor):
            unsharded = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="cpu")
            self.source = self.owner.part_of(unsharded.copy_(given), self._name)
            return
        if isinstance(given, (ShardedTensor, DTensor)) and self.parallel is None:
            raise TypeError(
                f"expected an unsharded tensor for {self._name} but got a {type(given).__name__}; load it with "
                "SHARDED_STATE_DICT"
            )
        if given.is_meta and not isinstance(given, StandIn):
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        self.source = given.source if isinstance(given, StandIn) else given


_data: Any = Tensor.data
_ALIASES = (Tensor.detach, _data.__get__)
_WRITES = (Tensor.copy_, _data.__set__)


def stand_ins_for(handle: FlatParamGroup, owner: Any, sources: Sequence[Any] = ()) -> list[StandIn]:
    """One for each parameter of a flat parameter."""
    made: list[StandIn] = []
    for index, slot in enumerate(handle.layout.slots):
        parallel = handle.param_infos[index].parallel
        like = torch.empty_strided(
            parallel.shape if parallel else slot.shape,
            parallel.stride if parallel else slot.stride,
            dtype=handle.dtype,
            device="meta",
            requires_grad=handle.wants_grad(index),
        )
        source = sources[index] if sources else None
        made.append(StandIn.made(like, slot.name, device=handle.device, owner=owner, source=source))
        made[-1].parallel = parallel
    return made
