"""Registration of the tensors that our Triton kernels read and write, with the simulated device.

The kernels reach most of them through the addresses in a table, which the device cannot follow.

As a plugin of pytest (`-p impl.kernels.tests.on_simulator`) it registers them in that process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from conformance import simulator
from conformance.simulator.triton_kernels import touching
from impl.kernels import _table, _update_table

# By kernel: the arguments that it writes, and whether it writes what its table addresses.
_WRITTEN: dict[str, tuple[set[str], bool]] = {
    "partial_norm_kernel": ({"partial_ptr"}, False),
    "finish_norm_kernel": ({"norm_ptr", "found_inf_ptr"}, False),
    "tensor_norms_kernel": ({"norm_ptr"}, False),
    "finish_step_kernel": (
        {"scaled_norm_ptr", "found_inf_ptr", "norm_ptr", "factor_ptr", "taken_ptr"},
        False,
    ),
    "unscale_kernel": ({"found_inf_ptr"}, True),
}


class _Addressed(NamedTuple):
    read: list[weakref.ref[Tensor]]
    written: list[weakref.ref[Tensor]]


_addressed: dict[int, _Addressed] = {}  # keyed by the address of the latest rows


def tell() -> None:
    """Enable the device and register the tensors of each launch. Call before the kernels are imported."""
    simulator.enable()
    _table.chunk_table = _remembering(_table.chunk_table, lambda tensors: ([], tensors.tensors))
    _update_table.update_table = _remembering(
        _update_table.update_table,
        lambda lists, steps: (
            [*lists[1], *steps],
            [tensor for at, tensors in enumerate(lists) if at != 1 for tensor in tensors],
        ),
    )
    _update_table.known_update_table = _remembering(
        _update_table.known_update_table,
        lambda memory, grads: (
            [*grads.tensors, *memory.steps],
            [tensor for tensors in memory.lists for tensor in tensors],
        ),
    )
    run = GridExecutor.__call__

    def launched(self: Any, *arguments: Any, **named: Any) -> None:
        reads, writes = _touched(self.fn.__name__, dict(zip(self.arg_names, arguments, strict=False)))
        with touching(reads, writes):
            run(self, *arguments, **named)

    GridExecutor.__call__ = launched


def _remembering(make: Callable[..., Any], touched: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(*arguments: Any) -> Any:
        table = make(*arguments)
        if table is not None:
            read, written = touched(*arguments)
            _addressed[table.rows.data_ptr()] = _Addressed(
                [*map(weakref.ref, read)], [*map(weakref.ref, written)]
            )
        return table

    return remembered


def _touched(kernel: str, arguments: dict[str, Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    rows = arguments.get("rows_ptr")
    addressed = _Addressed([], []) if rows is None else _addressed[rows.data_ptr()]
    read, written = ([tensor for ref in refs if (tensor := ref()) is not None] for refs in addressed)
    names, writes_addressed = _WRITTEN.get(kernel, (set(), True))
    out = [arguments[name] for name in names if isinstance(arguments[name], Tensor)]
    return (read, [*written, *out]) if writes_addressed else ([*read, *written], out)


def pytest_collection() -> None:
    tell()
