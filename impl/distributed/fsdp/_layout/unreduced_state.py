"""Journal of a backward's changes to unreduced gradients, which restores them if the backward raises."""

from __future__ import annotations

from collections.abc import Sequence

from impl.distributed.fsdp._params.param_group import describe_names


class UnreducedState:
    """Undo information for one group's unreduced gradients, used if a backward raises."""

    def __init__(self) -> None:
        self.is_being_reduced = False  # a reduction of this backward includes them
        self.is_partial = False  # includes some gradients of a failed backward
        self._is_new = False  # created by this backward
        self._is_added_to = False  # created earlier, added to by this backward

    def record_addition(self, to_earlier: bool) -> None:
        """Record that gradients of this backward were added, to earlier ones or as the first."""
        self._is_new |= not to_earlier
        self._is_added_to = not self._is_new

    def end_backward(self) -> bool:
        """Return whether the unreduced gradients must be dropped because they were reduced."""
        self._is_new = self._is_added_to = False
        return self.is_being_reduced

    def abandon_backward(self) -> bool:
        """Return whether the unreduced gradients must be dropped because the failed backward created them."""
        must_drop = self._is_new
        self.is_partial |= self._is_added_to
        self.is_being_reduced = self._is_new = self._is_added_to = False
        return must_drop

    def forget(self) -> None:
        self.is_being_reduced = self.is_partial = False

    def partial_gradients(self, names: Sequence[str], cure: str) -> RuntimeError:
        """Return the error for accumulated gradients that include only some gradients of a backward."""
        return RuntimeError(
            "a backward without synchronisation raised after it had added some of its gradients to those of earlier "
            f"backwards, of {describe_names(names, 3)}; {cure} before the next backward"
        )
