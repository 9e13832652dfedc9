"""The only access to the subject and to the reference: names are looked up by torch's paths.

`Library("torch").amp.GradScaler` is `torch.amp.GradScaler`. `Library("their.package").amp.GradScaler` is
`their.package.amp.GradScaler`, or the object that the package's claims file names for it. A name that the package lacks
raises `NotProvided`, which the judge reports as such.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

from conformance.judge import providers, surface
from conformance.judge.errors import FROM_OUTSIDE, describe
from conformance.judge.files.claims_file import claims_file
from conformance.judge.sandbox import environment


class NotProvided(AttributeError):
    """Raised when a library lacks a public name."""

    def __init__(self, library: str, path: str) -> None:
        super().__init__(f"{library} does not provide {path}")
        self.library, self.path = library, path

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.library, self.path)


class LookupFailed(Exception):
    """Raised when looking up a name, or importing its module, raises anything. The run continues."""


def package_of(spec: str) -> str:
    """Return the package of a spec, without the injected fault."""
    return spec.partition("+")[0]


class Library:
    """An implementation: the subject or the reference.

    `spec` is a package name, or `package+fault` with the name of a fault in `conformance.strength.faults`, which
    `load_library` injects. A spec is a plain string, so every process, rank and test worker can load the library.
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.package, self.fault_id = package_of(spec), spec.partition("+")[2]
        # The file is found by the package's name, because torch with a fault has the claims of torch.
        self.claims_file = claims_file(self.package)
        with contextlib.suppress(LookupFailed, NotProvided):  # reported by `wrong_in_claims`
            self.bring_device()
        self._root = importlib.import_module(self.package)
        # By identity, so that a replaced class is replaced under each of its public names.
        self._replaced: dict[int, tuple[Any, Any]] = {}

    def __repr__(self) -> str:
        return f"Library({self.spec!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.place_or_object(name)

    def find(self, path: str) -> Any:
        """Return the object at a dotted path, or a `ModuleView` for a module.

        If a subject has no enums and configurations for FSDP's arguments, torch's are used.
        """
        try:
            return self.own(path)
        except NotProvided:
            if path in surface.argument_types() and not self._has_argument_types:
                return surface.resolve(path)
            raise

    @functools.cached_property
    def _has_argument_types(self) -> bool:
        return any(map(self._has_its_own, surface.argument_types()))

    def _has_its_own(self, path: str) -> bool:
        """Return whether the subject has its own object, even if it is broken or only named by the claims file."""
        try:
            return self.own(path) is not surface.resolve(path)
        except NotProvided:
            return path in self.claims_file.names
        except LookupFailed:
            return True

    def own(self, path: str) -> Any:
        """Return the subject's own object at a path."""
        if self.package == "torch":
            path = surface.PRIVATE_IN_TORCH.get(path, path)
        value, walked, names = self._start(path)
        for name in names:
            walked = f"{walked}.{name}"
            value = self._attribute(value, name, walked, path)
        if isinstance(value, types.ModuleType):
            return ModuleView(self, path)
        return self._replaced.get(id(value), (value, value))[1]

    def place_or_object(self, path: str) -> Any:
        """Return the object at a path. A missing module gives a `ModuleView`, so that the missing name is reported."""
        try:
            return self.find(path)
        except NotProvided:
            if any(name.startswith(f"{path}.") for name in surface.names()):
                return ModuleView(self, path)
            raise

    def provides(self, path: str) -> bool:
        try:
            self.find(path)
        except NotProvided:
            return False
        return True

    def replace(self, path: str, make: Callable[[Any], Any]) -> None:
        """Replace the object at `path`, under all of its names, by `make(original)`."""
        original = self.find(path)
        key = next((k for k, (_, new) in self._replaced.items() if new is original), id(original))
        first = self._replaced.get(key, (original, None))[0]
        self._replaced[key] = (first, make(original))

    def bring_device(self) -> None:
        """Import the module that registers the device of the claims file.

        Raises:
            LookupFailed: the import raises.
            NotProvided: there is no such module.
        """
        device = self.claims_file.device
        if device and device.brought_by:
            self._submodule(device.brought_by, device.brought_by)
            environment.device_modules[device.type] = device.brought_by

    def _start(self, path: str) -> tuple[Any, str, list[str]]:
        """Return the module that the lookup of a path starts at, its name, and the names to look up in it."""
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


class ModuleView:
    """A module of a library, to look up names in."""

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
    """Return the library that a spec names, with its fault injected. There is one object for each process."""
    library = Library(spec)
    if library.fault_id:
        providers.provider("faults").inject(library)
    return library
