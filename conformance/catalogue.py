"""The catalogue: all clauses under one number, which is raised when a clause is added, removed or changed.

    python -m conformance.catalogue                 level and sentence of each clause
    python -m conformance.catalogue --json          also the names that it covers, its thread and its torch versions
    python -m conformance.catalogue --raise WHY     give the current clauses the next number

Reports with the same number used the same clauses. `catalogue.toml` has the changes of each number, and a digest of all
clauses, with which a test detects that the number was not raised. `--raise` compares with the clauses of the commit
that raised the number last, so it can be repeated.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.judge import clauses
from conformance.judge.catalogue import (
    FILE,
    CatalogueVersion,
    as_dict,
    changes_in,
    difference,
    digest_of,
    digests,
)

_ABOUT = """\
# Written by `python -m conformance.catalogue --raise WHY`: a digest of all clauses as they are, and what changed with
# each number of the catalogue, newest first.
"""


def text_of_next(why: str, before: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    """Return the text of the file under the next number.

    Args:
        why: what was changed, and why.
        before: the contents of the file with the current number.
        then: the catalogue with that number, as `as_dict` returned it.

    Raises:
        ValueError: no clause differs.
    """
    now, known = digests(clauses.for_report(), clauses.TORCH_VERSIONS), changes_in(before)
    rows = [{key: row[key] for key in row.keys() - {"since"}} for row in then["clauses"]]
    changed = difference(digests(rows, then["torch"]), now)
    if not any(changed.values()):
        raise ValueError(f"no clause has changed since catalogue {known[0].version}; it keeps its number")
    return _to_toml([CatalogueVersion(known[0].version + 1, why, **changed), *known], digest_of(now))


def _to_toml(rows: Sequence[CatalogueVersion], digest: str) -> str:
    lines = [f'{_ABOUT}digest = "{digest}"', ""]
    for row in rows:
        lines += ["[[changes]]", f"version = {row.version}", f"says = {json.dumps(row.says)}"]
        for name in ("added", "changed", "removed"):
            if ids := json.dumps(getattr(row, name))[1:-1]:
                lines += [f"{name} = [", *textwrap.wrap(ids, 120, break_long_words=False), "]"]
        lines.append("")
    return "\n".join(lines)


def _before() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the file and the catalogue in the commit that raised the number last."""
    git = functools.partial(subprocess.check_output, cwd=FILE.parents[1])
    path = f"{FILE.parent.name}/{FILE.name}"
    commit = git(["git", "log", "-1", "--format=%H", "--", path], text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        archive = git(["git", "archive", commit, FILE.parent.name])
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        command = [sys.executable, "-m", "conformance.catalogue", "--json"]
        printed = json.loads(subprocess.check_output(command, cwd=folder))
        return tomllib.loads(Path(folder, path).read_text()), printed


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.catalogue",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="print it as JSON")
    kinds.add_argument("--raise", dest="why", metavar="WHY", help="give the current clauses the next number")
    options = parser.parse_args(words)
    if options.why:
        try:
            FILE.write_text(text_of_next(options.why, *_before()))
        except ValueError as error:
            parser.error(str(error))
    elif options.json:
        print(json.dumps(as_dict(), indent=1))  # noqa: T201 the command's output
    else:
        for row in as_dict()["clauses"]:
            print(f"{row['id']} ({row['level']}, {row['mark']})\n    {row['says']}")  # noqa: T201 the command's output
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
