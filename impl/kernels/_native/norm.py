"""Sum of squares of a list of tensors in one pass over memory."""

from array import array

from impl.kernels._native import CHUNK, NativeLibrary
from impl.kernels._native.memory import TensorList


def sum_of_squares(library: NativeLibrary, tensors: TensorList) -> float | None:
    """Return the sum of squares of all elements in f64. Its order does not depend on the number of threads.

    Args:
        tensors: a non-empty list of dense tensors on the CPU.

    Returns:
        Inf or nan if an element is, else a finite number. None if the library does not support the tensors.
    Sync: none.
    """
    read = tensors.memory
    if read is None:
        return None
    numels = read.layout.numels
    sums = array("d", bytes(8 * (len(tensors.tensors) + numels.total // CHUNK)))
    return library.sum_of_squares(*library.lists(numels), read.list, sums.buffer_info()[0])
