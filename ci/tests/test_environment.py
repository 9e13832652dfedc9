"""Tests of the environments that the commands of ci/ create, and of the variables that they pass to programs."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.tests.sample_results import CI


def test_started_programs_write_bytecode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(CI))
    environment = importlib.import_module("_environment")
    monkeypatch.setattr(environment, "_is_ready", lambda *_: True)
    monkeypatch.setattr(environment, "LOCK", tmp_path / "lock")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("KEPT", "1")
    environ = environment.enter([])
    assert (environ.get("PYTHONDONTWRITEBYTECODE"), environ["KEPT"]) == (None, "1")


def test_another_torch_has_a_separate_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--torch", "2.12.0", "conformance/nn", "-k", "total norm"]

    def execve(_program: str, command: list[str], environ: dict[str, str]) -> None:
        assert (command[2:], environ["TANDEM_TORCH"]) == (arguments, "2.12.0")
        raise SystemExit("started again")

    monkeypatch.setattr("os.execve", execve)
    monkeypatch.delenv("TANDEM_TORCH", raising=False)
    with pytest.raises(SystemExit, match="started again"):
        run_ci_test(monkeypatch, arguments)

    monkeypatch.setenv("TANDEM_TORCH", "2.12.0")
    names = runpy.run_path(str(CI / "_environment.py"))
    assert (names["VENV"].name, names["LOCK"].name) == (".venv-torch-2.12.0", ".venv-torch-2.12.0.lock")
    assert names["_torch_version"]() == "2.12.0"


@pytest.mark.parametrize("options", [[], ["--clients"]])
def test_arguments_of_pytest_keep_their_order(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    arguments = ["conformance/nn", "-k", "total_norm", "-x"]

    def become(_extras: object, *command: str) -> None:
        assert [*command[-4:]] == arguments
        raise SystemExit("started")

    monkeypatch.syspath_prepend(str(CI))
    monkeypatch.setattr(importlib.import_module("_environment"), "become", become)
    with pytest.raises(SystemExit, match="started"):
        run_ci_test(monkeypatch, [*arguments, *options])


def run_ci_test(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.syspath_prepend(str(CI))
    monkeypatch.setattr(sys, "argv", ["ci/test", *arguments])
    runpy.run_path(str(CI / "test"), run_name="__main__")
