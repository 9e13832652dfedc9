"""Functions of torch with some of their words replaced, to plant a bug again that torch has fixed."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any
from unittest import mock


def rewritten(owner: Any, name: str, *replaced: tuple[str, str]) -> Any:
    """Return a patch that replaces words in the source of a function, regardless of its line breaks.

    Use it as a context manager, or call `start()`.

    Raises:
        RuntimeError: this torch does not have the words exactly once.
    """
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in replaced:
        words = r"\s*".join(map(re.escape, re.findall(r"\w+|\S", old)))
        source, count = re.subn(words, new, source)
        if count != 1:
            raise RuntimeError(f"{name} of this torch has {old!r} {count} times, but expected it once")
    names = dict(inspect.unwrap(function).__globals__)
    exec(compile(source, f"<{name}, with a bug>", "exec"), names)
    return mock.patch.object(owner, name, names[name])
