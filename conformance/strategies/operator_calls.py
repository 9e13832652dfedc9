"""Calls of an operator: its operands, and the names under which it can be called."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from conformance.judge.sandbox import seeding


@dataclass(frozen=True)
class DrawnTensor:
    """A description of a floating-point tensor to be drawn."""

    shape: tuple[int, ...]
    kind: str = "any"
    names: tuple[str, ...] | None = None

    def values(self, number: int) -> torch.Tensor:
        """Return float32 values. They differ for each number."""
        return _values(self, number, seeding.run_seed())


@functools.cache
def _values(drawn: DrawnTensor, number: int, seed: int) -> torch.Tensor:
    del seed
    generator = seeding.generator(number)
    if drawn.kind == "any":
        return torch.randn(drawn.shape, generator=generator)
    values = torch.rand(drawn.shape, generator=generator) * 0.8 + 0.1
    return values @ values.mT + torch.eye(drawn.shape[-1]) if drawn.kind == "definite" else values


def N(*shape: int, names: tuple[str, ...] | None = None) -> DrawnTensor:
    return DrawnTensor(shape, names=names)


def P(*shape: int) -> DrawnTensor:
    """Describe a tensor with values between 0.1 and 0.9."""
    return DrawnTensor(shape, "positive")


def D(*shape: int) -> DrawnTensor:
    """Describe positive definite matrices."""
    return DrawnTensor(shape, "definite")


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


@dataclass(frozen=True)
class OperatorCall:
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def operands(self, dtypes: Sequence[torch.dtype], device: str) -> OperatorCall:
        """Replace descriptions by fresh tensors, whose dtypes are taken from `dtypes` in turn."""
        count = iter(range(1000))

        def made(value: Any) -> Any:
            if isinstance(value, DrawnTensor):
                number = next(count)
                tensor = value.values(number).to(device, dtypes[number % len(dtypes)], copy=True)
                return tensor if value.names is None else tensor.rename(*value.names)
            if isinstance(value, torch.Tensor):
                return value.to(device, copy=True)
            return [made(item) for item in value] if isinstance(value, list) else value

        return OperatorCall(
            tuple(map(made, self.args)), {name: made(argument) for name, argument in self.kwargs.items()}
        )


def call(*args: Any, **kwargs: Any) -> OperatorCall:
    return OperatorCall(args, kwargs)


# Operators under another name, and functions that torch's namespaces lack.
_ELSEWHERE: dict[str, Callable[..., Any]] = {
    "pow": operator.pow,
    "matmul": operator.matmul,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "abs": operator.abs,
    "eq": operator.eq,
    "lt": operator.lt,
    "remainder": operator.mod,
    "cross_entropy_loss": F.cross_entropy,
    "nll_loss2d": F.nll_loss,
    "grid_sampler": lambda x, grid, *_: F.grid_sample(x, grid, align_corners=False),
    "constant_pad_nd": F.pad,
    "upsample_nearest2d": F.interpolate,
    "upsample_bilinear2d": lambda x, size, _: F.interpolate(x, size, mode="bilinear"),
    "upsample_bicubic2d": lambda x, size, _: F.interpolate(x, size, mode="bicubic"),
    "index_put": lambda x, index, value: operator.setitem(x, index[0], value),
    "linalg_matmul": operator.matmul,
    "view_as": lambda x, other: x.reshape(other.shape).type_as(other),
}
_GROUPS = {"linalg_": torch.linalg, "fft_": torch.fft, "special_": torch.special}


def spellings(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the names of this operator in the installed torch with their functions.

    Not every one takes its arguments.
    """
    plain, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, plain, None)
    if packet is not None:
        yield f"torch.ops.aten.{name}", getattr(packet, overload or "default", packet)
    for place, namespace in (("torch", torch), ("F", F), ("Tensor", torch.Tensor)):
        if hasattr(namespace, plain):
            yield f"{place}.{plain}", getattr(namespace, plain)
    for prefix, namespace in _GROUPS.items():
        short = plain.removeprefix(prefix)
        if short != plain and hasattr(namespace, short):
            yield f"torch.{prefix[:-1]}.{short}", getattr(namespace, short)
    if plain in _ELSEWHERE:
        yield f"{plain} by another name", _ELSEWHERE[plain]
    if hasattr(torch.Tensor, f"{plain}_"):
        yield f"Tensor.{plain}_", getattr(torch.Tensor, f"{plain}_")
    if hasattr(torch, plain):
        yield f"torch.{plain}(out=)", functools.partial(_into_new, getattr(torch, plain))


def _into_new(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    devices = {argument.device for argument in args if isinstance(argument, torch.Tensor)}
    return function(*args, **kwargs, out=torch.empty(0, device=next(iter(devices), None)))
