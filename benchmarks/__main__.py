"""A subject ÷ torch for every case, printed as it is measured; needs torch and nothing else.

python -m benchmarks --quick
python -m benchmarks --only RatioAmpStep --only gpt2 --json ratios.json

A case of impl that has become slower than at the last points of this kind of machine (benchmarks/results), three
measurements out of three, is a regression. Exit code: 0, 1 for regressions and failures, 2 for no case at all.
"""

import argparse
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import asv_format, catalogue, comparison, decision, history, slowed
from benchmarks.machine import describe_machine
from benchmarks.timing import FULL, QUICK, Effort

_AGAIN_DEADLINE_S = 300
# Of two reports whose ratios can be compared.
_SAME_MACHINE = ("torch", "cores", "threads", "instructions", "device")


def main() -> int:
    options = _options()
    if options.slow:
        slowed.slow_kernels(options.slow)
    cases = sorted(_cases(options), key=catalogue.by_inputs)
    if not cases:
        print(f"no case matches {' and '.join(options.only + options.case)}", file=sys.stderr)
        return 2
    effort = QUICK if options.quick else FULL
    print(_header(options.subject, effort))
    rows: list[dict[str, Any]] = []
    kept: asv_format.Measured = {}
    began_ms = round(time.time() * 1000)
    for position, (kind, case) in enumerate(cases, 1):
        _show_progress(f"  {position}/{len(cases)} {catalogue.name_of(kind, case)}")
        row, values = catalogue.measured(kind, case, effort, options.subject)
        rows.append(row)
        _show_progress("")
        print(_line(row), flush=True)
        if options.asv:
            catalogue.keep(kept, kind, case, row["outcome"], values)
            _write(options.asv, _for_asv(kept, began_ms))
    _print_summary(rows)
    report = {"machine": _machine(), "subject": options.subject, "rows": rows}
    report["against"] = _judge(rows, options)
    if options.json:
        _write(options.json, report)
    return 1 if any(row["outcome"] == "failed" or row.get("verdict") in decision.RED for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="cases whose name has NAME in it; all of them if repeated",
    )
    add("--without", action="append", default=[], metavar="NAME", help="not those whose name has NAME in it")
    add(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="the case of exactly this name (repeatable)",
    )
    add("--subject", default="impl", help="a package with torch's paths (default: impl)")
    add("--device", choices=["cpu", "cuda"], help="default: every device there is")
    add(
        "--quick",
        action="store_true",
        help="the cases that tell most, and fewer pairs: about two seconds a case",
    )
    add("--json", type=Path, metavar="FILE", help="write the numbers there too")
    add(
        "--baseline", type=Path, metavar="REPORT.JSON", help="judge by this run of ci/gate, not by the points"
    )
    add(
        "--before", type=int, metavar="MS", default=sys.maxsize, help="judge by points of commits before this"
    )
    add("--unjudged", action="store_true", help="measure only")
    add("--asv", type=Path, metavar="FILE", help="all benchmarks (--quick: the ratios), as asv keeps them")
    add(
        "--slow",
        type=float,
        metavar="TIMES",
        help="impl's kernels take so many times as long: does it turn red?",
    )
    return parser.parse_args()


def _cases(options: argparse.Namespace) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    devices = (
        [options.device] if options.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    )
    kinds = catalogue.load_all()
    if options.quick or not options.asv:
        kinds = [kind for kind in kinds if issubclass(kind, comparison.Ratio)]
    for kind in kinds:
        for case in catalogue.cases(kind, options.quick):
            name = catalogue.name_of(kind, case)
            wanted = all(part in name for part in options.only) and name in (options.case or [name])
            wanted = wanted and not any(part in name for part in options.without)
            if wanted and catalogue.device_of(kind, case) in devices:
                yield kind, case


