"""Show that the pool outlives its ranks' faults: `python -m conformance.ranks --faults 200`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping

from conformance.judge.errors import raise_stopped_by_user
from conformance.ranks.soak import Figures, soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.ranks", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="how many faults, in random order")
    parser.add_argument("--world-sizes", default="1,2,3", help="comma-separated; one pool for each")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON and nothing else")
    options = parser.parse_args()

    def progress(done: int, fault: str) -> None:
        if not options.json and sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{done}/{options.faults} {fault}")
            sys.stderr.flush()

    signal.signal(signal.SIGTERM, raise_stopped_by_user)
    began = time.monotonic()
    figures = soak(
        options.faults, [int(size) for size in options.world_sizes.split(",")], options.seed, progress
    )
    seconds = time.monotonic() - began
    sys.stdout.write(json.dumps(figures.as_dict()) if options.json else _as_text(figures, seconds))
    return 0 if figures.is_good else 1


def _as_text(figures: Figures, seconds: float) -> str:
    def listed(counts: Mapping[str, float]) -> str:
        return ", ".join(
            f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1])
        )

    lines = [
        f"{figures.faults} faults in {seconds:.0f} s; ranks made {figures.starts} times",
        f"came to: {listed(figures.kinds)}",
        f"warm pools: {listed(figures.warm)}",
        f"after the faults: {listed(figures.after_faults)}",
        f"at the end: {listed(figures.at_the_end)}",
        f"left behind between cases: {figures.leaks_between or 'nothing'}",
        f"left behind at the end: {figures.leaks_at_the_end or 'nothing'}",
        f"longest, in seconds: {listed(figures.seconds)}",
        *(f"SURPRISE {surprise}" for surprise in figures.surprises),
        "stopped by the user" if figures.was_stopped else "good" if figures.is_good else "BAD",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
