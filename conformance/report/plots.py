"""Plots of the curves of a training run for the page."""

from __future__ import annotations

import io
import re
import warnings
from typing import Any

import matplotlib as mpl
from markupsafe import Markup

from conformance.training.plot import draw


def plot(run: dict[str, Any], subject: str) -> Markup:
    output = io.StringIO()
    # matplotlib warns about letters that its font lacks, but the reader's browser draws the text.
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),
        mpl.rc_context(
            {"svg.hashsalt": "tandem", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
        ),
    ):
        figure = draw(run | {"name": _label(run["name"])}, _label(subject))
        figure.set_size_inches(6, 4.5)  # two per row on a desktop, one on a phone
        figure.savefig(output, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    # matplotlib escapes the texts. The XML prologue is not allowed inside HTML.
    svg = output.getvalue()
    return Markup(re.sub(r"\n\s*", "\n", svg[svg.index("<svg") :]))


def _label(text: str) -> str:
    """Escape "$", which would start a formula in matplotlib."""
    return text.replace("$", r"\$")
