"""The sum of squares of a list of tensors, in one pass over memory."""

from array import array
from collections.abc import Sequence

from torch import Tensor

from impl.kernels._lists import dtypes_of
from impl.kernels._native import CHUNK, CODES, Column, Library, List, memory_of


def sum_of_squares(library: Library, tensors: Sequence[Tensor]) -> float | None:
    """Of all elements together, summed in f64 in an order that does not depend on the number of threads.

    Args:
        tensors: dense ones of one dtype on the CPU.

    Returns:
        inf or nan if an element is, else a finite number. None if the library cannot take the tensors: their dtype is
        another one, or they have gaps.
    Sync: none.
    """
    code = CODES.get(tensors[0].dtype)
    if code is None or len(dtypes_of(tensors)) > 1 or (addresses := memory_of(tensors)) is None:
        return None
    numels, tensors_at = Column(list(map(Tensor.numel, tensors))), Column(addresses)
    sums = array("d", bytes(8 * (len(tensors) + sum(numels.numbers) // CHUNK)))
    return library.sum_of_squares(
        *library.lists(numels), List(tensors_at.address, code), sums.buffer_info()[0]
    )
