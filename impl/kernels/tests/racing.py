"""Calls of kernels while torch's multi-tensor operators race, as they do on CUDA, in a form for another process."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from impl import kernels
from impl.kernels import Parameters, TensorList
from impl.kernels.rules import SGDRule

_RACING = (
    "_foreach_add_",
    "_foreach_mul_",
    "_foreach_copy_",
    "_amp_foreach_non_finite_check_and_unscale_",
    "_fused_sgd_",
)


@contextmanager
def race() -> Generator[None]:
    """Context manager in which these operators read all tensors of a list before they write one, the first one last."""
    with mock.patch.multiple(torch, **{name: _racing(getattr(torch, name)) for name in _RACING}):
        yield


def _racing(operator: Callable[..., Any]) -> Callable[..., Any]:
    def raced(*args: Any, **more: Any) -> None:
        copies = [[*map(Tensor.clone, arg)] if isinstance(arg, list) else arg for arg in args]
        operator(*copies, **more)
        for arg, copy in zip(args, copies, strict=True):
            if isinstance(arg, list):
                for tensor, result in reversed([*zip(arg, copy, strict=True)]):
                    tensor.copy_(result)

    return raced


Range = tuple[int, int]  # first element in a buffer, and one past the last


def views_of(
    numel: int, ranges: list[Range], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[Tensor]]:
    buffer = torch.full((numel,), 64.0, dtype=dtype)
    return buffer, [buffer[start:stop] for start, stop in ranges]


def changed(backend: str, operation: str, numel: int, ranges: list[Range]) -> list[float]:
    """Return a buffer of 64s after an operation that halves each view of it."""
    buffer, views = views_of(numel, ranges)
    with race(), kernels.backend(backend):
        match operation:
            case "unscale_":
                kernels.unscale_(TensorList(views), torch.tensor(0.5), torch.zeros(1))
            case "unscale_by_":
                kernels.unscale_by_(TensorList(views), torch.tensor(2.0), torch.zeros(()))
            case "clip_":
                kernels.clip_(TensorList(views), 1.0, torch.tensor(2.0 - 1e-6))
            case _:
                kernels.scale_(TensorList(views), torch.tensor(0.5))
    return buffer.tolist()


def stepped(backend: str, shared: str) -> tuple[list[float], list[float], list[float]]:
    """Return parameters, momenta and copies after a step of three parameters whose `shared` tensors are one memory.

    The gradients are 1, 2 and 4, halved by the factor. The learning rate is 2 and the momentum is 0.5.
    """

    def tensors(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        if shared in {name, "all"}:
            return [torch.full((2,), 64.0, dtype=dtype)] * 3
        return [torch.full((2,), 64.0, dtype=dtype) for _ in range(3)]

    grads = [torch.full((2,), grad) for grad in (1.0, 2.0, 4.0)]
    params, momenta, copies = tensors("params"), tensors("momenta"), tensors("copies", torch.bfloat16)
    rule = SGDRule(lr=2.0, momentum=0.5, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)
    with race(), kernels.backend(backend):
        kernels.fused_step_(
            rule, Parameters(params, [momenta], (), copies), TensorList(grads), torch.tensor(0.5)
        )
    return tuple([float(tensor[0]) for tensor in listed] for listed in (params, momenta, copies))  # pyright: ignore[reportReturnType]
