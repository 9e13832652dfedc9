"""The subject is imported on trial, in a process of its own, before anything depends on it.

Whatever importing does to that process, exit, kill, hang or patch, the process that asked only hears of it.
    python -m conformance.judge.trial SUBJECT cpu,cuda 5      tells on the file descriptor 5; its output must be a file
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.judge import surface
from conformance.judge.claims import claims, wrong_in_claims
from conformance.judge.claims_file import UnreadableClaims, claims_file
from conformance.judge.environment import is_device
from conformance.judge.errors import FROM_OUTSIDE, describe
from conformance.judge.global_state import put_back, read
from conformance.judge.library import load_library, package_of
from conformance.judge.process_state import PROCESS

IMPORT_S = 60.0
_CHILDREN_S = 5.0  # for what was forked while importing to end
_LAST_WORDS = 2000
_MOST_OUTPUT_BYTES = 1 << 26
_CAME_BACK = 77  # exit code of a fork that came out of the import
_UNKNOWN_DEVICE = (
    "--device names {!r}, which torch does not know; expected cpu, cuda or another type of torch's, or one that the "
    "import in [device] of the claims file brings"
)


class CannotBeJudged(Exception):
    """What is wrong with a subject as a whole."""


@dataclass(frozen=True)
class Learned:
    """What is known of a subject before any test."""

    # None if looking for its names ended a process, or did not end; the tests will tell which name it was.
    claims: frozenset[str] | None
    # What its import does that none should, and what is wrong in its claims file: a sentence each, with the cure.
    bad_input: tuple[str, ...] = ()


_SIGNALS = {name: PROCESS[name] for name in ("signal handlers", "blocked signals")}


def load(spec: str) -> tuple[str, ...]:
    """Import a subject, here; returns what it did to signals, which is undone: deadlines stand on them.

    Raises:
        CannotBeJudged: it cannot be imported, or put something in the place of what it would be compared with.
    """
    reference = load_library("torch")
    before = {name: reference.find(name) for name in surface.names() if surface.is_imported(name)}
    signals = read(_SIGNALS)
    try:
        load_library(spec)
    except FROM_OUTSIDE:
        raise
    except UnreadableClaims as error:
        raise CannotBeJudged(str(error)) from error
    except BaseException as error:
        cure = (
            _NOT_THERE if _is_not_there(spec, error) else f"mend what raises in `import {package_of(spec)}`"
        )
        raise CannotBeJudged(_cannot_be_loaded(spec, describe(error), cure)) from error
    finally:
        changed = put_back(_SIGNALS, signals)
    replaced = [name for name in surface.names() if _is_replaced(name, before)]
    if replaced:
        raise CannotBeJudged(
            f"importing the subject {spec!r} put other objects in torch's places ({', '.join(replaced)}); it would be "
            "compared with itself. Let the package replace names when it is asked to, not when it is imported"
        )
    return tuple(
        f"importing {spec!r} changed the {name} (before, after): {values}. They were put back for judging; "
        "let it change them in a function that users call"
        for name, values in changed.items()
    )


def _is_replaced(name: str, before: Mapping[str, Any]) -> bool:
    """Of a module that the subject's import brought, what was not made there."""
    if name in before:
        return load_library("torch").find(name) is not before[name]
    return surface.is_imported(name) and not surface.is_defined_in_its_module(name)


def learn(spec: str, complaints: Sequence[str] = (), devices: str = "auto") -> Learned:
    """What there is to know of a subject that is loaded, here, with the complaints about its import.

    With it the devices are there that it brings, so that those which are asked for can be told from slips.
    """
    unknown = [] if devices == "auto" else [name for name in devices.split(",") if not is_device(name)]
    complaints = (*complaints, *(_UNKNOWN_DEVICE.format(name) for name in unknown))
    return Learned(claims(spec), (*complaints, *wrong_in_claims(load_library(spec))))


