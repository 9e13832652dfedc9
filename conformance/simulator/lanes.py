"""Hazards as a page: the streams are lanes, the program runs downwards, and the missing wait is a red arrow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from conformance.simulator.control import Hazard, Step, in_program

_LANE, _ROW, _TOP, _BOX = 270, 62, 40, 34
_ROWS = 40  # limit of a picture, which leaves out the middle
_NOT_DRAWN = (
    "Only the first hazards of a run are drawn, and only if the stream of the earlier access is known."
)
_HEAD = 12  # rows above what is left out
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222;background:#fff}
pre{white-space:pre-wrap;background:#f4f4f4;padding:.8em}svg{max-width:100%;height:auto}
text{font:12px sans-serif;fill:#222}.place{fill:#666}.head{font-weight:bold}
.lane{stroke:#ccc}.box{fill:#dbe9f6;stroke:#6b8fb3}.race{fill:#fde0dc;stroke:#c62828;stroke-width:2}
.wait{stroke:#6b8fb3;fill:none}
.missing{stroke:#c62828;stroke-width:2.5;stroke-dasharray:7 5;fill:none}
.red{fill:#c62828;paint-order:stroke;stroke:#fff;stroke-width:4px}
"""
_ARROWS = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
    for name, colour in (("known", "#6b8fb3"), ("absent", "#c62828"))
)


@dataclass(frozen=True)
class Row:
    """A line of a picture: a step, or steps that are left out."""

    step: Step | None
    left_out: int = 0
    is_race: bool = False


def page(title: str, hazards: Sequence[Hazard]) -> str:
    """Return a page without external resources, with a picture for each hazard that has its steps and streams."""
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{_says(len(hazards))}</p>"]
    for number, hazard in enumerate(hazards, 1):
        parts.append(f'<h2 id="hazard{number}">Hazard {number}</h2><pre>{escape(str(hazard))}</pre>')
        is_drawn = hazard.steps and hazard.before_stream
        parts.append(picture(hazard) if is_drawn else f"<p>{_NOT_DRAWN}</p>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"{''.join(parts)}</html>\n"
    )


def picture(hazard: Hazard) -> str:
    """Return a hazard as SVG."""
    rows = rows_of(hazard)
    lanes = lanes_of(rows)
    x_of = {lane: _LANE * index + _LANE // 2 for index, lane in enumerate(lanes)}
    width, height = _LANE * len(lanes), _TOP + _ROW * len(rows) + 10
    out = [
        f'<text class="head" x="{x}" y="18" text-anchor="middle">{escape(lane)}</text>'
        f'<path class="lane" d="M{x} 26V{height}"/>'
        for lane, x in x_of.items()
    ]
    boxes: list[tuple[Step, int]] = []
    race: list[tuple[int, int]] = []
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        if row.step is None:
            out.append(f'<text class="place" x="8" y="{y + 20}">… {row.left_out} more steps …</text>')
        elif row.step.source:
            out.append(_wait(row.step, x_of, y, boxes))
        else:
            boxes.append((row.step, y))
            out.append(_box(row, x_of[row.step.stream], y))
        if row.is_race and row.step is not None:
            race.append((x_of[row.step.stream], y))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(hazard.missing)}"><defs>{_ARROWS}</defs>{"".join(out)}{_missing(*race)}</svg>'
    )


def rows_of(hazard: Hazard) -> list[Row]:
    """Return the rows of a picture: some steps before the earlier access, and those up to the later one."""
    before = Step(
        hazard.before_stream, hazard.before_tick, hazard.before, in_program(hazard.before_place), "", -1
    )
    now = Step(hazard.now_stream, hazard.now_tick, hazard.now, in_program(hazard.now_place), "", -1)
    steps = [step for step in hazard.steps if step.source or step.tick != hazard.now_tick]
    if len(steps) > _ROWS:
        streams = {hazard.before_stream, hazard.now_stream}
        steps = [step for step in steps if streams & {step.stream, step.source}]
    is_before = [not step.source and step.tick == hazard.before_tick for step in steps]
    start = is_before.index(True) if any(is_before) else -1
    earlier, rows = [Row(step) for step in steps[: max(start, 0)]], [Row(step) for step in steps[start + 1 :]]
    if len(rows) > _ROWS:
        left_out = len(rows) - _ROWS
        rows[_HEAD : _HEAD + left_out] = [Row(None, left_out)]
    return [*earlier, Row(before, is_race=True), *rows, Row(now, is_race=True)]


def lanes_of(rows: Sequence[Row]) -> list[str]:
    """Return the streams of a picture in their order. The host is the first one."""
    names = {name for row in rows if row.step for name in (row.step.stream, row.step.source) if name}
    return sorted(names, key=lambda name: (name != "host", "default" not in name, len(name), name))


def _says(count: int) -> str:
    if not count:
        return "No hazard: every pair of accesses to the same memory is ordered by a wait."
    return (
        "The program runs downwards. A box is an operation of a stream, a blue arrow is a wait. Nothing makes the "
        "second red box wait for the first one: add the wait that the dashed arrow shows."
    )


def _box(row: Row, x: int, y: int) -> str:
    step = row.step
    assert step is not None
    left, look = x - _LANE // 2 + 12, "race" if row.is_race else "box"
    return (
        f'<g><title>{escape(step.place)}</title><rect class="{look}" x="{left}" y="{y}" rx="4" width="{_LANE - 24}" '
        f'height="{_BOX}"/><text x="{left + 8}" y="{y + 14}">{escape(_short(step.name))}</text>'
        f'<text class="place" x="{left + 8}" y="{y + 28}">{escape(_short(_basename(step.place)))}</text></g>'
    )


def _wait(step: Step, x_of: dict[str, int], y: int, boxes: Sequence[tuple[Step, int]]) -> str:
    """Return a wait as an arrow from the last operation that is waited for. It may be above the picture."""
    x, source_x, at = x_of[step.stream], x_of[step.source], y + _BOX // 2
    tops = [top for box, top in boxes if box.stream == step.source and box.tick <= step.source_tick]
    start = tops[-1] + _BOX if tops else 26
    return (
        f"<g><title>{escape(f'{step.stream} waits for {step.source}: {step.place}')}</title>"
        f'<path class="wait" marker-end="url(#known)" d="M{source_x} {start}L{x} {at}"/>'
        f'<text class="place" x="{x + 8}" y="{at + 4}">waits, {escape(_short(_basename(step.place), 26))}</text></g>'
    )


def _missing(before: tuple[int, int], now: tuple[int, int]) -> str:
    (x, y), (now_x, now_y) = before, now
    middle = (y + _BOX + now_y) / 2
    return (
        f'<path class="missing" marker-end="url(#absent)" '
        f'd="M{x} {y + _BOX}C{x} {middle} {now_x} {middle} {now_x} {now_y}"/>'
        f'<text class="red head" x="{(x + now_x) / 2 + 8}" y="{middle}">no wait</text>'
    )


def _basename(place: str) -> str:
    return re.sub(r"[^\s]*/|^\(.*?\) ", "", place)


def _short(text: str, limit: int = 36) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
