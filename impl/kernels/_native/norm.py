"""Sum of squares of a list of tensors in one pass over memory."""

from array import array
from collections.abc import Sequence

from torch import Tensor

from impl.kernels._native import CHUNK, NativeLibrary
from impl.kernels._native.memory import tensors_to_read


def sum_of_squares(library: NativeLibrary, tensors: Sequence[Tensor]) -> float | None:
    """Return the sum of squares of all elements in f64. Its order does not depend on the number of threads.

    Args:
        tensors: a non-empty list of dense tensors on the CPU.

    Returns:
        Inf or nan if an element is, else a finite number. None if the library does not support the tensors.
    Sync: none.
    """
    read = tensors_to_read(tensors)
    if read is None:
        return None
    numels = read.form.numels
    sums = array("d", bytes(8 * (len(tensors) + numels.total // CHUNK)))
    return library.sum_of_squares(*library.lists(numels), read.list, sums.buffer_info()[0])
