"""The runner of all measures: their options, progress, interruption and table of results."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance import strength
from conformance.judge.errors import raise_stopped_by_user
from conformance.judge.sandbox import environment
from conformance.strength import false_positives
from conformance.strength.faults import measure as faults
from conformance.strength.faults.trials import RedWithoutFault
from conformance.strength.mutation import measure as mutation
from conformance.strength.results import Table, read_table, write_table

AS_EXPECTED, NOT_AS_EXPECTED, NOT_JUDGED, STOPPED = 0, 1, 2, 130
# Each module has SUBJECT, OUT, `add_options`, `check_options`, `judge` and `sum_up`. `check_options` returns the
# settings of the table, and `sum_up` whether there are problems.
MEASURES: dict[str, Any] = {"faults": faults, "mutation": mutation, "false-positives": false_positives}
_print = functools.partial(print, flush=True)


def main(words: Sequence[str]) -> int:
    options = _options(words)
    measure, table = MEASURES[options.measure], options.table
    if options.listed:
        _print("\n".join(options.listed))
        return AS_EXPECTED
    signal.signal(signal.SIGTERM, raise_stopped_by_user)
    began = time.monotonic() - table.seconds

    def write() -> None:
        table.seconds = round(time.monotonic() - began, 1)
        write_table(options.out, table)

    try:
        with contextlib.closing(measure.judge(options, table)) as rows:
            for place, row in rows:
                table.rows.append(row)
                write()  # now, because the run may be stopped
                _print(f"[{place}] {row.seconds:6.1f} s  {row.name}: {row.text}")
    except RedWithoutFault as error:
        _print(f"{options.subject} is red without a fault: {error}")
        return NOT_JUDGED
    except RuntimeError as error:
        _print(f"stopped, because {error}")
        return NOT_JUDGED
    except KeyboardInterrupt:
        _print("stopped")
        return STOPPED
    write()
    problems = measure.sum_up(options, table, _print)
    return NOT_AS_EXPECTED if problems else AS_EXPECTED


def _options(words: Sequence[str]) -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    prog = "python -m conformance.strength"
    parser = argparse.ArgumentParser(prog=prog, description=strength.__doc__, formatter_class=as_written)
    parsers = parser.add_subparsers(dest="measure", required=True, metavar="|".join(MEASURES))
    for name, measure in MEASURES.items():
        own = parsers.add_parser(name, description=measure.__doc__, formatter_class=as_written)
        add = own.add_argument
        add("--subject", default=measure.SUBJECT, help=f"a correct package (default: {measure.SUBJECT})")
        add("--jobs", type=int, default=os.cpu_count() or 1, help="number of workers (default: one per core)")
        add("--out", type=Path, default=measure.OUT, help=f"file for the results (default: {measure.OUT})")
        add("--resume", action="store_true", help="keep the results at --out and judge only what is missing")
        measure.add_options(own)
    options = parser.parse_args(words)
    measure, options.listed = MEASURES[options.measure], []
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        if options.jobs < 1:
            raise ValueError(f"--jobs is {options.jobs}; expected at least 1")
        settings = measure.check_options(options)
        options.table = Table(options.measure, options.subject, environment.commit(), began, settings)
        if options.resume and options.out.exists():
            options.table = _read_unfinished(options.out, options.table)
    except ValueError as error:
        parsers.choices[options.measure].error(str(error))
    return options


def _read_unfinished(out: Path, new: Table) -> Table:
    """Return the table of an unfinished run.

    Raises:
        ValueError: the file has no such table, or that of another subject, setting or commit.
    """
    table = read_table(out, new.measure)
    if not new.commit or new.commit.endswith("-dirty"):
        raise ValueError(
            f"{out} cannot be resumed, because the files here match no commit ({new.commit or 'unknown'}); "
            "run without --resume"
        )
    for name in ("subject", "commit", "settings"):
        if getattr(table, name) != getattr(new, name):
            raise ValueError(
                f"{out} has the {name} {getattr(table, name)}, expected {getattr(new, name)}; "
                "run without --resume or with another --out"
            )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
