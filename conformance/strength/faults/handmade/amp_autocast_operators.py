"""Faults in what a region of torch.amp.autocast does to operators, and in the casts that it keeps.

They hold on the CPU, whose rules the dispatcher is given others for as long as a region is open.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from conformance.strength.faults.fault import in_methods, register_fault

REGION = "amp.autocast"
_KEY = "AutocastCPU"
_PRODUCTS = (torch.mm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
# Makes what is there while a region is open, and ends it.
Opened = Callable[[Any], Callable[[], None]]


def while_open(fault_id: str, says: str, thread: str = "own") -> Callable[[Opened], Opened]:
    """Enter `fault(region)`, which is called when a region is entered, and what it returns when that is left."""

    def enter(fault: Opened) -> Opened:
        def entering(original: Any, self: Any) -> Any:
            result = original(self)
            vars(self).setdefault("_faulty_exits", []).append(fault(self))
            return result

        def leaving(original: Any, self: Any, *exc: Any) -> Any:
            if vars(self).get("_faulty_exits"):
                self._faulty_exits.pop()()
            return original(self, *exc)

        register_fault(f"autocast.{fault_id}", REGION, says=says, thread=thread)(
            in_methods({"__enter__": entering, "__exit__": leaving})
        )
        return fault

    return enter


def with_rule(name: str, rule: Callable[[Any, torch.Tensor], torch.Tensor] | None) -> Opened:
    """Replace the casts of an operator by `rule(region, operand)` for each operand, or drop them if it is None."""

    def fault(region: Any) -> Callable[[], None]:
        kernels = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # replaced kernels
            kernel = torch.library.fallthrough_kernel if rule is None else casting(name, rule, region)
            kernels.impl(name, kernel, _KEY)
        return kernels._destroy

    return fault


def casting(name: str, rule: Callable[[Any, torch.Tensor], torch.Tensor], region: Any) -> Callable[..., Any]:
    plain, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, plain), overload or "default")

    def cast(value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return rule(region, value) if is_floating else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return operator(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel


while_open("no_rule_for_a_loss", "huber_loss runs as it does without a region")(with_rule("huber_loss", None))
while_open("neighbour_in_low_precision", "gelu, which has no rule, runs in the region's dtype")(
    with_rule("gelu", lambda region, tensor: tensor.to(region.fast_dtype))
)
while_open("float64_cast_too", "a product of float64 is cast", "pytorch/pytorch#36171")(
    with_rule("bmm", lambda region, tensor: tensor.to(region.fast_dtype))
)
while_open("float16_for_bfloat16", "a transposed convolution runs in float16 whatever the region's dtype")(
    with_rule(
        "conv_transpose3d.input",
        lambda region, tensor: tensor.half() if tensor.dtype is torch.float32 else tensor,
    )
)


# Cached casts


class _Keeping(TorchFunctionMode):
    """Keeps the casts of products' operands for which `is_kept(operand)`, by their addresses."""

    def __init__(self, region: Any, is_kept: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._region, self._is_kept = region, is_kept
        self._kept: dict[int, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and self._region._enabled:
            args = tuple(map(self._cast, args))
        return func(*args, **(kwargs or {}))

    def _cast(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.dtype is torch.float32 and self._is_kept(value)):
            return value
        if value.data_ptr() not in self._kept:
            self._kept[value.data_ptr()] = value.to(self._region.fast_dtype)
        return self._kept[value.data_ptr()]


def keeping(fault_id: str, says: str, is_kept: Callable[[torch.Tensor], bool]) -> None:
    def fault(region: Any) -> Callable[[], None]:
        mode = _Keeping(region, is_kept)
        mode.__enter__()
        return lambda: mode.__exit__(None, None, None)

    while_open(fault_id, says)(fault)


keeping(
    "frozen_kept",
    "casts of weights that require no gradient are kept",
    lambda tensor: tensor.is_leaf and not tensor.requires_grad,
)
keeping(
    "kept_by_address",
    "casts are kept by where a weight lies",
    lambda tensor: tensor.is_leaf and tensor.requires_grad,
)
