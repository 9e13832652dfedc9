"""The wheel, installed with its dependencies only, judges a package from any folder like the checkout."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from conformance.selftests.misbehaving import write_files
from conformance.selftests.processes import ROOT

_LIMIT_S = 200.0
_FOLDERS, _FILES = ("impl", "conformance", "benchmarks"), ("pyproject.toml", "README.md", "LICENSE")
# Clipping of torch's, but for one function, which does nothing.
_SUBJECT = """
from torch.nn.utils import clip_grad_norm_, get_total_norm


def clip_grad_value_(parameters, clip_value, foreach=None):
    pass
"""
_CLAUSE = "nn.utils.clip_grad.clip_grad_value_.foreach"

pytestmark = pytest.mark.deadline(_LIMIT_S + 60)


def run(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with few variables of this process, because its PYTHONPATH would find the checkout."""
    variables = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, without git, because building leaves files beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in _FOLDERS:
        left_out = shutil.ignore_patterns("__pycache__", "*.so", "results")
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    for name in _FILES:
        shutil.copy(ROOT / name, source)
    # The library in C is left out where there is no compiler, which is quicker.
    words = ("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, source)
    ended = run(sys.executable, "-m", "pip", *words, cwd=folder, CC="false")
    built = list(folder.glob("*.whl"))
    assert len(built) == 1, ended.stdout + ended.stderr
    return built[0]


@pytest.fixture(scope="module")
def programs(wheel: Path) -> Path:
    """Return the programs' folder of an environment with the wheel and this one's packages, without the checkout."""
    home = wheel.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=wheel.parent)
    python = home / "bin" / "python"
    words = ("--python", python, "install", "--no-deps", "--no-index", wheel)
    ended = run(sys.executable, "-m", "pip", *words, cwd=wheel.parent)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [packages] = home.glob("lib/python*/site-packages")
    # A path in such a file is searched, and no `.pth` file in it is read: the one that leads to the checkout is not.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a user's folder with a package to be judged, and a folder that has the name of one of ours."""
    home = tmp_path_factory.mktemp("theirs")
    sources = {
        "their/__init__.py": "",
        "their/scaling/nn/utils.py": _SUBJECT,
        "conformance/__init__.py": "raise ImportError('of another project')",
    }
    write_files(home, sources)
    (home / "plain").mkdir()
    (home / "plain" / "their").symlink_to(home / "their")
    return home


def test_wheel_contains_judge_and_no_foreign_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"impl", "conformance"}
    lacking = [
        str(file)
        for folder in ("conformance", "impl")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in (".toml", ".json", ".html", ".css", ".js", ".typed")
        and file.relative_to(ROOT).parts[1] not in ("selftests", "gpu")
        and str(file.relative_to(ROOT)) not in names
    ]
    assert lacking == []
    own = ("conformance/selftests/", "conformance/gpu/")
    assert not [name for name in names if name.startswith(own) or "/tests/" in name]


def test_wheel_judges_from_any_folder(programs: Path, folder: Path) -> None:
    words = ("their.scaling", _CLAUSE, "-n", "1")
    ended = run(programs / "tandem-judge", *words, cwd=folder)
    report = json.loads((folder / "report" / "report.json").read_text())
    assert (ended.returncode, report["verdict"]) == (1, "red"), ended.stdout + ended.stderr
    assert f"broken {_CLAUSE}" in ended.stdout
    files = {"index.html", "report.json", "junit.xml", "clauses.html"}
    assert files <= {file.name for file in (folder / "report").iterdir()}
    assert report["suite"]["commit"] == ""

    options = ("--subject", "their.scaling", "--clauses", _CLAUSE, "--report", folder / "ours", "-n", "0")
    pytest_words = ("-m", "pytest", "conformance/nn/utils", "--profile", "quick", "-p", "no:cacheprovider")
    run(sys.executable, *pytest_words, *options, cwd=ROOT, PYTHONPATH=str(folder / "plain"))
    assert outcomes(folder / "report") == outcomes(folder / "ours")

    replay = next(test["replay"] for test in report["tests"] if test["outcome"] == "failed")
    assert replay.startswith("tandem-judge their.scaling ")
    again = run(programs / "tandem-judge", *shlex.split(replay)[1:], "-n", "1", cwd=folder)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "1 failed" in again.stdout
    assert json.loads((folder / "report" / "report.json").read_text()) == report

    since = run(
        programs / "tandem-judge", "their.scaling", "--since", "report/report.json", *words[1:], cwd=folder
    )
    assert (since.returncode, "RED" in since.stdout) == (0, True), since.stdout + since.stderr
    assert "compared with the baseline (their.scaling" in since.stdout


def outcomes(folder: Path) -> dict[str, str]:
    tests = json.loads((folder / "report.json").read_text())["tests"]
    return {test["nodeid"]: test["outcome"] for test in tests}


def test_unjudgeable_input_is_distinguished_from_red(programs: Path, folder: Path) -> None:
    words = ("nobodys.package", _CLAUSE, "--out", folder / "none")
    ended = run(programs / "tandem-judge", *words, cwd=folder)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "the subject 'nobodys.package' cannot be loaded (ModuleNotFoundError: " in ended.stdout
    gate = run(programs / "python", "-P", "-m", "conformance.cli.gate", cwd=folder)
    assert (gate.returncode, "run ci/gate in a clone of the repository" in gate.stderr) == (2, True), (
        gate.stderr
    )
