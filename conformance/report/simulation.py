"""The simulated step that a report shows, where `python -m conformance.simulator.cost --json` has left one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

FILE = "simulation.json"  # in the report's folder
_KEYS = {"title", "columns", "rows", "notes", "panels"}


def read_simulation(file: Path) -> dict[str, Any]:
    """What the command has written.

    Raises:
        ValueError: the file is not there, or is something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"there is no simulation at {file}: {error.strerror}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or set(found) != _KEYS:
        raise ValueError(f"{file} is no simulation; python -m conformance.simulator.cost --json writes one")
    return found


def drawn(report: dict[str, Any]) -> Markup | None:
    found = report.get("simulation")
    if not found:
        return None
    from conformance.simulator.cost.picture import picture  # noqa: PLC0415 (brings torch)

    return Markup(picture(found["title"], found["panels"]))
