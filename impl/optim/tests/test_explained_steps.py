"""`GradScaler.explain` reports the functions that have run."""

from __future__ import annotations

from typing import Any

import pytest

from impl.kernels.tests.interpreter import the_interpreter
from impl.kernels.tests.native import the_library
from impl.optim.tests.explained_steps import explained_and_run


@pytest.mark.parametrize(
    ("backend", "copies", "expected", "reason"),
    [
        (
            "native",
            "",
            [("cpu_blocked", 1), ("native", 3)],
            "does not support the memory layout or the dtypes",
        ),
        ("native", "alike", [("cpu_blocked", 1), ("native", 3)], "native: "),
        (
            "native",
            "mixed",
            [("cpu_blocked", 4)],
            "does not support the memory layout or the dtypes",
        ),
        ("cpu_blocked", "", [("cpu_blocked", 4)], "not built, or not requested"),
        ("torch", "", [("torch", 4)], "'torch' was requested"),
    ],
)
def test_explanation_names_backend_that_ran(backend: Any, copies: str, expected: Any, reason: str) -> None:
    the_library()
    explained, ran, text = explained_and_run(backend, copies)
    assert explained == ran == expected
    assert reason in text


def test_explanation_names_triton_and_float64_parameters_without_it() -> None:
    explained, ran, text = the_interpreter().call(explained_and_run, "triton")
    assert explained == ran == [("torch", 1), ("triton", 3)]
    assert "do not support the memory layout, or float64 parameters" in text
