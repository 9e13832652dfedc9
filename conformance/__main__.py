"""Judge a package against the torch that is installed, and write a report to carry: `tandem-judge your.package`.

    tandem-judge your.package                         all that it exposes, in the profile quick
    tandem-judge your.package nn.utils.clip_grad      one area; a clause, or the beginning of some, will do
    tandem-judge your.package 'conformance/…::test'   one test, as a report's replay commands name it
    python -m conformance your.package                the same

The package is found as Python finds it, and in the folder that this is called in. Exit code 0 is green, 1 red, 2 that
what was handed in has to be mended first.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from conformance.judge import options
from conformance.judge.clauses import HERE
from conformance.judge.judging import chosen_tests, judged, tail
from conformance.judge.running import Stop
from conformance.judge.terminal import progress_on, say_broken, say_verdict
from conformance.report import conclude


def main(words: Sequence[str] | None = None) -> int:
    _find_here()
    asked = _options(words)
    is_replay = bool(asked.what) and asked.out is None and "::" in asked.what[0]
    with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
        # A test that is replayed leaves the report that it comes from as it is.
        out = Path(scratch if is_replay else asked.out or options.REPORT)
        out.mkdir(parents=True, exist_ok=True)
        return _judge(asked, out, is_replay)


def _judge(asked: argparse.Namespace, out: Path, is_replay: bool) -> int:
    console, stop = Console(), Stop()
    with stop.listening():
        with progress_on(console) as progress:
            report = judged(asked, out, progress, stop)
        if is_replay:
            console.print(tail(out), markup=False, highlight=False, soft_wrap=True)
        say_broken(console, report)
        return conclude(
            report,
            out,
            lambda report: say_verdict(console, report, None if is_replay else out),
        )


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tandem-judge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subject", type=options.subject, help="a package with torch's paths; impl, torch")
    parser.add_argument("what", nargs="*", help="clauses, beginnings of clauses, or tests (default: all)")
    options.add_judging(parser)
    parser.add_argument("-n", type=options.workers, default="auto", help="processes (default: one a core)")
    asked = parser.parse_args(words)
    try:
        chosen_tests(asked.what, asked.subject)
    except ValueError as error:
        parser.error(str(error))
    return asked


def _find_here() -> None:
    """Let the subject lie in this folder, for all processes to come; a `conformance` that lies there is not ours."""
    here = os.getcwd()
    found = [os.path.abspath(word) for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    if Path(here, HERE.name).exists() and Path(here) != HERE.parent:
        found.append(str(HERE.parent))
        os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, here])
    if here not in sys.path:
        sys.path.append(here)


if __name__ == "__main__":
    sys.exit(main())
