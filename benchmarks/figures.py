"""Figures to quote: the newest recorded result of each headline, with its floor and the command that repeats it.

`ci/check --fix` writes the table to `docs/benchmarks.md`, and the dashboard's first page shows it. The floor of a call
that memory limits is the time in which a plain copy moves the call's bytes. This module needs only Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import history

_COPY = "copy"
_MATRIX_PRODUCTS = "none: mostly matrix products"
# Case whose floor is one copy of GPT-2's tensors. It gives the bandwidth of a copy at its commit.
_COPIED, _COPIED_BYTES = "RatioUnscale[gpt2, float32, kept, cpu]", 4 * 124_439_808
TRANSFORMER_BYTES = 4 * 21_012_480  # parameters of `fsdp_ranks.Transformer`


@dataclass(frozen=True)
class Headline:
    """A case that users quote."""

    title: str
    case: str
    # `_COPY` for the time of a copy, which the case is compared with, or the reason why there is no floor.
    floor: str = _COPY
    # Bytes to copy, or to hold in memory, of a case that is not compared with a copy.
    floor_bytes: int = 0


@dataclass(frozen=True)
class Figure:
    """Texts of a row of the table."""

    title: str
    figure: str
    floor: str
    reached: str
    machine: str
    commit: str
    command: str


QUOTED = (
    Headline("Fused AMP step, GPT-2's tensors", "RatioFusedAmpStep[gpt2, float32, kept, cpu]"),
    Headline("`clip_grad_norm_`, GPT-2's tensors", "RatioClipGradNorm[gpt2, float32, clipped, kept, cpu]"),
    Headline("`GradScaler.unscale_`, GPT-2's tensors", _COPIED),
    Headline("Captured AdamW step, GPT-2's tensors", "RatioCapturedStep[gpt2, fused, kept, cpu]"),
    Headline(
        "Compiled AdamW step, a small tensor",
        "RatioOptimizerCompiled[AdamW, 1x1k, cpu]",
        "none: mostly guards",
    ),
    Headline("FSDP step, 21 M parameters, 2 ranks", "RatioFsdpStep[2, original, cpu]", _MATRIX_PRODUCTS),
    Headline("`fully_shard` step, 21 M parameters, 2 ranks", "RatioFullyShardStep[2, cpu]", _MATRIX_PRODUCTS),
    Headline(
        "FSDP: full state dict, 2 ranks", "RatioFsdpSave[model, FULL, cpu]", floor_bytes=TRANSFORMER_BYTES
    ),
    # A rank holds its half of the parameters and of their gradients.
    Headline("FSDP: peak memory of a step, 2 ranks", "FsdpPeak[2]", floor_bytes=TRANSFORMER_BYTES),
    Headline(
        "`fully_shard`: peak memory of a step, 2 ranks", "FullyShardPeak[2]", floor_bytes=TRANSFORMER_BYTES
    ),
    Headline(
        "AMP step by four calls, 1,000 small tensors",
        "RatioAmpStep[1000x1k, float32, kept, cuda]",
        "none: mostly launches of four calls",
    ),
    Headline(
        "`clip_grad_norm_`, 1,000 small tensors", "RatioClipGradNorm[1000x1k, float32, clipped, kept, cuda]"
    ),
)


def figures(points: Sequence[history.Point]) -> list[Figure]:
    """Return the rows of the headlines that have a result, each from its newest result that has seconds or bytes."""
    rows: list[Figure] = []
    for headline in QUOTED:
        own = [point for point in points if headline.case in point.ratios]
        if own:
            newest = max(
                own, key=lambda point: (point.ratios[headline.case].of_impl is not None, point.date_ms)
            )
            rows.append(_figure(headline, newest))
    return rows


def table(rows: Sequence[Figure]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| headline | Tandem | floor | reached | measured on | command |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.title} | {row.figure} | {row.floor} | {row.reached} | {row.machine} at {row.commit} "
            f"| `{row.command}` |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def command(case: str) -> str:
    """Return the command that measures a case of a point again."""
    name, _, values = case.partition("[")
    if name.startswith("Ratio"):
        return f'python -m benchmarks --case "{case}"'
    own, torch = (f'--case "{name}[{subject}, {values}"' for subject in ("impl", "torch"))
    return f"python -m benchmarks --history {own} {torch}"


def amount(value: float, unit: str) -> str:
    """Return seconds, or bytes if `unit` says so, with three digits."""
    if unit == "bytes":
        return f"{value / 1e6:.3g} MB"
    for name, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value * 1e9:.3g} ns"


def _figure(headline: Headline, point: history.Point) -> Figure:
    ratio = point.ratios[headline.case]
    shown = f"{ratio.value:.2f} × torch"
    if ratio.of_impl is not None:
        shown += f", {amount(ratio.of_impl, ratio.unit)}"
    floor, reached = _floor(headline, point)
    return Figure(
        headline.title, shown, floor, reached, point.machine, point.commit[:8], command(headline.case)
    )


def _floor(headline: Headline, point: history.Point) -> tuple[str, str]:
    """Return the floor and the fraction of it that the case reaches. The fraction is empty if there is no floor."""
    if headline.floor != _COPY:
        return headline.floor, ""
    ratio, copied = point.ratios[headline.case], point.ratios.get(_COPIED)
    if ratio.of_impl is None:
        return "not recorded", ""
    if not headline.floor_bytes:
        floor = _floor_of_copy(ratio)
    elif ratio.unit == "bytes":
        floor = headline.floor_bytes
    else:
        copy_s = copied and _floor_of_copy(copied)
        floor = copy_s and copy_s * headline.floor_bytes / _COPIED_BYTES
    return (amount(floor, ratio.unit), f"{floor / ratio.of_impl:.0%}") if floor else ("not recorded", "")


def _floor_of_copy(ratio: history.RatioPoint) -> float | None:
    if ratio.of_impl is None or ratio.share_of_copy is None:
        return None
    return ratio.of_impl * ratio.share_of_copy
