"""Tests of `ci/gpu` before it measures: C library, warm-up, and hosts that cannot be described."""

from __future__ import annotations

import ctypes
import json
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from ci.tests.test_gpu_bundle import HOST_ROW, stub
from conformance.gpu import __main__ as command
from conformance.gpu import c_library, phases
from conformance.gpu.phases import NO_CUDA

NAME = f"_library{EXTENSION_SUFFIXES[0]}"
OTHER = "_library.cpython-39-other.so"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a C source of a single function, which is built like the real library."""
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }\n")
    about = {"sources": [str(source)], "extra-compile-args": ["-O1"], "libraries": ["m"]}
    monkeypatch.setattr(c_library, "_extension", lambda: about)
    return tmp_path


def put(folder: Path, name: str, age_s: float = 0.0) -> None:
    file = folder / name
    file.write_text(name)
    written = (folder / "seven.c").stat().st_mtime - age_s
    os.utime(file, (written, written))


def test_c_library_is_built_if_it_is_missing(folder: Path) -> None:
    assert c_library.prepare(60.0, folder).startswith("built by ")
    assert ctypes.CDLL(str(folder / NAME)).seven() == 7
    assert c_library.prepare(60.0, folder) == f"found {NAME}"


def test_c_library_is_built_again_if_it_is_older_than_its_sources(folder: Path) -> None:
    put(folder, NAME, age_s=100.0)
    assert c_library.prepare(60.0, folder).startswith("built by ")
    assert ctypes.CDLL(str(folder / NAME)).seven() == 7


def test_carried_c_library_serves_under_the_name_of_this_python(folder: Path) -> None:
    put(folder, OTHER)
    assert c_library.prepare(60.0, folder) == f"found {OTHER}"
    assert (folder / NAME).read_text() == OTHER


def test_missing_c_library_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library, "compiler", lambda: None)
    assert "no compiler" in c_library.prepare(60.0, folder)
    put(folder, NAME, age_s=100.0)
    assert c_library.prepare(60.0, folder) == f"found {NAME}, older than its sources"


def test_failed_build_of_the_c_library_shows_the_compiler_error(folder: Path) -> None:
    (folder / "seven.c").write_text("int seven(void) { return eight; }\n")
    assert "eight" in c_library.prepare(60.0, folder)
    assert not (folder / NAME).exists()


WARM_ROW = {"name": "device", "outcome": "there", "says": "", "cuda": False}
WORKING_ROW = {"name": "found", "outcome": "works", "says": ""}


def run_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, **stubs: phases.GpuPhase
) -> dict[str, Any]:
    """Run the command with two small phases, and with `stubs` instead of the phases that examine the host."""
    monkeypatch.setattr(
        command, "phases", lambda gpus: [stub("kernels", WORKING_ROW), stub("training", WORKING_ROW)]
    )
    for name, phase in stubs.items():
        monkeypatch.setattr(command, name, phase)
    command.main(["--device", device, "--out", str(tmp_path), "--budget", "60"])
    return json.loads((tmp_path / "report.json").read_text())


def test_failed_host_phase_is_tried_again_and_cancels_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = stub("host", then="\nraise SystemExit('no driver')")
    again = stub("host, again", HOST_ROW)
    report = run_command(
        tmp_path, monkeypatch, "cuda", WARM_UP=stub("warm-up"), HOST=broken, _HOST_AGAIN=again
    )
    assert list(report["phases"]) == ["warm-up", "host", "kernels", "host, again", "training"]
    assert all(report["phases"][name]["rows"] for name in ("kernels", "training"))
    assert report["host"]["gpus"] == HOST_ROW["gpus"]


def test_warm_up_is_enough_to_detect_that_there_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = {"WARM_UP": stub("warm-up", WARM_ROW), "HOST": stub("host", then="\nraise SystemExit(1)")}
    report = run_command(tmp_path, monkeypatch, "cuda", **stubs)
    assert {report["phases"][name]["why"] for name in ("kernels", "training")} == {NO_CUDA}
    assert f"kernels: {NO_CUDA}" in report["not_shown"]
    assert run_command(tmp_path, monkeypatch, "auto", **stubs)["device"] == "cpu"
