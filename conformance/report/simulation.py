"""The simulated step of a report, if `python -m conformance.simulator.cost --json` has written one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

FILE = "simulation.json"  # name in the report's folder
_KEYS = {"title", "columns", "rows", "notes", "panels"}


def read_simulation(file: Path) -> dict[str, Any]:
    """Read a simulated step.

    Raises:
        ValueError: the file does not exist or is not a simulated step.
    """
    try:
        step = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"there is no simulation at {file}: {error.strerror}") from None
    except ValueError:
        step = None
    if not isinstance(step, dict) or set(step) != _KEYS:
        raise ValueError(
            f"{file} is not a simulation; python -m conformance.simulator.cost --json writes one"
        )
    return step


def draw(report: dict[str, Any]) -> Markup | None:
    step = report.get("simulation")
    if not step:
        return None
    from conformance.simulator.cost.picture import picture  # noqa: PLC0415 (brings torch)

    return Markup(picture(step["title"], step["panels"]))
