"""Patch of Triton's interpreter: put its functions into `triton.language` once, and leave them there.

Triton 3.6 to 3.9 put them there when a launch begins and again with each call of a device function, and remove them
when the launch ends. That takes half of the time of our launches. Nothing else in an interpreting process needs the
original language.

As a plugin of pytest (`-p impl.kernels.tests.interpreter_nesting`) it patches the interpreter of that process.
"""

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_language_once() -> None:
    patch_by_triton = interpreter._patch_lang
    done: set[frozenset[str]] = set()

    def patch(function: Callable[..., Any]) -> Any:
        names = _languages_of(function)
        if names not in done:
            patch_by_triton(function)
            done.add(names)
        return interpreter._LangPatchScope()  # empty scope: nothing to remove

    interpreter._patch_lang = patch


@functools.cache
def _languages_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the language modules that a function refers to."""
    values = [*function.__globals__.values()]
    return frozenset(
        language.__name__ for language in (tl, tl.core) if any(value is language for value in values)
    )


def pytest_configure() -> None:
    patch_language_once()
