"""The sum of squares of a list of tensors, in one pass over memory."""

from array import array
from collections.abc import Sequence

from torch import Tensor

from impl.kernels._native import CHUNK, NativeLibrary
from impl.kernels._native.memory import tensors_to_read


def sum_of_squares(library: NativeLibrary, tensors: Sequence[Tensor]) -> float | None:
    """Of all elements together, summed in f64 in an order that does not depend on the number of threads.

    Args:
        tensors: dense ones on the CPU; not empty.

    Returns:
        inf or nan if an element is, else a finite number. None if the library cannot take the tensors.
    Sync: none.
    """
    read = tensors_to_read(tensors)
    if read is None:
        return None
    numels = read.form.numels
    sums = array("d", bytes(8 * (len(tensors) + numels.total // CHUNK)))
    return library.sum_of_squares(*library.lists(numels), read.list, sums.buffer_info()[0])
