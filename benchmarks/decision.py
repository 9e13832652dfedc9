"""When a case has become slower: the rule by which `ci/gate` and `ci/bench` turn red.

Only ratios to torch decide, and only against ratios of the same machine, or pool of equal ones, with the same torch
(or of a run that the user names). Those of other machines are shown beside them and decide nothing. One measurement
proves nothing: what looks slower is measured again in processes of its own, and counts if it looks so every time.
What was is the median of the newest points, so that one lucky point does not make all that come after it look slow.

What a program does once, such as an import, may be a small part of torch's time for it, which a change of hardware or
of load moves several times over without anybody's noticing. So it must cost time as well: by as much as the ratio has
grown, of torch's time today, it takes `ONE_OFF_S` or more longer. What is done in every step has no such floor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LIMIT = 1.2  # times the earlier ratio
ONE_OFF_S = 0.05  # longer than by the earlier ratio, of what is done once
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


def limit(was: Sequence[float], reference_s: float | None = None) -> float:
    """The ratio beyond which a case is slower than it was; `reference_s` is torch's time for what is done once."""
    earlier = statistics.median(was)
    return max(LIMIT * earlier, earlier + ONE_OFF_S / reference_s if reference_s else 0.0)


def verdict(was: Sequence[float], now: Sequence[float], reference_s: float | None = None) -> str:
    """Of one case: its earlier ratios, and those of the measurements of today, none if it could not be measured."""
    if not was:
        return NEW
    if not now:
        return MISSING
    slower = [ratio > limit(was, reference_s) for ratio in now]
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
    """Give each row of a report its `verdict`, what `was`, the ratios measured `again`, and a red one its sentence."""
    rows = [row for row in rows if row["outcome"] != "failed"]  # which is red already
    now = {row["name"]: [row["ratio"]] if row["outcome"] == "measured" else [] for row in rows}
    once = {row["name"]: row.get("reference_s") for row in rows if row.get("is_one_off")}
    verdicts = {name: verdict(earlier.get(name, []), ratios, once.get(name)) for name, ratios in now.items()}
    for _ in range(MEASUREMENTS - 1):
        suspects = [name for name, found in verdicts.items() if found == SUSPECT]
        if not suspects:
            break
        for name, ratio in measure_again(suspects).items():
            now[name].append(ratio)
            verdicts[name] = verdict(earlier[name], now[name], once.get(name))
    for row in rows:
        name = row["name"]
        was = statistics.median(earlier[name]) if earlier.get(name) else None
        row.update(verdict=verdicts[name], again=now[name][1:], was=was)
        if row["verdict"] in RED:
            row["reported"] = sentence(row)


def sentence(row: dict[str, Any]) -> str:
    """Of a judged row: what was, what is."""
    if "ratio" not in row:
        return f"{row['name']} was {row['was']:.2f} × torch's time and is {row['outcome']} now"
    now = ", ".join(f"{ratio:.2f}" for ratio in (row["ratio"], *row["again"]))
    return f"{row['name']} was {row['was']:.2f} × torch's time, now {now}"
