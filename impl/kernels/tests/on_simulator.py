"""The simulated device told which tensors our Triton kernels reach through a table, and which tensors they write.

As a plugin of pytest (`-p impl.kernels.tests.on_simulator`) it tells the device of that process.
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
    "finish_step_kernel": (
        {"scaled_norm_ptr", "found_inf_ptr", "norm_ptr", "factor_ptr", "taken_ptr"},
        False,
    ),
    "unscale_kernel": ({"found_inf_ptr"}, True),
    "update_scale_kernel": ({"scale_ptr", "growth_tracker_ptr"}, False),
}


class _Addressed(NamedTuple):
    read: list[weakref.ref[Tensor]]
    written: list[weakref.ref[Tensor]]


_addressed: dict[int, _Addressed] = {}  # by the address of the rows, as of the last call


def tell() -> None:
    """Before the kernels are imported. The device is enabled."""
    simulator.enable()
    _table.chunk_table = _remembering(_table.chunk_table, lambda tensors: ([], tensors))
    _update_table.update_table = _remembering(
        _update_table.update_table,
        lambda lists, steps: (
            [*lists[1], *steps],
            [one for at, all in enumerate(lists) if at != 1 for one in all],
        ),
    )
    _update_table.known_update_table = _remembering(
        _update_table.known_update_table,
        lambda memory, grads: ([*grads, *memory.steps], [one for all in memory.lists for one in all]),
    )
    run = GridExecutor.__call__

    def launched(self: Any, *arguments: Any, **named: Any) -> None:
        reads, writes = _touched(self.fn.__name__, dict(zip(self.arg_names, arguments, strict=False)))
        with touching(reads, writes):
            run(self, *arguments, **named)

    GridExecutor.__call__ = launched


def _remembering(make: Callable[..., Any], touched: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(*given: Any) -> Any:
        table = make(*given)
        if table is not None:
            read, written = touched(*given)
            _addressed[table.rows.data_ptr()] = _Addressed(
                [*map(weakref.ref, read)], [*map(weakref.ref, written)]
            )
        return table

    return remembered


def _touched(kernel: str, arguments: dict[str, Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    rows = arguments.get("rows_ptr")
    found = _Addressed([], []) if rows is None else _addressed[rows.data_ptr()]
    read, written = ([one for ref in refs if (one := ref()) is not None] for refs in found)
    names, writes_addressed = _WRITTEN.get(kernel, (set(), True))
    out = [arguments[name] for name in names if isinstance(arguments[name], Tensor)]
    return (read, [*written, *out]) if writes_addressed else ([*read, *written], out)


def pytest_collection() -> None:
    tell()
