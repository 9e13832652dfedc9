"""Manual wrapping, inside `enable_wrap` and outside, with a stand-in for the wrapper class."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import nn

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.outcome import observe
from conformance.strategies.wrapping import StandInWrapper, compare_wrap


def _made(module: nn.Module, **kwargs: Any) -> Any:
    return ("made by a function", type(module).__name__, kwargs)


def _reported(wrapped: Any) -> Any:
    """Describe the module that `wrap` returned, for comparison."""
    if isinstance(wrapped, StandInWrapper):
        return ("Wrapper", type(wrapped.module).__name__, wrapped.kwargs)
    return type(wrapped).__name__ if isinstance(wrapped, nn.Module) else wrapped


@clause("distributed.fsdp.wrap.enable_wrap.wraps")
@pytest.mark.parametrize("wrapper", [StandInWrapper, _made], ids=["class", "function"])
@pytest.mark.parametrize("given_kwargs", [{}, {"a": 1}, {"a": 1, "b": [2]}], ids=str)
@pytest.mark.parametrize("overrides", [{}, {"a": 3}, {"b": None, "c": 4}], ids=str)
def test_enable_wrap_wraps_with_arguments(
    compare: Compare, wrapper: Any, given_kwargs: dict[str, Any], overrides: dict[str, Any]
) -> None:
    def question(wrap: Any) -> Any:
        module = nn.ReLU()
        with wrap.enable_wrap(wrapper_cls=wrapper, **given_kwargs) as entered:
            first = wrap.wrap(module, **overrides)
            nested = wrap.wrap(first, a="outer") if wrapper is StandInWrapper else None
            # Overrides apply to only one module.
            reported = [_reported(wrapped) for wrapped in (first, nested, wrap.wrap(nn.Linear(2, 2)))]
        return entered, getattr(first, "module", None) is module, reported

    compare_wrap(compare, question)


@clause("distributed.fsdp.wrap.enable_wrap.ends")
@pytest.mark.parametrize(
    "error", [None, ValueError, KeyboardInterrupt, GeneratorExit, StopIteration], ids=str
)
def test_enable_wrap_ends_with_context(compare: Compare, error: type[BaseException] | None) -> None:
    def question(wrap: Any) -> Any:
        raised = None
        try:
            with wrap.enable_wrap(wrapper_cls=StandInWrapper, a=1):
                inside = _reported(wrap.wrap(nn.ReLU()))
                if error is not None:
                    raise error("inside")
        except BaseException as caught:
            raised = type(caught).__name__
        after = _reported(wrap.wrap(nn.ReLU(), b=2))
        with wrap.enable_wrap(wrapper_cls=_made, b=2):
            return raised, inside, after, _reported(wrap.wrap(nn.ReLU()))

    compare_wrap(compare, question)


@clause("distributed.fsdp.wrap.enable_wrap.ends")
def test_enable_wrap_ends_after_wrapper_raised(compare: Compare) -> None:
    def refuse(module: nn.Module) -> Any:
        raise ValueError("not this one")

    def question(wrap: Any) -> Any:
        with pytest.raises(ValueError, match="not this one"), wrap.enable_wrap(wrapper_cls=refuse):
            wrap.wrap(nn.ReLU())
        return _reported(wrap.wrap(nn.ReLU()))

    compare_wrap(compare, question)


@clause("distributed.fsdp.wrap.enable_wrap.ends")
def test_enable_wrap_works_as_decorator(compare: Compare) -> None:
    def question(wrap: Any) -> Any:
        @wrap.enable_wrap(wrapper_cls=StandInWrapper, a=1)
        def build() -> nn.Module:
            return wrap.wrap(nn.ReLU())

        return _reported(build()), _reported(wrap.wrap(nn.ReLU())), _reported(build())

    compare_wrap(compare, question)


@clause("distributed.fsdp.wrap.enable_wrap.not_nested")
def test_nested_enable_wrap_is_refused(compare: Compare) -> None:
    def question(wrap: Any) -> Any:
        def inner() -> None:
            with wrap.enable_wrap(wrapper_cls=_made, b=2):
                raise AssertionError("it was entered")

        with wrap.enable_wrap(wrapper_cls=StandInWrapper, a=1):
            refused = observe(inner).raised
            still = _reported(wrap.wrap(nn.ReLU()))
        return refused, still, _reported(wrap.wrap(nn.ReLU()))

    compare_wrap(compare, question)


@clause("distributed.fsdp.wrap.enable_wrap.in_every_thread")
def test_enable_wrap_applies_in_every_thread(compare: Compare) -> None:
    def question(wrap: Any) -> Any:
        reports: list[Any] = []
        with wrap.enable_wrap(wrapper_cls=StandInWrapper, a=1):
            thread = threading.Thread(target=lambda: reports.append(_reported(wrap.wrap(nn.ReLU()))))
            thread.start()
            thread.join()
        return reports

    compare_wrap(compare, question)


_BAD_WRAPPERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "none": ((), {}),
    "positional": ((StandInWrapper,), {}),
    "None": ((), {"wrapper_cls": None}),
    "no function": ((), {"wrapper_cls": 3}),
    "an unknown argument": ((), {"wrapper_cls": nn.Linear, "unknown": 1}),
}


@clause("distributed.fsdp.wrap.enable_wrap.bad_arguments")
@pytest.mark.parametrize("call", list(_BAD_WRAPPERS))
def test_invalid_wrappers_raise_like_torch(compare: Compare, call: str) -> None:
    args, kwargs = _BAD_WRAPPERS[call]

    def question(wrap: Any) -> Any:
        def inside() -> Any:
            with wrap.enable_wrap(*args, **kwargs):
                return _reported(wrap.wrap(nn.ReLU()))

        return observe(inside).raised, _reported(wrap.wrap(nn.ReLU()))

    compare_wrap(compare, question)


@clause("distributed.fsdp.wrap.wrap.outside")
@pytest.mark.parametrize("kwargs", [{}, {"a": 1}, {"wrapper_cls": StandInWrapper}], ids=str)
def test_wrap_outside_of_enable_wrap_returns_module(compare: Compare, kwargs: dict[str, Any]) -> None:
    module = nn.Linear(2, 2)
    compare_wrap(compare, lambda wrap: wrap.wrap(module, **kwargs) is module)


@clause("distributed.fsdp.wrap.wrap.outside")
def test_wrap_without_module_raises_like_torch(compare: Compare) -> None:
    compare_wrap(compare, lambda wrap: wrap.wrap())
