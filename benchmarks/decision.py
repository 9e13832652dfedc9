"""The rule for speed regressions, by which `ci/gate` and `ci/bench` turn red.

Only ratios to torch are judged, and only against ratios of the same machine (or pool of equal machines) with the same
torch, or against a run that the user names. Ratios of other machines are shown but not judged. A single measurement is
not enough: a case that looks slower is measured again in separate processes, and is a regression if all of them agree.
The earlier ratio is the median of the newest results, so that one lucky result does not make all later ones look slow.

Work that a program does once, such as an import, can be a small fraction of torch's time for it. Then a change of
hardware or load multiplies the ratio, although users notice nothing. So a one-off case must also be slower by
`ONE_OFF_S` seconds: the increase of the ratio times torch's time today. Work of every step has no such minimum.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LIMIT = 1.2  # times the earlier ratio
ONE_OFF_S = 0.05  # least extra time of a slower one-off case
MEASUREMENTS = 3  # measurements that must agree
EARLIER_POINTS = 3
# A case is slower than torch if its whole interval is above this, and faster if it is below the inverse.
SURELY = 1.03

OK = "ok"
REGRESSION = "regression"
MISSING = "missing"  # measured earlier, not measurable now
INCONCLUSIVE = "inconclusive"  # measurements that do not agree
SUSPECT = "not confirmed"  # slower so far, not yet measured again
NEW = "nothing earlier"
RED = (REGRESSION, MISSING)


def limit(was: Sequence[float], reference_s: float | None = None) -> float:
    """Return the ratio above which a case counts as slower. `reference_s` is torch's time if the case is a one-off."""
    earlier = statistics.median(was)
    return max(LIMIT * earlier, earlier + ONE_OFF_S / reference_s if reference_s else 0.0)


def verdict(was: Sequence[float], now: Sequence[float], reference_s: float | None = None) -> str:
    """Return the verdict on a case from its earlier ratios and today's. `now` is empty if it could not be measured."""
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
    """Add to each report row the `verdict`, the earlier ratio (`was`) and the repeated ratios (`again`).

    A red row also gets a sentence (`reported`). A failed row is left alone, because it is red already.
    """
    rows = [row for row in rows if row["outcome"] != "failed"]
    now = {row["name"]: [row["ratio"]] if row["outcome"] == "measured" else [] for row in rows}
    one_off_s = {row["name"]: row.get("reference_s") for row in rows if row.get("is_one_off")}
    verdicts = {
        name: verdict(earlier.get(name, []), ratios, one_off_s.get(name)) for name, ratios in now.items()
    }
    for _ in range(MEASUREMENTS - 1):
        suspects = [name for name, reached in verdicts.items() if reached == SUSPECT]
        if not suspects:
            break
        for name, ratio in measure_again(suspects).items():
            now[name].append(ratio)
            verdicts[name] = verdict(earlier[name], now[name], one_off_s.get(name))
    for row in rows:
        name = row["name"]
        was = statistics.median(earlier[name]) if earlier.get(name) else None
        row.update(verdict=verdicts[name], again=now[name][1:], was=was)
        if row["verdict"] in RED:
            row["reported"] = sentence(row)


def sentence(row: dict[str, Any]) -> str:
    """Return the earlier and the current ratio of a judged row as a sentence."""
    if "ratio" not in row:
        return f"{row['name']} was {row['was']:.2f} × torch's time and is {row['outcome']} now"
    now = ", ".join(f"{ratio:.2f}" for ratio in (row["ratio"], *row["again"]))
    return f"{row['name']} was {row['was']:.2f} × torch's time, now {now}"
