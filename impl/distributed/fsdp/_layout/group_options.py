"""What may be changed of a group of DTensors between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from impl.distributed.fsdp._params.policies import ParamPrecision


@dataclass
class GroupOptions:
    """What may be changed between steps, but for the dtypes, which are None where the parameters' own serve."""

    precision: ParamPrecision
    # None: unless it is the root's. A number: to as many ranks, which gather it again for a backward.
    reshards_after_forward: bool | int | None = None
    reshards_after_backward: bool = True
    keeps_storage: bool = False  # memory of unsharded parameters stays allocated
    reduces_unused: bool = False  # zeros take the place of gradients that did not come
    policy: Any = None  # the user's own, which tensors that say how they are gathered may ask for
    all_gather: Any = None  # communication of the user's own: `allocate`, and a call
