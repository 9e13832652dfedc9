"""When a case has become slower: the rule by which `ci/gate` and `ci/bench` turn red.

Only ratios to torch decide, and only against ratios of the same kind of machine with the same torch. One measurement
proves nothing: what looks slower is measured again in processes of its own, and counts if it looks so every time.
What was is the median of the newest points, so that one lucky point does not make all that come after it look slow.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

LIMIT = 1.2  # times the earlier ratio
MEASUREMENTS = 3  # that must agree
EARLIER_POINTS = 3

REGRESSION, MISSING, INCONCLUSIVE, OK, NEW = "regression", "missing", "inconclusive", "ok", "nothing earlier"


def verdict(was: Sequence[float], now: Sequence[float]) -> str:
    """Of one case: its earlier ratios, and those of the measurements of today, none if it could not be measured."""
    if not was:
        return NEW
    if not now:
        return MISSING
    slower = [ratio > LIMIT * statistics.median(was) for ratio in now]
    if not slower[0]:
        return OK
    return REGRESSION if all(slower) and len(now) >= MEASUREMENTS else INCONCLUSIVE


def judge(
    rows: list[dict[str, Any]],
    earlier: dict[str, list[float]],
    measure_again: Callable[[str], float | None],
) -> None:
    """Give each row of a report its `verdict`, what `was`, and the ratios that were measured `again`."""
    for row in rows:
        if row["outcome"] == "failed":  # which is red already
            continue
        was = earlier.get(row["name"], [])
        now = [row["ratio"]] if row["outcome"] == "measured" else []
        while verdict(was, now) == INCONCLUSIVE and len(now) < MEASUREMENTS:
            again = measure_again(row["name"])
            if again is None or again <= LIMIT * statistics.median(was):
                now += [] if again is None else [again]
                break
            now.append(again)
        row.update(verdict=verdict(was, now), again=now[1:], was=statistics.median(was) if was else None)


def sentence(row: dict[str, Any]) -> str:
    """Of a judged row: what was, what is."""
    if "ratio" not in row:
        return f"{row['name']} was {row['was']:.2f} × torch's time and is {row['outcome']} now"
    now = ", ".join(f"{ratio:.2f}" for ratio in (row["ratio"], *row["again"]))
    return f"{row['name']} was {row['was']:.2f} × torch's time, now {now}"
