"""The type of the norm of DTensors, in a module of its own because torch.distributed.tensor loads slowly."""

from __future__ import annotations

import copy
from typing import Any

from torch.distributed.tensor import DTensor


class DTensorNorm(DTensor):
    """Replicated 0-dim DTensor that takes a format, as in `f"{norm:.3f}"`, like a plain tensor.

    Copies, pickles and results of operators are ordinary DTensors.
    """

    def __format__(self, format_spec: str) -> str:
        return format(self.to_local().item(), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._ordinary(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)

    def _ordinary(self) -> Any:
        dtensor: Any = DTensor
        return dtensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        # Compiled code that takes the norm checks that its inputs keep their type.
        dtensor: Any = DTensor.__tensor_unflatten__(*args)
        norm: Any = DTensorNorm
        return norm(dtensor._local_tensor, dtensor._spec, requires_grad=dtensor.requires_grad)
