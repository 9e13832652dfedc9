"""Modules that compute in float32 inside a low-precision model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._params.nested import map_tensors


class FullPrecision:
    """Hooks that cast a module's inputs to float32, and its outputs back to the dtype of the inputs."""

    def __init__(self, module: nn.Module) -> None:
        self._input_dtype: torch.dtype | None = None  # dtype of the last cast input, or None
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def before_forward(self, _module: nn.Module, args: tuple[object, ...]) -> Any:
        self._input_dtype = None
        return map_tensors(args, self._upcast)

    def after_forward(self, _module: nn.Module, _args: tuple[object, ...], output: object) -> Any:
        return output if self._input_dtype is None else map_tensors(output, self._downcast)

    def _upcast(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            self._input_dtype = tensor.dtype
            return tensor.float()
        return tensor

    def _downcast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._input_dtype) if tensor.is_floating_point() else tensor
