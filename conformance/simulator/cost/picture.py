"""A step's timeline as SVG: a panel for each subject, a row for each stream, and memory below them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from conformance.simulator.cost.timeline import Span, StepCost, Timeline, merged, step_cost

_WIDTH, _LEFT, _ROW, _GAP, _MEMORY = 1100, 130, 16, 4, 44
# Parts of a panel's time. A picture shows no shorter time than one part.
_SCALE = 1000
_LOOKS = {
    "other": ("#90b4d6", "other operators"),
    "product": ("#2b6cb0", "matrix products, attention"),
    "collective": ("#dd6b20", "collectives"),
}


def panel(name: str, timeline: Timeline) -> dict[str, Any]:
    """Return the panel of the last step as JSON data. Times are in thousandths of the step."""
    begin, end = timeline.marks[-2:]
    scale = _SCALE / (end - begin)
    spans = timeline.between(begin, end)
    memory: dict[int, int] = {}
    for at, size in timeline.allocated:
        if begin <= at <= end:
            x = int((at - begin) * scale)
            memory[x] = max(memory.get(x, 0), size)
    rows = []
    for number, stream in enumerate(sorted({span.stream for span in spans})):
        row = [span for span in spans if span.stream == stream]
        rows.append(
            {"role": _role(number, row), "boxes": {kind: _boxes(row, kind, begin, scale) for kind in _LOOKS}}
        )
    cost = step_cost(timeline)
    return {
        "name": name,
        "seconds": cost.seconds,
        "says": _says(cost),
        "rows": rows,
        "memory": sorted(memory.items()),
    }


def picture(title: str, panels: Sequence[dict[str, Any]]) -> str:
    """Return the panels as SVG, all with the same time scale."""
    longest = max(data["seconds"] for data in panels)
    parts, y = [_legend(title)], 58
    for data in panels:
        drawn, height = _drawn(data, (_WIDTH - _LEFT - 10) / _SCALE * data["seconds"] / longest)
        parts.append(f'<g transform="translate(0 {y})">{drawn}</g>')
        y += height
    style = "<style>.step text{font:12px sans-serif;fill:#333}.step .name{font-weight:bold}</style>"
    return (
        f'<svg class="step" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" role="img" '
        f'aria-label="{escape(title)}">{style}<rect width="{_WIDTH}" height="{y}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _role(number: int, row: Sequence[Span]) -> str:
    if number == 0:
        return "default stream"
    return "collectives" if any(span.kind == "collective" for span in row) else f"stream {number}"


def _boxes(row: Sequence[Span], kind: str, begin: float, scale: float) -> list[list[float]]:
    """Return begin and length of each box. Spans that are nearer than half a part are one box."""
    near = 0.5 / scale
    times = merged((span.begin, span.end + near) for span in row if span.kind == kind)
    return [[round((a - begin) * scale, 1), round((b - near - a) * scale, 1)] for a, b in times]


def _says(cost: StepCost) -> str:
    return (
        f"{cost.seconds * 1e3:.0f} ms; communication {cost.communicating_s * 1e3:.0f} ms, of which "
        f"{cost.exposed_s * 1e3:.0f} ms exposed; peak {cost.allocated_bytes / 2**30:.1f} GiB allocated"
    )


def _legend(title: str) -> str:
    out = [f'<text class="name" x="8" y="18">{escape(title)}</text>']
    for at, (colour, meaning) in enumerate(_LOOKS.values()):
        x = 8 + at * 230
        out.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="38">{meaning}</text>')
    return "".join(out)


def _drawn(data: dict[str, Any], scale: float) -> tuple[str, int]:
    out, y = [f'<text class="name" x="8" y="12">{escape(data["name"])}</text>'], 20
    out.append(f'<text x="{_LEFT}" y="12">{escape(data["says"])}</text>')
    for row in data["rows"]:
        out.append(f'<text x="8" y="{y + 12}">{escape(row["role"])}</text>')
        for kind, (colour, _) in _LOOKS.items():
            shape = "".join(
                f"M{_LEFT + x * scale:.1f} {y}h{wide * scale:.1f}v{_ROW}h{-wide * scale:.1f}z"
                for x, wide in row["boxes"][kind]
            )
            out.append(f'<path fill="{colour}" d="{shape}"/>')
        y += _ROW + _GAP
    out.append(f'<text x="8" y="{y + 14}">memory as asked</text>{_curve(data["memory"], scale, y + _MEMORY)}')
    return "".join(out), y + _MEMORY + 18


def _curve(points: Sequence[Sequence[float]], scale: float, base: int) -> str:
    top = max((size for _, size in points), default=1)
    line = "".join(f"L{_LEFT + x * scale:.1f} {base - size / top * (_MEMORY - 4):.1f}" for x, size in points)
    return f'<path fill="#e2e8f0" stroke="#718096" d="M{_LEFT} {base}{line}V{base}z"/>'
