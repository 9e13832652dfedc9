"""What FullyShardedDataParallel shows of a unit's parameters unless it is told to show the user's own."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn


class _KnownByMark(type(nn.Parameter)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_KnownByMark):
    """A rank's shard of a unit's parameters: 1-D, as long on every rank; zeros fill its tail.

    Its class is nn.Parameter itself, as torch's is: of others optimizers step one tensor after the other.
    """

    _is_flat_param: bool  # torch's name
    _fsdp_flattened: bool  # torch's name, by which Lightning tells that an optimizer has parameters of units
    # How its parameters are named below the unit; torch's name, which torch.distributed.checkpoint.state_dict asks for.
    _fqns: tuple[str, ...]

    def __new__(  # pyright: ignore[reportInconsistentConstructor]  nn.Parameter's stub has data by default
        cls, data: Tensor | None = None, requires_grad: bool = True
    ) -> FlatParameter:
        made = cast(
            "FlatParameter", nn.Parameter(cast("Tensor", data), requires_grad)
        )  # the stub knows no None
        made._is_flat_param = made._fsdp_flattened = True
        return made
