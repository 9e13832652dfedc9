"""Faults in what a region of torch.amp.autocast does to operators, and in the casts that it caches.

They are on the CPU. The dispatcher gets other rules while a region is open.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from conformance.strength.faults.fault import OWN, Decorator, Make, fault_in, in_methods

_PRODUCTS = (torch.mm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


def while_open(begin: Callable[[Any], Callable[[], object]]) -> Make:
    """Return a maker of a region that calls `begin(region)` when it is entered, and the result when it is left."""

    def enter(original: Any, self: Any) -> Any:
        result = original(self)
        vars(self).setdefault("_faulty_exits", []).append(begin(self))
        return result

    def leave(original: Any, self: Any, *exc: Any) -> Any:
        if vars(self).get("_faulty_exits"):
            self._faulty_exits.pop()()
        return original(self, *exc)

    return in_methods({"__enter__": enter, "__exit__": leave})


# Casts of operands

Rule = Callable[[Any, torch.Tensor], torch.Tensor]


def with_rule(operator: str, thread: str = OWN) -> Decorator:
    """Return a decorator of `rule(region, operand)`, which replaces the casts of an operator's operands."""

    def make(rule: Rule) -> Make:
        def begin(region: Any) -> Callable[[], None]:
            kernels = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # replaced kernels
                kernels.impl(operator, _kernel(operator, functools.partial(rule, region)), "AutocastCPU")
            return kernels._destroy

        return while_open(begin)

    return fault_in("autocast", "amp.autocast", make, thread)


def _kernel(name: str, rule: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    plain, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, plain), overload or "default")

    def cast(value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return rule(value) if is_floating else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return operator(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel


@with_rule("huber_loss")
def no_rule_for_a_loss(region: Any, operand: torch.Tensor) -> torch.Tensor:
    """The operands of huber_loss are not cast."""
    return operand


@with_rule("gelu")
def neighbour_in_low_precision(region: Any, operand: torch.Tensor) -> torch.Tensor:
    """The operand of gelu, which has no rule, is cast to the region's dtype."""
    return operand.to(region.fast_dtype)


@with_rule("bmm", "pytorch/pytorch#36171")
def float64_cast_too(region: Any, operand: torch.Tensor) -> torch.Tensor:
    """float64 operands of a product are cast."""
    return operand.to(region.fast_dtype)


@with_rule("conv_transpose3d.input")
def float16_for_bfloat16(region: Any, operand: torch.Tensor) -> torch.Tensor:
    """The operands of a transposed convolution are cast to float16, whatever the region's dtype."""
    return operand.half() if operand.dtype is torch.float32 else operand


# Cached casts


class _CachingMode(TorchFunctionMode):
    """A mode that caches the casts of products' operands for which `is_cached(operand)`, by their addresses."""

    def __init__(self, region: Any, is_cached: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._region, self._is_cached = region, is_cached
        self._casts: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and self._region._enabled:
            args = tuple(map(self._cast, args))
        return func(*args, **(kwargs or {}))

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        if not (is_float and self._is_cached(value)):
            return value
        if value.data_ptr() not in self._casts:
            self._casts[value.data_ptr()] = value.to(self._region.fast_dtype)
        return self._casts[value.data_ptr()]


def _caching(is_cached: Callable[[torch.Tensor], bool]) -> Make:
    def begin(region: Any) -> Callable[[], object]:
        mode = _CachingMode(region, is_cached)
        mode.__enter__()
        return lambda: mode.__exit__(None, None, None)

    return while_open(begin)


caching = fault_in("autocast", "amp.autocast", _caching)


@caching
def frozen_cached(tensor: torch.Tensor) -> bool:
    """Casts of weights that require no gradient are cached."""
    return tensor.is_leaf and not tensor.requires_grad


@caching
def cached_by_address(tensor: torch.Tensor) -> bool:
    """Casts are cached by the addresses of weights."""
    return tensor.is_leaf and tensor.requires_grad
