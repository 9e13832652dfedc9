"""Chunk table of a launch: addresses and sizes of a list of tensors of mixed sizes and dtypes."""

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from impl.kernels._copies import to_device
from impl.kernels._native import Column
from impl.kernels._native.memory import Addresses, TensorList
from impl.kernels._storage_order import are_dense

# Elements of one program. The tail of a tensor is a shorter chunk.
CHUNK = 1 << 13
# Addresses divisible by this are read 128 bits at a time.
_ALIGNED = 16
# Bytes of cached tables. That is five tables of 7 billion elements, or thousands of tables of a hundred tensors.
_MOST_BYTES = 1 << 26
_KEY_BYTES = 64  # addresses and size of a tensor on the host

CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_ITEM_BYTES = (2, 2, 4, 8)


class ChunkTable(NamedTuple):
    """Table with one row for each chunk, on the device of the tensors."""

    # [chunks, 4] i64: address of the first element, elements, code of the dtype, 1 if 16-byte aligned
    rows: Tensor
    chunks: int
    dtype: torch.dtype | None = None  # dtype of all tensors, or None if mixed or unknown
    # [tensors + 1] i64: first chunk of each tensor, then the number of chunks
    firsts: Tensor | None = None


class _Key(NamedTuple):
    """Key of a table: all its inputs, but no tensors, because other tensors may reuse an address."""

    addresses: bytes  # i64, like all numbers of a key, because bytes hash faster
    numels: bytes
    dtypes: tuple[torch.dtype, ...]  # a dtype for each tensor, or a single dtype for all
    device: torch.device
    # Id of the stream that copied the table to the device, because other streams may not see it yet.
    stream: int

    @property
    def tensors(self) -> int:
        return len(self.numels) // Column.ITEM


def chunk_table(tensors: TensorList) -> ChunkTable | None:
    """Return the table of these tensors. It is cached for the same addresses, sizes and dtypes.

    Returns:
        None if the kernels do not support the tensors: one has gaps, two share memory, so that order and number of
        writes matter, or one has a negative bit.
    Sync: none; a new table is copied to a device from pinned memory.
    """
    listed = tensors.tensors
    device = listed[0].device
    if tensors.layout is not None:
        memory, dtypes = tensors.memory, (listed[0].dtype,)
        if memory is None:
            return None
        addresses, numels = memory.addresses, memory.layout.numels
    else:
        if not are_dense(listed) or any(map(Tensor.is_neg, listed)):
            return None
        addresses, numels = Addresses(listed).column, Column(map(Tensor.numel, listed))
        dtypes = tuple([t.dtype for t in listed])
    return _table_of(
        _Key(addresses.numbers.tobytes(), numels.numbers.tobytes(), dtypes, device, stream_of(device))
    )


def stream_of(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id


class _TableKey(Protocol):
    @property
    def tensors(self) -> int: ...


_K = TypeVar("_K", bound=_TableKey)


class KeptTables(Generic[_K]):
    """Cache of tables by key. The least recently used ones are dropped if all take more than `most_bytes`.

    So the tables of hundreds of small groups stay from step to step, while few outdated tables of a large model, whose
    tensors have moved, stay on the device.
    """

    def __init__(self, make: Callable[[_K], ChunkTable | None], most_bytes: int = _MOST_BYTES) -> None:
        self._make = make
        self._most_bytes = most_bytes
        self._bytes = 0
        # Tables with their bytes, the least recently used first.
        self._kept: dict[_K, tuple[ChunkTable | None, int]] = {}
        # A finalizer may need a table while another one is made, so the lock is reentrant.
        self._lock = RLock()

    def __call__(self, key: _K) -> ChunkTable | None:
        with self._lock:
            entry = self._kept.pop(key, None)
            if entry is None:
                table = self._make(key)
                entry = table, _KEY_BYTES * key.tensors + (0 if table is None else table.rows.nbytes)
                self._bytes += entry[1] - self._kept.get(key, (None, 0))[1]
            self._kept[key] = entry
            while self._bytes > self._most_bytes and len(self._kept) > 1:
                self._bytes -= self._kept.pop(next(iter(self._kept)))[1]
        return entry[0]


@KeptTables
def _table_of(key: _Key) -> ChunkTable | None:
    address_T = numbers_in(key.addresses)  # T = tensors, C = chunks
    numel_T = numbers_in(key.numels)
    code_T = host_int64([CODES[d] for d in key.dtypes]).expand(key.tensors)
    bytes_T = host_int64(_ITEM_BYTES)[code_T]
    if not are_disjoint(address_T, address_T + numel_T * bytes_T):
        return None
    chunks = chunks_of(numel_T)
    address_C = address_T[chunks.tensor_C] + chunks.start_C * bytes_T[chunks.tensor_C]
    aligned_C = are_aligned(address_C)
    rows = torch.stack([address_C, chunks.count_C, code_T[chunks.tensor_C], aligned_C], dim=1)
    firsts = torch.cat([host_int64([0]), ((numel_T + CHUNK - 1) // CHUNK).cumsum(0)])
    # Both are copied to the device together.
    both = to_device_async(key.device, torch.cat([rows.flatten(), firsts]))
    return ChunkTable(
        both[: rows.numel()].view(rows.shape),
        len(rows),
        key.dtypes[0] if len({*key.dtypes}) == 1 else None,
        both[rows.numel() :],
    )


class Chunks(NamedTuple):
    """Chunks of all tensors in order: index of the tensor, first element, and number of elements."""

    tensor_C: Tensor
    start_C: Tensor
    count_C: Tensor


def chunks_of(numel_T: Tensor) -> Chunks:
    chunks_T = (numel_T + CHUNK - 1) // CHUNK
    tensor_C = torch.repeat_interleave(chunks_T)
    first_chunk_T = chunks_T.cumsum(0) - chunks_T
    start_C = (torch.arange(len(tensor_C), device="cpu") - first_chunk_T[tensor_C]) * CHUNK
    return Chunks(tensor_C, start_C, (numel_T[tensor_C] - start_C).clamp_(max=CHUNK))


def are_aligned(*addresses: Tensor) -> Tensor:
    """Return 1 for each chunk whose first element has an aligned address in every list, else 0."""
    return torch.stack([address_C % _ALIGNED == 0 for address_C in addresses]).all(dim=0).long()


def are_disjoint(starts: Tensor, stops: Tensor) -> bool:
    """Return whether no non-empty ranges of memory overlap, and none is without memory, like torch's zero tensors."""
    filled = stops > starts
    starts, order = starts[filled].sort()
    stops = stops[filled][order]
    return not bool((stops[:-1] > starts[1:]).any() or (starts[:1] == 0).any())


def numbers_in(key: bytes) -> Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.int64)


def host_int64(numbers: Sequence[int]) -> Tensor:
    """Return an i64 tensor on the host, for any default device."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def to_device_async(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a host tensor to `device` through pinned memory. Sync: none."""
    return tensor if device.type == "cpu" else to_device(tensor.pin_memory(), device)
