"""torch's global state that a library could leave changed, with functions that read and restore it.

There are two groups. *Settings* belong to the user, and no function of a judged library may change them. *Regions* are
changed by context managers between enter and exit, so a call may change them for the next one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import deterministic


class StateItem(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


State = Mapping[str, StateItem]


def read(state: State) -> dict[str, Any]:
    return {name: item.read() for name, item in state.items()}


def put_back(state: State, before: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Restore `state` and return what had changed, as (before, after) by name."""
    changed = {name: (before[name], now) for name, now in read(state).items() if now != before[name]}
    for name, (was, _) in changed.items():
        state[name].write(was)
    return {name: _reduce_to_difference(*values) for name, values in changed.items()}


def _reduce_to_difference(was: Any, now: Any) -> tuple[Any, Any]:
    """Return both values. If both are mappings, leave out entries that are equal in both."""
    if not isinstance(was, Mapping):
        return was, now
    keys = [key for key in {**was, **now} if key not in was or key not in now or was[key] != now[key]]
    return tuple({key: values[key] for key in keys if key in values} for values in (was, now))


def autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def set_autocast_depth(depth: int) -> None:
    while autocast_depth() > depth:
        torch.autocast_decrement_nesting()
    while autocast_depth() < depth:
        torch.autocast_increment_nesting()


# Inference modes that were entered. They are never freed, because that would restore the earlier mode.
_entered: list[Any] = []


def _set_inference_mode(mode: bool) -> None:
    _entered.append(torch.inference_mode(mode))
    _entered[-1].__enter__()


def _pop_function_modes(depth: int) -> None:
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()


def _pop_dispatch_modes(depth: int) -> None:
    while torch._C._len_torch_dispatch_stack() > depth:
        torch._C._pop_torch_dispatch_stack(None)


def _attribute(owner: Any, name: str) -> StateItem:
    return StateItem(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _autocast(where: str, device: Callable[[], str]) -> State:
    """Return the autocast state of a device type. `device` is called each time, as private backends can be renamed."""
    return {
        f"autocast on {where}": StateItem(
            lambda: torch.is_autocast_enabled(device()), lambda on: torch.set_autocast_enabled(device(), on)
        ),
        f"autocast dtype on {where}": StateItem(
            lambda: torch.get_autocast_dtype(device()),
            lambda dtype: torch.set_autocast_dtype(device(), dtype),
        ),
    }


SETTINGS: State = {
    "default dtype": StateItem(torch.get_default_dtype, torch.set_default_dtype),
    # Tests run without a default device, and even the CPU as default would intercept every call.
    "default device": StateItem(torch.get_default_device, lambda _: torch.set_default_device(None)),
    "deterministic algorithms": StateItem(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    "filling of uninitialized memory": _attribute(deterministic, "fill_uninitialized_memory"),
    "number of threads": StateItem(torch.get_num_threads, torch.set_num_threads),
    "float32 matmul precision": StateItem(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "cuDNN benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cuDNN deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "warn always": StateItem(torch.is_warn_always_enabled, torch.set_warn_always),
    "anomaly mode": StateItem(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
}

REGIONS: State = {
    "torch function modes": StateItem(torch._C._len_torch_function_stack, _pop_function_modes),
    "torch dispatch modes": StateItem(torch._C._len_torch_dispatch_stack, _pop_dispatch_modes),
    # Before the grad mode, which it also sets.
    "inference mode": StateItem(torch.is_inference_mode_enabled, _set_inference_mode),
    "grad mode": StateItem(torch.is_grad_enabled, torch.set_grad_enabled),
    **_autocast("cpu", lambda: "cpu"),
    **_autocast("cuda", lambda: "cuda"),
    **_autocast("a private backend", torch._C._get_privateuse1_backend_name),
    "autocast cache": StateItem(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "autocast depth": StateItem(autocast_depth, set_autocast_depth),
}

# Settings come first, because a default device is also a function mode.
EVERYTHING: State = {**SETTINGS, **REGIONS}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class RandomStates:
    """States of the random generators that the user's training draws from. Moving them changes the training."""

    def __init__(self) -> None:
        # Advance the generator first. Otherwise a call that seeds it with the same seed again would not be noticed.
        torch.randint(2, (1,), device="cpu")
        self._before = self._read()

    def moved(self) -> list[str]:
        now = self._read()
        return [name for name, state in self._before.items() if state != now[name]]

    @staticmethod
    def _read() -> dict[str, Any]:
        return {
            "torch's random generator": torch.default_generator.get_state().numpy().tobytes(),
            "Python's random generator": random.getstate(),
        }
