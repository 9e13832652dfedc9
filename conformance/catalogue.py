"""The catalogue: all clauses.

    python -m conformance.catalogue           level and sentence of each clause
    python -m conformance.catalogue --json    also the names that it covers, its thread and its torch versions

Reports with the same digest of the catalogue used the same clauses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from conformance.judge.catalogue import as_dict


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.catalogue",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    if parser.parse_args(words).json:
        print(json.dumps(as_dict(), indent=1))  # noqa: T201 the command's output
    else:
        for row in as_dict()["clauses"]:
            print(f"{row['id']} ({row['level']}, {row['mark']})\n    {row['says']}")  # noqa: T201 the command's output
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
