"""Put the timings of a bundle into the repository's results, where asv's dashboard finds them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import history
from conformance.gpu import source
from conformance.gpu.files import BENCHMARKS, MACHINE, REPORT, RESULTS
from conformance.gpu.phases import ROOT


class Unmergeable(ValueError):
    """What is wrong with the bundle, in words for its user."""


def merge(bundle: Path, root: Path = ROOT) -> list[Path]:
    """Add the bundle's results; the files that hold them. To do it again changes nothing.

    Benchmarks that an earlier run of the same commit on the same machine measured, and this one did not, are kept.

    Raises:
        Unmergeable: it is no bundle, has no timings, or comes from code that is no commit of this repository.
    """
    report = _read(bundle, REPORT)
    if not (bundle / RESULTS).is_file():
        raise Unmergeable(
            f"{bundle} has no timings of impl: its subject is {report['subject']}, its phase speed was "
            f"{_why_no_speed(report)}; run ci/gpu with that phase, on impl"
        )
    results, machine = _read(bundle, RESULTS), _read(bundle, MACHINE)
    try:
        commit = source.commit_of(report["files"], report["commit"], root)
    except source.UnknownSource as error:
        raise Unmergeable(f"{bundle} cannot be merged: {error}") from None
    name = machine["machine"]
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise Unmergeable(f"{bundle} names its machine {name!r}, which is no name for a folder")
    folder = root / "benchmarks" / "results"
    written = history.add(results, machine, commit, source.author_date_ms(commit, root), folder)
    # asv publishes nothing without it, and git does not have it: whoever times by asv makes it anew.
    catalogue = folder / BENCHMARKS.removeprefix("asv-")
    if not catalogue.is_file():
        catalogue.write_text((bundle / BENCHMARKS).read_text())
        written.append(catalogue)
    return written


def verdict_of(bundle: Path) -> str:
    return _read(bundle, REPORT)["verdict"]


def _read(bundle: Path, name: str) -> Any:
    try:
        return json.loads((bundle / name).read_text())
    except OSError as error:
        raise Unmergeable(f"{bundle} is no bundle of ci/gpu: it has no {name} ({error.strerror})") from None
    except ValueError as error:
        raise Unmergeable(f"{bundle / name} is not whole: {error}") from None


def _why_no_speed(report: dict[str, Any]) -> str:
    return report["phases"].get("speed", {}).get("why") or "whole"
