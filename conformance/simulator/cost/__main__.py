"""python -m conformance.simulator.cost: what a step of each subject would cost, as a table and as a picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.simulator import Unavailable
from conformance.simulator.cost.calibration import ACCELERATOR, fitted_efficiency, published
from conformance.simulator.cost.durations import Hardware, hardware
from conformance.simulator.cost.llama import LlamaConfig
from conformance.simulator.cost.picture import panel, picture
from conformance.simulator.cost.timeline import StepCost, schedule, step_cost
from conformance.simulator.cost.training_step import SUBJECTS, CostedTraining, traced

USAGE_ERROR = 2
_COLUMNS = (
    "ranks",
    "subject",
    "step, ms",
    "tokens/s a rank",
    "communication, ms",
    "exposed, ms",
    "allocated, GiB",
    "reserved, GiB",
)


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each subject and number of ranks, and how far it is off where something was published."""
    options = _parser().parse_args(arguments)
    training = CostedTraining(LlamaConfig(options.layers, fused=options.fused), options.batch, options.length)
    try:
        simulation = _simulated(options, training, hardware(options.accelerator))
    except (Unavailable, ValueError) as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        Path(options.json).write_text(json.dumps(simulation), encoding="utf-8")
    if options.picture:
        Path(options.picture).write_text(picture(simulation["title"], simulation["panels"]), encoding="utf-8")
    return 0


def _simulated(options: argparse.Namespace, training: CostedTraining, on: Hardware) -> dict[str, Any]:
    """Return all rows, and the panels of a picture of the first number of ranks."""
    blocks = "fused" if options.fused else "plain"
    tokens = f"{options.batch} x {options.length} tokens"
    of_what = f"Llama 3.1, {options.layers} {blocks} layers, {tokens}, {options.accelerator}"
    print(f"Simulated, not measured: {of_what}\n", _line(_COLUMNS), "|---" * len(_COLUMNS) + "|", sep="\n")
    rows, notes, panels = [], [], []
    for ranks in options.ranks:
        for subject in options.subjects:
            trace = traced(subject, training, ranks)
            timeline = schedule(trace.entries, on.seconds, on.host_s)
            cost = step_cost(timeline)
            tokens_per_s = training.tokens / cost.seconds
            rows.append([str(ranks), subject, *_figures(cost, tokens_per_s, trace.reserved_bytes)])
            print(_line(rows[-1]), flush=True)
            if known := published(training, subject, ranks, options.accelerator):
                notes.append(
                    f"{subject}, {ranks} ranks: {known.compared(tokens_per_s, trace.reserved_bytes)}"
                )
                if options.calibrate:
                    fitted = fitted_efficiency(trace.entries, on, training.tokens / known.tokens_per_s)
                    notes.append(f"product_efficiency = {fitted:.4f} would give the published tokens/s")
            if ranks == options.ranks[0]:
                panels.append(panel(subject, timeline))
    print("", *notes, sep="\n")
    title = f"Simulated, not measured: a step on {options.ranks[0]} ranks; {of_what}"
    return {"title": title, "columns": _COLUMNS, "rows": rows, "notes": notes, "panels": panels}


def _figures(cost: StepCost, tokens_per_s: float, reserved_bytes: int) -> list[str]:
    times = [f"{seconds * 1e3:.0f}" for seconds in (cost.communicating_s, cost.exposed_s)]
    memory = [f"{size / 2**30:.1f}" for size in (cost.allocated_bytes, reserved_bytes)]
    return [f"{cost.seconds * 1e3:.0f}", f"{tokens_per_s:.0f}", *times, *memory]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.simulator.cost",
        description="Simulate what a training step of Llama 3.1 costs, by shapes and a table of hardware.",
    )
    names = list(SUBJECTS)
    parser.add_argument("--ranks", type=_numbers, default=[8], help="numbers of ranks, by commas (8)")
    parser.add_argument(
        "--subjects", nargs="+", choices=names, default=names, help="subjects to simulate (all)"
    )
    parser.add_argument("--accelerator", default=ACCELERATOR, help=f"entry of hardware.toml ({ACCELERATOR})")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (32)")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank (2)")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence (8192)")
    parser.add_argument(
        "--fused", action="store_true", help="blocks as torch.compile is assumed to compile them"
    )
    parser.add_argument("--picture", help="SVG file with the timelines of the first number of ranks")
    parser.add_argument("--json", help="JSON file with all rows")
    parser.add_argument(
        "--calibrate", action="store_true", help="print the product_efficiency that gives the published speed"
    )
    return parser


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
