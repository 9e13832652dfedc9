"""The gate: judge a subject, time it against torch, train a real model with it, write the report, say yes or no.

    python -m conformance.gate --subject impl --profile quick --out report
    python -m conformance.gate --subject your.package --parts judging      the verdict alone, as tandem-judge gives it
    python -m conformance.gate --baseline earlier/report.json      what broke, was mended, got slower since

Each part runs in a process of its own, with a deadline, so that a subject that hangs or kills its process ends in a
red verdict and not in silence. Exit code 0 is green, 1 red, 2 that what was handed in has to be mended first.
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
from rich.progress import Progress

from conformance.faults.kill_matrix import read_kills
from conformance.judge.heading import CHECKOUT
from conformance.judge.judging import DEADLINES_S, judged, tail
from conformance.judge.options import REPORT, of_gate
from conformance.judge.running import Stop, run
from conformance.judge.terminal import begin, progress_on, say_broken, say_verdict
from conformance.report import conclude
from conformance.report.baseline import compare, read_report, sentences
from conformance.report.simulation import FILE as SIMULATION
from conformance.report.simulation import read_simulation

_NO_CHECKOUT = (
    "the gate times a subject too, by the folder benchmarks of a checkout, and this is an installed package: "
    "judge with tandem-judge, or take a clone of the repository and its ci/gate"
)


def main(words: Sequence[str]) -> int:
    if not CHECKOUT:
        print(_NO_CHECKOUT, file=sys.stderr)  # noqa: T201 the command's output
        return 2
    options, baseline, shown = _options(words)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    stop = Stop()
    with stop.listening():
        with progress_on(console) as progress:
            report = judged(options, out, progress, stop)
            say_broken(console, report)
            for name, key, run_part in (("timing", "speed", _timed), ("training", "training", _trained)):
                asked = (
                    name in options.parts.split(",") and not report["ended_early"] and not stop.is_requested
                )
                report[key] = (
                    _unless_unsafe(name, report) or run_part(options, out, progress, stop) if asked else {}
                )
        return _tell(report | shown, out, console, baseline)


def _unless_unsafe(part: str, report: dict[str, Any]) -> dict[str, Any]:
    """Why a part is not begun: nobody waits for a subject again that has hung or died before."""
    ends = Counter(test["outcome"] for test in report["tests"] if test["clause"])
    if not (ends["hang"] or ends["crash"]):
        return {}
    return {"error": f"{part} not begun: {ends['hang']} tests hung and {ends['crash']} ended their process"}


def _tell(report: dict[str, Any], out: Path, console: Console, baseline: dict[str, Any] | None) -> int:
    """The verdict, in files and on the terminal, and as an exit code."""
    changes = compare(baseline, report) if baseline else None
    report["baseline"] = asdict(changes) if changes else None
    say = functools.partial(say_verdict, console, out=out, changes=sentences(changes) if changes else [])
    return conclude(report, out, say)


def _options(
    words: Sequence[str],
) -> tuple[argparse.Namespace, dict[str, Any] | None, dict[str, Any]]:
    """The options, the baseline, and what else the report shows: read before a run can overwrite it."""
    parser = of_gate(__doc__)
    options = parser.parse_args(words)
    options.out = options.out or REPORT
    found = Path(options.out, "kills.json")
    kills = options.kills or (found if found.is_file() else None)
    simulated = Path(options.out, SIMULATION)
    try:
        return (
            options,
            read_report(Path(options.baseline)) if options.baseline else None,
            {
                "kills": read_kills(Path(kills)) if kills else None,
                "simulation": read_simulation(simulated) if simulated.is_file() else None,
            },
        )
    except ValueError as error:
        parser.error(str(error))


def _timed(options: argparse.Namespace, out: Path, progress: Progress, stop: Stop) -> dict[str, Any]:
    from benchmarks import point  # noqa: PLC0415 (lies in a checkout alone)

    file = out / "speed.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", f"--subject={options.subject}"]
    command += [f"--baseline={options.baseline}"] if options.baseline else []
    command += [f"--machine={options.machine}"] if options.machine else []
    command += _one_device(options)
    kept = out / point.FILE
    kept.unlink(missing_ok=True)
    files = [f"--json={file}", *([f"--point={kept}"] if options.subject == "impl" else [])]
    return _part("timing", command + files, file, out, progress, stop) | {"command": _readable(command[1:])}


def _trained(options: argparse.Namespace, out: Path, progress: Progress, stop: Stop) -> dict[str, Any]:
    file = out / "training.json"
    command = [sys.executable, "-m", "conformance.training", "--gate"]
    command += [f"--subject={options.subject}", f"--json={file}"]
    return _part("training", command + _one_device(options), file, out, progress, stop)


def _one_device(options: argparse.Namespace) -> list[str]:
    """Timing and training take one device, judging takes several: the first that was asked for."""
    return [] if options.device == "auto" else [f"--device={options.device.split(',')[0]}"]


def _part(
    name: str, command: list[str], file: Path, out: Path, progress: Progress, stop: Stop
) -> dict[str, Any]:
    """Run one part; its JSON, or the reason why there is none."""
    file.unlink(missing_ok=True)
    task = begin(progress, name, 1)
    ended, code = run(command, out / f"{name}.log", DEADLINES_S["quick"], stop)
    progress.update(task, completed=1)
    if file.is_file():
        return json.loads(file.read_text())
    return {"error": ended or f"{name} ended with code {code}: {tail(out, name)}"}


def _readable(words: Sequence[str]) -> str:
    return shlex.join(["python", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
