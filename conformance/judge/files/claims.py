"""Claims of a subject, which decide whether a missing name is red or only reported.

A package claims every public name that it exposes and no extension, unless its claims file
(`conformance.judge.files.claims_file`) says otherwise.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Iterator

from conformance.judge import surface
from conformance.judge.clauses import all_clauses, is_test
from conformance.judge.errors import describe
from conformance.judge.files.claims_file import Expectation, claims_file, similar
from conformance.judge.files.rows import limited_clauses
from conformance.judge.library import Library, LookupFailed, NotProvided, load_library, package_of
from conformance.judge.sandbox.environment import try_out


def claims(spec: str) -> frozenset[str]:
    """Return the public names that a subject claims. An injected fault does not change them."""
    package = package_of(spec)
    if (listed := _listed(package)) is not None:
        return listed
    return frozenset(name for name in surface.names() if _is_claimed_name(package, name))


def is_claimed(library: Library, path: str) -> bool:
    """Return whether the subject claims a name, or the class or module that contains it.

    No other name is looked up, because it might be in a module whose import does not end.
    """
    parts = path.split(".")
    return any(_is_claimed_name(library.package, ".".join(parts[:n])) for n in range(1, len(parts) + 1))


def claimed_extensions(spec: str) -> frozenset[str]:
    """Return the clauses that a subject claims although torch cannot do them, or cannot do them on every device.

    Only the claims file can claim them. Exposing a name does not.
    """
    return _extensions(package_of(spec))


@functools.cache
def _extensions(package: str) -> frozenset[str]:
    return _matching(claims_file(package).extensions, _all_extensions())


def _all_extensions() -> list[str]:
    """Return all clauses that may be claimed, also extensions that the installed torch can do itself."""
    limited = limited_clauses()
    return [
        clause.id
        for clause in all_clauses().values()
        if clause.level == "extension" or clause.until or clause.id in limited
    ]


@functools.cache
def _is_claimed_name(package: str, name: str) -> bool:
    if (listed := _listed(package)) is not None:
        return name in listed
    return name in surface.names() and exposes(load_library(package), name)


@functools.cache
def _listed(package: str) -> frozenset[str] | None:
    """Return the names that the package's claims file lists, or None if it has no list."""
    patterns = claims_file(package).claims
    return None if patterns is None else _matching(patterns, surface.names())


def _matching(patterns: Iterable[str], known: Iterable[str]) -> frozenset[str]:
    return frozenset(name for pattern in patterns for name in fnmatch.filter(known, pattern))


def exposes(library: Library, name: str) -> bool:
    """Return whether the library has a name. A name whose module fails to import is broken, not missing."""
    try:
        return library.provides(name)
    except LookupFailed:
        return True


def provided_names(spec: str) -> frozenset[str]:
    """Return the names of clauses that a subject has, whether or not it claims them."""
    library = load_library(package_of(spec))
    names = {name for clause in all_clauses().values() for name in clause.names}
    return frozenset(name for name in names if exposes(library, name))


def wrong_in_claims(library: Library) -> Iterator[str]:
    """Yield a sentence for each problem of a subject's claims file: first its format, then the names in it.

    A wrong entry has no effect: its name is not provided, its device is not used, its failure is not expected.
    """
    file = library.claims_file
    yield from file.problems
    sentences = (*_wrong_claims(library), *_wrong_names(library), *_wrong_device(library))
    yield from (f"{file.path}: {sentence}" for sentence in sentences)
    for expectation in file.expectations:
        if sentence := _wrong_expectation(expectation):
            yield f"{file.path}: {sentence}"


def _wrong_claims(library: Library) -> Iterator[str]:
    for pattern in library.claims_file.claims or ():
        if not fnmatch.filter(surface.names(), pattern):
            yield f"claims has {pattern!r}, which torch does not have{similar(pattern, surface.names())}"
    for pattern in library.claims_file.extensions:
        if not fnmatch.filter(_all_extensions(), pattern):
            known = _all_extensions()
            yield f"extensions has {pattern!r}, which is not a clause of an extension{similar(pattern, known)}"


def _wrong_names(library: Library) -> Iterator[str]:
    known = (*surface.names(), *surface.argument_types())
    for path, place in library.claims_file.names.items():
        if not any(f"{name}.".startswith(f"{path}.") for name in known):
            like = similar(path, known)
            yield f"[names] has {path!r}, which torch does not have{like}; expected a public name that is judged"
            continue
        try:
            library.own(path)
        except NotProvided:
            yield (
                f"[names] says that {path} is {place}, which does not exist; "
                "expected module.name, as Python imports it"
            )
        except LookupFailed as error:
            yield f"[names] says that {path} is {place}, but {error}; fix what raises, or remove the line"


def _wrong_device(library: Library) -> Iterator[str]:
    device = library.claims_file.device
    if device is None:
        return
    try:
        library.bring_device()
        try_out(device.type)
    except Exception as error:
        why = (str(error).strip() or describe(error)).splitlines()[0]
        yield (
            f"[device] {device.type} cannot be used ({why}), so other devices are used instead. Set import to the "
            "module that registers the device with torch, and run on a machine that has one"
        )


def _wrong_expectation(expectation: Expectation) -> str:
    if expectation.clause:
        if expectation.clause in all_clauses():
            return ""
        known = similar(expectation.clause, all_clauses())
        return f"[[expectations]] names the clause {expectation.clause!r}, which does not exist{known}"
    if is_test(expectation.test):
        return ""
    return (
        f"[[expectations]] names the test {expectation.test!r}, which does not exist; expected a test as reports name "
        "it, conformance/FOLDER/test_FILE.py::test_NAME, with or without [parameters]"
    )
