"""Sum of squares of a list of tensors in one pass over memory."""

from array import array

from torch import Tensor

from impl.kernels._native import CHUNK, NativeLibrary
from impl.kernels._native.memory import TensorList


def sum_of_squares(
    library: NativeLibrary, tensors: TensorList, square_T: Tensor | None = None
) -> float | None:
    """Return the sum of squares of all elements in f64. Its order does not depend on the number of threads.

    Args:
        tensors: a non-empty list of dense tensors on the CPU.
        square_T: [T] f64 for T tensors, written: the sum of squares of each tensor.

    Returns:
        Inf or nan if an element is, else a finite number. None if the library does not support the tensors.
    Sync: none.
    """
    read = tensors.memory
    if read is None:
        return None
    numels = read.layout.numels
    sums = array("d", bytes(8 * (len(tensors.tensors) + numels.total // CHUNK)))
    of_tensors = None if square_T is None else square_T.data_ptr()
    return library.sum_of_squares(*library.lists(numels), read.list, sums.buffer_info()[0], of_tensors)
