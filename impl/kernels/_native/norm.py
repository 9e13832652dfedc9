"""Sum of squares of a list of tensors in one pass over memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from impl.kernels._native import NativeLibrary, chunk_counts, chunk_power
from impl.kernels._native.memory import TensorList, Tensors


class ChunkSquares(NamedTuple):
    """Sums of squares of the chunks of one tensor."""

    power: int  # exponent of two of a chunk's elements
    sums: array[float]


def sum_of_squares(
    library: NativeLibrary,
    tensors: TensorList,
    square_T: Tensor | None = None,
    known: Mapping[int, ChunkSquares] | None = None,
) -> float | None:
    """Return the sum of squares of all elements in f64. Its order does not depend on the number of threads.

    Args:
        tensors: a non-empty list of dense tensors on the CPU.
        square_T: [T] f64 for T tensors, written: the sum of squares of each tensor.
        known: sums that were taken before, by the tensor's address. They are used if the list has the same chunks.

    Returns:
        Inf or nan if an element is, else a finite number. None if the library does not support the tensors.
    Sync: none.
    """
    memory = tensors.memory
    if memory is None:
        return None
    numels = memory.layout.numels
    counts = numels.chunk_counts
    sums = array("d", bytes(8 * sum(counts)))
    are_known = None if not known else _fill(sums, memory.addresses.numbers, counts, numels.total, known)
    square_address = None if square_T is None else square_T.data_ptr()
    known_address = None if are_known is None else are_known.buffer_info()[0]
    return library.sum_of_squares(
        *library.lists(numels), memory.list, sums.buffer_info()[0], square_address, known_address
    )


def sum_of_chunks(library: NativeLibrary, tensors: TensorList, power: int) -> dict[int, ChunkSquares] | None:
    """Return the sums of squares of chunks of two to the `power` elements, by the tensor's address.

    Return None if the library does not support the tensors.
    """
    memory = tensors.memory
    if memory is None:
        return None
    numels = memory.layout.numels
    squares = ChunkSquares(power, array("d", bytes(8 * sum(chunk_counts(numels.numbers, power)))))
    library.sum_of_squares(
        *library.lists(numels, power), memory.list, squares.sums.buffer_info()[0], None, None
    )
    return split_by_tensor(squares, memory)


def split_by_tensor(squares: ChunkSquares, tensors: Tensors) -> dict[int, ChunkSquares]:
    """Return the sums of each tensor in a list, by its address."""
    power, start = squares.power, 0
    by_address: dict[int, ChunkSquares] = {}
    counts = chunk_counts(tensors.layout.numels.numbers, power)
    for address, count in zip(tensors.addresses.numbers, counts, strict=True):
        by_address[address] = ChunkSquares(power, squares.sums[start : start + count])
        start += count
    return by_address


def _fill(
    sums: array[float],
    addresses: Iterable[int],
    counts: Iterable[int],
    total: int,
    known: Mapping[int, ChunkSquares],
) -> array[int]:
    """Copy known sums to their places. Return for each tensor whether its sums are known."""
    power, start, are_known = chunk_power(total), 0, array("b")
    for address, count in zip(addresses, counts, strict=True):
        squares = known.get(address)
        if squares is not None and squares.power == power and len(squares.sums) == count:
            sums[start : start + count] = squares.sums
            are_known.append(1)
        else:
            are_known.append(0)
        start += count
    return are_known
