"""The command that judges faults and idle clauses and writes the kill matrix."""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conformance.judge.clauses import all_clauses
from conformance.judge.errors import raise_stopped_by_user
from conformance.judge.sandbox import environment
from conformance.strength import faults
from conformance.strength.faults.earlier_kills import load_earlier_kills, remember
from conformance.strength.faults.kill_matrix import IdleClause, Kill, Kills, read_kills, write_kills
from conformance.strength.faults.trials import (
    RedWithoutFault,
    clauses_about,
    fault_ids,
    judge_clause,
    judge_fault,
    needs_ranks,
    verify_kill,
)
from conformance.strength.faults.worker import Trial, WorkerPool

AS_EXPECTED, NOT_AS_EXPECTED, NOT_JUDGED, STOPPED = 0, 1, 2, 130
_print = functools.partial(print, flush=True)


def main(words: Sequence[str]) -> int:
    options = _options(words)
    ids = [fault_id for fault_id in fault_ids() if options.only in fault_id]
    if options.list:
        _print("\n".join(ids))
        return AS_EXPECTED
    signal.signal(signal.SIGTERM, raise_stopped_by_user)
    kills = options.kills
    began = time.monotonic() - kills.seconds
    try:
        clauses = clauses_about(ids) if options.only else ()
        with WorkerPool(options.subject, options.jobs, clauses=clauses) as pool:
            _judge_faults(pool, kills, ids, Path(options.out))
            if options.clauses:
                _judge_idle_clauses(pool, kills, Path(options.out))
        if not all(row.could_run for row in kills.idle or []):
            # The profile full has tests of clauses that have none in the profile quick.
            with WorkerPool(options.subject, options.jobs, "full") as pool:
                _judge_idle_clauses(pool, kills, Path(options.out))
        kills.complete = not options.resume or {kill.fault for kill in kills.kills} >= set(fault_ids())
    except RedWithoutFault as error:
        _print(f"{options.subject} is red without a fault: {error}")
        return NOT_JUDGED
    except KeyboardInterrupt:
        _print("stopped")
        return STOPPED
    finally:
        kills.seconds = round(time.monotonic() - began, 1)
        if kills.kills:
            write_kills(Path(options.out), kills)
    if options.remember:
        remember(kills)
    return sum_up(kills)


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.strength.faults",
        description=faults.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--subject", default="impl", help="the correct implementation to inject faults into (default: impl)")
    add("--only", default="", metavar="WORD", help="only faults whose name contains this word")
    add(
        "--clauses",
        action="store_true",
        help="also find a fault for each clause that was the first to kill none",
    )
    add("--jobs", type=int, default=os.cpu_count() or 1, help="number of workers (default: one per core)")
    add("--out", default="report/kills.json", help="file for the kill matrix (default: report/kills.json)")
    add("--resume", action="store_true", help="keep the kill matrix at --out and judge only what is missing")
    add("--remember", action="store_true", help="record the killing tests in killers.json, for later runs")
    add("--list", action="store_true", help="only list the faults")
    options = parser.parse_args(words)
    if options.clauses and options.only:
        parser.error("--clauses needs all faults; remove --only")
    if options.only and not any(options.only in fault_id for fault_id in fault_ids()):
        parser.error(f"no fault has {options.only!r} in its name; --list shows the names")
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; expected at least 1")
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    options.kills = Kills(options.subject, environment.commit(), began)
    if options.resume and Path(options.out).exists():
        try:
            options.kills = _read_unfinished(Path(options.out), options.subject)
        except ValueError as error:
            parser.error(str(error))
    return options


def _read_unfinished(out: Path, subject: str) -> Kills:
    """Return the kill matrix of an unfinished run.

    Raises:
        ValueError: the file is not a kill matrix, or is of another subject or commit.
    """
    matrix, commit = read_kills(out), environment.commit()
    if not commit or commit.endswith("-dirty"):
        raise ValueError(
            f"{out} cannot be resumed, because the files here match no commit ({commit or 'unknown'}); "
            "run without --resume"
        )
    for name, expected in {"subject": subject, "commit": commit}.items():
        if matrix[name] != expected:
            raise ValueError(
                f"{out} has the {name} {matrix[name]}, expected {expected}; "
                "run without --resume or with another --out"
            )
    return Kills.of(matrix | {"complete": False})


def _judge_faults(pool: WorkerPool, kills: Kills, ids: Sequence[str], out: Path) -> None:
    """Judge all faults. Faults that need ranks take the longest and come last."""
    judged = {kill.fault for kill in kills.kills}
    green = {kill.nodeid for kill in kills.kills}
    left = sorted((fault_id for fault_id in ids if fault_id not in judged), key=needs_ranks)
    first = load_earlier_kills(out).faults

    def trial(fault_id: str) -> Trial[Kill]:
        return verify_kill(
            judge_fault(kills.subject, fault_id, first.get(fault_id, "")), kills.subject, green
        )

    for done, kill in enumerate(pool.run(map(trial, left)), start=1):
        kills.kills.append(kill)
        write_kills(out, kills)  # now, because the run may be stopped
        _print(f"[{done}/{len(left)}] {kill.seconds:6.1f} s  {kill.fault}: {_status(kill)}")


def _judge_idle_clauses(pool: WorkerPool, kills: Kills, out: Path) -> None:
    busy = {kill.clause for kill in kills.kills}
    kills.idle = [row for row in kills.idle or [] if row.could_run and row.clause not in busy]
    judged = busy.union(row.clause for row in kills.idle)
    left = [clause_id for clause_id in all_clauses() if clause_id not in judged]
    green = {kill.nodeid for kill in kills.kills}
    first = load_earlier_kills(out).clauses
    trials = (judge_clause(kills.subject, clause_id, green, first.get(clause_id, "")) for clause_id in left)
    for done, row in enumerate(pool.run(trials), start=1):
        kills.idle.append(row)
        write_kills(out, kills)
        _print(f"[{done}/{len(left)}] {row.clause}: {_use(row)}")


def _status(kill: Kill) -> str:
    if not kill.killed:
        return f"survived, reason: {kill.why}" if kill.why else "SURVIVED"
    text = f"killed by {kill.clause or kill.nodeid} ({kill.how})"
    return f"{text}; STALE REASON: {kill.why}" if kill.why else text


def _use(idle: IdleClause) -> str:
    if not idle.kills:
        return (
            f"kills none of {idle.tried}, reason: {idle.why}" if idle.why else f"KILLS NONE of {idle.tried}"
        )
    use = f"kills {idle.kills}, fault number {idle.tried} that was tried"
    return f"{use}; STALE REASON: {idle.why}" if idle.why else use


def sum_up(kills: Kills) -> int:
    """Print a summary with the faults that survived and the clauses that kill none, and return the exit code."""
    idle = kills.idle or []
    _print(
        f"{sum(kill.killed for kill in kills.kills)} of {len(kills.kills)} killed in {kills.seconds:.0f} s"
    )
    for kill in kills.kills:
        if kill.why or not kill.killed:
            _print(f"{kill.fault}: {_status(kill)}")
    for row in idle:
        if row.why or not row.kills:
            _print(f"{row.clause}: {_use(row)}")
    as_expected = all(row.is_due for row in [*kills.kills, *idle])
    return AS_EXPECTED if as_expected else NOT_AS_EXPECTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
