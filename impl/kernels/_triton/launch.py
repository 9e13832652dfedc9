"""Launches of compiled kernels without Triton's search for them, which takes three quarters of a launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface

from impl.kernels._lists import PLAIN_TYPES

_ALIGNED = 16  # divisor in Triton's specialisation of addresses and integers
_TRITONS_RUN = JITFunction.run  # pyright: ignore[reportUnknownMemberType]


class _Kept(NamedTuple):
    kernel: object  # referenced, so that no other kernel gets its id
    run: Callable[..., None]
    function: int
    metadata: object
    constants: tuple[object, ...]  # ordered like the kernel's parameters


_kept: dict[tuple[Hashable, ...], _Kept] = {}


def launch(kernel: KernelInterface[Any], grid: tuple[int], *args: object, **constants: object) -> None:
    """Call `kernel[grid](*args, **constants)`, and keep the compiled kernel for calls of the same specialisation.

    Triton's own call is used in its interpreter, under hooks, and for arguments that are not plain tensors, numbers or
    None. A change of Triton's settings after the first launch has no effect on kernels that are kept.

    Args:
        kernel: a function under `triton.jit`.
        grid: programs, in one dimension.
        args: the kernel's parameters up to its constants.
        constants: the kernel's constants and Triton's options, in the same order in every call.

    Sync: none.
    """
    key = _key_of(kernel, args, constants)
    if key is None:
        kernel[grid](*args, **constants)
        return
    cached = _kept.get(key)
    if cached is None:
        _keep(key, kernel, kernel[grid](*args, **constants), len(args), constants)
        return
    active: Any = driver.active
    stream = active.get_current_stream(key[1])
    cached.run(
        grid[0], 1, 1, stream, cached.function, cached.metadata, None, None, None, *args, *cached.constants
    )  # fmt: skip


def _key_of(
    kernel: KernelInterface[Any], args: tuple[object, ...], constants: dict[str, object]
) -> tuple[Hashable, ...] | None:
    """Return a key of everything that selects the compiled kernel, or None if Triton has to search for it."""
    if type(kernel) is not JITFunction or JITFunction.run is not _TRITONS_RUN or _has_hooks(kernel):
        return None
    forms: list[Hashable] = []
    for arg in args:
        kind: type[Any] = type(arg)
        if kind in PLAIN_TYPES:
            forms.append(arg.dtype if arg.data_ptr() % _ALIGNED == 0 else (arg.dtype, "unaligned"))
        elif kind is int:
            forms.append(_specialization_of(arg))
        elif arg is None or kind is float:
            forms.append(kind)
        else:
            return None
    active: Any = driver.active
    return (id(kernel), active.get_current_device(), *forms, *constants, *constants.values())


def _has_hooks(kernel: JITFunction[Any]) -> bool:
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _specialization_of(number: int) -> Hashable:
    """Return what Triton specialises an integer by: whether it is 1, its width, and whether 16 divides it."""
    return number == 1 or (number.bit_length() > 31, number.bit_length() > 63, number % _ALIGNED == 0)


def _keep(
    key: tuple[Hashable, ...],
    kernel: JITFunction[Any],
    compiled: object,
    arg_count: int,
    constants: dict[str, object],
) -> None:
    parameters = kernel.params[arg_count:]
    if isinstance(compiled, CompiledKernel) and all(
        parameter.is_constexpr and parameter.name in constants for parameter in parameters
    ):
        typed: Any = compiled
        in_order = tuple(constants[parameter.name] for parameter in parameters)
        _kept[key] = _Kept(kernel, typed.run, typed.function, typed.packed_metadata, in_order)
