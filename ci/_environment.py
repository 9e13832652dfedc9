"""The virtual environment of all commands of ci/. It is created once and then reused.

`TANDEM_TORCH=VERSION` selects another torch than the recorded one, in an environment `.venv-torch-VERSION`.

Why a lock: each command holds `.venv.lock` shared while it runs (the program that replaces it inherits the lock), and
a command that changes the environment holds it exclusively. So concurrent commands do not both build the environment,
and no command changes it during a test run.

Why a stamp: it is written last, so an environment without a stamp is incomplete and is created again. The same happens
if the interpreter or torch differs. If only packages are missing, or the dependencies in pyproject.toml have changed,
the environment is updated in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

try:
    import tomllib
except ModuleNotFoundError:  # Python before 3.11, which `enter` refuses
    tomllib = None

OLDEST, NEWEST = (3, 11), (3, 14)
# Extras of the gate, and of the test suite, which also tests the gate.
JUDGING = ("conformance", "report")
ROOT = Path(__file__).resolve().parent.parent
# Another torch than the recorded one has its own environment, so that switching between them rebuilds neither.
OTHER_TORCH = os.environ.get("TANDEM_TORCH")
VENV = ROOT / (f".venv-torch-{OTHER_TORCH}" if OTHER_TORCH else ".venv")
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "tandem-stamp.json"
LOCK = VENV.with_name(f"{VENV.name}.lock")

CPU_INDEX = os.environ.get("TANDEM_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
INDEX_DEADLINE_S = 5  # time to connect
BIG_DOWNLOAD_MB = 5.0
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-color"]
# Without bytecode files, hundreds of test processes would compile the same sources, a fifth of their start time.
_REMOVED_VARIABLES = ("PYTHONHOME", "__PYVENV_LAUNCHER__", "PYTHONDONTWRITEBYTECODE")


def git(root: Path, *arguments: str, check: bool = True) -> str:
    """Return the output of git in `root`. Without `check`, git may fail."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=check).stdout


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def become(extras: Iterable[str], *command: str) -> NoReturn:
    """Prepare the environment and replace this process by `command`, a program in it."""
    environ = enter(extras)
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execve(VENV / "bin" / command[0], list(command), environ)


def enter(extras: Iterable[str]) -> dict[str, str]:
    """Prepare the environment with these extras of pyproject.toml. Return the environment variables for programs."""
    _require_python()
    expected = {"root": str(ROOT), "python": sys.version, "torch": _torch_build(), "dependencies": _digest()}
    missing = set(extras)
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.set_inheritable(lock, True)
    _wait_for(lock, fcntl.LOCK_SH)
    while not _is_ready(stamp := _read_stamp(), expected, missing):
        # flock cannot upgrade a shared lock atomically, so check again when the exclusive lock is held.
        fcntl.flock(lock, fcntl.LOCK_UN)
        _wait_for(lock, fcntl.LOCK_EX)
        if not _is_ready(stamp := _read_stamp(), expected, missing):
            _build(expected, stamp, missing)
        _wait_for(lock, fcntl.LOCK_SH)
    environ = {name: value for name, value in os.environ.items() if name not in _REMOVED_VARIABLES}
    # The command runs in another folder than the one that relative paths refer to.
    if searched := environ.get("PYTHONPATH"):
        environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, searched.split(os.pathsep)))
    return environ | {
        "VIRTUAL_ENV": str(VENV),
        "PATH": f"{VENV / 'bin'}{os.pathsep}{environ.get('PATH', '')}",
    }


def _require_python() -> None:
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        sys.exit(
            f"Tandem needs Python 3.11 to 3.14, and this is {sys.version.split()[0]}; "
            f"run the command with another Python, for example: python3.12 {sys.argv[0]}"
        )


def _wait_for(lock: int, kind: int) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        event = "another command has set it up" if kind == fcntl.LOCK_SH else "other commands that use it end"
        say(f"{VENV.name}: waiting until {event} (lock: {LOCK.name})")
        fcntl.flock(lock, kind)


# Current and expected state


def _is_ready(stamp: dict[str, Any] | None, expected: dict[str, str], extras: set[str]) -> bool:
    return (
        stamp is not None
        and _same(stamp, expected, *expected)
        and extras <= set(stamp["extras"])
        and PYTHON.exists()
    )


def _same(stamp: dict[str, Any], expected: dict[str, str], *keys: str) -> bool:
    return all(stamp[key] == expected[key] for key in keys)


def _read_stamp() -> dict[str, Any] | None:
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return None


