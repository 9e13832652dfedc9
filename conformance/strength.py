"""How strong the suite is: each planted fault is judged by the unmodified suite, which must turn red.

    python -m conformance.strength                 every fault, planted in impl; prints and writes the kill matrix
    python -m conformance.strength --list          the faults by name
    python -m conformance.strength --only scale    those whose name holds a word

The kill matrix goes to `report/kills.json`, where the next `ci/gate` finds it and draws it into its report.

A fault is judged in a process of its own, forked from one that has torch imported already. It counts as killed by
the first test that fails; nothing tells the suite what was planted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.clauses import HERE, all_clauses
from conformance.errors import stop_by_hand
from conformance.plants import CATALOGUE, find, generated
from conformance.results import RED

_DEADLINE_S = 300.0
# Dynamo, since the first step of an optimizer imports it.
_PRELOAD = ["torch", "torch._dynamo", "hypothesis", "pytest", "conformance.plugin", "conformance.plants"]


@dataclass(frozen=True)
class Kill:
    """What the suite made of one planted fault."""

    plant: str
    killed: bool
    clause: str  # the clause whose test failed first; empty if none did
    nodeid: str
    how: str  # failed, hang, crash
    seconds: float
    says: str = ""
    thread: str = ""
    why: str = ""  # the reason in `survivors.toml` if nothing can catch it


def plant_ids() -> list[str]:
    return [*CATALOGUE, *generated.plant_ids()]


def broken_name(plant_id: str) -> str:
    """The public name in which a plant lies."""
    return find(plant_id).breaks


def test_files(plant_id: str) -> list[Path]:
    """The test files of every area that has a clause about the broken name; all of them run until one is red."""
    name = broken_name(plant_id)
    areas = {
        clause.area
        for clause in all_clauses().values()
        if any(_is_about(item, name) for item in clause.covers)
    }
    return _files_of(areas)


def _files_of(areas: Iterable[str]) -> list[Path]:
    return [
        file
        for area in sorted(areas)
        for file in sorted(_stem(area).parent.glob(f"test_{_stem(area).name}*.py"))
    ]


def _stem(area: str) -> Path:
    return HERE.joinpath(*area.split("."))


def _is_about(item: str, name: str) -> bool:
    return item == name or item.startswith((f"{name}.", f"{name}("))


def judge(plant_id: str, package: str = "impl", profile: str = "quick") -> Kill:
    """Run the suite on `package` with one fault planted, in a fresh process."""
    files = test_files(plant_id)
    if not files:  # pytest without files would run everything
        raise LookupError(f"no clause is about {broken_name(plant_id)}")
    return _judge(plant_id, f"{package}+{plant_id}", files, profile)


def judge_unplanted(package: str) -> Kill:
    """Without a fault the suite must be green: on a red baseline every kill would be an illusion."""
    return _judge("nothing", package, _files_of({clause.area for clause in all_clauses().values()}), "quick")


def _judge(plant_id: str, spec: str, files: Sequence[Path], profile: str) -> Kill:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plant-") as directory:
        # Not a daemon: tests start ranks, and daemons may start nothing.
        process = context.Process(target=_run, args=(spec, files, profile, directory))
        process.start()
        process.join(_DEADLINE_S)
        hung = process.is_alive()
        if hung:
            process.kill()
            process.join()
        report = Path(directory, "report.json")
        red = _first_red(json.loads(report.read_text())) if report.is_file() else None
        died = process.exitcode is not None and process.exitcode < 0
        how = "hang" if hung else "crash" if died else red["outcome"] if red else ""
    found = CATALOGUE.get(plant_id)
    return Kill(
        plant=plant_id,
        killed=bool(how),
        clause=red["clause"] if red else "",
        nodeid=red["nodeid"] if red else "",
        how=how,
        seconds=round(time.monotonic() - began, 2),
        says=found.says if found else "",
        thread=found.thread if found else "",
        why=excuses().get(plant_id, ""),
    )


def excuses() -> dict[str, str]:
    """Why a fault may survive, by its id."""
    return tomllib.loads((HERE / "survivors.toml").read_text())


def _run(spec: str, files: Sequence[Path], profile: str, directory: str) -> None:
    import pytest  # noqa: PLC0415 preloaded in the fork server; here it is a lookup

    with contextlib.ExitStack() as stack:
        log = stack.enter_context(Path(directory, "log").open("w"))
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        words = [
            "-x",
            "-q",
            "--no-shrink",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            f"--subject={spec}",
        ]
        pytest.main(
            [*words, f"--profile={profile}", f"--report={directory}", *map(str, files)],
            plugins=[_QuickFirst()],
        )


class _QuickFirst:
    """Tests of one example before those of many: most faults die in them, in a tenth of the time."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: hasattr(getattr(item, "obj", None), "hypothesis"))


def _first_red(report: dict[str, Any]) -> dict[str, Any] | None:
    return next((test for test in report["tests"] if test["outcome"] in RED), None)


def judge_all(ids: Sequence[str], package: str, jobs: int) -> Generator[Kill]:
    threads = ThreadPoolExecutor(jobs)
    try:
        yield from threads.map(lambda plant_id: judge(plant_id, package), ids)
    finally:  # at once if somebody stops it in the middle
        threads.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.kill()


def write_kills(file: Path, package: str, kills: Sequence[Kill], began: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "subject": package,
        "began": datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - began, 1),
    }
    file.write_text(json.dumps(head | {"kills": [asdict(kill) for kill in kills]}, indent=1))


def read_kills(file: Path) -> dict[str, Any]:
    """A kill matrix as `write_kills` leaves it.

    Raises:
        ValueError: the file is not there, or is something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = [Kill(**kill) for kill in found["kills"]]
        return {"subject": found["subject"], "began": found["began"], "seconds": found["seconds"]} | {
            "kills": [asdict(row) for row in rows]
        }
    except OSError as error:
        raise ValueError(f"there is no kill matrix at {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is no kill matrix; python -m conformance.strength writes one") from None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.strength", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--subject", default="impl", help="the right implementation that the faults are planted in"
    )
    parser.add_argument("--only", default="", metavar="WORD", help="only faults whose name holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", default="report/kills.json", help="where the kill matrix goes")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(words)
    ids = [plant_id for plant_id in plant_ids() if options.only in plant_id]
    if options.list:
        print("\n".join(ids))  # noqa: T201 the command's output
        return 0
    began = time.time()
    baseline = judge_unplanted(options.subject)
    if baseline.killed:
        print(f"{options.subject} is red without a fault: {baseline.clause} {baseline.nodeid}")  # noqa: T201
        return 2
    kills: list[Kill] = []
    signal.signal(signal.SIGTERM, stop_by_hand)
    with contextlib.closing(judge_all(ids, options.subject, options.jobs)) as judged:
        try:
            for kill in judged:
                kills.append(kill)
                fate = f"killed by {kill.clause or kill.nodeid} ({kill.how})" if kill.killed else "SURVIVED"
                print(f"[{len(kills)}/{len(ids)}] {kill.seconds:6.1f} s  {kill.plant}: {fate}", flush=True)  # noqa: T201
        except KeyboardInterrupt:
            print(f"stopped by hand after {len(kills)} of {len(ids)} faults")  # noqa: T201
    write_kills(Path(options.out), options.subject, kills, began)
    survivors = [kill.plant for kill in kills if not kill.killed]
    print(f"{len(kills) - len(survivors)} of {len(kills)} killed")  # noqa: T201
    return 1 if survivors or len(kills) < len(ids) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