def learn_on_trial(spec: str, devices: str = "auto", limit_s: float = IMPORT_S) -> Learned:
    """Load a subject and learn about it in another process.

    Raises:
        CannotBeJudged: as `load`; or importing it ended the process, forked it for good, or has not ended after
            `limit_s`.
    """
    heard, reported_end = os.pipe()
    with open(heard) as answers, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "conformance.judge.trial", spec, devices, str(reported_end)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=output,
            pass_fds=[reported_end],
            start_new_session=True,
        )
        os.close(reported_end)
        try:
            select.select([heard], [], [], IMPORT_S)  # until torch is there: its time is not the subject's
            process.wait(limit_s)
            end = f"importing it ended its process with {_code(process.returncode)}"
            cure = "let the import return, and raise an ImportError where it cannot"
        except subprocess.TimeoutExpired:
            end = f"importing it did not end within {limit_s:g} s"
            cure = "let the import return without waiting for a device, a network or a lock"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.set_blocking(heard, False)  # a process that got away may hold the other end
        reported = _reported(answers.readlines())
        if "error" in reported:
            raise CannotBeJudged(reported["error"])
        if "loaded" not in reported:
            raise CannotBeJudged(_cannot_be_loaded(spec, end + _last_words(printed, output), cure))
        known = frozenset(reported["claims"]) if "claims" in reported else None
        return Learned(known, tuple(reported["bad_input"]))


_NOT_THERE = "expected impl, torch, or an importable package that mirrors torch's paths"


def _is_not_there(spec: str, error: BaseException) -> bool:
    """Rather than that something in it raises."""
    return isinstance(error, ModuleNotFoundError) and f"{package_of(spec)}.".startswith(f"{error.name}.")


def _cannot_be_loaded(spec: str, why: str, cure: str) -> str:
    return f"the subject {spec!r} cannot be loaded ({why}); {cure}"


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _reported(lines: list[str]) -> dict[str, Any]:
    reported: dict[str, Any] = {}
    for line in lines:
        reported |= json.loads(line)
    return reported


def _last_words(*outputs: Any) -> str:
    words = ""
    for output in outputs:
        output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_WORDS))
        words += output.read().decode(errors="replace")
    return f"; it wrote, lastly: {words.strip()}" if words.strip() else ""


def main(spec: str, devices: str, descriptor: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_OUTPUT_BYTES, _MOST_OUTPUT_BYTES))
    with open(descriptor, "w", buffering=1) as answers:

        def tell(**words: Any) -> None:
            answers.write(json.dumps(words) + "\n")

        load_library("torch")
        surface.names()  # which imports more of torch
        tell(ready=True)
        try:
            complaints = _watched(spec)
            tell(loaded=True, bad_input=[*complaints, *claims_file(package_of(spec)).problems])
            learned = learn(spec, complaints, devices)
            tell(claims=sorted(learned.claims or ()), bad_input=learned.bad_input)
        except CannotBeJudged as error:
            tell(error=str(error))
        except Exception as error:
            tell(error=f"what the subject {spec!r} claims cannot be read ({describe(error)})")
        os._exit(0)  # past what the subject has registered for its exit


def _watched(spec: str) -> list[str]:
    """Import the subject; what it did meanwhile that no import should, each with the cure."""
    importer, forks = os.getpid(), []
    os.register_at_fork(before=lambda: forks.append(1))
    before = os.fstat(1).st_size
    try:
        complaints = list(load(spec))
    finally:
        if os.getpid() != importer:
            os._exit(_CAME_BACK)
    with contextlib.suppress(Exception):  # whatever the subject has put there
        sys.stdout.flush()
    text = os.pread(1, _LAST_WORDS, before).decode(errors="replace").strip()
    if text:
        complaints.append(
            f"importing {spec!r} prints {textwrap.shorten(text, 200, placeholder=' …')!r}, which every program that "
            "imports it has in its output; let it warn or log instead"
        )
    return complaints + (_complaints_about_forks(spec) if forks else [])


def _complaints_about_forks(spec: str) -> list[str]:
    """Whoever was forked must have ended by itself, or runs on; one that came out of the import runs a second judge."""
    end, codes, running = time.monotonic() + _CHILDREN_S, [], True
    while running and time.monotonic() < end:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            running = False
        else:
            codes += [os.waitstatus_to_exitcode(status)] if child else []
            time.sleep(0.0 if child else 0.05)
    cure = "let it start processes in a function that users call"
    if _CAME_BACK in codes:
        raise CannotBeJudged(
            f"importing {spec!r} forked the process and came back in both: whoever imports it runs twice; {cure}"
        )
    what = "a process that runs on" if running else "a process, which has ended"
    return [f"importing {spec!r} forked {what}; {cure}"]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
