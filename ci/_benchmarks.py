"""Generator of the tables in `docs/benchmarks.md` from recorded results: the figures to quote, and what has moved.

`ci/check --fix` writes them, and `ci/check --only freshness` compares them.
"""

from __future__ import annotations

import sys

import _runs
from _environment import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks import figures, history, movers

PAGE = "docs/benchmarks.md"


def page() -> str:
    """Return the page with tables of the current results."""
    points = history.points()
    moved = movers.movers(points, history.release_date_ms())
    text = _runs.with_block(
        PAGE, (ROOT / PAGE).read_text(), "figures", figures.table(figures.figures(points))
    )
    return _runs.with_block(PAGE, text, "movers", f"{movers.table(moved)}\n{movers.legend()}")
