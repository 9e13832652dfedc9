"""Triton's interpreter, made to put its functions into `triton.language` once, and to leave them there.

By itself (Triton 3.6 to 3.9) it puts them there as a launch begins, again, the same ones, with each call of a device
function, and takes them away as the launch ends: half of the time of our launches. Nothing else in a process that
interprets needs the language as it was.

As a plugin of pytest (`-p impl.kernels.tests.interpreter_nesting`) it mends the interpreter of that process.
"""

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    theirs = interpreter._patch_lang
    done: set[frozenset[str]] = set()

    def patch(function: Callable[..., Any]) -> Any:
        names = _languages_of(function)
        if names not in done:
            theirs(function)
            done.add(names)
        return interpreter._LangPatchScope()  # with nothing in it to be taken away

    interpreter._patch_lang = patch


@functools.cache
def _languages_of(function: Callable[..., Any]) -> frozenset[str]:
    """The modules by which a function knows Triton's language."""
    values = [*function.__globals__.values()]
    return frozenset(one.__name__ for one in (tl, tl.core) if any(value is one for value in values))


def pytest_configure() -> None:
    mend()
