"""Temporary replacement of torch's objects by ours."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Iterable

Replacement = tuple[object, object]  # torch's object, our object

# All patch sets share one lock, because they change global names of the process.
_lock = threading.RLock()


class PatchSet:
    """Replacements of torch's objects, in effect from `install` to `uninstall` and in `installed` blocks.

    Args:
        find: returns the pairs. Called at each replacement.
        along: returns a context that is open while the replacements are in effect.
        within: package whose modules are searched for the objects. A smaller one takes less time.
        sparing: modules, or packages of modules, that keep torch's objects.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Replacement]],
        along: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        within: str = "torch",
        sparing: tuple[str, ...] = (),
    ) -> None:
        self._find, self._along, self._within, self._sparing = find, along, within, sparing
        self._is_pinned = False  # whether `install` was called, and `uninstall` not since
        self._open_blocks = 0  # number of open `installed` blocks in all threads
        self._active_pairs: list[Replacement] = []  # replacements in effect
        self._along_stack = contextlib.ExitStack()

    def install(self) -> None:
        with _lock:
            self._replace()
            self._is_pinned = True

    def uninstall(self) -> None:
        with _lock:
            self._is_pinned = False
            self._restore_if_unused()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        with _lock:
            self._replace()
            self._open_blocks += 1
        try:
            yield
        finally:
            with _lock:
                self._open_blocks -= 1
                self._restore_if_unused()

    def _replace(self) -> None:
        if self._active_pairs:
            return
        pairs = list(self._find())
        self._along_stack.enter_context(self._along())
        self._swap(pairs)
        self._active_pairs.extend(pairs)

    def _restore_if_unused(self) -> None:
        if not self._is_pinned and not self._open_blocks:
            self._swap([(replacement, original) for original, replacement in self._active_pairs])
            self._active_pairs.clear()
            self._along_stack.close()

    def _swap(self, pairs: list[Replacement]) -> None:
        """Rebind every module-level name that holds the first object of a pair to the second one."""
        new_by_id = {id(old): new for old, new in pairs}
        for module_name, module in list(sys.modules.items()):
            if not _is_in(module_name, self._within) or any(
                _is_in(module_name, spared) for spared in self._sparing
            ):
                continue
            # getattr instead of vars() would load lazy modules.
            for name, value in list(vars(module).items()):
                if id(value) in new_by_id:
                    setattr(module, name, new_by_id[id(value)])


def _is_in(module_name: str, package: str) -> bool:
    return module_name == package or module_name.startswith(f"{package}.")
