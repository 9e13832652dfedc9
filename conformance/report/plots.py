"""The curves of a training run, as the page shows them."""

from __future__ import annotations

import io
import re
import warnings
from typing import Any

import matplotlib as mpl
from markupsafe import Markup

from conformance.training.plot import draw


def plot(run: dict[str, Any], subject: str) -> Markup:
    drawn = io.StringIO()
    # Whether matplotlib's own font has a letter does not matter: the page's reader draws the text.
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),
        mpl.rc_context(
            {"svg.hashsalt": "tandem", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
        ),
    ):
        figure = draw(run | {"name": _label(run["name"])}, _label(subject))
        figure.set_size_inches(6, 4.5)  # two beside each other on a desk, one that can be read on a phone
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    # Matplotlib escapes the texts it draws; the XML prologue has no place inside HTML.
    svg = drawn.getvalue()
    return Markup(re.sub(r"\n\s*", "\n", svg[svg.index("<svg") :]))


def _label(text: str) -> str:
    """As matplotlib takes it: with a "$" that starts no formula."""
    return text.replace("$", r"\$")
