"""Comparison of the certificates of two runs. It names the first difference by step, phase, tensor and rank."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Gradients over 1, 2 and 4 ranks were at most 0.6 roundings apart, relative to the tensor's norm, and AdamW's states
# after a clipping that sums in another order 2.2. An estimate from a sketch is rarely half or twice the true distance.
_ROUNDINGS = 16


class NotComparable(ValueError):
    """Raised if certificates cannot be compared."""


@dataclass(frozen=True)
class Whole:
    """A tensor of one run at one point, joined from its parts on all ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: int
    sketch: tuple[float, ...]
    nonfinite: int
    digests: Mapping[int, str]  # hash by rank

    @property
    def norm(self) -> float:
        """An estimate of the norm."""
        return math.hypot(*self.sketch)

    def distance(self, other: Whole) -> float:
        """Return an estimate of the norm of the difference, divided by the larger norm."""
        difference = math.hypot(*(a - b for a, b in zip(self.sketch, other.sketch, strict=True)))
        return difference / max(self.norm, other.norm) if difference else 0.0


@dataclass(frozen=True)
class PhaseRecord:
    """Records of one phase of one step. The order of tensors is that of the recorder."""

    tensors: Mapping[str, Whole]
    of_rank: Mapping[str, Whole]
    scaler: Mapping[str, Any]


@dataclass(frozen=True)
class Certificate:
    folder: Path
    header: Mapping[str, Any]
    points: Mapping[tuple[int, str], PhaseRecord]

    @classmethod
    def read(cls, folder: str | Path) -> Certificate:
        """Read the files of all ranks.

        Raises:
            NotComparable: a file is missing or cut off, or replicas within the run differ.
        """
        folder = Path(folder)
        files = sorted(folder.glob("rank-*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank-")))
        if not files:
            raise NotComparable(f"{folder} has no certificate: expected files rank-0.jsonl and so on")
        lines = [[*map(json.loads, _complete_lines(file))] for file in files]
        header = lines[0][0]
        if len(files) != header["world_size"]:
            raise NotComparable(
                f"{folder} has the files of {len(files)} ranks, but the run had {header['world_size']}"
            )
        of_ranks = [{(line["step"], line["phase"]): line for line in rank[1:]} for rank in lines]
        common = [key for key in of_ranks[0] if all(key in rank for rank in of_ranks)]
        points = {key: _point(folder, key, [rank[key] for rank in of_ranks]) for key in common}
        return cls(folder, header, points)


def _complete_lines(file: Path) -> list[str]:
    text = file.read_text()
    if not text.endswith("\n"):
        raise NotComparable(f"{file} is cut off, so its process has probably ended early")
    return text.splitlines()


def _point(folder: Path, key: tuple[int, str], records: list[Mapping[str, Any]]) -> PhaseRecord:
    where = f"{folder}, step {key[0]}, {key[1]}"
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    own: dict[str, Whole] = {}
    for rank, record in enumerate(records):
        for name, entry in record["tensors"].items():
            by_name.setdefault(name, {})[rank] = entry
        for name, entry in record["of_rank"].items():
            own[f"{name} of rank {rank}"] = _whole(where, name, {rank: entry})
    for name in [name for name, entries in by_name.items() if _is_buffer_of_rank(name, entries)]:
        for rank, entry in by_name.pop(name).items():
            own[f"{name} of rank {rank}"] = _whole(where, name, {rank: entry})
    tensors = {name: _whole(where, name, entries) for name, entries in by_name.items()}
    return PhaseRecord(tensors, own, records[0]["scaler"])


def _is_buffer_of_rank(name: str, entries: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether ranks have different values of a buffer, such as the statistics of their own data."""
    is_plain = all(entry["part"] is None for entry in entries.values())
    return name.startswith("buffer ") and is_plain and len({entry["hash"] for entry in entries.values()}) > 1


def _whole(where: str, name: str, entries: Mapping[int, Mapping[str, Any]]) -> Whole:
    first = next(iter(entries.values()))
    parts: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for rank, entry in entries.items():
        other_rank, other = parts.setdefault(json.dumps(entry["part"]), (rank, entry))
        if other["hash"] != entry["hash"]:
            raise NotComparable(f"{where}: ranks {other_rank} and {rank} have different copies of {name}")
    distinct = [entry for _, entry in parts.values()]
    total, expected = sum(entry["elements"] for entry in distinct), math.prod(first["shape"])
    if total != expected:
        raise NotComparable(
            f"{where}: the parts of {name} have {total} elements together, and the tensor has {expected}"
        )
    return Whole(
        name,
        first["dtype"],
        tuple(first["shape"]),
        sum(int(entry["hash"], 16) for entry in distinct) % 2**64,
        tuple(map(math.fsum, zip(*(entry["sketch"] for entry in distinct), strict=True))),
        sum(entry["nonfinite"] for entry in distinct),
        {rank: entry["hash"] for rank, entry in entries.items()},
    )


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison. `says` is empty if the runs agree."""

    compared: str
    says: list[str]

    @property
    def agrees(self) -> bool:
        return not self.says


def certify(first: Certificate, second: Certificate) -> Verdict:
    """Compare two runs at all points that both have recorded.

    Raises:
        NotComparable: they have no point in common.
    """
    common = [key for key in first.points if key in second.points]
    if not common:
        raise NotComparable(
            f"{first.folder} and {second.folder} have no phase of a step in common: "
            f"the first has {_some(first.points)}, the second {_some(second.points)}"
        )
    steps = {step for step, _ in common}
    compared = f"{len(common)} records of {len(steps)} steps, {min(steps)} to {max(steps)}"
    for key in common:
        if says := list(_differences(first, second, key)):
            return Verdict(compared, [*says, *_settings(first, second), *_later(first, second, common, key)])
    return Verdict(compared, [])


def _some(points: Iterable[tuple[int, str]]) -> str:
    names = [f"step {step} {phase}" for step, phase in points]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "") or "none"


