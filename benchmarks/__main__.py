"""Measure a subject ÷ torch for every case and print each ratio. Only torch is required.

python -m benchmarks --quick
python -m benchmarks --only RatioAmpStep --only gpt2 --json ratios.json

A case of impl is a regression if three of three measurements are slower than the last recorded results
(benchmarks/results) of this machine, or of the pool of equal machines that --machine names. Without such results speed
is not judged. Exit code: 0 for success, 1 for regressions and failures, 2 if no case matches.
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

from benchmarks import (
    asv_format,
    catalogue,
    comparison,
    decision,
    earlier,
    figures,
    point,
    slowed,
    source,
)
from benchmarks.common import LEFT_OUT_OF_HISTORY, LEFT_OUT_OF_QUICK
from benchmarks.machine import describe_machine, machine_name, own_name
from benchmarks.timing import FULL, HISTORY, QUICK, Effort

_AGAIN_DEADLINE_S = 300


def main() -> int:
    options = _options()
    if options.slow:
        slowed.slow_kernels(options.slow)
    cases = sorted(_cases(options), key=catalogue.by_inputs)
    if not cases:
        print(f"no case matches {' and '.join(options.only + options.case)}", file=sys.stderr)
        return 2
    effort = HISTORY if options.history else QUICK if options.quick else FULL
    elsewhere = earlier.elsewhere(options.machine, _release()) if options.subject == "impl" else {}
    print(_header(options.subject, effort, elsewhere))
    rows: list[dict[str, Any]] = []
    measured: asv_format.Measured = {}
    began_ms, ran = round(time.time() * 1000), source.here() if options.point else {}
    for position, (kind, case) in enumerate(cases, 1):
        _show_progress(f"  {position}/{len(cases)} {catalogue.name_of(kind, case)}")
        row, values = catalogue.measure_case(kind, case, effort, options.subject)
        others = {
            machine: ratios[row["name"]] for machine, ratios in elsewhere.items() if row["name"] in ratios
        }
        rows.append(row | ({"elsewhere": others} if others else {}))
        _show_progress("")
        print(_line(rows[-1]), flush=True)
        if options.point:
            catalogue.add_to(measured, kind, case, row["outcome"], values)
            _write(options.point, _as_point(measured, options.machine, began_ms, ran))
    _print_summary(rows)
    report = {"machine": _machine(), "subject": options.subject, "rows": rows} | _judge(rows, options)
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
        help="only cases with NAME in their names (repeatable: with all of them)",
    )
    add(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="no cases with NAME in their names (repeatable)",
    )
    add(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="only the case with exactly this name (repeatable)",
    )
    add("--subject", default="impl", help="package to time, with torch's module paths (default: impl)")
    add("--device", choices=["cpu", "cuda"], help="only this device (default: all available devices)")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument(
        "--quick",
        action="store_true",
        help="only the most informative cases, with fewer pairs: about two seconds a case",
    )
    how_many.add_argument(
        "--history",
        action="store_true",
        help="the cases of the dashboard: also sharded training on one and four ranks, all checkpoints, and memory",
    )
    add("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")
    add(
        "--baseline",
        type=Path,
        metavar="REPORT.JSON",
        help="judge by this report of ci/gate instead of the recorded results",
    )
    add(
        "--before",
        type=int,
        metavar="MS",
        default=sys.maxsize,
        help="judge by results of commits before this date",
    )
    add("--unjudged", action="store_true", help="only measure, do not judge")
    add(
        "--machine",
        type=machine_name,
        metavar="NAME",
        help="judge by the results of this pool of equal machines (default: of this machine)",
    )
    add(
        "--point",
        type=Path,
        metavar="FILE",
        help="write all results to FILE for ci/bench --add; without --quick, also measure absolute times and memory",
    )
    add(
        "--slow",
        type=float,
        metavar="TIMES",
        help="slow down impl's kernels by this factor, to test the verdict",
    )
    options = parser.parse_args()
    options.machine = options.machine or own_name()
    if options.point and (options.slow or options.subject != "impl"):
        parser.error(
            "--point records impl without changes; do not combine it with --slow or another --subject"
        )
    return options


def _cases(options: argparse.Namespace) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    devices = (
        [options.device] if options.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    )
    kinds, left_out = catalogue.load_all(), {}
    if options.history:
        kinds, left_out = list(filter(catalogue.is_tracked, kinds)), LEFT_OUT_OF_HISTORY
    elif options.quick or not options.point:
        kinds = [kind for kind in kinds if issubclass(kind, comparison.Ratio)]
        left_out = LEFT_OUT_OF_QUICK if options.quick else {}
    for kind in kinds:
        for case in catalogue.cases(kind, left_out):
            name = catalogue.name_of(kind, case)
            chosen = all(part in name for part in options.only) and name in (options.case or [name])
            chosen = chosen and not any(part in name for part in options.without)
            if chosen and catalogue.device_of(kind, case) in devices:
                yield kind, case


def _judge(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, str]:
    """Judge the ratios by earlier ones. Return the source (`against`) or the reason for not judging (`not_judged`)."""
    if options.unjudged:
        return {"not_judged": "not requested"}
    if options.baseline:
        report = json.loads(options.baseline.read_text())
        source_text, ratios = earlier.of_baseline(report, options.subject, _machine())
    else:
        source_text, ratios = earlier.of_points(options.machine, _release(), options.subject, options.before)
    if ratios:
        judged = [row for row in rows if row["outcome"] != "measured" or "ratio" in row]
        decision.judge(judged, ratios, functools.partial(_measure_again, options))
    _print_verdicts(rows, source_text)
    return source_text


def _measure_again(options: argparse.Namespace, names: list[str]) -> dict[str, float]:
    """Measure these cases again in a new process. Return the ratios of the cases that could be measured."""
    _show_progress(f"  {len(names)} again")
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


def _as_point(
    measured: asv_format.Measured, machine: str, began_ms: int, ran: dict[str, Any]
) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    description = describe_machine(machine, gpu)
    versions = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": _release()}
    benchmarks = asv_format.describe_benchmarks(catalogue.load_all())
    results = asv_format.results(benchmarks, measured, description, versions, began_ms)
    return point.content_of(results, description, ran)


def _write(file: Path, content: Any) -> None:
    """Write the file completely or not at all, because the run may be stopped at any time."""
    file.with_suffix(".part").write_text(json.dumps(content, indent=1) + "\n")
    file.with_suffix(".part").replace(file)


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def _header(subject: str, effort: Effort, elsewhere: dict[str, dict[str, float]]) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in _machine().items())
    title = f"{subject + ' ÷ torch, lower is better':64} ratio  95% interval    {subject:>9}      torch"
    title += "  pairs  of a copy"
    title += f"  elsewhere ({', '.join(elsewhere)})" if elsewhere else ""
    return f"{machine}\nup to {effort.pairs} pairs a case\n{title}"


def _line(row: dict[str, Any]) -> str:
    if row["outcome"] != "measured":
        return f"{row['name']:64} {row['outcome']}: {row['why'].splitlines()[0]}"
    if "ratio" not in row:
        return f"{row['name']:64} {figures.amount(row['bytes'], 'bytes') if 'bytes' in row else 'measured'}"
    interval = f"{row['low']:.3f} to {row['high']:.3f}"
    own, torchs = (figures.amount(row[key], "time") for key in ("subject_s", "reference_s"))
    times = f"{own:>9}  {torchs:>9}"
    share = f"{row['share_of_copy']:.0%}" if row.get("share_of_copy") else ""
    others = ", ".join(f"{ratio:.3f}" for ratio in row.get("elsewhere", {}).values())
    line = f"{row['name']:64} {row['ratio']:6.3f}  {interval:14}  {times}  {row['pairs']:>5}  {share:>9}"
    return f"{line}  {others}".rstrip()


def _print_summary(rows: list[dict[str, Any]]) -> None:
    measured = [row for row in rows if "ratio" in row]
    slower = [row["name"] for row in measured if row["low"] > decision.SURELY]
    print(f"\n{sum(row['outcome'] == 'measured' for row in rows)} of {len(rows)} cases measured")
    if measured:
        mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in measured))
        print(f"geometric mean of the ratios: {mean:.3f}")
        title = f"clearly slower than torch (interval above {decision.SURELY}): {len(slower)}"
        print("\n  ".join([title, *slower]))


def _print_verdicts(rows: list[dict[str, Any]], source_text: dict[str, str]) -> None:
    if "against" in source_text:
        print(f"judged by {source_text['against']}")
    else:
        print(f"speed: not judged: {source_text['not_judged']}")
    for row in rows:
        if row.get("verdict", decision.NEW) not in (decision.OK, decision.NEW):
            print(f"  {row['verdict']}: {decision.sentence(row)}")
    judged = sum(row.get("verdict", decision.NEW) != decision.NEW for row in rows)
    if judged and not any(row.get("verdict") == decision.REGRESSION for row in rows):
        print(f"no regression in {judged} cases")


def _release() -> str:
    return torch.__version__.split("+")[0]


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
