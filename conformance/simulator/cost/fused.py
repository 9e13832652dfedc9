"""Kernels that `torch.compile` is assumed to generate for a block's operators between matrix products."""

from __future__ import annotations

from typing import Any

import torch

# These operators have shapes only, because the simulated device runs nothing but their meta kernels.
_library = torch.library.Library("simfused", "DEF")


def _operator(schema: str, shapes: Any) -> Any:
    name = _library.define(schema)
    _library.impl(name, shapes, "Meta")
    return getattr(torch.ops.simfused, name)


_norm = _operator(
    "norm(Tensor x, Tensor weight) -> (Tensor, Tensor)",
    lambda x, weight: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)
_norm_backward = _operator(
    "norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse) -> (Tensor, Tensor)",
    lambda grad, x, weight, inverse: (torch.empty_like(x), torch.empty_like(weight)),
)
_rotate = _operator("rotate(Tensor x, Tensor turns) -> Tensor", lambda x, turns: torch.empty_like(x))
_gate = _operator("gate(Tensor a, Tensor b) -> Tensor", lambda a, b: torch.empty_like(a))
_gate_backward = _operator(
    "gate_backward(Tensor grad, Tensor a, Tensor b) -> (Tensor, Tensor)",
    lambda grad, a, b: (torch.empty_like(a), torch.empty_like(b)),
)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out, inverse = _norm(x, weight)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _norm_backward(grad, *ctx.saved_tensors)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(turns)
        return _rotate(x, turns)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _rotate(grad, *ctx.saved_tensors), None


class Gate(torch.autograd.Function):
    """silu(a) * b"""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _gate(a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _gate_backward(grad, *ctx.saved_tensors)
