"""Checks of optimizer state dicts of sharded models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from conformance.distributed.fsdp import optim_state_cases as cases
from conformance.distributed.fsdp.lab import TREE
from conformance.distributed.fsdp.module_trees import ModuleTree
from conformance.distributed.fsdp.optim_state_cases import Optimized
from conformance.judge.outcome import TensorState
from conformance.judge.tolerances import ONE_STEP


def unwrapped(optimized: Optimized, tree: ModuleTree = TREE) -> dict[str, Any]:
    """Return the optimizer state dict of the same model without wrapping, by parameter names."""
    model = tree.build()
    return cases.by_name(model, optimized.stepped(model))


def as_tensors(value: Any) -> Any:
    """Replace each `TensorState` that a rank reported by its tensor."""
    return tree_map(lambda leaf: leaf.values if isinstance(leaf, TensorState) else leaf, value)


def assert_close_states(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Compare states by parameter names: `expected` of one process, `actual` as a rank reported them."""
    assert expected.keys() == actual.keys(), f"parameters {sorted(actual)}, expected {sorted(expected)}"
    for name, state in expected.items():
        assert state.keys() == actual[name].keys(), (
            f"{name}: {sorted(actual[name])}, expected {sorted(state)}"
        )
        for key, value in state.items():
            reported: TensorState = actual[name][key]
            assert reported.shape == tuple(value.shape), f"{name}[{key!r}] has the shape {reported.shape}"
            assert (excess := ONE_STEP.excess(value, reported.values)) is None, f"{name}[{key!r}]: {excess}"


def assert_same_states(expected: Mapping[Any, Any], actual: Mapping[Any, Any]) -> None:
    """Compare two states of a rank's own optimizer.

    A state whose tensors have no elements on this rank may be missing, because the optimizer creates it again.
    """
    for key, state in expected.items():
        if key not in actual:
            parts = [value for value in state.values() if value.shape]
            assert parts, f"{key} is lost"
            assert all(not value.values.numel() for value in parts), f"{key} is lost"
            continue
        for name, value in state.items():
            assert torch.equal(actual[key][name].values, value.values), f"{key}[{name!r}] changed"
