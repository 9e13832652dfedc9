"""Prepare the host before anything is timed: imports from a cold disk, the device, Triton, and the C library.

The rows also report what this host lacks.
"""

from __future__ import annotations

import importlib
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path

from conformance.gpu import c_library
from conformance.gpu.phase_rows import PhaseTask, Rows, in_words, serve

THERE, MISSING, FAILED = "there", "missing", "failed"
_MODULES = ("torch", "torch._dynamo", "torch.distributed.fsdp", "triton")
_WIDTH = 999


def work(task: PhaseTask, rows: Rows) -> None:
    steps: dict[str, Callable[[], tuple[str, str]]] = {
        "compiler": _compiler,
        "headers": _headers,
        **{f"import {name}": lambda name=name: _imported(name) for name in _MODULES},
        "device": lambda: _multiplied(task.device),
        "Triton": lambda: _launched(task.device),
        "C library": lambda: _library(prepared),
    }
    rows.plan(steps)
    prepared: list[str] = []
    # Compiling takes half a minute on another core, as long as the imports.
    building = threading.Thread(
        target=lambda: prepared.append(c_library.prepare(rows.left_s - 1)), daemon=True
    )
    building.start()
    for name, step in steps.items():
        if name == "C library":
            building.join(max(rows.left_s, 0))
        began = time.monotonic()
        try:
            outcome, says = step()
        except Exception as error:  # the others are still worth knowing
            outcome, says = FAILED, in_words(error)
        more = {"cuda": _has_cuda()} if name == "device" else {}
        rows.add(name, outcome, f"{says} ({time.monotonic() - began:.1f} s)".lstrip(), **more)


def _compiler() -> tuple[str, str]:
    if (tool := c_library.compiler()) is None:
        return MISSING, "Triton needs a C compiler to launch kernels, and so does the C library"
    shown = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=10, check=False)
    return THERE, " ".join([tool, *shown.stdout.splitlines()[:1]])


def _headers() -> tuple[str, str]:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return (THERE if header.is_file() else MISSING), str(header)


def _imported(name: str) -> tuple[str, str]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return MISSING, str(error)
    return THERE, getattr(module, "__version__", "")


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415  the import has a row of its own

    return torch.cuda.is_available()


def _multiplied(requested: str) -> tuple[str, str]:
    import torch  # noqa: PLC0415

    device = requested if requested != "auto" else "cuda" if _has_cuda() else "cpu"
    if device == "cuda" and not _has_cuda():
        return MISSING, f"torch {torch.__version__} finds no CUDA device"
    matrix = torch.randn(_WIDTH, _WIDTH, device=device)
    total = (matrix @ matrix).sum().item()
    return THERE, f"{torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}, matmul {total:.3g}"


def _launched(requested: str) -> tuple[str, str]:
    import torch  # noqa: PLC0415

    from impl import kernels  # noqa: PLC0415

    if requested == "cpu" or not _has_cuda():
        return THERE if _imported("triton")[0] == THERE else MISSING, "no CUDA device to launch on"
    tensor = torch.ones(1, device="cuda")
    with kernels.backend("triton"):
        kernels.scale_(kernels.TensorList([tensor]), torch.full((), 2.0, device="cuda"))
    return THERE, f"a kernel scaled 1 to {tensor.item():g}"


def _library(prepared: list[str]) -> tuple[str, str]:
    from impl.kernels import _native  # noqa: PLC0415

    says = prepared[0] if prepared else "its build did not end in time"
    return (THERE if _native.library() is not None else MISSING), says


if __name__ == "__main__":
    serve(work)
