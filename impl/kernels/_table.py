"""The table from which one launch finds its way through a list of tensors of mixed sizes and dtypes."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Elements one program works on. The tail of a tensor is a shorter chunk.
CHUNK = 1 << 15
# Addresses divisible by this are read 128 bits at a time.
_ALIGNED = 16

CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_ITEM_BYTES = (2, 2, 4, 8)


class ChunkTable(NamedTuple):
    """One row a chunk, on the device of the tensors."""

    rows: Tensor  # [chunks, 4] i64: address of the first element, elements, code of the dtype, whole
    chunks: int  # `whole` is 1 for full chunks at aligned addresses: no mask, 128-bit loads


class _Key(NamedTuple):
    """All that a table depends on, and no tensor: a freed gradient's address may be somebody else's tomorrow."""

    addresses: tuple[int, ...]
    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    stream: int  # a table copied on one stream may not have arrived on another


def chunk_table(tensors: Sequence[Tensor]) -> ChunkTable | None:
    """The table of these tensors, kept while addresses, sizes and dtypes stay the same.

    Returns:
        None if a tensor has gaps or two share memory, for order and number of writes then matter; or if memory is
        not what a tensor holds, as that of a view that negates. No kernel can take them.
    Sync: none; on CUDA a new table is copied there from pinned memory.
    """
    if not all(t.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(t) for t in tensors):
        return None
    if any(map(Tensor.is_neg, tensors)):
        return None
    device = tensors[0].device
    return _table_of(
        _Key(
            addresses=tuple([t.data_ptr() for t in tensors]),
            numels=tuple([t.numel() for t in tensors]),
            dtypes=tuple([t.dtype for t in tensors]),
            device=device,
            stream=torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0,
        )
    )


@lru_cache(maxsize=64)
def _table_of(key: _Key) -> ChunkTable | None:
    spans = sorted(
        (address, address + numel * _ITEM_BYTES[CODES[dtype]])
        for address, numel, dtype in zip(key.addresses, key.numels, key.dtypes, strict=True)
        if numel
    )
    if any(stop > start for (_, stop), (start, _) in pairwise(spans)):
        return None
    if spans and spans[0][0] == 0:  # a tensor of zeros for which torch keeps no memory
        return None
    rows = _rows(key)
    chunks = len(rows)
    if key.device.type == "cuda":
        rows = rows.pin_memory().to(key.device, non_blocking=True)
    return ChunkTable(rows, chunks)


def _rows(key: _Key) -> Tensor:
    """Rows on the CPU, tensor after tensor, chunk after chunk."""
    address_T = torch.tensor(key.addresses, dtype=torch.int64)  # T = tensors, C = chunks
    numel_T = torch.tensor(key.numels, dtype=torch.int64)
    code_T = torch.tensor([CODES[d] for d in key.dtypes], dtype=torch.int64)
    chunks_T = (numel_T + CHUNK - 1) // CHUNK
    tensor_C = torch.repeat_interleave(chunks_T)
    first_chunk_T = chunks_T.cumsum(0) - chunks_T
    start_C = (torch.arange(len(tensor_C)) - first_chunk_T[tensor_C]) * CHUNK
    code_C = code_T[tensor_C]
    address_C = address_T[tensor_C] + start_C * torch.tensor(_ITEM_BYTES)[code_C]
    count_C = (numel_T[tensor_C] - start_C).clamp_(max=CHUNK)
    whole_C = ((count_C == CHUNK) & (address_C % _ALIGNED == 0)).long()
    return torch.stack([address_C, count_C, code_C, whole_C], dim=1)
