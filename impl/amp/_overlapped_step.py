"""Result of a step whose updates run during the backward."""

from __future__ import annotations

from torch import Tensor

from impl.optim._updates_ahead import UpdatesAhead


class OverlappedStep:
    """Result of `GradScaler.overlapped_step`, after the region."""

    def __init__(self) -> None:
        self._norm: Tensor | None = None
        self._early_numel = self._repeated_numel = 0

    @property
    def norm(self) -> Tensor:
        """Norm of the unscaled gradients before clipping, as `fused_step` returns it: 0-dim.

        Raises:
            RuntimeError: the region has not ended, or an exception left it.
        """
        if self._norm is None:
            raise RuntimeError("the norm is not known inside of overlapped_step(); read it after the region")
        return self._norm

    @property
    def early_numel(self) -> int:
        """Number of this rank's elements that the backward's updates have stepped."""
        return self._early_numel

    @property
    def repeated_numel(self) -> int:
        """Number of this rank's elements whose update was repeated or undone at the end."""
        return self._repeated_numel

    def finish(self, norm: Tensor, ahead: UpdatesAhead) -> None:
        """Record the outcome."""
        self._norm, self._early_numel, self._repeated_numel = norm, ahead.kept_numel, ahead.undone_numel
