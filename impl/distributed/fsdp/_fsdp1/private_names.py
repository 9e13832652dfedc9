"""Private names of torch's units that clients read. `conformance/compat_names.toml` lists the clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from impl.distributed.fsdp._engine.phase import TrainingState, training_state_of
from impl.distributed.fsdp._flat_param import FlatParameter
from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._layout.flat import FlatParamGroup


class Handle:
    """Attributes of a unit's flat parameters that accelerate sets."""

    def __init__(self, param_groups: Sequence[FlatParamGroup]) -> None:
        self._param_groups = param_groups

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """Dtype in which the optimizer steps. Setting it, after casting the flat parameter, also casts frozen ones."""
        return self._param_groups[0].dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        for group in self._param_groups:
            group.set_param_dtype(dtype)


class PrivateNames(Wrapper):
    """Part of FullyShardedDataParallel without state of its own."""

    @property
    def _is_root(self) -> bool | None:
        return None if self._root is None else self._root.is_root(self._unit)

    @property
    def training_state(self) -> TrainingState:
        """State of the unit. The outermost unit is also in a backward during the backward of any other."""
        root = self._root
        if root is not None and root.is_in_backward and root.is_root(self._unit):
            return TrainingState.FORWARD_BACKWARD
        return training_state_of(self._unit.phase)

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.param_groups)

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self._unit.param_groups[0].flat_param if self._unit.param_groups else None

    @property
    def _handle(self) -> Handle | None:
        return Handle(self._unit.param_groups) if self._unit.param_groups else None
