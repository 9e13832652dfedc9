"""Judge the published packages of this folder, run their proofs, and update the table of docs/judging.md.

    python -m conformance.subjects                       all installed packages
    python -m conformance.subjects torchtitan --check    one package, without updating the table

Reports go to report/subjects. Its index.html compares the packages clause by clause. Rows of packages that are not
installed stay as they are. Exit code 1: a package or a proof is red, or a package that is named, or with --check any
package, is not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.judge.clauses import all_clauses
from conformance.judge.files.claims_file import NAME, read
from conformance.judge.files.expectations import NOT_JUDGED
from conformance.report.matrix import SEVERITY

HERE = Path(__file__).parent
_ROOT = HERE.parents[1]
PAGE = _ROOT / "docs" / "judging.md"
SUBJECTS = sorted(file.parent.name for file in HERE.glob(f"*/{NAME}"))
_LIMIT_S = 1800.0
# torch_npu, once installed, would be imported with torch, and fails without its device.
_ENVIRON = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def main(words: Sequence[str]) -> int:
    options = _options(words)
    rows: dict[str, str] = {}
    is_red = False
    for name in options.names or SUBJECTS:
        version = _version(read(HERE / name / NAME).distribution)
        if version is None:
            print(f"{name}: not installed")  # noqa: T201 the command's output
            is_red |= options.check or bool(options.names)
            continue
        report, code = _judged(name, options)
        proven = _run([f"conformance.subjects.{name}.proofs"]) == 0
        rows[name] = row(name, version, report)
        is_red |= code != 0 or not proven
        verdict = report["verdict"] if proven else "red: a proof no longer shows a difference"
        print(f"{name}: {verdict}\n{rows[name]}")  # noqa: T201 as above
    reports = [str((options.out / name / "report.json").absolute()) for name in rows]
    if reports:
        page = options.out / "index.html"
        _run(["conformance.report", "--compare", *reports, "--out", str(page.absolute())])
        print(f"side by side: {page}")  # noqa: T201 as above
    if not options.check:
        PAGE.write_text(noted(PAGE.read_text(), rows))
    return int(is_red)


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.subjects", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SUBJECTS))
    parser.add_argument("--profile", default="quick")
    parser.add_argument("--workers", default="auto", help="as pytest -n takes them")
    parser.add_argument(
        "--out", type=Path, default=Path("report/subjects"), help="where each report.json goes"
    )
    parser.add_argument("--check", action="store_true", help="do not update the table")
    options = parser.parse_args(words)
    if unknown := set(options.names) - set(SUBJECTS):
        parser.error(f"no subject {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    return options


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _judged(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    out = (options.out / name).absolute()
    out.mkdir(parents=True, exist_ok=True)
    command = ["pytest", *folders(name), "-q", "--tb=native", f"--subject=conformance.subjects.{name}"]
    code = _run(
        [*command, f"-n={options.workers}", f"--profile={options.profile}", f"--report={out}"], out / "log"
    )
    return json.loads((out / "report.json").read_text()), code


def folders(name: str) -> list[str]:
    """Return the folders with tests of a subject's names. Other tests would have nothing to judge."""
    names = set(read(HERE / name / NAME).names)
    areas = {clause.area for clause in all_clauses().values() if names & set(clause.names)}
    return ["conformance/test_surface.py", *sorted({f"conformance/{area.split('.')[0]}" for area in areas})]


def _run(words: Sequence[str], log: Path | None = None) -> int:
    with log.open("w") if log else open(os.devnull, "w") as output:
        command = [sys.executable, "-m", *words]
        return subprocess.run(
            command, cwd=_ROOT, env=_ENVIRON, stdout=output, stderr=output, timeout=_LIMIT_S, check=False
        ).returncode


_HOLDS = ("passed", "known", "reference cannot run here")


def row(name: str, version: str, report: dict[str, Any]) -> str:
    """Return the package's line: how many of its clauses and tests hold. A clause counts as its worst test."""
    outcomes_of: dict[str, list[str]] = {}
    for test in report["tests"]:
        if test["outcome"] not in NOT_JUDGED and test["clause"] in all_clauses():
            outcomes_of.setdefault(test["clause"], []).append(test["outcome"])
    worst = [min(outcomes, key=SEVERITY.index) for outcomes in outcomes_of.values()]
    file = read(HERE / name / NAME)
    names = ", ".join(f"`{path.rpartition('.')[2]}`" for path in file.names)
    clauses, tests = (
        _share_that_holds(worst),
        _share_that_holds([outcome for outcomes in outcomes_of.values() for outcome in outcomes]),
    )
    proofs = f"[{sum(outcome not in _HOLDS for outcome in worst)}](../conformance/subjects/{name}/proofs.py)"
    return f"| {file.distribution} {version} | {names} | {clauses} | {tests} | {proofs} |"


def _share_that_holds(outcomes: Sequence[str]) -> str:
    reported = f"{sum(outcome in _HOLDS for outcome in outcomes)} of {len(outcomes)}"
    return f"{reported}, {known} in torch's way" if (known := outcomes.count("known")) else reported


def noted(page: str, rows: Mapping[str, str]) -> str:
    """Return the page with the rows of these packages replaced."""
    for name, line in rows.items():
        link = re.escape(f"(../conformance/subjects/{name}/proofs.py)")
        page = re.sub(rf"^\|.*{link} \|$", line.replace("\\", r"\\"), page, flags=re.MULTILINE)
    return page


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
