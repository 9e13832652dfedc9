"""Masters: parameters of fully_shard in the `master_dtype` of a policy, wider than the dtype of their forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from impl.distributed.fsdp._layout.sharded_param import ShardedParam


class Masters:
    """Masters of one group, of which some may have been cast.

    Args:
        params: all parameters of the group.
        dtype: dtype that the policy asks for. If it is None, no parameter is a master.
    """

    def __init__(self, params: Sequence[ShardedParam], dtype: torch.dtype | None) -> None:
        self._params = params
        self._dtype = dtype
        self._rounded: dict[ShardedParam, str] = {}  # masters that were cast and not loaded since

    def record_casts(self) -> None:
        """Record the masters that were cast. Casting a master back does not restore the lost bits."""
        self._rounded = self._lost() | self._rounded

    def record_load(
        self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *, assigned: bool
    ) -> None:
        """Record that a module loads its masters again.

        A load into a cast master is rounded, unless it replaces it.
        """
        for param in [*self._rounded]:
            own = (place.attribute for place in param.info.locations if place.module is module)
            keeps_all_bits = assigned or param.dtype is self._dtype
            if keeps_all_bits and any(prefix + attribute in state_dict for attribute in own):
                del self._rounded[param]

    def check(self) -> None:
        """Check that the masters have their dtype and all their bits.

        Raises:
            RuntimeError: masters were cast, or replaced by parameters of another dtype.
        """
        if self._dtype is None:
            return
        lost = self._lost()
        if lost:
            raise RuntimeError(
                f"{', '.join(lost.values())} should be {self._dtype}, the master_dtype of the policy, but have been "
                f"cast or replaced; call module.to({self._dtype}), and load them again if they were rounded"
            )
        if self._rounded:
            raise RuntimeError(
                f"{', '.join(self._rounded.values())} were cast, and back to {self._dtype}, the master_dtype of the "
                "policy, without the bits that this has rounded away; load them by load_state_dict(), or load their "
                "own state_dict() to continue with the rounded values"
            )

    def _lost(self) -> dict[ShardedParam, str]:
        if self._dtype is None:
            return {}
        floating = (p for p in self._params if p.dtype.is_floating_point)
        return {p: f"{p.name} ({p.dtype})" for p in floating if p.dtype is not self._dtype}
