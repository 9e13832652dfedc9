"""The machine and the versions a result was obtained with, as they go into every report."""

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

from conformance import simulator

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
    """What is checked out of the repository that tracks a file, with `-dirty` behind it where files differ.

    Empty if none does: a virtual environment may lie inside somebody's repository, and git may be absent.
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
    """Whether torch knows a device type of that name, here or not; or it is the simulated one."""
    if name == simulator.NAME:
        return True
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def try_out(device: str) -> None:
    """Hold a tensor on a device type; what it raises says why it cannot be used here.

    The simulated one is there for good once it was asked for.
    """
    if device == simulator.NAME:
        simulator.enable()
    torch.empty(1, device=device)


def is_usable(device: str) -> bool:
    """Whether a device type can hold tensors here."""
    if device == "cuda":  # without beginning to use it
        return torch.cuda.is_available()
    try:
        try_out(device)
    except simulator.Unavailable as error:
        warnings.warn(str(error), stacklevel=2)
        return False
    except Exception:
        return False
    return True


def quieten_triton() -> None:
    """Triton's interpreter computes with NumPy, which warns about zeros, inf and nan, as kernels meet them."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        numpy.seterr(all="ignore")
