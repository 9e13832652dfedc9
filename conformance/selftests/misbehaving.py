"""Subjects that misbehave. Each is torch, except for what `clip_grad_value_` does first, or for what its import does.

`written(folder)` makes a package of each in a folder, for a path that a process looks for modules in.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import io
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_NAMES = ("clip_grad_norm", "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
_kept: list[Any] = []


def clipping(**instead: Any) -> SimpleNamespace:
    """Return an `nn` with torch's clipping functions, except for those that are passed."""
    functions = {name: getattr(torch.nn.utils, name) for name in _NAMES}
    return SimpleNamespace(utils=SimpleNamespace(**functions | instead))


def after(act: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does something else before it calls `function`."""

    @functools.wraps(function)
    def acting(*args: Any, **kwargs: Any) -> Any:
        ACTS[act]()
        return function(*args, **kwargs)

    return acting


def clamping_after(act: str) -> SimpleNamespace:
    """Return an `nn` whose `clip_grad_value_` does something else first."""
    return clipping(clip_grad_value_=after(act, torch.nn.utils.clip_grad_value_))


def _raise(error: BaseException) -> None:
    raise error


def _recurse() -> None:
    _recurse()


def _enter_inference_mode() -> None:
    _kept.append(torch.inference_mode())
    _kept[-1].__enter__()


def _print() -> None:
    """Print megabytes, by Python's streams and by the operating system."""
    for _ in range(32):
        print("x" * (1 << 19))  # noqa: T201 that is the point
        os.write(1, b"y" * (1 << 19))
        os.write(2, b"z" * (1 << 19))
    raise ValueError("the end")


def _go_on_whatever_is_raised() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            continue


class _Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


_Untold.__name__ = _Untold.__qualname__ = "Untold"

ACTS: dict[str, Callable[[], object]] = {
    "sets_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "sets_default_device": lambda: torch.set_default_device("meta"),
    "sets_grad_mode": lambda: torch.set_grad_enabled(False),
    "sets_inference_mode": _enter_inference_mode,
    "sets_deterministic": lambda: torch.use_deterministic_algorithms(True),
    "sets_threads": lambda: torch.set_num_threads(3 - min(2, torch.get_num_threads())),
    "sets_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "sets_anomaly_mode": lambda: torch.autograd.set_detect_anomaly(True),
    "sets_warn_always": lambda: torch.set_warn_always(True),
    "draws_numbers": lambda: torch.rand(1),
    "seeds": lambda: torch.manual_seed(0),
    "changes_directory": lambda: os.chdir("/"),
    "changes_environment": lambda: os.environ.update(OMP_NUM_THREADS="1"),
    "changes_signals": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "changes_stdout": lambda: setattr(sys, "stdout", io.StringIO()),
    "patches_torch": lambda: setattr(torch.nn.utils, "clip_grad_norm_", print),
    "patches_pytest": lambda: setattr(pytest, "fail", pytest.skip),
    "raises_interrupt": lambda: _raise(KeyboardInterrupt()),
    "exits": lambda: sys.exit(0),
    "ends_pytest": lambda: pytest.exit("enough", returncode=0),
    "raises_what_has_no_text": lambda: _raise(_Untold()),
    "recurses": _recurse,
    "prints": _print,
    "exits_in_the_end": lambda: _raise(ValueError("wrong")),
    "leaks_a_thread": lambda: threading.Thread(target=threading.Event().wait).start(),
    "hogs_memory": lambda: _kept.append(torch.ones(1 << 50)),
    "sleeps": lambda: time.sleep(3600),
    # Faults that end or block the process
    "ends_its_process": lambda: os._exit(0),
    "is_killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stops_its_process": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfaults": lambda: ctypes.string_at(0),
    "holds_pythons_lock": lambda: collections.deque(itertools.repeat(None), maxlen=0),
    "cannot_be_stopped": _go_on_whatever_is_raised,
}
IMPORTS: dict[str, Callable[[], object]] = {
    "fails_on_import": lambda: _raise(RuntimeError("not on this machine")),
    "dies_on_import": lambda: os._exit(0),
    "hangs_on_import": lambda: ctypes.PyDLL(None).sleep(3600),  # keeps Python's lock
    "doubles_on_import": os.fork,
    "forks_on_import": lambda: os.fork() or os._exit(0),
    "prints_on_import": lambda: sys.stdout.write("hello, world\n"),
    "changes_signals_on_import": lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
    "exits_in_the_end": lambda: atexit.register(os._exit, 0),
}
_FROM = f"from {__name__} import"
_SOURCES = {
    name: f"{_FROM} IMPORTS, amp, clipping, cpu, cuda\n\nnn = clipping()\nIMPORTS[{name!r}]()\n"
    for name in IMPORTS
}
_SOURCES |= {
    name: f"{_FROM} amp, clamping_after, cpu, cuda\n\nnn = clamping_after({name!r})\n" for name in ACTS
}
_SOURCES["exits_in_the_end"] += f"{_FROM} IMPORTS\n\nIMPORTS['exits_in_the_end']()\n"
_CLIPPING = f"{_FROM} clipping\n\nnn = clipping()\n"
_FILES = {f"{name}/__init__.py": source for name, source in _SOURCES.items()} | {
    "lacks_a_module/__init__.py": _CLIPPING,
    "lacks_what_it_claims/__init__.py": _CLIPPING,
    "lacks_what_it_claims/conformance_claims.toml": 'claims = ["amp.GradScaler", "nn.utils.clip_grad_value_"]\n',
    "lacks_what_ranks_ask_for/__init__.py": "",
    "lacks_what_ranks_ask_for/distributed/__init__.py": "",
    "lacks_what_ranks_ask_for/distributed/fsdp/__init__.py": (
        "from torch.distributed.fsdp import FullyShardedDataParallel\n"
    ),
    # Neither with FSDP1 nor with GradScaler.
    "has_names_alone/__init__.py": "",
    "has_names_alone/distributed/__init__.py": "",
    "has_names_alone/distributed/fsdp/__init__.py": (
        "from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard\n"
    ),
    "has_names_alone/distributed/fsdp/sharded_grad_scaler.py": (
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
    ),
    "has_a_broken_module/__init__.py": _CLIPPING,
    "has_a_broken_module/amp.py": 'import sys\n\nsys.exit("amp is not for this machine")\n',
    "has_a_hanging_module/__init__.py": _CLIPPING,
    "has_a_hanging_module/amp.py": "import time\n\ntime.sleep(3600)\n",
    "dies_in_many_ways/__init__.py": f"{_FROM} amp_that_dies as amp, nn_that_dies as nn\n",
}

amp, cpu, cuda = torch.amp, torch.cpu, torch.cuda
nn_that_dies = clipping(
    clip_grad_norm=after("cannot_be_stopped", torch.nn.utils.clip_grad_norm),
    clip_grad_norm_=after("stops_its_process", torch.nn.utils.clip_grad_norm_),
    clip_grad_value_=after("is_killed", torch.nn.utils.clip_grad_value_),
    clip_grads_with_norm_=after("segfaults", torch.nn.utils.clip_grads_with_norm_),
    get_total_norm=after("ends_its_process", torch.nn.utils.get_total_norm),
)
amp_that_dies = SimpleNamespace(
    autocast=torch.amp.autocast,
    custom_fwd=torch.amp.custom_fwd,
    is_autocast_available=after("holds_pythons_lock", torch.amp.is_autocast_available),
)


def written(folder: Path) -> Path:
    """Write each subject as a package in a folder, and return the folder."""
    return write_files(folder, _FILES)


def write_subject(folder: Path, name: str, claims: str, source: str = _CLIPPING) -> None:
    """Write a package with a claims file. By default it has torch's clipping."""
    write_files(folder / name, {"__init__.py": source, "conformance_claims.toml": claims})


def write_files(folder: Path, sources: Mapping[str, str]) -> Path:
    for name, source in sources.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return folder
