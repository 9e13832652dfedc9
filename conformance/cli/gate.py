"""The gate: judge a subject, time it against torch, train a real model with it, and write a report with a verdict.

    python -m conformance.cli.gate --subject impl --profile quick --out report
    python -m conformance.cli.gate --subject your.package --parts judging    only the judging, like tandem-judge
    python -m conformance.cli.gate --baseline earlier/report.json            also what broke, was fixed or became slower

Each phase runs in its own process with a deadline, so that a subject that hangs or kills its process still gets a
verdict, which is red. Exit codes: 0 green, 1 red, 2 invalid input (a bad option, a bad claims file, or a package that
cannot be imported).
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from conformance.cli.judging import DEADLINES_S, judge, tail
from conformance.cli.options import REPORT, of_gate
from conformance.cli.running import Stop, run
from conformance.cli.terminal import PhaseProgress, print_broken, print_verdict, progress_on
from conformance.judge.heading import CHECKOUT
from conformance.report import conclude
from conformance.report.baseline import compare, read_report, sentences

_NO_CHECKOUT = (
    "the gate also times the subject, which needs the folder benchmarks of a checkout, but this is an installed "
    "package; judge with tandem-judge, or run ci/gate in a clone of the repository"
)


def main(words: Sequence[str]) -> int:
    if not CHECKOUT:
        print(_NO_CHECKOUT, file=sys.stderr)  # noqa: T201 the command's output
        return 2
    options, baseline = _options(words)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    stop = Stop()
    with stop.listening():
        with progress_on(console) as progress:
            report = judge(options, out, progress, stop)
            print_broken(console, report)
            for name, key, run_phase in (("timing", "speed", _time), ("training", "training", _train)):
                is_next = (
                    name in options.parts.split(",") and not report["ended_early"] and not stop.is_requested
                )
                report[key] = (
                    _reason_not_to_run(name, report) or run_phase(options, out, progress, stop)
                    if is_next
                    else {}
                )
        return _conclude(report, out, console, baseline)


def _reason_not_to_run(phase: str, report: dict[str, Any]) -> dict[str, Any]:
    """Return why a phase is skipped, which is the case if the subject has hung or ended its process before."""
    ends = Counter(test["outcome"] for test in report["tests"] if test["clause"])
    if not (ends["hang"] or ends["crash"]):
        return {}
    return {"error": f"{phase} not run: {ends['hang']} tests hung and {ends['crash']} ended their process"}


def _conclude(report: dict[str, Any], out: Path, console: Console, baseline: dict[str, Any] | None) -> int:
    """Write the verdict to files and to the terminal, and return the exit code."""
    changes = compare(baseline, report) if baseline else None
    report["baseline"] = asdict(changes) if changes else None
    show = functools.partial(print_verdict, console, out=out, changes=sentences(changes) if changes else [])
    return conclude(report, out, show)


def _options(words: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any] | None]:
    """Return the options and the baseline, read before the run can overwrite it."""
    parser = of_gate(__doc__)
    options = parser.parse_args(words)
    options.out = options.out or REPORT
    try:
        return options, read_report(Path(options.baseline)) if options.baseline else None
    except ValueError as error:
        parser.error(str(error))


def _time(options: argparse.Namespace, out: Path, progress: PhaseProgress, stop: Stop) -> dict[str, Any]:
    from benchmarks import point  # noqa: PLC0415 (only in a checkout)

    file = out / "speed.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", f"--subject={options.subject}"]
    command += [f"--baseline={options.baseline}"] if options.baseline else []
    command += [f"--machine={options.machine}"] if options.machine else []
    command += _one_device(options)
    result = out / point.FILE
    result.unlink(missing_ok=True)
    files = [f"--json={file}", *([f"--point={result}"] if options.subject == "impl" else [])]
    return _run_phase("timing", command + files, file, out, progress, stop) | {
        "command": shlex.join(["python", *command[1:]])
    }


def _train(options: argparse.Namespace, out: Path, progress: PhaseProgress, stop: Stop) -> dict[str, Any]:
    file = out / "training.json"
    command = [sys.executable, "-m", "conformance.training", "--gate"]
    command += [f"--subject={options.subject}", f"--json={file}"]
    return _run_phase("training", command + _one_device(options), file, out, progress, stop)


def _one_device(options: argparse.Namespace) -> list[str]:
    """Return the option for the first requested device. Judging takes several, timing and training only one."""
    return [] if options.device == "auto" else [f"--device={options.device.split(',')[0]}"]


def _run_phase(
    name: str, command: list[str], file: Path, out: Path, progress: PhaseProgress, stop: Stop
) -> dict[str, Any]:
    """Run one phase and return its JSON, or the reason why there is none."""
    file.unlink(missing_ok=True)
    task = progress.begin(name)
    log = out / f"{name}.log"
    ended, code = run(command, log, DEADLINES_S["quick"], stop, functools.partial(progress.update, task))
    progress.update(task, total=1, completed=1)
    if file.is_file():
        return json.loads(file.read_text())
    return {"error": ended or f"{name} ended with code {code}: {tail(out, name)}"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
