"""Which code carries an operation out: torch's operators, the CPU fast path, or Triton."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch
from torch import Tensor

Route = Literal["auto", "plain", "cached", "triton"]
_NAMES: tuple[str, ...] = get_args(Route)
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))


def _checked(name: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"there is no kernel route {name!r}; choose one of {', '.join(_NAMES)}")
    return name


_DEFAULT: str = _checked(os.environ.get("TANDEM_KERNELS", "auto"))
_asked: ContextVar[str] = ContextVar("_asked", default=_DEFAULT)


@contextmanager
def route(name: Route) -> Generator[None]:
    """Carry the kernels called inside the block, in this thread, by `name`.

    Args:
        name: "plain" is torch's own operators; "cached" the CPU fast path on top of them; "triton" the Triton
            kernels (CUDA tensors, or CPU tensors when Triton was imported under TRITON_INTERPRET=1); "auto"
            takes the fastest that can carry the tensors at hand. The environment variable TANDEM_KERNELS,
            read at import, sets what holds outside any block.

    Raises:
        ValueError: there is no such route.
    Sync: none. Collectives: none.
    """
    token = _asked.set(_checked(name))
    try:
        yield
    finally:
        _asked.reset(token)


def carrier(tensors: Sequence[Tensor]) -> Literal["plain", "cached", "triton"]:
    """The route for these tensors: what was asked for, or "plain" where that cannot take them."""
    return "plain"


def is_eager(tensors: Sequence[Tensor]) -> bool:
    """Whether these are ordinary tensors that no compiler, tracer or dispatch mode is watching.

    Only then may addresses be read and values, on the CPU, be looked at.
    """
    return (
        not torch.compiler.is_compiling()
        and _PLAIN_TYPES.issuperset(map(type, tensors))
        and torch._C._len_torch_dispatch_stack() == 0
    )


def are_real(dtypes: set[torch.dtype]) -> bool:
    """Whether the kernels know these dtypes; torch's operators take, or refuse, all others."""
    return dtypes <= _FLOATS
