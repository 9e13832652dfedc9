"""Parameters of a unit that FullyShardedDataParallel exposes unless `use_orig_params` is set."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class _KnownByMark(type(nn.Parameter)):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_KnownByMark):
    """A rank's shard of a unit's parameters: 1-D, equally long on every rank, padded with zeros.

    While the unit is unsharded, its modules have another flat parameter with all elements, in the compute dtype.

    The class of an instance is nn.Parameter, as in torch, because optimizers step tensors of other classes one by one.
    """

    _is_flat_param: bool  # torch's name
    # torch's name. Lightning reads it to detect that an optimizer has parameters of units.
    _fsdp_flattened: bool
    # Names of its parameters relative to the unit. torch.distributed.checkpoint.state_dict reads this name of torch.
    _fqns: tuple[str, ...]

    def __new__(  # pyright: ignore[reportInconsistentConstructor]  nn.Parameter's stub has data by default
        cls, data: Tensor | None = None, requires_grad: bool = True
    ) -> FlatParameter:
        # The stub does not allow None.
        flat_param = cast("FlatParameter", nn.Parameter(cast("Tensor", data), requires_grad))
        flat_param._is_flat_param = flat_param._fsdp_flattened = True
        return flat_param