def _judge(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Judge the ratios by what there is of earlier ones; says what that is."""
    if options.unjudged:
        return "nothing: not asked for"
    against, earlier = _baseline(options) if options.baseline else _points(options)
    if earlier:
        ratios = [row for row in rows if row["outcome"] != "measured" or "ratio" in row]
        decision.judge(ratios, earlier, functools.partial(_measured_again, options))
    _print_verdicts(rows, against)
    return against


def _points(options: argparse.Namespace) -> tuple[str, dict[str, list[float]]]:
    if options.subject != "impl":
        return (
            f"nothing: points are impl's, and this is {options.subject}; --baseline takes an earlier run",
            {},
        )
    machine, release = _kind_of_machine()["machine"], _release()
    found = [point for point in history.of_machine(machine, release) if point.date_ms < options.before]
    earlier = history.ratios_by_case(found, decision.EARLIER_POINTS)
    if not earlier:
        return f"nothing: no earlier point of {machine} with torch {release}", {}
    return f"the points of {machine} with torch {release}, the newest {found[-1].commit[:8]}", earlier


def _baseline(options: argparse.Namespace) -> tuple[str, dict[str, list[float]]]:
    report = json.loads(options.baseline.read_text())
    speed = report.get("speed") or report
    rows, there, here = speed.get("rows", []), speed.get("machine", {}), _machine()
    if not rows:
        return "nothing: the baseline has no timings", {}
    differ = [key for key in _SAME_MACHINE if there.get(key) != here[key]]
    differ += ["subject"] if report.get("subject") != options.subject else []
    if differ:
        return f"nothing: the baseline differs in {', '.join(differ)}", {}
    return "the baseline", {row["name"]: [row["ratio"]] for row in rows if row["outcome"] == "measured"}


def _measured_again(options: argparse.Namespace, names: list[str]) -> dict[str, float]:
    """The ratios of these cases, measured in a process of its own; without those that could not be measured."""
    _show_progress(f"  {len(names)} once more")
    words = [f"--case={name}" for name in names] + [f"--subject={options.subject}", "--unjudged"]
    words += ["--quick"] if options.quick else []
    words += [f"--slow={options.slow}"] if options.slow else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "again.json")
        command = [sys.executable, "-m", "benchmarks", f"--json={file}", *words]
        subprocess.run(command, capture_output=True, timeout=_AGAIN_DEADLINE_S, check=False)
        rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    _show_progress("")
    return {row["name"]: row["ratio"] for row in rows if row["outcome"] == "measured"}


def _for_asv(kept: asv_format.Measured, began_ms: int) -> dict[str, Any]:
    versions = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": _release()}
    described = asv_format.described(catalogue.load_all())
    return asv_format.results(described, kept, _kind_of_machine(), versions, began_ms)


def _write(file: Path, content: Any) -> None:
    """Whole or not at all: the run may be stopped at any time."""
    file.with_suffix(".part").write_text(json.dumps(content, indent=1) + "\n")
    file.with_suffix(".part").replace(file)


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def _header(subject: str, effort: Effort) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in _machine().items())
    title = (
        f"{subject + ' ÷ torch, lower is better':64} ratio  95% interval    {subject:>9}      torch  pairs"
    )
    return f"{machine}\nup to {effort.pairs} pairs a case\n{title}"


def _line(row: dict[str, Any]) -> str:
    if row["outcome"] != "measured":
        return f"{row['name']:64} {row['outcome']}: {row['why'].splitlines()[0]}"
    if "ratio" not in row:
        return f"{row['name']:64} measured"
    interval = f"{row['low']:.3f} to {row['high']:.3f}"
    times = f"{_time(row['subject_s']):>9}  {_time(row['reference_s']):>9}"
    return f"{row['name']:64} {row['ratio']:6.3f}  {interval:14}  {times}  {row['pairs']:>5}"


def _print_summary(rows: list[dict[str, Any]]) -> None:
    measured = [row for row in rows if "ratio" in row]
    slower = [row["name"] for row in measured if row["low"] > decision.SURELY]
    print(f"\n{sum(row['outcome'] == 'measured' for row in rows)} of {len(rows)} cases measured")
    if measured:
        mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in measured))
        print(f"geometric mean of the ratios: {mean:.3f}")
        title = f"surely slower than torch (whole interval above {decision.SURELY}): {len(slower)}"
        print("\n  ".join([title, *slower]))


def _print_verdicts(rows: list[dict[str, Any]], against: str) -> None:
    print(f"judged by {against}")
    for row in rows:
        if row.get("verdict", decision.NEW) not in (decision.OK, decision.NEW):
            print(f"  {row['verdict']}: {decision.sentence(row)}")
    judged = sum(row.get("verdict", decision.NEW) != decision.NEW for row in rows)
    if judged and not any(row.get("verdict") == decision.REGRESSION for row in rows):
        print(f"no regression in {judged} cases")


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _release() -> str:
    return torch.__version__.split("+")[0]


def _kind_of_machine() -> dict[str, str]:
    return describe_machine(torch.cuda.get_device_name() if torch.cuda.is_available() else "none")


def _machine() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": device,
        "load": f"{os.getloadavg()[0]:.1f}",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
