"""Values of a checkpoint other than the model's tensors: data that is loaded without running code."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map


def as_data(value: object) -> Any:
    """Convert numpy's numbers to Python's. Learning rates are often numpy numbers unintentionally."""
    return tree_map(_as_number, value)


def _as_number(value: Any) -> Any:
    is_numpys = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_numpys else value


def check_readable(values: Mapping[str, Any]) -> None:
    """Check that `load` can read the values.

    Raises:
        TypeError: `load` would refuse one of them. The error names it.
    """
    for name, value in values.items():
        written = io.BytesIO()
        try:
            torch.save(tree_map(_without_elements, value), written)
            torch.load(io.BytesIO(written.getvalue()), weights_only=True)
        except Exception as error:  # any error of pickling a user's object
            raise TypeError(
                f"{name} cannot be loaded again: it holds {_culprit(error)}, and a checkpoint holds numbers, strings, "
                "tensors and containers of them, which load without running code"
            ) from error


def _without_elements(value: Any) -> Any:
    return torch.empty(0, dtype=value.dtype) if type(value) in (Tensor, nn.Parameter) else value


def _culprit(error: Exception) -> str:
    named = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return named[1] if named else f"a value that cannot be pickled ({type(error).__name__}: {error})"


def optimizer_values_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's settings and state other than tensors, by name.

    Raises:
        TypeError: a key of the state is not a string.
    """
    states = list(optimizer.state.values())
    numbered = [key for state in states for key in state if not isinstance(key, str)]
    if numbered:
        raise TypeError(
            f"optimizer.state has the key {numbered[0]!r}, which is no string, but would be loaded as one"
        )
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    non_tensors = [
        {key: value for key, value in state.items() if not isinstance(value, Tensor)} for state in states
    ]
    return {"optimizer.param_groups": groups, "optimizer.state": non_tensors}
