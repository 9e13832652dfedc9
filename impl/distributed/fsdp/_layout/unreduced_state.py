"""What a backward does to gradients that wait to be reduced, so that it can be undone should it raise."""

from __future__ import annotations

from collections.abc import Sequence

from impl.distributed.fsdp._params.param_group import describe_names


class UnreducedState:
    """Of one group, whatever holds its gradients; who does so forgets them where it is told to."""

    def __init__(self) -> None:
        self.is_on_the_way = False  # a reduction of this backward has had them
        self.is_partial = False  # they have a part of a backward that raised
        self._is_new = False  # this backward has made them
        self._is_added_to = False  # or has added to those of earlier ones

    def note_added(self, to_earlier: bool) -> None:
        """Some came in this backward: to others, its own or of earlier ones, or where there were none."""
        self._is_new |= not to_earlier
        self._is_added_to = not self._is_new

    def end_backward(self) -> bool:
        """Whether they are to be forgotten: they have been reduced."""
        self._is_new = self._is_added_to = False
        return self.is_on_the_way

    def abandon_backward(self) -> bool:
        """Whether they are to be forgotten: the backward that raised has made them."""
        are_its_own = self._is_new
        self.is_partial |= self._is_added_to
        self.is_on_the_way = self._is_new = self._is_added_to = False
        return are_its_own

    def forget(self) -> None:
        self.is_on_the_way = self.is_partial = False

    def partial_gradients(self, names: Sequence[str], cure: str) -> RuntimeError:
        """What is raised of those that are partial."""
        return RuntimeError(
            "a backward without synchronisation raised when it had added some of its gradients to those of earlier "
            f"ones, of {describe_names(names, 3)}; {cure} before the next backward"
        )
