"""Plots of a comparison: loss curves, held-out losses, scales and skipped steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from conformance.training.judge import TrainingComparison, as_entry

_REFERENCE = {"color": "#b35900", "linewidth": 3.0, "alpha": 0.55}
_SUBJECT = {"color": "#0550ae", "linewidth": 1.2}


def draw(entry: dict[str, Any], subject: str) -> Figure:
    """Draw one comparison, an entry that `judge.as_entry` returns."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    sides = ((entry["reference"], "torch", _REFERENCE), (entry["subject"], subject, _SUBJECT))
    for run, name, line in sides:
        top.plot(run["losses"], label=f"{name}, training", **line)
        bottom.step(range(len(run["scales"])), run["scales"], where="mid", **line)
        steps = [int(step) for step in run["held_out"]]  # keys of JSON are strings
        top.plot(steps, list(run["held_out"].values()), "o:", label=f"{name}, held out", **line)
    for step in entry["subject"]["skipped"]:
        bottom.axvline(step, color="#cf222e", alpha=0.3, linewidth=1)
    top.set_title(f"{entry['name']}: {'agrees' if entry['agrees'] else 'differs'}", loc="left")
    top.set_ylabel("loss, bits per byte")
    top.legend(frameon=False)
    bottom.set_yscale("log", base=2)
    bottom.set_ylabel("loss scale")
    bottom.set_xlabel("step (red: skipped by the subject)")
    return figure


def save(comparison: TrainingComparison, subject: str, folder: Path) -> list[Path]:
    """Write an SVG and a PNG that are named after the comparison, and return their paths."""
    figure = draw(as_entry(comparison), subject)
    stem = comparison.name.replace(", ", "-").replace(" ", "-")
    files = [folder / f"{stem}.svg", folder / f"{stem}.png"]
    with mpl.rc_context({"svg.hashsalt": "tandem", "svg.fonttype": "none"}):
        figure.savefig(files[0], metadata={"Date": None})
    figure.savefig(files[1], dpi=120)
    return files