def _differences(first: Certificate, second: Certificate, key: tuple[int, str]) -> Iterator[str]:
    """Yield sentences about the differences at one point."""
    a, b = first.points[key], second.points[key]
    at = f"step {key[0]}, {key[1]}"
    has_gradients = first.header["has_gradients"] and second.header["has_gradients"]
    for present, others, run in ((a, b, second), (b, a, first)):
        missing = [
            name
            for name in present.tensors
            if name not in others.tensors
            and (has_gradients or not name.startswith("gradient of "))
            and not _is_unused_state(present.tensors[name])
        ]
        if missing:
            yield f"{at}: {run.folder} has no {missing[0]}{_and_others(missing)}"
    names = [name for name in a.tensors if name in b.tensors]
    differing = [name for name in names if _differs(a.tensors[name], b.tensors[name])]
    if differing:
        same_ranks = first.header["world_size"] == second.header["world_size"]
        yield f"{at}: {_difference(a.tensors[differing[0]], b.tensors[differing[0]], same_ranks)}"
        yield _cause(first, second, [(a.tensors[name], b.tensors[name]) for name in differing])
        yield f"{len(differing)} of {len(names)} tensors differ: {', '.join(differing[:5])}{_and_others(differing, 5)}"
    own = [name for name in a.of_rank if name in b.of_rank and _differs(a.of_rank[name], b.of_rank[name])]
    if own and first.header["world_size"] == second.header["world_size"]:
        yield f"{at}: {', '.join(own[:5])} differ"
    if a.scaler != b.scaler:
        pairs = {name: (a.scaler.get(name), b.scaler.get(name)) for name in {**a.scaler, **b.scaler}}
        values = (f"{name} is {left} and {right}" for name, (left, right) in pairs.items() if left != right)
        yield f"{at}: states of the scaler differ: {', '.join(values)}"


def _is_unused_state(whole: Whole) -> bool:
    """Return whether this is an optimizer's state in which every element is 0, as if it had not been created yet."""
    is_state = not whole.name.startswith(("parameter ", "gradient of ", "buffer "))
    return is_state and not whole.norm and not whole.nonfinite


def _differs(a: Whole, b: Whole) -> bool:
    return (a.digest, a.shape, a.dtype) != (b.digest, b.shape, b.dtype)


def _difference(a: Whole, b: Whole, same_ranks: bool) -> str:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.name} is {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    ranks = [rank for rank, digest in a.digests.items() if digest != b.digests.get(rank)]
    where = f" on rank {', '.join(map(str, ranks))}" if same_ranks and ranks else ""
    return f"{a.name} differs{where}, by about {a.distance(b):.1e} of its norm"


def _cause(first: Certificate, second: Certificate, pairs: list[tuple[Whole, Whole]]) -> str:
    """Return a sentence that says whether the rounding of sums in another order may be the cause."""
    for a, b in pairs:
        if a.nonfinite != b.nonfinite:
            return f"rounding does not explain it: {a.name} has {a.nonfinite} and {b.nonfinite} nonfinite elements"
    worst, precision, name = max(_roundings(first, second, a, b) for a, b in pairs)
    far = f"{name} is about {worst:.1f} roundings of {precision} apart, relative to its norm"
    if worst <= _ROUNDINGS:
        return f"a different order of sums may explain it: {far}"
    return f"a different order of sums does not explain it, which is at most {_ROUNDINGS} roundings: {far}"


def _roundings(first: Certificate, second: Certificate, a: Whole, b: Whole) -> tuple[float, str, str]:
    dtypes = {a.dtype, b.dtype}
    if a.name.startswith("gradient of "):  # updates compute in the dtypes of their tensors
        dtypes |= {first.header["precision"], second.header["precision"]} - {None}
    floating = [dtype for dtype in dtypes if _is_inexact(getattr(torch, dtype))]
    if (a.shape, a.dtype) != (b.shape, b.dtype) or not floating:
        return math.inf, a.dtype, a.name
    precision = max(floating, key=_eps)
    return a.distance(b) / _eps(precision), precision, a.name


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@functools.cache
def _eps(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps


def _settings(first: Certificate, second: Certificate) -> Iterator[str]:
    for name, value in first.header.items():
        if second.header.get(name) != value:
            yield f"{name} is {value} in {first.folder}, {second.header.get(name)} in {second.folder}"


def _later(
    first: Certificate, second: Certificate, common: list[tuple[int, str]], key: tuple[int, str]
) -> Iterator[str]:
    """Yield a sentence about the distance of the parameters at the end, unless the first difference is there."""
    last = common[-1]
    if last == key:
        return
    a, b = first.points[last].tensors, second.points[last].tensors
    pairs = [(a[name], b[name]) for name in a if name in b and name.startswith("parameter ")]
    same = [(a, b) for a, b in pairs if a.shape == b.shape]
    if same:
        worst, name = max((a.distance(b), a.name) for a, b in same)
        yield f"in the end (step {last[0]}, {last[1]}) {name} is the furthest apart, {worst:.1e} of its norm"


def _and_others(names: list[str], shown: int = 1) -> str:
    return f" and {len(names) - shown} others" if len(names) > shown else ""
