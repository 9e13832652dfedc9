"""Autocast as a decorator, by calling an instance or by autocast_decorator."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.strategies.regions import LOW, Planned, operands, state


@clause("amp.autocast_mode.autocast.decorator")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_decorated_function_matches_torch(compare: Compare, device: str, dtype: torch.dtype) -> None:
    def decorated(library: Library) -> Outcome:
        @library.amp.autocast(device, dtype=dtype)
        def product(a: torch.Tensor, *, b: torch.Tensor) -> Any:
            """Multiply."""
            return a @ b, state()

        a, b = operands(device)
        attributes = (product.__name__, product.__doc__, str(inspect.signature(product)), state())
        return observe(lambda: (product(a, b=b), product(a, b=b), attributes, state()))

    compare(decorated)


@clause("amp.autocast_mode.autocast.decorator")
def test_decorated_method_stays_in_region_after_recursion(subject: Library, device: str) -> None:
    """The innermost call raises."""

    class DecoratedModel:
        @subject.amp.autocast(device)
        def forward(self, depth: int) -> list[bool]:
            if depth == 0:
                raise Planned
            inner: list[bool] = []
            with contextlib.suppress(Planned):
                inner = self.forward(depth - 1)
            return [*inner, torch.is_autocast_enabled(device)]

    before = state()
    try:
        assert DecoratedModel().forward(3) == [True, True, True]
        with pytest.raises(Planned):
            DecoratedModel().forward(0)
    finally:
        # An instance of torch's class stores one saved state, which recursion overwrites.
        torch.set_autocast_enabled(device, before["enabled"][device])


@clause("amp.autocast_mode.autocast.decorator")
def test_generator_and_coroutine_bodies_run_outside_region(compare: Compare, device: str) -> None:
    """The region lasts as long as the call, which only creates the generator or coroutine."""

    def run(library: Library) -> Outcome:
        region = library.amp.autocast(device)

        @region
        def generator() -> Any:
            yield state()
            yield state()

        @region
        async def coroutine() -> Any:
            return state()

        def use() -> Any:
            running = coroutine()
            try:
                running.send(None)
            except StopIteration as returned:
                kinds = inspect.isgeneratorfunction(generator), inspect.iscoroutinefunction(coroutine)
                return list(generator()), returned.value, kinds, state()

        return observe(use)

    compare(run)


@clause("amp.autocast_mode.autocast.decorator")
def test_attributes_of_the_function_are_kept(compare: Compare, device: str) -> None:
    def run(library: Library) -> Outcome:
        def function() -> None: ...

        function.mark, function.__module__ = "kept", "of.its.own"
        decorated = library.amp.autocast(device)(function)
        return observe(
            lambda: (decorated.mark, decorated.__module__, decorated.__wrapped__ is function, vars(function))
        )

    compare(run)


@clause("amp.autocast_mode.autocast.decorator")
@pytest.mark.parametrize("value", [None, 3, "f", torch.ones(2)], ids=repr)
def test_decorating_non_callable_matches_torch(subject: Library, reference: Library, value: Any) -> None:
    # Whether the result is callable is compared, because the functions of two libraries are never equal.
    expected, actual = (
        observe(lambda lib=lib: callable(lib.amp.autocast("cpu")(value))) for lib in (reference, subject)
    )
    if expected.raised is None and actual.raised is not None:
        # torch 2.11 returns a function that fails when it is called. Later versions raise at once, as may the subject.
        assert actual.raised.kind is TypeError
        assert actual.raised.text.startswith("autocast()(func) requires a callable, but got")
    else:
        assert_same_outcome(expected, actual)


@clause("amp.autocast_mode.autocast_decorator.wraps")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_autocast_decorator(compare: Compare, device: str, dtype: torch.dtype) -> None:
    def decorated(library: Library) -> Outcome:
        a, b = operands(device)

        def run() -> Any:
            mm = library.amp.autocast_mode.autocast_decorator(
                library.amp.autocast(device, dtype=dtype), torch.mm
            )
            add = library.amp.autocast_mode.autocast_decorator(
                library.amp.autocast(device, enabled=False), torch.add
            )
            with library.amp.autocast(device, dtype=torch.bfloat16):
                return mm(a, b), add(a, b), mm.__name__, add.__name__

        return observe(run)

    compare(decorated)


@clause("amp.autocast_mode.autocast.decorator")
def test_scripting_decorated_function_is_rejected(compare: Compare, device: str) -> None:
    def scripted(library: Library) -> Outcome:
        @library.amp.autocast(device)
        def add_one(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        return observe(torch.jit.script, add_one)

    [outcome] = compare(scripted)
    assert "not supported in script mode" in str(outcome.raised)
