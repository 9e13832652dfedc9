"""What the constructor of a unit was told that matters while training."""

from __future__ import annotations

from dataclasses import dataclass

from impl.distributed.fsdp.api import BackwardPrefetch, MixedPrecision


@dataclass(frozen=True)
class UnitConfig:
    """The same for all of the unit's handles."""

    frees_after_forward: bool
    mixed_precision: MixedPrecision
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    full_precision_in_eval: bool

    @property
    def keeps_low_precision_grads(self) -> bool:
        return self.mixed_precision.keep_low_precision_grads
