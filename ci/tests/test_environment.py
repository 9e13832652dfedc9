"""What the commands of ci/ hand on to what they start."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks.tests.clock_cases import CI


def test_what_they_start_keeps_its_bytecode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(CI))
    environment = importlib.import_module("_environment")
    monkeypatch.setattr(environment, "_is_ready", lambda *_: True)
    monkeypatch.setattr(environment, "LOCK", tmp_path / "lock")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("KEPT", "1")
    environ = environment.enter([])
    assert (environ.get("PYTHONDONTWRITEBYTECODE"), environ["KEPT"]) == (None, "1")
