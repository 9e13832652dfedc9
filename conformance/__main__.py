"""Judge a package against the installed torch and write a report: `tandem-judge your.package`.

    tandem-judge your.package                         everything that it exposes, in the profile quick
    tandem-judge your.package nn.utils.clip_grad      one area, one clause, or all clauses that begin so
    tandem-judge your.package 'conformance/…::test'   one test, as the replay commands of a report name it
    tandem-judge your.package --since old/report.json also what broke, was fixed or is new
    python -m conformance your.package                the same as the first

The package is imported as usual, or from the current folder. Exit codes: 0 green, 1 red, 2 invalid input (a bad option,
a bad claims file, or a package that cannot be imported). With --since, 1 means that something broke.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from conformance.cli import options
from conformance.cli.judging import chosen_tests, judge, tail
from conformance.cli.running import Stop
from conformance.cli.terminal import print_broken, print_verdict, progress_on
from conformance.judge.clauses import HERE
from conformance.report import conclude
from conformance.report.baseline import compare, exit_code_since, read_report, sentences


def main(words: Sequence[str] | None = None) -> int:
    _make_folder_importable()
    parsed = _options(words)
    is_replay = bool(parsed.what) and parsed.out is None and "::" in parsed.what[0]
    with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
        # A replay does not overwrite the report that its command is from.
        out = Path(scratch if is_replay else parsed.out or options.REPORT)
        out.mkdir(parents=True, exist_ok=True)
        return _judge(parsed, out, is_replay)


def _judge(parsed: argparse.Namespace, out: Path, is_replay: bool) -> int:
    console, stop = Console(), Stop()
    with stop.listening():
        with progress_on(console) as progress:
            report = judge(parsed, out, progress, stop)
        if is_replay:
            console.print(tail(out), markup=False, highlight=False, soft_wrap=True)
        print_broken(console, report)
        changes = compare(parsed.earlier, report) if parsed.earlier else None
        lines = sentences(changes, most=20) if changes else []
        report["baseline"] = asdict(changes) if changes else None
        code = conclude(
            report,
            out,
            lambda report: print_verdict(console, report, None if is_replay else out, lines),
        )
        return exit_code_since(changes, report) if changes else code


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tandem-judge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "subject", type=options.subject, help="a package that has torch's paths, or impl, or torch"
    )
    parser.add_argument("what", nargs="*", help="clauses, beginnings of clauses, or tests (default: all)")
    options.add_judging(parser)
    parser.add_argument(
        "--since",
        type=options.file,
        metavar="REPORT.JSON",
        help="an earlier report; fail only for what broke",
    )
    parser.add_argument("-n", type=options.workers, default="auto", help="processes (default: one per core)")
    parsed = parser.parse_intermixed_args(words)
    try:
        chosen_tests(parsed.what)
        # The run may overwrite the earlier report.
        parsed.earlier = read_report(Path(parsed.since)) if parsed.since else None
    except ValueError as error:
        parser.error(str(error))
    return parsed


def _make_folder_importable() -> None:
    """Add the current folder to the import path of this process and of those that it starts.

    A package `conformance` in that folder does not replace this one.
    """
    here = os.getcwd()
    paths = [os.path.abspath(word) for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    if Path(here, HERE.name).exists() and Path(here) != HERE.parent:
        paths.append(str(HERE.parent))
        os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, here])
    if here not in sys.path:
        sys.path.append(here)


if __name__ == "__main__":
    sys.exit(main())
