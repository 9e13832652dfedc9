"""Chunk table of an update: addresses of parameters, gradients, states and low-precision copies."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from impl.kernels._native import Column
from impl.kernels._native.fused_step import UpdateMemory
from impl.kernels._native.memory import Addresses, TensorList
from impl.kernels._table import (
    ChunkTable,
    KeptTables,
    are_aligned,
    are_disjoint,
    chunks_of,
    host_int64,
    numbers_in,
    stream_of,
    to_device_async,
)

# First columns of a row. The addresses of each list follow.
COUNT, ALIGNED, STEP, ADDRESSES = range(4)


class _Key(NamedTuple):
    """Key of the table: all its inputs, but no tensors, like the key of a chunk table."""

    addresses: tuple[bytes, ...]  # addresses of each list's tensors
    item_bytes: tuple[int, ...]  # element size of each list
    numels: bytes
    steps: bytes  # addresses of the step counters
    device: torch.device
    stream: int

    @property
    def tensors(self) -> int:
        return len(self.numels) // Column.ITEM


def update_table(lists: Sequence[Sequence[Tensor]], steps: Sequence[Tensor]) -> ChunkTable | None:
    """Return the table of lists that are updated together. It is cached for the same addresses and sizes.

    Args:
        lists: lists of equal length, each with one dtype. Tensors of one index have one shape. All are on one device.
        steps: a 0-dim counter for each index, or empty.

    Returns:
        [chunks, 3 + lists] i64: elements, aligned, address of the counter or 0, address of the first element in each
        list. `aligned` is 1 for chunks that are 16-byte aligned in every list. None if the kernels do not support the
        tensors: two share memory, one has a negative bit, or those of one index are not dense with the same layout.
    Sync: none; a new table is copied to a device from pinned memory.
    """
    if not _are_laid_out_alike(lists) or any(map(Tensor.is_neg, chain(*lists, steps))):
        return None
    params = lists[0]
    return _table_of(
        _Key(
            addresses=tuple([Addresses(tensors).column.numbers.tobytes() for tensors in lists]),
            item_bytes=tuple([tensors[0].element_size() for tensors in lists]),
            numels=Column(map(Tensor.numel, params)).numbers.tobytes(),
            steps=Addresses(steps).column.numbers.tobytes(),
            device=params[0].device,
            stream=stream_of(params[0].device),
        )
    )


def known_update_table(memory: UpdateMemory, grads: TensorList) -> ChunkTable | None:
    """Return the same table without a query to any tensor. None also if a gradient has no memory.

    Args:
        memory: the tensors to update, whose addresses have not changed since `refresh_addresses` was called.
        grads: gradients with a known layout, each with that of its parameter.
    Sync: as `update_table`.
    """
    grads_memory = grads.memory
    if grads_memory is None:
        return None
    params, *others = memory.lists
    device = grads.tensors[0].device
    (param_addresses, *other_addresses), steps = memory.columns()
    return _table_of(
        _Key(
            addresses=(param_addresses, grads_memory.addresses.numbers.tobytes(), *other_addresses),
            item_bytes=tuple([tensors[0].element_size() for tensors in (params, grads.tensors, *others)]),
            numels=grads_memory.layout.numels.numbers.tobytes(),
            steps=steps,
            device=device,
            stream=stream_of(device),
        )
    )


def _are_laid_out_alike(lists: Sequence[Sequence[Tensor]]) -> bool:
    if all(map(Tensor.is_contiguous, chain(*lists))):
        return True
    return all(
        all(map(Tensor.is_contiguous, row))
        or (
            torch.ops.aten.is_non_overlapping_and_dense(row[0])
            and all(tensor.stride() == row[0].stride() for tensor in row)
        )
        for row in zip(*lists, strict=True)
    )


@KeptTables
def _table_of(key: _Key) -> ChunkTable | None:
    address_LT = torch.stack([*map(numbers_in, key.addresses)])  # L = lists, T = tensors of a list
    bytes_L1 = host_int64(key.item_bytes)[:, None]
    numel_T = numbers_in(key.numels)
    if not are_disjoint(address_LT.flatten(), (address_LT + numel_T * bytes_L1).flatten()):
        return None
    chunks = chunks_of(numel_T)
    address_LC = address_LT[:, chunks.tensor_C] + chunks.start_C * bytes_L1
    aligned_C = are_aligned(*address_LC)
    step_T = numbers_in(key.steps) if key.steps else torch.zeros_like(numel_T)
    rows = torch.stack([chunks.count_C, aligned_C, step_T[chunks.tensor_C], *address_LC], dim=1)
    return ChunkTable(to_device_async(key.device, rows), len(rows))
