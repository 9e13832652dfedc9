"""The subject is imported on trial, in a process of its own, before anything depends on it.

Whatever importing does to that process, exit, kill, hang or patch, the process that asked only hears of it.
    python -m conformance.trial SUBJECT 5       tells on the file descriptor 5
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from conformance import surface
from conformance.claims import claims, wrong_in_claims
from conformance.claims_file import UnreadableClaims, claims_file
from conformance.errors import FROM_OUTSIDE, told
from conformance.library import load_library, package_of

IMPORT_S = 60.0
_LAST_WORDS = 2000
_MOST_OUTPUT_BYTES = 1 << 26


class CannotBeJudged(Exception):
    """What is wrong with a subject as a whole."""


@dataclass(frozen=True)
class Learned:
    """What is known of a subject before any test."""

    # None if looking for its names ended a process, or did not end; the tests will tell which name it was.
    claims: frozenset[str] | None
    # What is wrong in its claims file, a sentence each.
    bad_input: tuple[str, ...] = ()


def load(spec: str) -> None:
    """Import a subject, here.

    Raises:
        CannotBeJudged: it cannot be imported, or put something in the place of what it would be compared with.
    """
    reference = load_library("torch")
    before = {name: reference.find(name) for name in surface.names()}
    try:
        load_library(spec)
    except FROM_OUTSIDE:
        raise
    except UnreadableClaims as error:
        raise CannotBeJudged(str(error)) from error
    except BaseException as error:
        raise CannotBeJudged(_cannot_be_loaded(spec, told(error))) from error
    replaced = [name for name, found in before.items() if reference.find(name) is not found]
    if replaced:
        raise CannotBeJudged(
            f"importing the subject {spec!r} put other objects in torch's places ({', '.join(replaced)}); it would be "
            "compared with itself. Let the package replace names when it is asked to, not when it is imported"
        )


def learn(spec: str) -> Learned:
    """What there is to know of a subject that is loaded, here."""
    return Learned(claims(spec), tuple(wrong_in_claims(load_library(spec))))


def learn_on_trial(spec: str, limit_s: float = IMPORT_S) -> Learned:
    """Load a subject and learn about it in another process.

    Raises:
        CannotBeJudged: as `load`; or importing it ended the process, or has not ended after `limit_s`.
    """
    heard, told_end = os.pipe()
    with open(heard) as answers, tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "conformance.trial", spec, str(told_end)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[told_end],
            start_new_session=True,
        )
        os.close(told_end)
        try:
            process.wait(limit_s)
            end = "ended its process with " + _code(process.returncode)
        except subprocess.TimeoutExpired:
            end = f"did not end within {limit_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.set_blocking(heard, False)  # a process that got away may hold the other end
        said = _said(answers.readlines())
        if "error" in said:
            raise CannotBeJudged(said["error"])
        if "loaded" not in said:
            raise CannotBeJudged(_cannot_be_loaded(spec, f"importing it {end}{_last_words(output)}"))
        known = frozenset(said["claims"]) if "claims" in said else None
        return Learned(known, tuple(said.get("bad_input", ())))


def _cannot_be_loaded(spec: str, why: str) -> str:
    return (
        f"the subject {spec!r} cannot be loaded ({why}); "
        "--subject wants impl, torch, or an importable package that mirrors torch's paths"
    )


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _said(lines: list[str]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for line in lines:
        said |= json.loads(line)
    return said


def _last_words(output: Any) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_WORDS))
    words = output.read().decode(errors="replace").strip()
    return f"; it wrote, lastly: {words}" if words else ""


def main(spec: str, descriptor: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_OUTPUT_BYTES, _MOST_OUTPUT_BYTES))
    with open(descriptor, "w", buffering=1) as answers:

        def tell(**words: Any) -> None:
            answers.write(json.dumps(words) + "\n")

        try:
            load(spec)
            tell(loaded=True, bad_input=claims_file(package_of(spec)).problems)
            learned = learn(spec)
            tell(claims=sorted(learned.claims or ()), bad_input=learned.bad_input)
        except CannotBeJudged as error:
            tell(error=str(error))
        except Exception as error:
            tell(error=f"what the subject {spec!r} claims cannot be read ({told(error)})")
        os._exit(0)  # past what the subject has registered for its exit


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
