"""The gate: judge a subject, time it against torch, train a real model with it, write the report, say yes or no.

    python -m conformance.gate --subject impl --profile quick --out report
    python -m conformance.gate --subject your.package --parts judging      the verdict alone, within a minute or two
    python -m conformance.gate --baseline earlier/report.json      what broke, was mended, got slower since

Each part runs in a process of its own, with a deadline, so that a subject that hangs or kills its process ends in a
red verdict and not in silence. Exit code 0 is green, 1 red, 2 that the subject cannot be loaded, or that its claims
file is wrong.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks import point
from benchmarks.machine import checked_name
from conformance import clauses, environment
from conformance.claims_file import give
from conformance.library import package_of
from conformance.plugin import PROFILES
from conformance.report import write_page
from conformance.report.baseline import compare, read_report, sentences
from conformance.report.verdict import parts, reasons
from conformance.results import BAD_INPUT, RED, broken_clauses
from conformance.running import Stop, run
from conformance.strength import read_kills

_DEADLINES_S = {"quick": 1200.0, "full": 5400.0, "deep": 86400.0}
PARTS = ("judging", "timing", "training")
_MOST_BROKEN, _MOST_REASONS = 10, 3  # in the terminal; the report has all


def main(words: Sequence[str]) -> int:
    options, baseline, kills = _options(words)
    if options.claims:
        give(package_of(options.subject), options.claims)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    stop = Stop()
    with stop.listening():
        with _progress(console) as progress:
            report = _judged(options, out, progress, stop)
            _say_broken(console, report)
            for name, key, run_part in (("timing", "speed", _timed), ("training", "training", _trained)):
                wanted = name in options.parts and not report["ended_early"] and not stop.is_wanted
                report[key] = (
                    _unless_unsafe(name, report) or run_part(options, out, progress, stop) if wanted else {}
                )
        return _tell(report, out, console, baseline, kills)


def _unless_unsafe(part: str, report: dict[str, Any]) -> dict[str, Any]:
    """Why a part is not begun: nobody waits for a subject again that has hung or died before."""
    ends = Counter(test["outcome"] for test in report["tests"] if test["clause"])
    if not (ends["hang"] or ends["crash"]):
        return {}
    return {"error": f"{part} not begun: {ends['hang']} tests hung and {ends['crash']} ended their process"}


def _tell(
    report: dict[str, Any],
    out: Path,
    console: Console,
    baseline: dict[str, Any] | None,
    kills: dict[str, Any] | None,
) -> int:
    """The verdict, in files and on the terminal, and as an exit code."""
    report["reasons"] = reasons(report)
    report["verdict"] = "red" if report["reasons"] else "green"
    changes = compare(baseline, report) if baseline else None
    report["baseline"] = asdict(changes) if changes else None
    report["kills"] = kills
    (out / "report.json").write_text(json.dumps(report, indent=1))
    _say(console, report, out, sentences(changes) if changes else [])
    write_page(report, out / "index.html")  # last, so that nothing in it can keep the verdict back
    return BAD_INPUT if report.get("bad_input") else int(report["verdict"] == "red")


def _options(
    words: Sequence[str],
) -> tuple[argparse.Namespace, dict[str, Any] | None, dict[str, Any] | None]:
    """The options, the baseline and the kill matrix: both are read before a run can overwrite them."""
    parser = argparse.ArgumentParser(prog="ci/gate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--subject", default="impl", help="impl, torch, or any package that mirrors torch's paths"
    )
    parser.add_argument("--claims", type=Path, metavar="FILE", help="the subject's claims file")
    parser.add_argument(
        "--device", default="auto", help="comma-separated device types (default: what is there)"
    )
    parser.add_argument("--world-sizes", default="1,2", help="comma-separated numbers of ranks")
    parser.add_argument("--profile", default="quick", choices=PROFILES, help="how much to try")
    parser.add_argument(
        "--seed", type=int, help="another draw of examples; without it every run tries the same"
    )
    parser.add_argument(
        "--parts",
        default=PARTS,
        type=_parts,
        metavar="NAME,NAME",
        help="judging, and timing or training (default: all)",
    )
    parser.add_argument("--out", default="report", help="folder for index.html, report.json and junit.xml")
    parser.add_argument("--baseline", type=Path, help="report.json of an earlier run to compare with")
    parser.add_argument(
        "--machine", type=checked_name, help="the pool of equal machines whose points judge speed"
    )
    parser.add_argument(
        "--kills",
        type=Path,
        help="the suite's strength, to be shown (default: kills.json in --out, if there)",
    )
    options = parser.parse_args(words)
    found = Path(options.out, "kills.json")
    kills = options.kills or (found if found.is_file() else None)
    try:
        return (
            options,
            read_report(options.baseline) if options.baseline else None,
            read_kills(kills) if kills else None,
        )
    except ValueError as error:
        parser.error(str(error))


def _parts(text: str) -> list[str]:
    """The parts that a list names; judging is always one."""
    named = text.split(",")
    if "judging" not in named or not set(named) <= set(PARTS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of judging, timing and training with judging in it"
        )
    return named


def _judged(options: argparse.Namespace, out: Path, progress: Progress, stop: Stop) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "conformance",
        "-n",
        "auto",
        "-q",
        "--tb=native",  # the others read the source again for each test, which takes longer than many tests do
        f"--subject={options.subject}",
    ]
    command += [
        f"--device={options.device}",
        f"--world-sizes={options.world_sizes}",
        f"--profile={options.profile}",
    ]
    command += [f"--report={out}", f"--junitxml={out / 'junit.xml'}"]
    command += [] if options.seed is None else [f"--seed={options.seed}"]
    command += [] if options.claims is None else [f"--claims={options.claims}"]
    log = out / "judgements.jsonl"
    log.unlink(missing_ok=True)
    bar = _JudgingBar(progress, _begin(progress, "judging", None), log)
    began = time.time()
    ended, code = run(command, out / "judging.log", _DEADLINES_S[options.profile], stop, bar.advance)
    written = out / "report.json"
    if written.is_file() and written.stat().st_mtime >= began:
        report = json.loads(written.read_text())
        # pytest: 0 passed, 1 tests failed, 2 bad input (which the report tells); anything else came before its time.
        is_whole = code in (0, 1) or (code == BAD_INPUT and report["bad_input"])
        why = ended or ("" if is_whole else f"judging ended with code {code}: {_tail(out)}")
        return report | {"ended_early": [why] if why else []}
    why = ended or f"judging ended with code {code}: {_tail(out)}"
    bad_input = [why] if code == BAD_INPUT and not ended else []
    return _salvaged(options, log, began, why) | {"bad_input": bad_input}


def _salvaged(options: argparse.Namespace, log: Path, began: float, why: str) -> dict[str, Any]:
    """A report from the lines that were written before judging ended too soon."""
    last = {entry["nodeid"]: entry for entry in _Lines(log).new() if "nodeid" in entry}
    return {
        "verdict": "red",
        "subject": options.subject,
        "profile": options.profile,
        "seed": options.seed,
        "began": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(began)),
        "seconds": round(time.time() - began, 1),
        "environment": environment.describe(),
        "clauses": clauses.for_report(),
        "deviations": [],
        "expectations": [],
        "bad_input": [],
        "claims_file": options.claims and str(options.claims),
        "tests": list(last.values()),
        "ended_early": [why],
    }


def _timed(options: argparse.Namespace, out: Path, progress: Progress, stop: Stop) -> dict[str, Any]:
    file = out / "speed.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--quick",
        f"--subject={options.subject}",
        *([f"--baseline={options.baseline}"] if options.baseline else []),
        *([f"--machine={options.machine}"] if options.machine else []),
    ]
    command += _one_device(options)
    kept = out / point.FILE
    kept.unlink(missing_ok=True)
    files = [f"--json={file}", *([f"--point={kept}"] if options.subject == "impl" else [])]
    return _part("timing", command + files, file, out, progress, stop) | {"command": _readable(command[1:])}


def _trained(options: argparse.Namespace, out: Path, progress: Progress, stop: Stop) -> dict[str, Any]:
    file = out / "training.json"
    command = [
        sys.executable,
        "-m",
        "conformance.training",
        "--gate",
        f"--subject={options.subject}",
        f"--json={file}",
    ]
    return _part("training", command + _one_device(options), file, out, progress, stop)


def _one_device(options: argparse.Namespace) -> list[str]:
    """Timing and training take one device, judging takes several: the first that was asked for."""
    return [] if options.device == "auto" else [f"--device={options.device.split(',')[0]}"]


def _part(
    name: str, command: list[str], file: Path, out: Path, progress: Progress, stop: Stop
) -> dict[str, Any]:
    """Run one part; its JSON, or the reason why there is none."""
    file.unlink(missing_ok=True)
    task = _begin(progress, name, 1)
    ended, code = run(command, out / f"{name}.log", _DEADLINES_S["quick"], stop)
    progress.update(task, completed=1)
    if file.is_file():
        return json.loads(file.read_text())
    return {"error": ended or f"{name} ended with code {code}: {_tail(out, name)}"}


def _begin(progress: Progress, name: str, total: int | None) -> TaskID:
    if not progress.console.is_terminal:  # no bar moves in a log
        progress.console.print(f"{name} …")
    return progress.add_task(name, total=total, note="")


class _JudgingBar:
    """Moves by what each look finds new in the log of judgements."""

    def __init__(self, progress: Progress, task: TaskID, log: Path) -> None:
        self._progress, self._task, self._lines = progress, task, _Lines(log)
        self._collected: int | None = None
        self._outcomes: dict[str, str] = {}  # by test: one that fails in its teardown has two lines

    def advance(self) -> None:
        for entry in self._lines.new():
            if "collected" in entry:
                self._collected = max(entry["collected"], self._collected or 0)
            else:
                self._outcomes[entry["nodeid"]] = entry["outcome"]
        red = sum(outcome in RED for outcome in self._outcomes.values())
        note = f"{red} red" if red else "" if self._outcomes else "collecting"
        self._progress.update(self._task, total=self._collected, completed=len(self._outcomes), note=note)


class _Lines:
    """The entries of a log that another process is writing; each is handed out once, when its line is whole."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_bytes = 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._log.is_file():
            return
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):  # half written: the next look begins with it
                    return
                self._read_bytes += len(line)
                yield json.loads(line)