def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _digest() -> str:
    """Return a digest of the inputs of the installation: C code and tables of pyproject.toml, without lint rules."""
    settings = project()
    tables = [
        settings["build-system"],
        settings["project"],
        settings["tool"]["tandem"],
        settings["tool"]["setuptools"],
    ]
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode())
    for source in sorted((ROOT / "impl").rglob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _torch_version() -> str:
    return OTHER_TORCH or project()["tool"]["tandem"]["torch"]


def _torch_build() -> str:
    return f"{_torch_version()} {'for CUDA' if _has_nvidia_driver() else 'for the CPU'}"


def _has_nvidia_driver() -> bool:
    try:
        return (
            subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


# Building


def _build(expected: dict[str, str], stamp: dict[str, Any] | None, extras: set[str]) -> None:
    began = time.monotonic()
    if stamp is not None and PYTHON.exists() and _same(stamp, expected, "root", "python", "torch"):
        extras = extras | set(stamp["extras"])
        say(f"{VENV.name}: updating ({', '.join(sorted(extras))})")
        STAMP.unlink()
    else:
        _create(stamp)
        _install_torch(expected["torch"])
    say(f"{VENV.name}: installing the extras {', '.join(sorted(extras))}")
    # The interpreter of Triton 3.6, which torch 2.11 for CUDA installs, fails with newer versions of numpy.
    numpy = ["numpy<2.4"] if _torch_version().startswith("2.11.") else []
    if _pip_install("-e", f"{ROOT}[{','.join(sorted(extras))}]", f"torch=={_torch_version()}", *numpy):
        sys.exit("ci: pip could not install the packages; see its messages above")
    STAMP.write_text(json.dumps(expected | {"extras": sorted(extras)}, indent=1))
    took_s = time.monotonic() - began
    say(f"{VENV.name}: ready in {took_s:.0f} s, torch {_installed_torch()}, {_size_mb()} MB on disk")


def _create(stamp: dict[str, Any] | None) -> None:
    if VENV.exists():
        say(
            f"{VENV.name}: is incomplete, creating it again"
            if stamp is None
            else f"{VENV.name}: was created with another Python, torch or folder, creating it again"
        )
        STAMP.unlink(missing_ok=True)
        shutil.rmtree(VENV)
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            "this Python lacks ensurepip; install it first (Debian and Ubuntu: apt install python3-venv)"
        )
    say(f"{VENV.name}: creating it with Python {sys.version.split()[0]}")
    # sys.executable may be the interpreter of the .venv that was just deleted.
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", VENV], check=True)


def _install_torch(build: str) -> None:
    version, kind = build.split(" ", 1)
    if kind == "for the CPU":
        say(
            f"{VENV.name}: no NVIDIA driver found, installing the CPU build of torch {version} from {CPU_INDEX}"
        )
        if _answers(CPU_INDEX) and not _pip_install(
            "--index-url", CPU_INDEX, f"torch=={version}", quiet=True
        ):
            return
        say(
            f"{VENV.name}: not available there; installing torch {version} from PyPI (it may include CUDA libraries of"
            " several GB; TANDEM_TORCH_INDEX selects another index)"
        )
    else:
        say(f"{VENV.name}: NVIDIA driver found, installing torch {version} from PyPI")
    if _pip_install(f"torch=={version}"):
        sys.exit(f"ci: pip could not install torch {version}; see its message above")


def _answers(index: str) -> bool:
    """Return whether the index answers within seconds. pip would retry for minutes."""
    if not index.startswith(("http://", "https://")):
        return True
    try:
        urllib.request.urlopen(
            urllib.request.Request(f"{index.rstrip('/')}/torch/", method="HEAD"), timeout=INDEX_DEADLINE_S
        )
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError) as error:
        # pip has its own certificates, so an error about certificates still counts as an answer.
        return "CERTIFICATE" in str(error)
    return True


def _pip_install(*arguments: str, quiet: bool = False) -> int:
    """Run pip and print its large downloads and its last step, or its full output if it fails. Return its exit code."""
    command = [*PIP, "install", "--progress-bar", "off", *arguments]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.append(line)
            if progress := _progress_of(line.strip()):
                say(f"       {progress}")
    if pip.returncode and not quiet:
        sys.stderr.writelines(lines)
    return pip.returncode


def _progress_of(line: str) -> str | None:
    if download := re.match(r"Downloading (?:\S*/)?([^/ ]+) \(([\d.]+) ([MG])B\)", line):
        name, size, unit = download.groups()
        return (
            f"downloading {name}, {size} {unit}B"
            if float(size) * (1000 if unit == "G" else 1) > BIG_DOWNLOAD_MB
            else None
        )
    if line.startswith("Installing collected packages:"):
        return f"installing {line.count(',') + 1} packages"
    return None


def _installed_torch() -> str:
    code = "import importlib.metadata as m; print(m.version('torch'))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _size_mb() -> int:
    return sum(size for size in _file_sizes(VENV)) // 1_000_000


def _file_sizes(folder: Path) -> Iterator[int]:
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(path, name)).st_size
