"""Somebody's script under one schedule after the other, each in a process forked before anything has run."""

from __future__ import annotations

import concurrent.futures
import hashlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from conformance.simulator.control import (
    log_hazards,
    set_schedule,
    synchronize,
    take_hazards,
    take_host_waits,
    take_unreplayable,
)


@dataclass(frozen=True)
class Script:
    path: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    timeout: float = 300


@dataclass
class Course:
    """What a script did under one schedule."""

    seed: int
    status: int = 0
    output: str = ""
    errors: str = ""
    saved: dict[str, str] = field(default_factory=dict)  # digests of tensors, by file and key
    hazards: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    unreplayable: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    what: str
    told: str

    def __str__(self) -> str:
        return self.told


def differences(reference: Course, course: Course) -> list[Difference]:
    """Where a course left the reference."""
    found = []
    if course.status != reference.status:
        last = course.errors.strip().splitlines()[-1:] if course.status else []
        found.append(
            Difference(
                "exit status",
                f"exit status {course.status}, not {reference.status}{': ' + last[0] if last else ''}",
            )
        )
    ours, theirs = course.output.splitlines(), reference.output.splitlines()
    if ours != theirs:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        line, expected = (lines[at] if at < len(lines) else "nothing" for lines in (ours, theirs))
        found.append(Difference("output", f"line {at + 1} says {line!r}, not {expected!r}"))
    for name in sorted({*reference.saved, *course.saved}):
        if reference.saved.get(name) != course.saved.get(name):
            found.append(
                Difference(name, f"{name} has other bits" if name in course.saved else f"{name} is not saved")
            )
    return found


def run(script: Script, seeds: list[int], jobs: int) -> list[Course]:
    """The courses of a script under `seeds`, in their order, `jobs` at a time."""
    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool, tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(index)) for index in range(len(seeds))]
        return list(pool.map(lambda seed, place: _run(script, seed, place), seeds, folders))


def _run(script: Script, seed: int, folder: Path) -> Course:
    folder.mkdir()
    port = _free_port()
    children = [_fork(script, seed, rank, port, folder) for rank in range(script.ranks)]
    statuses = _wait(children, time.monotonic() + script.timeout)
    course = Course(seed)
    for rank, status in enumerate(statuses):
        prefix = f"rank {rank}: " if script.ranks > 1 else ""
        course.status = course.status or status
        course.output += "".join(
            prefix + line
            for line in (folder / f"output{rank}").read_text(errors="replace").splitlines(keepends=True)
        )
        course.errors += (folder / f"errors{rank}").read_text(errors="replace")
        if status == -signal.SIGKILL:
            course.errors += f"{prefix}ended after {script.timeout:g} s\n"
        seen = folder / f"seen{rank}.json"
        if seen.exists():
            told = json.loads(seen.read_text())
            course.saved |= {prefix + name: digest for name, digest in told.pop("saved").items()}
            for name, lines in told.items():
                getattr(course, name).extend(lines)
    return course


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _fork(script: Script, seed: int, rank: int, port: int, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _redirect(folder / f"output{rank}", folder / f"errors{rank}")
        if script.ranks > 1:
            size = str(script.ranks)
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
            os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        status = _execute(script, seed, rank, folder / f"seen{rank}.json")
        sys.stdout.flush()
    finally:
        os._exit(status)


def _redirect(output: Path, errors: Path) -> None:
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False))
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)


def _execute(script: Script, seed: int, rank: int, seen: Path) -> int:
    torch.set_num_threads(1)
    saved: dict[str, str] = {}
    _watch_saving(saved)
    log_hazards()
    set_schedule(seed, rank)
    sys.argv = [script.path, *script.arguments]
    sys.path[0] = str(Path(script.path).resolve().parent)
    status = 0
    try:
        runpy.run_path(script.path, run_name="__main__")
        synchronize()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # whatever it is, it is how the script ends
        traceback.print_exc()
        status = 1
    told = {
        "saved": saved,
        "hazards": take_hazards(),
        "waits": take_host_waits(),
        "unreplayable": take_unreplayable(),
    }
    seen.write_text(json.dumps(told, default=str))
    return status


def _watch_saving(saved: dict[str, str]) -> None:
    save = torch.save

    def watched(obj: object, f: object, *args: object, **kwargs: object) -> object:
        file = Path(f).name if isinstance(f, str | os.PathLike) else "a stream"
        for key, tensor in _tensors(obj, file):
            saved[key] = hashlib.sha256(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            ).hexdigest()
        return save(obj, f, *args, **kwargs)

    torch.save = watched


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


def _wait(children: list[int], until: float) -> list[int]:
    """Exit statuses; who is not through by then is ended, and so are the peers of one that failed, a little later."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    statuses[child] = os.waitstatus_to_exitcode(status)
        if any(statuses.values()):
            until = min(until, time.monotonic() + 10)
        if time.monotonic() > until:
            for child in children:
                if child not in statuses:
                    os.kill(child, signal.SIGKILL)
            until = float("inf")
        time.sleep(0.01)
    return [statuses[child] for child in children]
