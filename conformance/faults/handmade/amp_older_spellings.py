"""Faults in torch.cuda.amp and torch.cpu.amp, the older spellings of torch.amp."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from conformance.faults.fault import in_method, register_fault


def broken(fault_id: str, breaks: str, says: str, fault: Any) -> None:
    """Enter `fault(original, self, ...)`, which is called in the place of the class's `__init__`."""
    register_fault(f"older.{fault_id}", breaks, says=says)(in_method("__init__", fault))


def another_warning(category: type[Warning] | None) -> Any:
    """The old spelling warns in another category, or not at all."""

    def fault(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            original(self, *args, **kwargs)
        for warning in caught:
            if issubclass(warning.category, FutureWarning) and category is not None:
                warnings.warn(str(warning.message), category, stacklevel=3)
            elif not issubclass(warning.category, FutureWarning):
                warnings.warn(warning.message, stacklevel=3)

    return fault


broken(
    "cuda_scaler_warns_otherwise",
    "cuda.amp.GradScaler",
    "torch.cuda.amp.GradScaler gives a DeprecationWarning, which few see",
    another_warning(DeprecationWarning),
)
broken(
    "cpu_scaler_is_silent",
    "cpu.amp.GradScaler",
    "torch.cpu.amp.GradScaler does not say that it is old",
    another_warning(None),
)
broken(
    "cuda_region_is_silent",
    "cuda.amp.autocast",
    "torch.cuda.amp.autocast does not say that it is old",
    another_warning(None),
)


def cpu_region_in_float16(
    original: Any, self: Any, enabled: Any = True, dtype: Any = torch.float16, cache_enabled: Any = True
) -> None:
    original(self, enabled, dtype, cache_enabled)


broken(
    "cpu_region_in_float16",
    "cpu.amp.autocast",
    "torch.cpu.amp.autocast runs in float16 by default, as the one for CUDA",
    cpu_region_in_float16,
)


def cuda_region_asks_for_its_dtype(
    original: Any, self: Any, enabled: Any = True, dtype: Any = None, cache_enabled: Any = True
) -> None:
    original(self, enabled, torch.bfloat16 if dtype is None else dtype, cache_enabled)


broken(
    "cuda_region_in_bfloat16",
    "cuda.amp.autocast",
    "torch.cuda.amp.autocast runs in bfloat16 by default",
    cuda_region_asks_for_its_dtype,
)


def region_for_both(original: Any, self: Any) -> Any:
    result = original(self)
    torch.set_autocast_enabled("cpu", True)
    return result


register_fault(
    "older.cuda_region_on_the_cpu",
    "cuda.amp.autocast",
    says="torch.cuda.amp.autocast casts on the CPU as well",
    thread="allenai/OLMo#339",
)(in_method("__enter__", region_for_both))


@register_fault(
    "older.cuda_custom_bwd_is_silent",
    "cuda.amp.custom_bwd",
    says="torch.cuda.amp.custom_bwd does not say that it is old",
)
def cuda_custom_bwd_is_silent(original: Any) -> Any:
    @functools.wraps(original)
    def silent(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return original(*args, **kwargs)

    return silent
