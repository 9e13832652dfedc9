"""Count how many runs of the benchmarks are red, with a slowdown injected into impl and without.

python -m benchmarks.rates --runs 20
python -m benchmarks.rates --runs 20 --busy 1      while another program occupies one core

The baseline is the median of three runs before them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import decision

CASES = (
    "RatioClipGradNorm[1000x1k, float32, clipped, kept, cpu]",
    "RatioClipGradNormUnclipped[1000x1k, float32, unclipped, kept, cpu]",
    "RatioUnscale[1000x1k, float32, kept, cpu]",
)
_DEADLINE_S = 600
# The program ends with its parent, even if the parent is killed.
_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--runs",
        type=int,
        default=20,
        metavar="N",
        help="number of runs with the slowdown, and of runs without (default: 20)",
    )
    add("--slow", type=float, default=1.5, metavar="TIMES", help="factor of the slowdown (default: 1.5)")
    add(
        "--busy",
        type=int,
        default=0,
        metavar="CORES",
        help="number of cores that another program occupies (default: 0)",
    )
    add(
        "--case",
        action="append",
        metavar="NAME",
        help="case to run (repeatable; default: three on 1000 short tensors)",
    )
    options = parser.parse_args()
    cases = options.case or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        baseline = Path(folder, "baseline.json")
        baseline.write_text(json.dumps(_median_report([_run(cases, "--unjudged") for _ in range(3)])))
        kinds = {"unchanged": [], f"slower by a factor of {options.slow:g}": [f"--slow={options.slow:g}"]}
        red, verdicts = Counter(), {kind: Counter() for kind in kinds}
        with _busy(options.busy):
            for position in range(1, options.runs + 1):
                for kind, words in kinds.items():
                    rows = _run(cases, f"--baseline={baseline}", *words)["rows"]
                    red[kind] += any(row["verdict"] in decision.RED for row in rows)
                    verdicts[kind].update(row["verdict"] for row in rows)
                lines = (f"{kind}: {_summary(red[kind], position, verdicts[kind])}" for kind in kinds)
                print("; ".join(lines), flush=True)
    return 0


def _summary(red: int, runs: int, verdicts: Counter[str]) -> str:
    cases = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    return f"{red} of {runs} runs red (cases: {cases})"


def _run(cases: list[str], *words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "speed.json")
        command = [sys.executable, "-m", "benchmarks", "--quick", f"--json={file}", *words]
        command += [f"--case={name}" for name in cases]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=_DEADLINE_S, check=False)
        return json.loads(file.read_text())


def _median_report(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first report with the median ratio of each case."""
    rows = zip(*(report["rows"] for report in reports), strict=True)
    return reports[0] | {
        "rows": [
            of_case[0] | {"ratio": statistics.median(row["ratio"] for row in of_case)} for of_case in rows
        ]
    }


@contextmanager
def _busy(cores: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    raise SystemExit(main())