def _tail(out: Path, name: str = "judging") -> str:
    return (out / f"{name}.log").read_text(errors="replace")[-1500:].strip()


def _readable(words: Sequence[str]) -> str:
    return shlex.join(["python", *words])


def _progress(console: Console) -> Progress:
    bar = BarColumn(bar_width=32)
    return Progress(
        TextColumn("{task.description:9}"),
        bar,
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _say_broken(console: Console, report: dict[str, Any]) -> None:
    """As soon as it is known: timing and training take longer than judging."""
    tell = _teller(console)
    broken = broken_clauses(report["tests"])
    for clause in broken[:_MOST_BROKEN]:
        console.print("[red]broken[/red] ", end="")
        tell(f"{clause.name}: {clause.count}", *(clause.says, clause.why, clause.replay), sep="\n       ")
    if len(broken) > _MOST_BROKEN:
        tell(f"       and {len(broken) - _MOST_BROKEN} more, in the report")


def _say(console: Console, report: dict[str, Any], out: Path, changes: Sequence[str] = ()) -> None:
    tell = _teller(console)
    for part in parts(report):
        tell(f"{part.name}: {part.says}")
        for reason in part.reasons[:_MOST_REASONS]:
            tell(f"  - {reason}")
        if len(part.reasons) > _MOST_REASONS:
            tell(f"  - and {len(part.reasons) - _MOST_REASONS} more, in the report")
    for line in changes:
        tell(line)
    colour = "green" if report["verdict"] == "green" else "red"
    console.print(f"[bold {colour}]{report['verdict'].upper()}[/bold {colour}] ", end="")
    tell(f"{report['subject']}; the report is {(out / 'index.html').absolute()}")


def _teller(console: Console) -> Callable[..., None]:
    return functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
