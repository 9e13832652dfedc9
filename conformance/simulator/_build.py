"""The extension in C++: built once for its sources, torch and Python, into the cache folder of torch's extensions."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

TORCH_VERSIONS = ("2.13", "2.14", "2.15")
MODULE = "_sim"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-fPIC",
    "-O1",
    "-g0",
    "-std=c++20",
    "-Wno-attributes",
    "-Wno-deprecated-declarations",
    f"-DTORCH_EXTENSION_NAME={MODULE}",
)


class Unavailable(RuntimeError):
    """The simulator cannot be built or loaded here. The message says why."""


def load() -> ModuleType:
    """Load the extension. Build it first if it is not in the cache.

    Raises:
        Unavailable: torch is not one of `TORCH_VERSIONS`, there is no compiler, or the build failed.
    """
    path = ensure_built()
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    )  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def ensure_built() -> Path:
    """Return the path of the extension without loading it. Build it first if necessary. Raises like `load`."""
    if not torch.__version__.startswith(tuple(f"{version}." for version in TORCH_VERSIONS)):
        raise Unavailable(
            f"the simulator needs torch {TORCH_VERSIONS[0]} to {TORCH_VERSIONS[-1]}, "
            f"but the installed torch is {torch.__version__}"
        )
    cache = _cache()
    compiler = _compiler()
    path = cache / f"{MODULE}-{_digest(compiler or _any_built(cache))}.so"
    if path.exists():
        return path
    if compiler is None:
        raise Unavailable(
            "the simulator has to be built once, and there is no C++ compiler: install g++, or name one by CXX"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_suffix(".lock")):
        if not path.exists():
            _build(compiler, cache, path)
    return path


def _cache() -> Path:
    from torch.utils import cpp_extension  # noqa: PLC0415 - slow, and of use only where something is built

    return (
        Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
        / "tandem_simulator"
    )


def _compiler() -> str | None:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _digest(compiler: str) -> str:
    parts = [torch.__version__, sys.version, compiler, *FLAGS]
    parts += [path.read_text() for path in (*sorted(SOURCES.glob("*.h")), *_sources())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _any_built(cache: Path) -> str:
    """Return the compiler of an earlier build, which can be loaded if there is no compiler now."""
    with contextlib.suppress(OSError):
        return (cache / "compiler").read_text()
    return ""


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(compiler: str, cache: Path, path: Path) -> None:
    """Compile all sources as one, because most of the time goes into torch's headers."""
    print("building the simulator once, in one or two minutes", file=sys.stderr, flush=True)  # noqa: T201 - else it seems to hang
    (cache / "compiler").write_text(compiler)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        together, library = Path(folder) / "together.cpp", Path(folder) / "library.so"
        together.write_text("".join(f'#include "{source}"\n' for source in _sources()))
        _run(
            [
                compiler,
                "-shared",
                *FLAGS,
                *_include_flags(),
                str(together),
                "-o",
                str(library),
                *_link_flags(),
            ]
        )
        os.replace(library, path)


def _include_flags() -> list[str]:
    from torch.utils import cpp_extension  # noqa: PLC0415 - slow, and of use only where something is built

    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [abi, *(word for folder in folders for word in ("-isystem", folder))]


def _link_flags() -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    return [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", "-lpthread"]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        report = f"{' '.join(command[:2])} … ended with {done.returncode}:\n{done.stderr[-4000:]}"
        raise Unavailable(f"the simulator could not be built: {report}")
