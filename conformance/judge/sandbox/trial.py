"""Import of the subject in a separate process, before the suite depends on it.

The import may exit, kill, hang or patch that process. This process only receives a report.

    python -m conformance.judge.sandbox.trial SUBJECT cpu,cuda 5    writes to file descriptor 5; needs a file as output
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
from conformance.judge.errors import FROM_OUTSIDE, describe
from conformance.judge.files.claims import claims, provided_names, wrong_in_claims
from conformance.judge.files.claims_file import UnreadableClaims, claims_file
from conformance.judge.library import load_library, package_of
from conformance.judge.sandbox.environment import is_device
from conformance.judge.sandbox.global_state import put_back, read
from conformance.judge.sandbox.process_state import PROCESS

IMPORT_S = 60.0
_CHILDREN_S = 5.0  # time for forked processes to end
_TAIL_BYTES = 2000
_MOST_OUTPUT_BYTES = 1 << 26
_FORK_RETURNED = 77  # exit code of a forked process that returned from the import
_UNKNOWN_DEVICE = (
    "--device names {!r}, which torch does not know; expected cpu, cuda or another device type of torch, or one that "
    "the module in [device] of the claims file registers"
)


class CannotBeJudged(Exception):
    """Raised when a subject cannot be judged at all."""


@dataclass(frozen=True)
class SubjectInfo:
    """The properties of a subject that are known before any test."""

    # This is None if looking up the names ended a process or did not end. The tests will show which name it was.
    claims: frozenset[str] | None
    # A sentence with a cure for each problem of its import and of its claims file.
    bad_input: tuple[str, ...] = ()
    # The names of clauses that it has, claimed or not. This is None under the same condition.
    provided: frozenset[str] | None = None


_SIGNALS = {name: PROCESS[name] for name in ("signal handlers", "blocked signals")}


def load(spec: str) -> tuple[str, ...]:
    """Import a subject in this process and return complaints about it.

    Changes to signals are complained about and undone, because deadlines depend on signals.

    Raises:
        CannotBeJudged: it cannot be imported, or it replaced objects of torch that it would be compared with.
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
        cure = _NOT_FOUND if _is_not_found(spec, error) else f"fix what raises in `import {package_of(spec)}`"
        raise CannotBeJudged(_cannot_be_loaded(spec, describe(error), cure)) from error
    finally:
        changed = put_back(_SIGNALS, signals)
    replaced = [name for name in surface.names() if _is_replaced(name, before)]
    if replaced:
        raise CannotBeJudged(
            f"importing the subject {spec!r} replaced objects of torch ({', '.join(replaced)}), so it would be "
            "compared with itself; replace them in a function that users call, not during the import"
        )
    return tuple(
        f"importing {spec!r} changed the {name} (before, after): {values}. They were put back for judging; "
        "let it change them in a function that users call"
        for name, values in changed.items()
    )


def _is_replaced(name: str, before: Mapping[str, Any]) -> bool:
    """Return whether the import replaced a name of torch, also in a torch module that it imported first."""
    if name in before:
        return load_library("torch").find(name) is not before[name]
    return surface.is_imported(name) and not surface.is_defined_in_its_module(name)


def subject_info(spec: str, complaints: Sequence[str] = (), devices: str = "auto") -> SubjectInfo:
    """Return the properties of a subject that this process has loaded. `complaints` are those of `load`.

    The subject must be loaded because it may register devices. Other unknown names in `devices` are mistakes.
    """
    unknown = [] if devices == "auto" else [name for name in devices.split(",") if not is_device(name)]
    complaints = (*complaints, *(_UNKNOWN_DEVICE.format(name) for name in unknown))
    return SubjectInfo(claims(spec), (*complaints, *wrong_in_claims(load_library(spec))))


def import_in_subprocess(spec: str, devices: str = "auto", limit_s: float = IMPORT_S) -> SubjectInfo:
    """Load a subject in another process and return its properties.

    Raises:
        CannotBeJudged: as `load`. Also if the import ended its process, returned in a forked process, or did not end
            within `limit_s`.
    """
    read_end, write_end = os.pipe()
    with open(read_end) as answers, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "conformance.judge.sandbox.trial", spec, devices, str(write_end)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=output,
            pass_fds=[write_end],
            start_new_session=True,
        )
        os.close(write_end)
        try:
            # Wait until torch is imported, which does not count as the subject's time.
            select.select([read_end], [], [], IMPORT_S)
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
        os.set_blocking(read_end, False)  # an escaped process may still have the write end open
        reported = _reported(answers.readlines())
        if "error" in reported:
            raise CannotBeJudged(reported["error"])
        if "loaded" not in reported:
            raise CannotBeJudged(_cannot_be_loaded(spec, end + _tail_of_output(printed, output), cure))
        known = frozenset(reported["claims"]) if "claims" in reported else None
        provided = frozenset(reported["provided"]) if "provided" in reported else None
        return SubjectInfo(known, tuple(reported["bad_input"]), provided)


_NOT_FOUND = "expected impl, torch, or an importable package that has torch's paths"


def _is_not_found(spec: str, error: BaseException) -> bool:
    """Return whether the package is missing, as opposed to raising while it is imported."""
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


def _tail_of_output(*outputs: Any) -> str:
    text = ""
    for output in outputs:
        output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text += output.read().decode(errors="replace")
    return f"; its last output: {text.strip()}" if text.strip() else ""


def main(spec: str, devices: str, descriptor: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_OUTPUT_BYTES, _MOST_OUTPUT_BYTES))
    with open(descriptor, "w", buffering=1) as answers:

        def report(**entries: Any) -> None:
            answers.write(json.dumps(entries) + "\n")

        load_library("torch")
        surface.names()  # imports more modules of torch
        report(ready=True)
        try:
            complaints = _load_and_watch(spec)
            report(loaded=True, bad_input=[*complaints, *claims_file(package_of(spec)).problems])
            info = subject_info(spec, complaints, devices)
            report(claims=sorted(info.claims or ()), bad_input=info.bad_input)
            report(provided=sorted(provided_names(spec)))
        except CannotBeJudged as error:
            report(error=str(error))
        except Exception as error:
            report(error=f"the claims of the subject {spec!r} cannot be read ({describe(error)})")
        os._exit(0)  # skips the subject's exit handlers


def _load_and_watch(spec: str) -> list[str]:
    """Import the subject and return complaints about what an import should not do, each with a cure."""
    importer, forks = os.getpid(), []
    os.register_at_fork(before=lambda: forks.append(1))
    before = os.fstat(1).st_size
    try:
        complaints = list(load(spec))
    finally:
        if os.getpid() != importer:
            os._exit(_FORK_RETURNED)
    with contextlib.suppress(Exception):  # the subject may have replaced stdout
        sys.stdout.flush()
    text = os.pread(1, _TAIL_BYTES, before).decode(errors="replace").strip()
    if text:
        complaints.append(
            f"importing {spec!r} prints {textwrap.shorten(text, 200, placeholder=' …')!r} into the output of every "
            "program that imports it; let it warn or log instead"
        )
    return complaints + (_complaints_about_forks(spec) if forks else [])


def _complaints_about_forks(spec: str) -> list[str]:
    """Return a complaint about forked processes, after waiting for them to end.

    Raises:
        CannotBeJudged: a forked process returned from the import, and would have run a second judge.
    """
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
    if _FORK_RETURNED in codes:
        raise CannotBeJudged(
            f"importing {spec!r} forked the process and returned in both, so every importing program runs twice; {cure}"
        )
    state = "a process that is still running" if running else "a process, which has ended"
    return [f"importing {spec!r} forked {state}; {cure}"]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
