"""`docs/results.svg`, drawn from recorded results: clauses of judged packages, and time relative to torch.

`ci/check --fix` writes it, and `ci/check --only freshness` compares it. The clauses come from the table of
`docs/judging.md`, the times from the newest file of `benchmarks/results` that has all cases.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from _environment import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks import history

JUDGED = "docs/judging.md"
# The name of a row, and the beginning of its cases' names.
_ROWS = {
    "FullyShardedDataParallel step": "RatioFsdpStep[",
    "fully_shard step": "RatioFullyShardStep[",
    "fully_shard: full state dict": "RatioFullyShardWholeState[",
    "sharded checkpoint: save": "RatioFsdpSave[",
    "AMP step, four calls": "RatioAmpStep[",
    "AMP step, fused_step": "RatioFusedAmpStep[",
    "clip_grad_norm_": "RatioClipGradNorm[",
    "GradScaler.unscale_": "RatioUnscale[",
    "GradScaler.update": "RatioUpdate[",
    "captured optimizer step": "RatioCapturedStep[",
    "compiled optimizer step": "RatioOptimizerCompiled[",
    "autocast region": "RatioRegion[",
}
_WIDTH, _ROW, _TOP = 880, 22, 62
# The bars are between the first two, and the times between the last two.
_LEFT, _LEFT_END, _RIGHT, _RIGHT_END = 130, 330, 600, 830
_NAMES = 415  # left edge of the rows' names
_LOWEST, _HIGHEST = 0.15, 1.6
_TICKS = (0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
_STYLE = """
text { font: 12px sans-serif; fill: #1f2328 } .head { font-weight: bold } .small { font-size: 11px; fill: #59636e }
.rest { fill: #d1d9e0 } .hold { fill: #0969da } .line { stroke: #0969da; stroke-width: 2 }
.grid { stroke: #d1d9e0 } .torch { stroke: #1f2328; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 } .rest, .grid { fill: #3d444d; stroke: #3d444d }
.hold { fill: #4493f8 } .line { stroke: #4493f8 } .torch { stroke: #f0f6fc } }
"""


@dataclass(frozen=True)
class Package:
    name: str
    holds: int
    clauses: int


@dataclass(frozen=True)
class Times:
    point: history.Point
    ratios: dict[str, list[float]]  # keyed by row

    @property
    def about(self) -> str:
        traits = self.point.traits
        date = time.strftime("%Y-%m-%d", time.gmtime(self.point.date_ms / 1000))
        gpu = "no GPU" if traits["gpu"] == "none" else traits["gpu"]
        return (
            f"{traits['cpu']}, {traits['num_cpu']} cores, {gpu}; torch {traits['torch']}, "
            f"Python {traits['python']}; commit {self.point.commit[:8]} ({date})"
        )


def packages() -> list[Package]:
    rows = re.findall(
        r"^\| (\S+ \S+) \| [^|]+ \| (\d+) of (\d+)[^|]* \|.*proofs\.py\) \|$",
        (ROOT / JUDGED).read_text(),
        re.M,
    )
    return [Package(name, int(holds), int(clauses)) for name, holds, clauses in rows]


def times() -> Times:
    for point in reversed(history.points(ROOT / "benchmarks/results")):
        ratios = {
            row: [ratio.value for case, ratio in point.ratios.items() if case.startswith(cases)]
            for row, cases in _ROWS.items()
        }
        if all(ratios.values()):
            return Times(point, ratios)
    raise ValueError("no file of benchmarks/results has the cases of docs/results.svg: run ci/bench")


def picture() -> str:
    judged, measured = packages(), times()
    bottom = _TOP + _ROW * len(_ROWS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 58}" role="img" '
        'aria-label="Clauses of judged packages, and time of Tandem relative to torch">',
        f"<style>{_STYLE}</style>",
        _text(10, 20, "Clauses that hold, of those asked", "head"),
        _text(_NAMES, 20, "Time of Tandem ÷ time of torch (left of 1: Tandem is faster)", "head"),
        *_bars(judged),
        *_axis(bottom),
        *_dots(measured),
        _text(10, bottom + 34, "Left: published packages, judged in the profile quick on the CPU."),
        _text(10, bottom + 50, f"Right: geometric mean and range of the recorded cases. {measured.about}"),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _bars(judged: list[Package]) -> Iterator[str]:
    width = _LEFT_END - _LEFT
    for row, package in enumerate(judged):
        y = _TOP + _ROW * row
        share = width * package.holds / package.clauses
        yield _text(10, y + 11, package.name, "small")
        yield f'<rect class="rest" x="{_LEFT}" y="{y}" width="{width}" height="14"/>'
        yield f'<rect class="hold" x="{_LEFT}" y="{y}" width="{share:.1f}" height="14"/>'
        yield _text(_LEFT_END + 8, y + 11, f"{package.holds} of {package.clauses}", "small")


def _axis(bottom: int) -> Iterator[str]:
    for tick in _TICKS:
        kind = "torch" if tick == 1.0 else "grid"
        yield f'<line class="{kind}" x1="{_x(tick)}" x2="{_x(tick)}" y1="{_TOP - 10}" y2="{bottom}"/>'
        yield f'<text class="small" x="{_x(tick)}" y="{_TOP - 16}" text-anchor="middle">{tick:g}</text>'


def _dots(measured: Times) -> Iterator[str]:
    for row, (name, ratios) in enumerate(measured.ratios.items()):
        y = _TOP + _ROW * row + 7
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        yield _text(_NAMES, y + 4, name, "small")
        yield f'<line class="line" x1="{_x(min(ratios))}" x2="{_x(max(ratios))}" y1="{y}" y2="{y}"/>'
        yield f'<circle class="hold" cx="{_x(mean)}" cy="{y}" r="4"/>'
        yield _text(_RIGHT_END + 10, y + 4, f"{mean:.2f}", "small")


def _x(ratio: float) -> float:
    share = math.log(max(ratio, _LOWEST) / _LOWEST) / math.log(_HIGHEST / _LOWEST)
    return round(_RIGHT + (_RIGHT_END - _RIGHT) * min(share, 1.0), 1)


def _text(x: int, y: int, text: str, kind: str = "small") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'
