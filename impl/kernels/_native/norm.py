"""The sum of squares of a list of tensors, in one pass over memory."""

from array import array
from collections.abc import Sequence

from torch import Tensor

from impl.kernels._native import CHUNK, Library
from impl.kernels._native.memory import form_of


def sum_of_squares(library: Library, tensors: Sequence[Tensor]) -> float | None:
    """Of all elements together, summed in f64 in an order that does not depend on the number of threads.

    Args:
        tensors: dense ones on the CPU; not empty.

    Returns:
        inf or nan if an element is, else a finite number. None if the library cannot take the tensors.
    Sync: none.
    """
    form = form_of(tensors)
    read = form and form.at(tensors)
    if form is None or read is None:
        return None
    sums = array("d", bytes(8 * (len(tensors) + form.numels.total // CHUNK)))
    return library.sum_of_squares(*library.lists(form.numels), read.list, sums.buffer_info()[0])
