"""Captured optimizers inside `torch.compile`, for Dynamo's own tracker of optimizers.

From torch 2.15, Dynamo calls `_init_group` outside of the trace only if it is a method of the class. `capture` replaces
it on the instance, so the graph would break there and the complete step would run eagerly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._dynamo.variables import base, misc
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.optimizer import OptimizerVariable

from impl.optim.captured import is_captured

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

# torch 2.14 and older have no such tables, and need no entry.
_base: Any = base
_misc: Any = misc
_tracker: Any = OptimizerVariable


def _resolve(tracker: Any, _tx: InstructionTranslatorBase) -> VariableTracker | None:
    """Return a tracker whose calls reach Dynamo's rule for `_init_group`, or None if nothing is captured."""
    return _misc.CallMethodVariable(tracker, "_init_group") if is_captured(tracker.value) else None


def _decline_assignment(
    _tracker: Any, _tx: InstructionTranslatorBase, _value: VariableTracker | None
) -> None:
    """Leave assignments to Dynamo."""


if "_init_group" in getattr(_tracker, "tp_methods", ()):
    _tracker.tp_getset["_init_group"] = _base.GetSet(_resolve, _decline_assignment)
