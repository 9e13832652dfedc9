"""Run a user's script under one schedule after the other, each in processes that are forked before anything has run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import faulthandler
import gc
import hashlib
import importlib
import io
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from conformance.simulator.control import (
    Hazard,
    course,
    leave_peers,
    log_hazards,
    set_schedule,
    synchronize,
    take_hazards,
    take_host_waits,
    take_unreplayable,
)

_NO_REPORT = (
    "ended without a report of its hazards: let the script return, or call sys.exit instead of os._exit"
)
_AFTER_FAILURE_S = 10.0  # limit for the reports of peers
_REPORT_STACKS = signal.SIGUSR1  # sent to a late rank
_REPORT_S = 0.5  # time to write them


@dataclass(frozen=True)
class Script:
    path: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    timeout: float = 300


@dataclass
class ScheduledRun:
    """Results of a script under one schedule."""

    seed: int
    digests: list[str] = field(default_factory=list)  # order of the work on each rank's device
    status: int = 0
    output: str = ""
    errors: str = ""
    saved: dict[str, str] = field(default_factory=dict)  # digests of tensors, by file and key
    hazards: list[Hazard] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    unreplayable: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


def differences(reference: ScheduledRun, course: ScheduledRun) -> list[Difference]:
    """Return how a run differs from the reference."""
    changes = []
    if course.status != reference.status:
        last = course.errors.strip().splitlines()[-1:] if course.status else []
        changes.append(
            Difference(
                "exit status",
                f"exit status {course.status}, not {reference.status}{': ' + last[0] if last else ''}",
            )
        )
    lines_of_course, lines_of_reference = course.output.splitlines(), reference.output.splitlines()
    if lines_of_course != lines_of_reference:
        at = next(
            (i for i, (a, b) in enumerate(zip(lines_of_course, lines_of_reference, strict=False)) if a != b),
            min(len(lines_of_course), len(lines_of_reference)),
        )
        line, expected = (
            lines[at] if at < len(lines) else "nothing" for lines in (lines_of_course, lines_of_reference)
        )
        changes.append(Difference("output", f"line {at + 1} says {line!r}, not {expected!r}"))
    for name in sorted({*reference.saved, *course.saved}):
        if reference.saved.get(name) != course.saved.get(name):
            changes.append(
                Difference(name, f"{name} has other bits" if name in course.saved else f"{name} is not saved")
            )
    return changes


def import_shared(script: Script) -> None:
    """Import Dynamo once for all schedules, because optimizers and process groups import it, which takes seconds.

    Dynamo reads its environment variables when it is imported, so a script that names one imports Dynamo itself.
    """
    if "TORCH" not in Path(script.path).read_text(errors="replace"):
        importlib.import_module("torch._dynamo")


def run(script: Script, seeds: list[int], jobs: int) -> list[ScheduledRun]:
    """Run a script under each of `seeds`, `jobs` at a time. Return the runs in the order of the seeds."""
    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool, tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(index)) for index in range(len(seeds))]
        return list(pool.map(lambda seed, place: _run(script, seed, place), seeds, folders))


def _run(script: Script, seed: int, folder: Path) -> ScheduledRun:
    folder.mkdir()
    store = _store(script.ranks)
    children = [_fork(script, seed, rank, store, folder) for rank in range(script.ranks)]
    course = ScheduledRun(seed)
    for rank, end in enumerate(_wait(children, script.timeout)):
        prefix = f"rank {rank}: " if script.ranks > 1 else ""
        course.status = course.status or end.status
        course.output += "".join(
            prefix + line
            for line in (folder / f"output{rank}").read_text(errors="replace").splitlines(keepends=True)
        )
        course.errors += (folder / f"errors{rank}").read_text(errors="replace")
        if end.why:
            course.errors += f"{prefix}{end.why}\n"
        file = folder / f"seen{rank}.json"
        if not file.exists() and not end.status:
            course.status = course.status or 1
            course.errors += f"{prefix}{_NO_REPORT}\n"
        if file.exists():
            reported = json.loads(file.read_text())
            course.saved |= {prefix + name: digest for name, digest in reported.pop("saved").items()}
            course.hazards += [Hazard.from_json(fields) for fields in reported.pop("hazards")]
            for name, lines in reported.items():
                getattr(course, name).extend(lines)
    return course


def _store(ranks: int) -> dist.TCPStore | None:
    """Return the store of the ranks. It listens before they start, so that no run takes the port of another."""
    if ranks == 1:
        return None
    return dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)


def _fork(script: Script, seed: int, rank: int, store: dist.TCPStore | None, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _redirect(folder / f"output{rank}", folder / f"errors{rank}")
        if store is not None:
            os.environ |= _as_torchrun(rank, script.ranks, store.port)
        status = _execute(script, seed, rank, folder)
        sys.stdout.flush()
    finally:
        os._exit(status)


def _as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _redirect(output: Path, errors: Path) -> None:
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False))
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    faulthandler.register(_REPORT_STACKS)


def _execute(script: Script, seed: int, rank: int, folder: Path) -> int:
    torch.set_num_threads(1)
    # Forget what was counted before the fork, which would decide when cycles, and their tensors, are freed. Collections
    # need not visit the objects of the parent.
    gc.freeze()
    gc.collect()
    saved: dict[str, str] = {}
    _watch_saving(saved, folder)
    log_hazards()
    set_schedule(seed, rank)
    sys.argv = [script.path, *script.arguments]
    sys.path[0] = str(Path(script.path).resolve().parent)
    try:
        status = _run_as_main(script.path)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        if not status:
            synchronize()
            leave_peers(checks_sends=True)
    except BaseException:  # any end of the script
        traceback.print_exc()
        status = 1
    if status:
        with contextlib.suppress(RuntimeError):  # the store may be gone
            leave_peers(checks_sends=False)
    reported = {
        "saved": saved,
        "digests": [course()],
        "hazards": [vars(hazard) for hazard in take_hazards()],
        "waits": take_host_waits(),
        "unreplayable": take_unreplayable(),
    }
    (folder / f"seen{rank}.json").write_text(json.dumps(reported, default=str))
    return status


def _run_as_main(path: str) -> int:
    """Run a script, and return the exit status that it asks for."""
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0


def _watch_saving(saved: dict[str, str], folder: Path) -> None:
    """Record what is saved, and store it in the folder of this run, because other runs save the same files."""
    save, load = torch.save, torch.load

    def place_of(file: object) -> Path | None:
        if not isinstance(file, str | os.PathLike):
            return None
        return folder / hashlib.sha256(str(Path(file).resolve()).encode()).hexdigest()

    def watched_save(obj: object, f: object, *args: object, **kwargs: object) -> object:
        place = place_of(f)
        for key, tensor in _tensors(obj, Path(f).name if place else "a stream"):  # type: ignore[arg-type]
            saved[key] = hashlib.sha256(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            ).hexdigest()
        return save(obj, place or f, *args, **kwargs)

    def watched_load(f: object, *args: object, **kwargs: object) -> object:
        place = place_of(f)
        return load(place if place and place.exists() else f, *args, **kwargs)

    torch.save, torch.load = watched_save, watched_load


def _tensors(obj: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(obj, torch.Tensor):
        yield name, obj
    elif isinstance(obj, torch.nn.Module):
        yield from _tensors(obj.state_dict(), name)
    elif isinstance(obj, Mapping):
        for key, value in obj.items():
            yield from _tensors(value, f"{name}: {key}")
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            yield from _tensors(value, f"{name}: {index}")


@dataclass(frozen=True)
class _End:
    status: int
    why: str = ""  # reason if this process ended it


def _wait(children: list[int], timeout: float) -> list[_End]:
    """Wait for the ranks, and return how each ended. End those that are late or survive a failed one too long."""
    ends: dict[int, _End] = {}
    until, why = time.monotonic() + timeout, f"ended after {timeout:g} s"
    while len(ends) < len(children):
        for rank, child in enumerate(children):
            ended, status = os.waitpid(child, os.WNOHANG) if rank not in ends else (0, 0)
            if not ended:
                continue
            ends[rank] = _End(os.waitstatus_to_exitcode(status))
            if status and time.monotonic() + _AFTER_FAILURE_S < until:
                until = time.monotonic() + _AFTER_FAILURE_S
                why = f"ended, because it went on for {_AFTER_FAILURE_S:g} s after rank {rank} had failed"
        if time.monotonic() > until:
            late = [(rank, child) for rank, child in enumerate(children) if rank not in ends]
            for _, child in late:
                os.kill(child, _REPORT_STACKS)
            time.sleep(_REPORT_S)
            for rank, child in late:
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                ends[rank] = _End(os.waitstatus_to_exitcode(status), why)
        time.sleep(0.01)
    return [ends[rank] for rank in range(len(children))]
