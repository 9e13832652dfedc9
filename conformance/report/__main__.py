"""Draw the page of a report again, without judging.

python -m conformance.report report/report.json --baseline earlier/report.json --out page.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from conformance.report.baseline import compare, read_report
from conformance.report.page import write_page
from conformance.strength import read_kills


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("report", type=Path, help="the report.json of a run")
    parser.add_argument("--baseline", type=Path, help="the report.json of an earlier run to compare with")
    parser.add_argument("--kills", type=Path, help="a kill matrix of python -m conformance.strength")
    parser.add_argument("--out", type=Path, default=Path("index.html"))
    options = parser.parse_args(words)
    try:
        report = read_report(options.report)
        if options.baseline:
            report["baseline"] = asdict(compare(read_report(options.baseline), report))
        if options.kills:
            report["kills"] = read_kills(options.kills)
    except ValueError as error:
        parser.error(str(error))
    write_page(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
