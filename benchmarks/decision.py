"""When a case has become slower: the rule by which `ci/gate` and `ci/bench` turn red.

Only ratios to torch decide, and only against ratios of the same kind of machine with the same torch. One measurement
proves nothing: what looks slower is measured again in processes of its own, and counts if it looks so every time.
What was is the median of the newest points, so that one lucky point does not make all that come after it look slow.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LIMIT = 1.2  # times the earlier ratio
MEASUREMENTS = 3  # that must agree
EARLIER_POINTS = 3
SURELY = (
    1.03  # an interval that lies wholly beyond this, or below its inverse, is slower or faster than torch
)

OK = "ok"
REGRESSION = "regression"
MISSING = "missing"  # was measured earlier, and cannot be now
INCONCLUSIVE = "inconclusive"  # the measurements do not agree: noise
SUSPECT = "not confirmed"  # slower so far, to be measured again
NEW = "nothing earlier"
RED = (REGRESSION, MISSING)


def verdict(was: Sequence[float], now: Sequence[float]) -> str:
    """Of one case: its earlier ratios, and those of the measurements of today, none if it could not be measured."""
    if not was:
        return NEW
    if not now:
        return MISSING
    slower = [ratio > LIMIT * statistics.median(was) for ratio in now]
    if not slower[0]:
        return OK
    if not all(slower):
        return INCONCLUSIVE
    return REGRESSION if len(now) >= MEASUREMENTS else SUSPECT


def judge(
    rows: list[dict[str, Any]],
    earlier: Mapping[str, Sequence[float]],
    measure_again: Callable[[list[str]], Mapping[str, float]],
) -> None:
    """Give each row of a report its `verdict`, what `was`, and the ratios that were measured `again`."""
    rows = [row for row in rows if row["outcome"] != "failed"]  # which is red already
    now = {row["name"]: [row["ratio"]] if row["outcome"] == "measured" else [] for row in rows}
    verdicts = {name: verdict(earlier.get(name, []), ratios) for name, ratios in now.items()}
    for _ in range(MEASUREMENTS - 1):
        suspects = [name for name, found in verdicts.items() if found == SUSPECT]
        if not suspects:
            break
        for name, ratio in measure_again(suspects).items():
            now[name].append(ratio)
            verdicts[name] = verdict(earlier[name], now[name])
    for row in rows:
        name = row["name"]
        was = statistics.median(earlier[name]) if earlier.get(name) else None
        row.update(verdict=verdicts[name], again=now[name][1:], was=was)


def sentence(row: dict[str, Any]) -> str:
    """Of a judged row: what was, what is."""
    if "ratio" not in row:
        return f"{row['name']} was {row['was']:.2f} × torch's time and is {row['outcome']} now"
    now = ", ".join(f"{ratio:.2f}" for ratio in (row["ratio"], *row["again"]))
    return f"{row['name']} was {row['was']:.2f} × torch's time, now {now}"
