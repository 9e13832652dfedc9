"""Which code carries an operation out: torch's operators, the CPU fast path, or Triton."""

import os
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from impl.kernels._copies import is_capturing
from impl.kernels._lists import KERNEL_DTYPES, PLAIN_TYPES
from impl.kernels._native import NativeLibrary, library
from impl.kernels._native.memory import KnownLayoutList

Backend = Literal["auto", "torch", "cpu_blocked", "native", "triton"]
_Chosen = Literal["torch", "cpu_blocked", "triton"]

_NAMES: tuple[str, ...] = get_args(Backend)
_MANY = 8


def _checked(name: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"there is no kernel backend {name!r}; choose one of {', '.join(_NAMES)}")
    return name


_DEFAULT: str = _checked(os.environ.get("TANDEM_KERNELS", "auto"))
_asked: ContextVar[str] = ContextVar("_asked", default=_DEFAULT)


@contextmanager
def backend(name: Backend) -> Generator[None]:
    """Carry the kernels called inside the block, in this thread, by `name`.

    What a backend cannot take (tensor subclasses, traced code, other dtypes; for Triton what a CUDA graph captures)
    "torch" takes, whatever was asked for.

    Args:
        name: "torch" is torch's own operators; "cpu_blocked" the same on pieces that stay in the CPU's cache; "native"
            that, with the CPU library for what it has; "triton" the Triton kernels, on CUDA and wherever else Triton
            launches them, or in Triton's interpreter on CPU tensors where TRITON_INTERPRET=1 was set before Triton was
            imported; "auto" the fastest that takes the tensors at hand: on CUDA Triton's kernels, or, where none can
            be launched there, torch's operators after one warning. Outside any block the environment variable
            TANDEM_KERNELS holds, read at import.

    Raises:
        ValueError: there is no such backend.
    Sync: none. Collectives: none.
    """
    token = _asked.set(_checked(name))
    try:
        yield
    finally:
        _asked.reset(token)


class Dispatch(NamedTuple):
    backend: _Chosen
    dtypes: set[torch.dtype]  # of the tensors
    is_eager: bool  # addresses may be read and, on the CPU, values looked at


def asked_backend() -> str:
    """The name asked for: all that an operation need know for which the CPU has one backend, or takes mixed dtypes."""
    return _asked.get()


def dispatch_for(tensors: Sequence[Tensor]) -> Dispatch:
    """What carries these tensors: what was asked for, or "torch" where that cannot take them.

    Raises:
        RuntimeError: "triton" was asked for and cannot run here.
    """
    tensors = one_of_each_kind(tensors)
    dtypes = {t.dtype for t in tensors}
    if not is_eager(tensors):
        return Dispatch("torch", dtypes, is_eager=False)
    asked = _asked.get()
    if asked == "torch" or not dtypes <= KERNEL_DTYPES:
        return Dispatch("torch", dtypes, is_eager=True)
    return Dispatch(_fastest(asked, tensors[0]), dtypes, is_eager=True)


def one_of_each_kind(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of tensors whose form is known one stands for all."""
    return tensors[:1] if isinstance(tensors, KnownLayoutList) else tensors


def _fastest(asked: str, tensor: Tensor) -> _Chosen:
    if asked == "triton" or (tensor.is_cuda and asked != "cpu_blocked" and _has_triton()):
        # A captured graph would outlive the table of addresses that a Triton launch reads.
        if is_capturing(tensor.device):
            return "torch"
        why_not = _why_not_triton(tensor.device)
        if why_not is None:
            return "triton"
        if asked == "triton":
            raise RuntimeError(f"the kernel backend is 'triton' but {why_not}, or ask for 'auto'")
        _warn_without_triton(why_not)
        return "torch"
    return "cpu_blocked" if tensor.is_cpu else "torch"


def cpu_library(tensors: Sequence[Tensor] | None = None) -> NativeLibrary | None:
    """The CPU library, for the backend "cpu_blocked": None where there is none, or it was not asked for.

    Args:
        tensors: where torch has an operator that does the same, which is as fast for a few.

    Raises:
        RuntimeError: "native" was asked for and there is none.
    """
    asked = _asked.get()
    found = library() if asked in ("auto", "native") else None
    if asked == "native" and found is None:
        raise RuntimeError(
            "the kernel backend is 'native' but the CPU library was not built, or from other sources, or finds no "
            "OpenMP runtime of torch; install the package with a C compiler at hand, or ask for 'auto'"
        )
    return None if asked == "auto" and tensors is not None and len(tensors) < _MANY else found


def known_on_host(flag: Tensor) -> bool | None:
    """Whether `flag` is not zero, where a look at it costs nothing; None where it would be a synchronisation."""
    return flag.item() != 0 if dispatch_for([flag]).backend == "cpu_blocked" else None


def is_eager(tensors: Sequence[Tensor]) -> bool:
    """Whether these are ordinary tensors that no compiler, tracer, transform or dispatch mode watches."""
    return (
        not torch.compiler.is_compiling()
        and PLAIN_TYPES.issuperset(map(type, tensors))
        and torch._C._len_torch_dispatch_stack() == 0
        and peek_interpreter_stack() is None  # pyright: ignore[reportUnnecessaryComparison]  its stub is wrong
        and not torch._C._is_tracing()
    )


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _why_not_triton(device: torch.device) -> str | None:
    """Why Triton's kernels do not run there, and the cure; None where they do. The first question launches one."""
    if not _has_triton():
        return "Triton is not installed; install it"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on cpu; for these set TRITON_INTERPRET=1 before Triton is imported, move them to CUDA"
    return _failure_of_a_launch(device)


@cache
def _failure_of_a_launch(device: torch.device) -> str | None:
    one, factor = torch.ones(1, device=device), torch.ones((), device=device)
    try:
        from impl.kernels._triton.scale import launch_scale  # noqa: PLC0415  optional, and slow to import

        if launch_scale([one], factor):
            return None
        failure = "it has no memory to write to"
    except Exception as error:  # a driver, a compiler, Python's headers: what lacks has many types
        if "out of memory" in str(error):  # which passes
            raise
        failure = f"{type(error).__name__}: {error}"
    return (
        f"Triton cannot launch a kernel on {device.type} ({failure}); it needs a driver, a C compiler and the headers "
        "of Python: install what is missing"
    )


@cache
def _warn_without_triton(why_not: str) -> None:
    warnings.warn(
        f"torch's operators do the work of impl's kernels: {why_not}, or ask for the backend 'torch'",
        stacklevel=2,
    )
