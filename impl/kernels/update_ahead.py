"""Update that is applied before its factor is certain, and can be undone to the bit."""

from __future__ import annotations

from array import array
from ctypes import c_float

import torch

from impl.kernels._decorators import no_grad_fast
from impl.kernels._dispatch import cpu_library, dispatch_for
from impl.kernels._native import chunk_counts
from impl.kernels._native.fused_step import SavedTensors, UpdateExtras, fused_step
from impl.kernels._native.memory import TensorList
from impl.kernels._native.norm import ChunkSquares, split_by_tensor, sum_of_chunks
from impl.kernels._parameters import Parameters
from impl.kernels.rules import Rule


class UpdateAhead:
    """Updates of parameters by the CPU library with a factor that may turn out to be another one.

    Args:
        parameters: tensors on the CPU. Their step counters are counters of this object.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.is_applied = False
        self._saved: SavedTensors | None = None
        self._rule: Rule | None = None
        self._factor = 0.0

    @no_grad_fast
    def apply(
        self, rule: Rule, grads: TensorList, factor: float, power: int
    ) -> dict[int, ChunkSquares] | None:
        """Update, and save the previous contents in the same pass. The version counters stay the same.

        Returns:
            The sums of squares of the gradients' chunks of two to the `power` elements, by the gradients' addresses;
            or None, without a change, if the CPU library does not support the tensors.
        Sync: none.
        """
        library = None if dispatch_for(grads).backend != "cpu_blocked" else cpu_library()
        if library is None or grads.memory is None:
            return None
        if self._saved is None:
            self._saved = SavedTensors(
                [
                    [torch.empty_like(tensor) for tensor in tensors]
                    for tensors in self.parameters.memory.updated
                ]
            )
        chunks = sum(chunk_counts(grads.memory.layout.numels.numbers, power))
        squares = ChunkSquares(power, array("d", bytes(8 * chunks)))
        extras = UpdateExtras(self._saved, squares=squares)
        if not fused_step(library, rule, self.parameters.memory, grads, factor, extras):
            return None
        self.is_applied, self._rule, self._factor = True, rule, factor
        return split_by_tensor(squares, grads.memory)

    def is_by(self, rule: Rule, factor: float) -> bool:
        """Return whether the update that was applied is the one by `rule` and `factor`."""
        return self._rule == rule and c_float(self._factor).value == c_float(factor).value

    def keep(self) -> None:
        """Keep the update."""
        self.is_applied = False
        self.parameters.count_write()

    @no_grad_fast
    def redo(self, rule: Rule, grads: TensorList, factor: float) -> None:
        """Replace the update that was applied by another one, in one pass. Sync: none."""
        library = cpu_library()
        assert library is not None
        assert self._saved is not None
        extras = UpdateExtras(self._saved, restores=True)
        is_done = fused_step(library, rule, self.parameters.memory, grads, factor, extras)
        assert is_done, "tensors of an update changed, which its caller must have noticed"
        self.keep()

    @no_grad_fast
    def undo(self) -> None:
        """Restore the previous contents. Low-precision copies get those of the parameters. Sync: none."""
        assert self._saved is not None
        self.is_applied = False
        for tensors, saved in zip(self.parameters.memory.updated, self._saved.lists, strict=True):
            # The version counters stay the same, because the contents are those of before.
            torch._foreach_copy_([tensor.data for tensor in tensors], [*saved])
        if self.parameters.low_precision_params:
            torch._foreach_copy_([*self.parameters.low_precision_params], [*self.parameters.params])


def squares_of_chunks(grads: TensorList, power: int) -> dict[int, ChunkSquares] | None:
    """Return the same as `UpdateAhead.apply`, without an update."""
    library = None if dispatch_for(grads).backend != "cpu_blocked" else cpu_library()
    return None if library is None else sum_of_chunks(library, grads, power)
