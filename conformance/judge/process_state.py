"""What a library could leave changed in its process beside torch's global state, and how it is put back."""

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

from conformance.judge.global_state import State, StateItem

_TORCHS_FOLDER = os.path.dirname(torch.__file__) + os.sep
# Settings that pytest, and parts of torch when they are imported, make for themselves.
_THEIR_OWN = re.compile("PYTEST_CURRENT_TEST|TORCH|TRITON|KINETO")
_SIGNALS = tuple(number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP))
# Whose functions and classes stay what they are: a subject that replaced them would be compared with itself.
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
    return {name: value for name, value in os.environ.items() if not _THEIR_OWN.match(name)}


def _set_environment(before: Mapping[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in _SIGNALS}


def _set_handlers(before: Mapping[str, Any]) -> None:
    for name, handler in before.items():
        if handler is not None:  # one that Python did not set, and cannot set
            signal.signal(signal.Signals[name], handler)


def _streams() -> dict[str, Any]:
    return {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr", "excepthook")}


def _set_streams(before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        setattr(sys, name, value)


@functools.cache
def _originals() -> tuple[tuple[Any, Mapping[str, Any]], ...]:
    """The functions of each owner by name, as they are when this is first asked."""
    return tuple(
        (owner, {name: value for name, value in vars(owner).items() if callable(value)}) for owner in _OWNERS
    )


def _replaced() -> dict[str, Any]:
    """Asked around each test: nearly always nothing, so that what finds it out takes the least."""
    replaced = {}
    for owner, originals in _originals():
        now = vars(owner).get
        for name in [name for name, original in originals.items() if now(name) is not original]:
            if not _is_torchs(now(name)):
                replaced[f"{owner.__name__}.{name}"] = now(name)
    return replaced


def _is_torchs(function: Any) -> bool:
    """Dynamo replaces functions of torch when it is imported."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCHS_FOLDER)


def _replace_back(before: Mapping[str, Any]) -> None:
    changed = _replaced()
    for owner, originals in _originals():
        for name, original in originals.items():
            if (path := f"{owner.__name__}.{name}") in changed:
                setattr(owner, name, before.get(path, original))


def lasting_threads() -> list[threading.Thread]:
    """Threads that would keep the interpreter from ending."""
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
    # No thread can be ended from outside: see `Deadlines.pytest_unconfigure`.
    "threads": StateItem(lambda: {thread.ident: thread.name for thread in lasting_threads()}, lambda _: None),
}
