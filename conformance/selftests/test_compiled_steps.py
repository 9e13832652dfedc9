"""Compiled steps are traced without what other tests have left in the process."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from conformance.judge.library import load_library
from conformance.strategies.compiled_steps import CompiledHarness, tracing_of
from conformance.strategies.optimizers import maker


def test_hooks_of_all_optimizers_are_off_while_a_step_is_traced() -> None:
    calls: list[str] = []

    def hook(optimizer: object, args: Any, kwargs: Any) -> None:
        calls.append("hook")

    handle = register_optimizer_step_pre_hook(hook)
    try:
        with tracing_of(load_library("torch")):
            CompiledHarness(maker("SGD")).train()
        assert calls == []
        CompiledHarness(maker("SGD")).plain_train()
        assert calls == ["hook"]
    finally:
        handle.remove()
