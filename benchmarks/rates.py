"""How often the clock's verdict is red, with a slowdown injected into impl and without: whole runs, counted.

python -m benchmarks.rates --runs 20
python -m benchmarks.rates --runs 20 --busy 1      with so many cores taken by another program

What the runs are judged by is the median of three runs before them.
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
# Ends with its parent, even one that is killed.
_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--runs", type=int, default=20, metavar="N", help="with the slowdown, and as many without")
    add("--slow", type=float, default=1.5, metavar="TIMES", help="as python -m benchmarks has it")
    add("--busy", type=int, default=0, metavar="CORES", help="cores that another program takes meanwhile")
    add("--case", action="append", metavar="NAME", help="which cases (default: three on 1000 short tensors)")
    options = parser.parse_args()
    cases = options.case or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        baseline = Path(folder, "baseline.json")
        baseline.write_text(json.dumps(_middle([_run(cases, "--unjudged") for _ in range(3)])))
        kinds = {"as it is": [], f"slowed {options.slow:g} times": [f"--slow={options.slow:g}"]}
        red, verdicts = Counter(), {kind: Counter() for kind in kinds}
        with _busy(options.busy):
            for position in range(1, options.runs + 1):
                for kind, words in kinds.items():
                    found = [row["verdict"] for row in _run(cases, f"--baseline={baseline}", *words)["rows"]]
                    red[kind] += any(verdict in decision.RED for verdict in found)
                    verdicts[kind].update(found)
                reported = (f"{kind}: {_reported(red[kind], position, verdicts[kind])}" for kind in kinds)
                print("; ".join(reported), flush=True)
    return 0


def _reported(red: int, runs: int, verdicts: Counter[str]) -> str:
    cases = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    return f"{red} of {runs} runs red (cases: {cases})"


def _run(cases: list[str], *words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "speed.json")
        command = [sys.executable, "-m", "benchmarks", "--quick", f"--json={file}", *words]
        command += [f"--case={name}" for name in cases]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=_DEADLINE_S, check=False)
        return json.loads(file.read_text())


def _middle(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report with the median ratio of each case."""
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
