"""A subject ÷ torch for every case, printed as it is measured; needs torch and nothing else.

python -m benchmarks --quick
python -m benchmarks --only RatioAmpStep --only gpt2 --json ratios.json

"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import catalogue, comparison
from benchmarks.timing import FULL, QUICK, Effort


def main() -> int:
    options = _options()
    cases = sorted(_cases(options), key=catalogue.by_inputs)
    if not cases:
        print(f"no case matches {' and '.join(options.only)}", file=sys.stderr)
        return 2
    effort = QUICK if options.quick else FULL
    print(_header(options.subject, effort))
    rows: list[dict[str, Any]] = []
    for position, (kind, case) in enumerate(cases, 1):
        _show_progress(f"  {position}/{len(cases)} {catalogue.name_of(kind, case)}")
        rows.append(catalogue.measured(kind, case, effort, options.subject))
        _show_progress("")
        print(_line(rows[-1]), flush=True)
    _print_summary(rows)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": _machine(), "subject": options.subject, "rows": rows}, indent=1) + "\n"
        )
    return 1 if any(row["outcome"] == "failed" for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="cases whose name has NAME in it; all of them if repeated",
    )
    parser.add_argument("--subject", default="impl", help="a package with torch's paths (default: impl)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: every device there is")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the cases that tell most, and fewer pairs: about two seconds a case",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser.parse_args()


def _cases(options: argparse.Namespace) -> Iterator[tuple[type[comparison.Ratio], tuple[Any, ...]]]:
    devices = (
        [options.device] if options.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    )
    catalogue.load_all()
    for kind in comparison.Ratio.__subclasses__():
        for case in kind.cases(options.quick):
            name = catalogue.name_of(kind, case)
            if all(part in name for part in options.only) and set(devices).intersection(case):
                yield kind, case


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
    interval = f"{row['low']:.3f} to {row['high']:.3f}"
    times = f"{_time(row['subject_s']):>9}  {_time(row['reference_s']):>9}"
    return f"{row['name']:64} {row['ratio']:6.3f}  {interval:14}  {times}  {row['pairs']:>5}"


def _print_summary(rows: list[dict[str, Any]]) -> None:
    measured = [row for row in rows if row["outcome"] == "measured"]
    slower = [row["name"] for row in measured if row["low"] > 1.03]
    print(f"\n{len(measured)} of {len(rows)} cases measured")
    if measured:
        mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in measured))
        print(f"geometric mean of the ratios: {mean:.3f}")
        print("\n  ".join([f"surely slower than torch (whole interval above 1.03): {len(slower)}", *slower]))


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


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
