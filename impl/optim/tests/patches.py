"""Patches injected into impl for the suite's own tests, and the question whether anything notices them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


class Patches(dict[str, Patch]):
    """Patches by their descriptions."""

    def named(self, says: str) -> Callable[[Patch], Patch]:
        """Enter the function below by this name."""

        def enter(patch: Patch) -> Patch:
            self[says] = patch
            return patch

        return enter


def first_failure(checks: Mapping[str, Callable[[], object]]) -> str | None:
    """Return the name and the error of the first failing check, or None."""
    for name, check in checks.items():
        try:
            check()
        except Exception as error:  # a fault may also raise where nothing should
            return f"{name}: {error}"
    return None
