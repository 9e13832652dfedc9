"""Which tests a subject is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conformance.clauses import HERE
from conformance.plugin import _concerns


@pytest.mark.parametrize(
    ("package", "own_parts", "kernels"),
    [("impl", True, True), ("torch", True, False), ("else", False, False)],
)
def test_a_package_from_elsewhere_is_not_asked_about_this_repository(
    package: str, own_parts: bool, kernels: bool
) -> None:
    def is_asked(file: str) -> bool:
        item: Any = SimpleNamespace(path=HERE / file)
        return _concerns(item, package)

    assert is_asked("amp/test_grad_scaler_step.py")
    assert is_asked("test_surface.py")
    assert is_asked("meta/test_gate.py") == is_asked("training/test_training.py") == own_parts
    assert is_asked("kernels/test_norm.py") == kernels
