"""Functions and classes with some words of their source replaced, to plant a bug in an installed package."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from typing import Any
from unittest import mock


def rewritten(owner: Any, name: str, *replaced: tuple[str, str]) -> Any:
    """Return a patch that replaces words in the source of a function or class, regardless of its line breaks.

    Use it as a context manager, or call `start()`.

    Raises:
        RuntimeError: the installed version does not have the words exactly once.
    """
    definition = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(definition))
    for old, new in replaced:
        words = r"\s*".join(map(re.escape, re.findall(r"\w+|\S", old)))
        source, count = re.subn(words, new, source)
        if count != 1:
            raise RuntimeError(
                f"{name} of the installed version has {old!r} {count} times, but expected it once"
            )
    names = dict(vars(sys.modules[inspect.unwrap(definition).__module__]))
    exec(compile(source, f"<{name}, with a bug>", "exec"), names)
    return mock.patch.object(owner, name, names[name])
