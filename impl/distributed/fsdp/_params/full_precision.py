"""Modules that compute in float32 in the midst of others that do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._params.nested import replaced


class FullPrecision:
    """Casts what a module is given to float32, and what it returns back to the dtype it was given."""

    def __init__(self, module: nn.Module) -> None:
        self._given: torch.dtype | None = None  # of the last input that was cast; None if none was
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def before_forward(self, _module: nn.Module, args: tuple[Any, ...]) -> Any:
        self._given = None
        return replaced(args, self._widened)

    def after_forward(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return output if self._given is None else replaced(output, self._narrowed)

    def _widened(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            self._given = tensor.dtype
            return tensor.float()
        return tensor

    def _narrowed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._given) if tensor.is_floating_point() else tensor
