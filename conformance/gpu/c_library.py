"""The C library of `impl.kernels` on a host without an installed package: copied with the tree, or built here.

Without it a fused step of many tensors takes up to twice the host time, which no real installation does.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import tempfile
import time
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from conformance.gpu.phases import ROOT

FOLDER = ROOT / "impl" / "kernels" / "_native"
_COMPILERS = ("cc", "gcc", "clang")
# A copy of the tree may give each file the time at which it was written, in any order.
_COPYING_S = 10.0


def compiler() -> str | None:
    """Return the path of a C compiler, or None."""
    names = filter(None, [os.environ.get("CC"), *_COMPILERS])
    return next(filter(None, map(shutil.which, names)), None)


def prepare(most_s: float, folder: Path = FOLDER) -> str:
    """Put a library that fits the sources where `impl` looks for it. Return a text on how, or why it failed.

    It is loaded by ctypes, so a library that was built for another Python serves under the name for this one.
    """
    target = folder / f"_library{EXTENSION_SUFFIXES[0]}"
    built = [path for path in (target, *sorted(folder.glob("_library.*.so"))) if path.is_file()]
    fresh = [path for path in built if _is_fresh(path, folder)]
    tool = compiler()
    try:
        if fresh or (built and tool is None):
            source = (fresh or built)[0]
            if source != target:
                _put(source, target)
            return f"found {source.name}" + ("" if fresh else ", older than its sources")
        if tool is None:
            return f"there is none in {folder}, and no compiler ({', '.join(_COMPILERS)})"
        began = time.monotonic()
        _build(tool, target, most_s)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {_output_of(error) or error}"
    return f"built by {tool} in {time.monotonic() - began:.0f} s"


def _is_fresh(library: Path, folder: Path) -> bool:
    sources = [*folder.glob("*.c"), *folder.glob("*.h")]
    return all(source.stat().st_mtime <= library.stat().st_mtime + _COPYING_S for source in sources)


def _put(source: Path, target: Path) -> None:
    # A temporary name, because another process may load the library now.
    part = target.with_name(f"part-{os.getpid()}.so")
    shutil.copy2(source, part)
    os.replace(part, target)


def _build(tool: str, target: Path, most_s: float) -> None:
    about = _extension()
    end = time.monotonic() + most_s
    with (
        tempfile.TemporaryDirectory(prefix="tandem-c-") as folder,
        concurrent.futures.ThreadPoolExecutor() as threads,
    ):

        def compiled(source: str) -> str:
            out = str(Path(folder) / f"{Path(source).stem}.o")
            _call([tool, *about["extra-compile-args"], "-fPIC", "-c", str(ROOT / source), "-o", out], end)
            return out

        objects = list(threads.map(compiled, about["sources"]))
        library = Path(folder) / "library.so"
        _call(
            [tool, "-shared", *objects, *(f"-l{name}" for name in about["libraries"]), "-o", str(library)],
            end,
        )
        _put(library, target)


def _call(words: list[str], end: float) -> None:
    left_s = max(end - time.monotonic(), 0.1)
    subprocess.run(words, check=True, timeout=left_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _extension() -> dict[str, Any]:
    """Return the build settings of the library from pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["setuptools"]["ext-modules"][0]


def _output_of(error: Exception) -> str:
    output = getattr(error, "output", None) or b""
    return output.decode(errors="replace").strip()[-300:]
