"""Show that pools survive faults of their ranks: `python -m conformance.ranks --faults 200`."""

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
    parser.add_argument("--faults", type=int, default=100, help="number of faults, in random order")
    parser.add_argument("--world-sizes", default="1,2,3", help="comma-separated sizes, one pool for each")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order")
    parser.add_argument("--json", action="store_true", help="print only the figures, as JSON")
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
    def join(counts: Mapping[str, float]) -> str:
        return ", ".join(
            f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1])
        )

    lines = [
        f"{figures.faults} faults in {seconds:.0f} s; ranks were started {figures.starts} times",
        f"exceptions: {join(figures.kinds)}",
        f"resources of warm pools: {join(figures.warm)}",
        f"resources after the faults: {join(figures.after_faults)}",
        f"resources at the end: {join(figures.at_the_end)}",
        f"leaked between cases: {figures.leaks_between or 'nothing'}",
        f"leaked at the end: {figures.leaks_at_the_end or 'nothing'}",
        f"longest time of each fault, in seconds: {join(figures.seconds)}",
        *(f"SURPRISE {surprise}" for surprise in figures.surprises),
        "stopped by the user" if figures.was_stopped else "good" if figures.is_good else "BAD",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
