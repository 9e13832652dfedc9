"""Write the page of an existing report, or a page that compares several reports.

python -m conformance.report report/report.json --baseline earlier/report.json --out page.html
python -m conformance.report --compare theirs/report.json ours/report.json … --out compare.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from conformance.report.baseline import compare, read_report
from conformance.report.page import write_page
from conformance.report.side_by_side import write_side_by_side
from conformance.report.simulation import read_simulation
from conformance.strength.faults.kill_matrix import read_kills


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("report", type=Path, nargs="+", help="report.json of one or more runs")
    parser.add_argument("--compare", action="store_true", help="compare the reports, in this order")
    parser.add_argument("--baseline", type=Path, help="report.json of an earlier run to compare with")
    parser.add_argument("--kills", type=Path, help="kill matrix of python -m conformance.strength.faults")
    parser.add_argument(
        "--simulation", type=Path, help="simulated step of python -m conformance.simulator.cost"
    )
    parser.add_argument("--out", type=Path, default=Path("index.html"), help="page (default: index.html)")
    options = parser.parse_args(words)
    if not options.compare and len(options.report) > 1:
        parser.error(f"got {len(options.report)} reports; expected one, or --compare")
    if options.compare and (options.baseline or options.kills or options.simulation):
        parser.error("--baseline, --kills and --simulation are for the page of one report; remove --compare")
    try:
        reports = [read_report(file) for file in options.report]
        if options.compare:
            write_side_by_side(reports, options.out)
            return 0
        report = reports[0]
        if options.baseline:
            report["baseline"] = asdict(compare(read_report(options.baseline), report))
        if options.kills:
            report["kills"] = read_kills(options.kills)
        if options.simulation:
            report["simulation"] = read_simulation(options.simulation)
    except ValueError as error:
        parser.error(str(error))
    write_page(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
