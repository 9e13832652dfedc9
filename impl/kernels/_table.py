"""The table from which one launch finds its way through a list of tensors of mixed sizes and dtypes."""

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from impl.kernels._copies import placed
from impl.kernels._native import Column
from impl.kernels._native.memory import Addresses, KnownLayoutList
from impl.kernels._storage_order import are_dense

# Elements one program works on. The tail of a tensor is a shorter chunk.
CHUNK = 1 << 13
# Addresses divisible by this are read 128 bits at a time.
_ALIGNED = 16
# What tables that are kept may take: of 7 billion elements five, of groups of a hundred tensors thousands.
_MOST_BYTES = 1 << 26
_KEY_BYTES = 64  # a tensor's addresses and size, on the host

CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_ITEM_BYTES = (2, 2, 4, 8)


class ChunkTable(NamedTuple):
    """One row a chunk, on the device of the tensors."""

    rows: Tensor  # [chunks, 4] i64: address of the first element, elements, code of the dtype, 1 if 16-byte aligned
    chunks: int
    dtype: torch.dtype | None = None  # of all tensors; None if they are mixed, or unknown


class _Key(NamedTuple):
    """All that a table depends on, and no tensor: a freed gradient's address may be somebody else's tomorrow."""

    addresses: bytes  # i64, as all numbers of a key: it takes less time to hash than objects
    numels: bytes
    dtypes: tuple[torch.dtype, ...]  # of each tensor; a single one if it is that of all
    device: torch.device
    stream: int  # a table copied on one stream may not have arrived on another

    @property
    def tensors(self) -> int:
        return len(self.numels) // Column.ITEM


def chunk_table(tensors: Sequence[Tensor]) -> ChunkTable | None:
    """The table of these tensors, kept while addresses, sizes and dtypes stay the same.

    Returns:
        None if a tensor has gaps or two share memory, for order and number of writes then matter; or if memory is
        not what a tensor holds, as that of a view that negates. No kernel can take them.
    Sync: none; a new table is copied to a device from pinned memory.
    """
    device = tensors[0].device
    if isinstance(tensors, KnownLayoutList):
        located, dtypes = tensors.located, (tensors[0].dtype,)
        if located is None:
            return None
        addresses, numels = located.addresses, located.form.numels
    else:
        if not are_dense(tensors) or any(map(Tensor.is_neg, tensors)):
            return None
        addresses, numels = Addresses(tensors).column, Column(map(Tensor.numel, tensors))
        dtypes = tuple([t.dtype for t in tensors])
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
    """Tables by what they depend on. Those asked for longest ago go when all take more than `most_bytes`.

    So hundreds of small groups keep theirs from step to step, and of a large model, whose tensors have moved, few that
    nobody will ask for again stay on the device.
    """

    def __init__(self, make: Callable[[_K], ChunkTable | None], most_bytes: int = _MOST_BYTES) -> None:
        self._make = make
        self._most_bytes = most_bytes
        self._bytes = 0
        # Asked for longest ago first; with its bytes.
        self._kept: dict[_K, tuple[ChunkTable | None, int]] = {}
        self._lock = RLock()  # a finalizer may ask for a table while one is made

    def __call__(self, key: _K) -> ChunkTable | None:
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                table = self._make(key)
                found = table, _KEY_BYTES * key.tensors + (0 if table is None else table.rows.nbytes)
                self._bytes += found[1] - self._kept.get(key, (None, 0))[1]
            self._kept[key] = found
            while self._bytes > self._most_bytes and len(self._kept) > 1:
                self._bytes -= self._kept.pop(next(iter(self._kept)))[1]
        return found[0]


@KeptTables
def _table_of(key: _Key) -> ChunkTable | None:
    address_T = numbers_in(key.addresses)  # T = tensors, C = chunks
    numel_T = numbers_in(key.numels)
    code_T = on_host([CODES[d] for d in key.dtypes]).expand(key.tensors)
    bytes_T = on_host(_ITEM_BYTES)[code_T]
    if not lie_apart(address_T, address_T + numel_T * bytes_T):
        return None
    chunks = chunks_of(numel_T)
    address_C = address_T[chunks.tensor_C] + chunks.start_C * bytes_T[chunks.tensor_C]
    aligned_C = are_aligned(address_C)
    rows = torch.stack([address_C, chunks.count_C, code_T[chunks.tensor_C], aligned_C], dim=1)
    return ChunkTable(
        sent_to(key.device, rows), len(rows), key.dtypes[0] if len({*key.dtypes}) == 1 else None
    )


class Chunks(NamedTuple):
    """Of tensor after tensor, chunk after chunk: which tensor, from which element on, how many elements."""

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


def lie_apart(starts: Tensor, stops: Tensor) -> bool:
    """Whether no two spans of memory that are not empty share a byte, and none lacks memory, as torch's zeros may."""
    filled = stops > starts
    starts, order = starts[filled].sort()
    stops = stops[filled][order]
    return not bool((stops[:-1] > starts[1:]).any() or (starts[:1] == 0).any())


def numbers_in(key: bytes) -> Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.int64)


def on_host(numbers: Sequence[int]) -> Tensor:
    """i64, whatever device is the default."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """From the host, without waiting for it."""
    return tensor if device.type == "cpu" else placed(tensor.pin_memory(), device)
