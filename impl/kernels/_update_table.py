"""The table from which one launch finds its way through parameters and all that is read and written beside them."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from impl.kernels._native import Column
from impl.kernels._native.fused_step import UpdateMemory
from impl.kernels._native.memory import Addresses, KnownLayoutList
from impl.kernels._table import (
    ChunkTable,
    KeptTables,
    are_aligned,
    chunks_of,
    lie_apart,
    numbers_in,
    on_host,
    sent_to,
    stream_of,
)

# The first columns of a row; an address for each list follows.
COUNT, ALIGNED, STEP, ADDRESSES = range(4)


class _Key(NamedTuple):
    """As a chunk table's: all that this one depends on, and no tensor."""

    addresses: tuple[bytes, ...]  # of each list's tensors
    item_bytes: tuple[int, ...]  # of each list
    numels: bytes
    steps: bytes  # addresses
    device: torch.device
    stream: int

    @property
    def tensors(self) -> int:
        return len(self.numels) // Column.ITEM


def update_table(lists: Sequence[Sequence[Tensor]], steps: Sequence[Tensor]) -> ChunkTable | None:
    """The table of lists whose tensors of one place are walked together; kept while addresses and sizes are the same.

    Args:
        lists: of one length, each of one dtype; tensors of one place have one shape, all are on one device.
        steps: a 0-dim counter for each place; or empty.

    Returns:
        [chunks, 3 + lists] i64: elements, aligned, address of the counter or 0, address of the first element in each
        list. `aligned` is 1 for chunks that are 16-byte aligned in every list. None where no kernel can take the
        tensors: two share memory, or memory is not what one holds, or those of one place are not dense and laid out
        alike.
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


def known_update_table(memory: UpdateMemory, grads: KnownLayoutList) -> ChunkTable | None:
    """Return the same table without a question to any tensor; None also if a gradient has no memory.

    Args:
        memory: what the update writes. It has not moved since `have_moved` was asked.
        grads: of one dtype, each laid out as its parameter.
    Sync: as `update_table`.
    """
    located = grads.located
    if located is None:
        return None
    params, *others = memory.lists
    device = grads[0].device
    (own, *rest), steps = memory.columns()
    return _table_of(
        _Key(
            addresses=(own, located.addresses.numbers.tobytes(), *rest),
            item_bytes=tuple([tensors[0].element_size() for tensors in (params, grads, *others)]),
            numels=located.form.numels.numbers.tobytes(),
            steps=steps,
            device=device,
            stream=stream_of(device),
        )
    )


def _are_laid_out_alike(lists: Sequence[Sequence[Tensor]]) -> bool:
    if all(map(Tensor.is_contiguous, chain(*lists))):
        return True
    return all(
        all(map(Tensor.is_contiguous, alike))
        or (
            torch.ops.aten.is_non_overlapping_and_dense(alike[0])
            and all(tensor.stride() == alike[0].stride() for tensor in alike)
        )
        for alike in zip(*lists, strict=True)
    )


@KeptTables
def _table_of(key: _Key) -> ChunkTable | None:
    address_LT = torch.stack([*map(numbers_in, key.addresses)])  # L = lists, T = places
    bytes_L1 = on_host(key.item_bytes)[:, None]
    numel_T = numbers_in(key.numels)
    if not lie_apart(address_LT.flatten(), (address_LT + numel_T * bytes_L1).flatten()):
        return None
    chunks = chunks_of(numel_T)
    address_LC = address_LT[:, chunks.tensor_C] + chunks.start_C * bytes_L1
    aligned_C = are_aligned(*address_LC)
    step_T = numbers_in(key.steps) if key.steps else torch.zeros_like(numel_T)
    rows = torch.stack([chunks.count_C, aligned_C, step_T[chunks.tensor_C], *address_LC], dim=1)
    return ChunkTable(sent_to(key.device, rows), len(rows))
