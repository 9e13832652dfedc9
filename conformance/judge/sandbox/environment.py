"""The machine, its devices, and the software versions that every report names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch

from conformance.judge import providers

# Modules by the device type that their import registers with torch. Ranks import them too.
device_modules: dict[str, str] = {}
_PACKAGES = ("torch", "triton", "numpy", "pytest", "pytest-xdist", "hypothesis", "asv")


def describe() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "tandem": f"commit {known}" if (known := commit()) else "unknown",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "packages": {name: _version(name) for name in _PACKAGES},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


def commit(file: Path = Path(__file__)) -> str:
    """Return the commit of the repository that tracks `file`, with the suffix `-dirty` if its files have changed.

    Return an empty string if git is missing or no repository tracks the file. A virtual environment may be in a folder
    of an unrelated repository.
    """
    tracked = ["git", "ls-files", "--error-unmatch", file.name]
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        for words in (tracked, command):
            reported = subprocess.run(
                words, cwd=file.parent, capture_output=True, text=True, timeout=30, check=True
            )
    except (OSError, subprocess.SubprocessError):
        return ""
    return reported.stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def is_device(name: str) -> bool:
    """Return whether `name` is the simulated device or a device type of torch, also if this machine has none."""
    if name == providers.provider("simulator").NAME:
        return True
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def try_out(device: str) -> None:
    """Create a tensor on a device type. The exception says why the device cannot be used.

    This enables the simulated device permanently.
    """
    simulator = providers.provider("simulator")
    if device == simulator.NAME:
        simulator.enable()
    torch.empty(1, device=device)


def is_usable(device: str) -> bool:
    """Return whether this machine can create tensors on a device type."""
    if device == "cuda":  # no initialization of CUDA
        return torch.cuda.is_available()
    try:
        try_out(device)
    except providers.provider("simulator").Unavailable as error:
        warnings.warn(str(error), stacklevel=2)
        return False
    except Exception:
        return False
    return True


def quieten_triton() -> None:
    """Silence NumPy's floating-point warnings if Triton's interpreter, which computes with NumPy, is on."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        numpy.seterr(all="ignore")
