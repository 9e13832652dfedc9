"""Puts objects of ours in torch's places for as long as somebody wants them there."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

Pair = tuple[Any, Any]  # (torch's object, ours)

# One for all patch sets: what they change is the process's.
_lock = threading.RLock()


class PatchSet:
    """Some objects, torch's or ours in torch's places: ours from `install` to `uninstall`, and in `installed` blocks.

    Args:
        find: the pairs, asked for at each placing.
        along: opens what has to be in place for as long as these are.
        within: the package whose modules hold the names; the smaller it is, the sooner they are found.
        sparing: modules, and packages whose modules, go on by the names that they hold.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Pair]],
        along: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        within: str = "torch",
        sparing: tuple[str, ...] = (),
    ) -> None:
        self._find, self._along, self._within, self._sparing = find, along, within, sparing
        self._is_pinned = False  # install() was called, and uninstall() not since
        self._open_blocks = 0  # how many installed() are open, in all threads
        self._placed: list[Pair] = []  # what is in place
        self._held = contextlib.ExitStack()

    def install(self) -> None:
        with _lock:
            self._place()
            self._is_pinned = True

    def uninstall(self) -> None:
        with _lock:
            self._is_pinned = False
            self._restore_if_unused()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        with _lock:
            self._place()
            self._open_blocks += 1
        try:
            yield
        finally:
            with _lock:
                self._open_blocks -= 1
                self._restore_if_unused()

    def _place(self) -> None:
        if self._placed:
            return
        pairs = list(self._find())
        self._held.enter_context(self._along())
        self._swap(pairs)
        self._placed.extend(pairs)

    def _restore_if_unused(self) -> None:
        if not self._is_pinned and not self._open_blocks:
            self._swap([(ours, theirs) for theirs, ours in self._placed])
            self._placed.clear()
            self._held.close()

    def _swap(self, pairs: list[Pair]) -> None:
        """In each of the modules, give every name that holds the first of a pair the second."""
        new_by_id = {id(old): new for old, new in pairs}
        for module_name, module in list(sys.modules.items()):
            if not _is_in(module_name, self._within) or any(
                _is_in(module_name, one) for one in self._sparing
            ):
                continue
            # vars(), since getattr would wake modules that load on first use.
            for name, value in list(vars(module).items()):
                if id(value) in new_by_id:
                    setattr(module, name, new_by_id[id(value)])


def _is_in(module_name: str, package: str) -> bool:
    return module_name == package or module_name.startswith(f"{package}.")
