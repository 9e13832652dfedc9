"""The command: every fault, then the clauses that caught none, and the kill matrix."""

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

from conformance import faults
from conformance.faults.earlier_kills import known, remember
from conformance.faults.kill_matrix import IdleClause, Kill, Kills, read_kills, write_kills
from conformance.faults.trials import (
    RedWithoutFault,
    asked_about,
    fault_ids,
    idle,
    killing,
    proven,
    takes_ranks,
)
from conformance.faults.worker import Crew, Trial
from conformance.judge import environment
from conformance.judge.clauses import all_clauses
from conformance.judge.errors import raise_stopped_by_user

AS_EXPECTED, NOT_AS_EXPECTED, NOT_JUDGED, STOPPED = 0, 1, 2, 130
_say = functools.partial(print, flush=True)


def main(words: Sequence[str]) -> int:
    options = _options(words)
    ids = [fault_id for fault_id in fault_ids() if options.only in fault_id]
    if options.list:
        _say("\n".join(ids))
        return AS_EXPECTED
    signal.signal(signal.SIGTERM, raise_stopped_by_user)
    kills = options.known
    began = time.monotonic() - kills.seconds
    try:
        clauses = asked_about(ids) if options.only else ()
        with Crew(options.subject, options.jobs, clauses=clauses) as crew:
            _judge_faults(crew, kills, ids, Path(options.out))
            if options.clauses:
                _judge_idle_clauses(crew, kills, Path(options.out))
        if not all(row.asked for row in kills.idle or []):
            with Crew(options.subject, options.jobs, "full") as crew:  # which has tests that the others lack
                _judge_idle_clauses(crew, kills, Path(options.out))
        kills.complete = not options.resume or {kill.fault for kill in kills.kills} >= set(fault_ids())
    except RedWithoutFault as error:
        _say(f"{options.subject} is red without a fault: {error}")
        return NOT_JUDGED
    except KeyboardInterrupt:
        _say("stopped")
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
        prog="python -m conformance.faults",
        description=faults.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--subject", default="impl", help="the right implementation that the faults are injected into")
    add("--only", default="", metavar="WORD", help="only faults whose name holds this")
    add("--clauses", action="store_true", help="try also each clause that was the first to catch nothing")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once (default: one a core)")
    add("--out", default="report/kills.json", help="where the kill matrix goes")
    add("--resume", action="store_true", help="keep what lies at --out, judge only what it lacks")
    add("--remember", action="store_true", help="have later runs begin with what kills today: killers.json")
    add("--list", action="store_true", help="only name the faults")
    options = parser.parse_args(words)
    if options.clauses and options.only:
        parser.error("--clauses needs every fault: leave out --only")
    if options.only and not any(options.only in fault_id for fault_id in fault_ids()):
        parser.error(f"no fault's name holds {options.only!r}; --list tells them all")
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; at least one is needed")
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    options.known = Kills(options.subject, environment.commit(), began)
    if options.resume and Path(options.out).exists():
        try:
            options.known = _left_by(Path(options.out), options.subject)
        except ValueError as error:
            parser.error(str(error))
    return options


def _left_by(out: Path, subject: str) -> Kills:
    """What an unfinished run has written.

    Raises:
        ValueError: it is no kill matrix, or one of another subject or commit.
    """
    found, commit = read_kills(out), environment.commit()
    if not commit or commit.endswith("-dirty"):
        raise ValueError(
            f"what {out} is of cannot be told from what is here: {commit or 'no commit'}; judge anew"
        )
    for name, expected in {"subject": subject, "commit": commit}.items():
        if found[name] != expected:
            raise ValueError(
                f"{out} is of {name} {found[name]}, not {expected}: judge anew, or to another --out"
            )
    return Kills.of(found | {"complete": False})


def _judge_faults(crew: Crew, kills: Kills, ids: Sequence[str], out: Path) -> None:
    """Those that are seen in this process first: those on ranks take the longest."""
    judged = {kill.fault for kill in kills.kills}
    green = {kill.nodeid for kill in kills.kills}
    left = sorted((one for one in ids if one not in judged), key=takes_ranks)
    first = known(out).faults

    def trial(fault_id: str) -> Trial[Kill]:
        return proven(killing(kills.subject, fault_id, first.get(fault_id, "")), kills.subject, green)

    for done, found in enumerate(crew.run(map(trial, left)), start=1):
        kills.kills.append(found)
        write_kills(out, kills)  # whatever ends this run
        _say(f"[{done}/{len(left)}] {found.seconds:6.1f} s  {found.fault}: {_status(found)}")


def _judge_idle_clauses(crew: Crew, kills: Kills, out: Path) -> None:
    busy = {kill.clause for kill in kills.kills}
    kills.idle = [row for row in kills.idle or [] if row.asked and row.clause not in busy]
    judged = busy.union(row.clause for row in kills.idle)
    left = [clause_id for clause_id in all_clauses() if clause_id not in judged]
    green = {kill.nodeid for kill in kills.kills}
    first = known(out).clauses
    trials = (idle(kills.subject, clause_id, green, first.get(clause_id, "")) for clause_id in left)
    for done, found in enumerate(crew.run(trials), start=1):
        kills.idle.append(found)
        write_kills(out, kills)
        _say(f"[{done}/{len(left)}] {found.clause}: {_use(found)}")


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
    use = f"kills {idle.kills}, the fault {idle.tried} that was tried"
    return f"{use}; STALE REASON: {idle.why}" if idle.why else use


def sum_up(kills: Kills) -> int:
    """Say what became of the whole, with every fault that survived and every clause that kills nothing."""
    idle = kills.idle or []
    _say(f"{sum(kill.killed for kill in kills.kills)} of {len(kills.kills)} killed in {kills.seconds:.0f} s")
    for kill in kills.kills:
        if kill.why or not kill.killed:
            _say(f"{kill.fault}: {_status(kill)}")
    for row in idle:
        if row.why or not row.kills:
            _say(f"{row.clause}: {_use(row)}")
    as_expected = all(row.is_due for row in [*kills.kills, *idle])
    return AS_EXPECTED if as_expected else NOT_AS_EXPECTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
