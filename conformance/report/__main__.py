"""Write the page of an existing report, or a page that compares several reports.

python -m conformance.report report/report.json --baseline earlier/report.json --out page.html
python -m conformance.report --merge shard-1/report.json shard-2/report.json … --out report
python -m conformance.report --compare theirs/report.json ours/report.json … --out compare.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.report.baseline import compare, read_report
from conformance.report.merging import merge_shards
from conformance.report.page import write_page
from conformance.report.side_by_side import write_side_by_side
from conformance.report.verdict import parts
from conformance.report.verdict_files import conclude


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("report", type=Path, nargs="+", help="report.json of one or more runs")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--compare", action="store_true", help="compare the reports, in this order")
    group.add_argument(
        "--merge", action="store_true", help="join the reports of all shards into the folder of --out"
    )
    parser.add_argument("--baseline", type=Path, help="report.json of an earlier run to compare with")
    parser.add_argument(
        "--out",
        type=Path,
        help="page (default: index.html) or, with --merge, folder (default: report)",
    )
    options = parser.parse_args(words)
    out = options.out or Path("report" if options.merge else "index.html")
    if options.merge and out.is_file():
        parser.error(f"--out {out} is a file; expected a folder")
    is_of_many = options.compare or options.merge
    if not is_of_many and len(options.report) > 1:
        parser.error(f"got {len(options.report)} reports; expected one, or --compare or --merge")
    if is_of_many and options.baseline:
        parser.error("--baseline is for the page of one report; remove --compare or --merge")
    try:
        reports = [read_report(file) for file in options.report]
        if options.compare:
            write_side_by_side(reports, out)
            return 0
        if options.merge:
            merged = merge_shards(reports)
            out.mkdir(parents=True, exist_ok=True)
            return conclude(merged, out, _print_verdict)
        report = reports[0]
        if options.baseline:
            report["baseline"] = asdict(compare(read_report(options.baseline), report))
    except ValueError as error:
        parser.error(str(error))
    write_page(report, out)
    return 0


def _print_verdict(report: dict[str, Any]) -> None:
    print(*(f"{part.name}: {part.says}" for part in parts(report)), sep="\n")  # noqa: T201 the command's output
    print(f"{report['verdict'].upper()} {report['subject']}")  # noqa: T201 as above


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
