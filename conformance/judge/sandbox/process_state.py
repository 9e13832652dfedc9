"""State of the process, besides torch's, that a library could leave changed, with functions to read and restore it."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from conformance.judge.sandbox.global_state import State, StateItem

_TORCHS_FOLDER = os.path.dirname(torch.__file__) + os.sep
# Variables that pytest sets, and that modules of torch set when they are imported.
_IGNORED_VARIABLES = re.compile("PYTEST_CURRENT_TEST|TORCH|TRITON|KINETO")
_SIGNALS = tuple(number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP))
# Objects whose functions and classes must not be replaced, because the subject would be compared with itself.
_OWNERS = (
    torch,
    torch.Tensor,
    torch.autograd,
    torch.optim.Optimizer,
    torch.nn.utils,
    torch.nn.utils.clip_grad,
    torch.amp.autocast_mode,
    torch.amp.grad_scaler,
    torch.cuda.amp,
    pytest,
)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "none: it was removed"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _IGNORED_VARIABLES.match(name)}


def _set_environment(before: Mapping[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in _SIGNALS}


def _set_handlers(before: Mapping[str, Any]) -> None:
    for name, handler in before.items():
        if handler is not None:  # set by Python
            signal.signal(signal.Signals[name], handler)


def _streams() -> dict[str, Any]:
    return {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr", "excepthook")}


def _set_streams(before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        setattr(sys, name, value)


@functools.cache
def _originals() -> tuple[tuple[Any, Mapping[str, Any]], ...]:
    """Return the functions of each owner by name, as they are at the first call."""
    return tuple(
        (owner, {name: value for name, value in vars(owner).items() if callable(value)}) for owner in _OWNERS
    )


def _replaced() -> dict[str, Any]:
    """Return the functions of torch that were replaced. This runs around each test, so the usual empty case is fast."""
    replaced = {}
    for owner, originals in _originals():
        now = vars(owner).get
        for name in [name for name, original in originals.items() if now(name) is not original]:
            if not _is_torchs(now(name)):
                replaced[f"{owner.__name__}.{name}"] = now(name)
    return replaced


def _is_torchs(function: Any) -> bool:
    """Return whether a function is defined by torch, such as those that Dynamo puts in place when it is imported."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCHS_FOLDER)


def _replace_back(before: Mapping[str, Any]) -> None:
    changed = _replaced()
    for owner, originals in _originals():
        for name, original in originals.items():
            if (path := f"{owner.__name__}.{name}") in changed:
                setattr(owner, name, before.get(path, original))


def lasting_threads() -> list[threading.Thread]:
    """Return the threads that keep the interpreter from ending."""
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]


PROCESS: State = {
    "the working directory": StateItem(_working_directory, os.chdir),
    "the environment": StateItem(_environment, _set_environment),
    "signal handlers": StateItem(_handlers, _set_handlers),
    "blocked signals": StateItem(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    ),
    "the streams and hooks of sys": StateItem(_streams, _set_streams),
    "the recursion limit": StateItem(sys.getrecursionlimit, sys.setrecursionlimit),
    "garbage collection": StateItem(gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "functions of torch": StateItem(_replaced, _replace_back),
    # A thread cannot be ended from outside. See `Deadlines.pytest_unconfigure`.
    "threads": StateItem(lambda: {thread.ident: thread.name for thread in lasting_threads()}, lambda _: None),
}
