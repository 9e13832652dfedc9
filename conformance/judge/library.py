"""The only door to the subject and to the reference: names are looked up by torch's own paths.

`Library("torch").amp.GradScaler` is `torch.amp.GradScaler`; `Library("their.package").amp.GradScaler` is
`their.package.amp.GradScaler`, or what the package's claims file has in its place. A name the package lacks raises
`NotProvided`, which the judge reports as such.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

from conformance.faults import handmade
from conformance.judge import surface
from conformance.judge.claims_file import claims_file
from conformance.judge.errors import FROM_OUTSIDE, describe

_CHANGED_SOURCE = ("mutant:", "lines:")  # what `conformance.mutation` makes of a subject


class NotProvided(AttributeError):
    """The subject has no such public name."""

    def __init__(self, library: str, path: str) -> None:
        super().__init__(f"{library} does not provide {path}")
        self.library, self.path = library, path

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.library, self.path)


class LookupFailed(Exception):
    """The subject raised when a name was looked up or its module imported; whatever it raised, the run goes on."""


def package_of(spec: str) -> str:
    """The package that a spec names, whatever fault is injected into it."""
    return spec.partition("+")[0]


class Library:
    """One implementation. `spec` is a package name, or `package+fault` for one with a fault.

    `fault` is a fault's name in `conformance.faults`; `load_library` puts it in place. So a spec is a plain string
    that every process, rank or test worker can resolve for itself.
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.package, self.fault_id = package_of(spec), spec.partition("+")[2]
        # Of the package alone: what stands in the place of torch is torch.
        self.claims_file = claims_file(self.package)
        with contextlib.suppress(LookupFailed, NotProvided):  # told with what else is wrong in the file
            self.bring_device()
        self._root = importlib.import_module(self.package)
        # Keyed by identity, so that a replaced class is replaced under each of its public spellings.
        self._replaced: dict[int, tuple[Any, Any]] = {}

    def __repr__(self) -> str:
        return f"Library({self.spec!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.place_or_object(name)

    def find(self, path: str) -> Any:
        """The object at a dotted path; modules come back as places one can look further from.

        A subject that has none of its own of the enums and configurations that FSDP1 is given takes torch's.
        """
        try:
            return self.own(path)
        except NotProvided:
            if path in surface.given() and not self._has_given:
                return surface.resolve(path)
            raise

    @functools.cached_property
    def _has_given(self) -> bool:
        return any(map(self._has_its_own, surface.given()))

    def _has_its_own(self, path: str) -> bool:
        """Also if it is broken, or lacking where the claims file says that it is."""
        try:
            return self.own(path) is not surface.resolve(path)
        except NotProvided:
            return path in self.claims_file.names
        except LookupFailed:
            return True

    def own(self, path: str) -> Any:
        """What the subject itself has at a path."""
        if self.package == "torch":
            path = surface.PRIVATE_IN_TORCH.get(path, path)
        found, walked, names = self._start(path)
        for name in names:
            walked = f"{walked}.{name}"
            found = self._attribute(found, name, walked, path)
        if isinstance(found, types.ModuleType):
            return LibraryModule(self, path)
        return self._replaced.get(id(found), (found, found))[1]

    def place_or_object(self, path: str) -> Any:
        """A module that is lacking is a place all the same: what counts is which name in it is asked for."""
        try:
            return self.find(path)
        except NotProvided:
            if any(name.startswith(f"{path}.") for name in surface.names()):
                return LibraryModule(self, path)
            raise

    def provides(self, path: str) -> bool:
        try:
            self.find(path)
        except NotProvided:
            return False
        return True

    def replace(self, path: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in the place of the object at `path`, wherever else it is spelled."""
        original = self.find(path)
        key = next((k for k, (_, new) in self._replaced.items() if new is original), id(original))
        kept = self._replaced.get(key, (original, None))[0]
        self._replaced[key] = (kept, make(original))

    def bring_device(self) -> None:
        """Import what brings the device that the package names.

        Raises:
            LookupFailed, NotProvided: that fails, or is not there.
        """
        device = self.claims_file.device
        if device and device.brought_by:
            self._submodule(device.brought_by, device.brought_by)

    def _start(self, path: str) -> tuple[Any, str, list[str]]:
        """Where a path begins: the module, its name, and the names to look up from there."""
        names = path.split(".")
        for count in range(len(names), 0, -1):
            if place := self.claims_file.names.get(".".join(names[:count])):
                top, *others = place.split(".")
                return self._submodule(top, path), top, [*others, *names[count:]]
        return self._root, self.package, names

    def _attribute(self, owner: Any, name: str, walked: str, path: str) -> Any:
        try:
            return getattr(owner, name)
        except AttributeError:
            if not isinstance(owner, types.ModuleType):
                raise NotProvided(self.spec, path) from None
        except FROM_OUTSIDE:
            raise
        except BaseException as error:
            raise LookupFailed(f"{walked} cannot be looked up ({describe(error)})") from error
        return self._submodule(walked, path)

    def _submodule(self, name: str, path: str) -> types.ModuleType:
        try:
            return importlib.import_module(name)
        except FROM_OUTSIDE:
            raise
        except BaseException as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is not None and (name == missing or name.startswith(missing + ".")):
                raise NotProvided(self.spec, path) from None
            raise LookupFailed(f"{name} cannot be imported ({describe(error)})") from error


class LibraryModule:
    """A module of a library, on the way to a name."""

    def __init__(self, library: Library, path: str) -> None:
        self._library, self._path = library, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._library.place_or_object(f"{self._path}.{name}")

    def __repr__(self) -> str:
        return f"{self._library.spec}:{self._path}"


@functools.cache
def load_library(spec: str) -> Library:
    """The library a spec names, with its fault in place; one object a process."""
    library = Library(spec)
    if library.fault_id.startswith(_CHANGED_SOURCE):
        importlib.import_module("conformance.mutation.mutants").change_source(
            library.package, library.fault_id
        )
    elif library.fault_id:
        fault = handmade.find(library.fault_id)
        library.replace(fault.breaks, fault.make)
    return library
