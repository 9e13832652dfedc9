"""Settings of a group of DTensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from impl.distributed.fsdp._params.policies import MixedPrecisionPolicy, ParamPrecision


@dataclass
class GroupOptions:
    """Settings of a group. All but the dtypes may change between steps. A dtype of None is the parameters' own."""

    precision: ParamPrecision
    # With None only the root's group stays unsharded. A number counts the ranks that gather again for backward.
    reshards_after_forward: bool | int | None = None
    reshards_after_backward: bool = True
    keeps_storage: bool = False  # unsharded memory stays allocated
    reduces_unused: bool = False  # zeros replace missing gradients
    # The user's policy, which tensors with an all-gather extension may take.
    policy: MixedPrecisionPolicy | None = None
    custom_all_gather: Any = None
