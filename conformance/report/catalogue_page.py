"""The page of all clauses, with sentence, level, thread and torch versions of each."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from conformance.report.page import environment


def write_catalogue(catalogue: dict[str, Any], file: Path) -> None:
    """Write the page of a catalogue, as `conformance.judge.catalogue.as_dict` returns it."""
    areas = [(area, list(rows)) for area, rows in groupby(catalogue["clauses"], lambda row: row["area"])]
    page = environment().get_template("catalogue.html").render(catalogue=catalogue, areas=areas)
    file.write_text(page, encoding="utf-8")
