"""Checks of the older spellings torch.cuda.amp.GradScaler and torch.cpu.amp.GradScaler."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.strategies.scaling import Harness, pickled

# Each parameter on its own, all by position and by name, and invalid arguments.
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "none": ((), {}),
    "init_scale": ((), {"init_scale": 8.0}),
    "growth_factor": ((), {"growth_factor": 3.0, "growth_interval": 1}),
    "backoff_factor": ((), {"backoff_factor": 0.25}),
    "growth_interval": ((), {"growth_interval": 2}),
    "enabled": ((), {"enabled": False}),
    "by position": ((8.0, 3.0, 0.25, 2, True), {}),
    "by position, off": ((8.0, 3.0, 0.25, 2, False), {}),
    "growth_factor of 1": ((), {"growth_factor": 1.0}),
    "backoff_factor of 1": ((), {"backoff_factor": 1.0}),
}


class OlderScaler:
    """The scaler class of `torch.<kind>.amp`, for both libraries."""

    def __init__(self, kind: str, subject: Library, reference: Library) -> None:
        self._kind, self._subject, self._reference = kind, subject, reference

    def assert_scales_as_torchs_and_as_newer_class(self, arguments: str, device: str) -> None:
        def scenario(library: Library) -> Iterator[Outcome]:
            return _scenario(library, self._of(library), arguments, device)

        outcomes = Compare(self._reference, self._subject)(scenario)
        newer_class = partial(self._subject.amp.GradScaler, self._kind)
        newer_outcomes = _scenario(self._subject, newer_class, arguments, device)
        for older, newer in zip(outcomes, newer_outcomes, strict=True):
            warned = tuple(warning for warning in older.warned if warning[0] != "FutureWarning")
            # The older class calls the newer one, so the newer one's warning points at a line of the library.
            assert_same_outcome(replace(newer, at_the_caller=frozenset()), replace(older, warned=warned))

    def assert_takes_no_device(self) -> None:
        # Whether the warning comes before the error does not matter.
        libraries = (self._reference, self._subject)
        expected, actual = (observe(self._of(library), device=self._kind).raised for library in libraries)
        assert None is not expected == actual, f"raised {actual}, expected {expected}"

    def assert_warns(self) -> None:
        def scale(library: Library) -> Outcome:
            return observe(lambda: self._of(library)(2.0).get_scale())

        [outcome] = Compare(self._reference, self._subject)(scale)
        assert "FutureWarning" in dict(outcome.warned)

    def assert_is_a_subclass(self, device: str) -> None:
        """Assert that the older class is a subclass of the newer class, and that copies keep their class."""
        scaler = self._of(self._subject)(init_scale=4.0)
        assert isinstance(scaler, self._subject.amp.GradScaler), (
            f"{type(scaler).__mro__} lacks the newer class"
        )
        harness = Harness(self._subject, device)
        harness.scaler = scaler
        harness.used()
        for copied in (pickled(scaler), copy.deepcopy(scaler)):
            assert type(copied) is type(scaler), f"a copy of a {type(scaler)} is a {type(copied)}"
            assert copied.get_scale() == 4.0, f"a copy's scale is {copied.get_scale()}, expected 4.0"

    def _of(self, library: Library) -> Any:
        return library.find(f"{self._kind}.amp.GradScaler")


def _scenario(library: Library, scaler_class: Any, arguments: str, device: str) -> Iterator[Outcome]:
    """Yield the construction with its warnings, then a few iterations."""
    args, kwargs = ARGUMENTS[arguments]
    harness = Harness(library, device)
    scalers: list[Any] = []

    def make() -> Any:
        scalers.append(scaler_class(*args, **kwargs))
        return scalers[0].is_enabled(), scalers[0].state_dict()

    yield observe(make)
    if scalers:
        harness.scaler = scalers[0]
        for last in (None, None, math.inf, None):
            yield from harness.iteration(last)
        yield observe(harness.scaler.get_scale)
