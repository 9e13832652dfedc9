"""Choice of the backend of an operation: torch's operators, the CPU fast path, or Triton."""

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
from impl.kernels._native.memory import TensorList

Backend = Literal["auto", "torch", "cpu_blocked", "native", "triton"]
_Chosen = Literal["torch", "cpu_blocked", "triton"]

_NAMES: tuple[str, ...] = get_args(Backend)
_MANY = 8


def _checked(name: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"there is no kernel backend {name!r}; choose one of {', '.join(_NAMES)}")
    return name


_DEFAULT: str = _checked(os.environ.get("TANDEM_KERNELS", "auto"))
_requested: ContextVar[str] = ContextVar("_requested", default=_DEFAULT)


@contextmanager
def backend(name: Backend) -> Generator[None]:
    """Context manager that selects the backend of the kernels in this thread.

    If a backend does not support a call (tensor subclasses, traced code, other dtypes; for Triton the capture of a CUDA
    graph), "torch" is used. Outside of a block, the environment variable TANDEM_KERNELS selects the backend. It is read
    at import.

    Args:
        name: "torch" uses torch's own operators. "cpu_blocked" uses them on pieces that fit into the CPU's cache.
            "native" uses the CPU library for operations that it has, else "cpu_blocked". "triton" uses the Triton
            kernels, on CUDA and other devices that Triton supports, or in Triton's interpreter on the CPU if
            TRITON_INTERPRET=1 was set before Triton was imported. "auto" chooses the fastest for the tensors. On CUDA
            that is Triton, or, with one warning, torch's operators if Triton cannot launch.

    Raises:
        ValueError: there is no such backend.
    Sync: none. Collectives: none.
    """
    token = _requested.set(_checked(name))
    try:
        yield
    finally:
        _requested.reset(token)


class Dispatch(NamedTuple):
    backend: _Chosen
    dtypes: set[torch.dtype]  # dtypes of the tensors
    is_eager: bool  # whether addresses, and on the CPU values, may be read
    reason: str = ""  # reason for "torch"


def requested_backend() -> str:
    """Return the requested name. It suffices for an operation with one CPU backend, or one for mixed dtypes."""
    return _requested.get()


def dispatch_for(tensors: TensorList) -> Dispatch:
    """Return the requested backend for these tensors, or "torch" if it does not support them.

    Raises:
        RuntimeError: "triton" was requested and cannot run here.
    """
    representatives = tensors.representatives
    dtypes = {t.dtype for t in representatives}
    if not is_eager(representatives):
        return Dispatch("torch", dtypes, False, "tensor subclasses, or traced or transformed code")
    requested = _requested.get()
    if requested == "torch":
        return Dispatch("torch", dtypes, True, "the backend 'torch' was requested")
    if not dtypes <= KERNEL_DTYPES:
        return Dispatch("torch", dtypes, True, "a dtype that no kernel supports")
    chosen, reason = _fastest(requested, representatives[0])
    return Dispatch(chosen, dtypes, True, reason)


def _fastest(requested: str, tensor: Tensor) -> tuple[_Chosen, str]:
    """Return the fastest backend that was requested, and the reason if it is "torch"."""
    if requested == "triton" or (tensor.is_cuda and requested != "cpu_blocked" and _has_triton()):
        # A captured graph would outlive the table of addresses that a Triton launch reads.
        if is_capturing(tensor.device):
            return "torch", "a graph is captured"
        reason = _reason_against_triton(tensor.device)
        if reason is None:
            return "triton", ""
        if requested == "triton":
            raise RuntimeError(f"the kernel backend is 'triton' but {reason}, or ask for 'auto'")
        _warn_without_triton(reason)
        return "torch", reason
    if tensor.is_cpu:
        return "cpu_blocked", ""
    return "torch", "no kernel runs on this type of device without a request for 'triton'"


def cpu_library(tensors: TensorList | None = None) -> NativeLibrary | None:
    """Return the CPU library for the backend "cpu_blocked", or None if there is none or it was not requested.

    Args:
        tensors: pass them if torch has an equivalent operator, which is as fast for a few tensors.

    Raises:
        RuntimeError: "native" was requested and there is no library.
    """
    requested = _requested.get()
    loaded = library() if requested in ("auto", "native") else None
    if requested == "native" and loaded is None:
        raise RuntimeError(
            "the kernel backend is 'native' but the CPU library was not built, or from other sources, or finds no "
            "OpenMP runtime of torch; install the package with a C compiler at hand, or ask for 'auto'"
        )
    return None if requested == "auto" and tensors is not None and len(tensors.tensors) < _MANY else loaded


def flag_if_free_to_read(flag: Tensor) -> bool | None:
    """Return whether `flag` is not zero, or None if reading it would synchronise.

    The result is also None in traced code and with the backends "torch" and "triton", on the CPU too.
    """
    is_free = flag.is_cpu and dispatch_for(TensorList([flag])).backend == "cpu_blocked"
    return flag.item() != 0 if is_free else None


def is_eager(tensors: Sequence[Tensor]) -> bool:
    """Return whether these are plain tensors outside of compilers, tracers, transforms and dispatch modes."""
    return (
        not torch.compiler.is_compiling()
        and PLAIN_TYPES.issuperset(map(type, tensors))
        and torch._C._len_torch_dispatch_stack() == 0
        and not is_transformed()
        and not torch._C._is_tracing()
    )


def is_transformed() -> bool:
    """Return whether a transform of `torch.func`, such as `vmap`, runs this code."""
    return peek_interpreter_stack() is not None  # pyright: ignore[reportUnnecessaryComparison]  its stub is wrong


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _reason_against_triton(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on `device` and the cure, or None. The first call launches a kernel."""
    if not _has_triton():
        return "Triton is not installed; install it"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on cpu; for these set TRITON_INTERPRET=1 before Triton is imported, move them to CUDA"
    return _failure_of_a_launch(device)


@cache
def _failure_of_a_launch(device: torch.device) -> str | None:
    tensor, factor = torch.ones(1, device=device), torch.ones((), device=device)
    try:
        from impl.kernels._triton.scale import launch_scale  # noqa: PLC0415  optional, and slow to import

        if launch_scale(TensorList([tensor]), factor):
            return None
        failure = "it has no memory to write to"
    except Exception as error:  # many types: no driver, no compiler, no Python headers
        if "out of memory" in str(error):  # a temporary failure
            raise
        failure = f"{type(error).__name__}: {error}"
    return (
        f"Triton cannot launch a kernel on {device.type} ({failure}); it needs a driver, a C compiler and the headers "
        "of Python: install what is missing"
    )


@cache
def _warn_without_triton(reason: str) -> None:
    warnings.warn(
        f"torch's operators do the work of impl's kernels: {reason}, or ask for the backend 'torch'",
        stacklevel=2,
    )
