"""Agreement of all ranks that each of them can do its work, before any of them starts."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.distributed.fsdp._comm.desync.collective_order import CollectiveOrderChecker, order_checker_of
from impl.distributed.fsdp._comm.group_collectives import all_reduce
from impl.distributed.fsdp._fsdp1.wrapper import Wrapper

_TEXT_BYTES = 2048
_NO_RANK = 2**31


def first_problem_on_any_rank(
    wrappers: Sequence[Wrapper], problem: str, sources: Sequence[tuple[str, str]]
) -> str:
    """Return the first problem on any rank as text, or a key for which ranks got different sources, or "".

    Args:
        wrappers: wrappers whose groups take part, the same on all ranks.
        problem: this rank's own problem.
        sources: (key, source) of what this rank loads, with the same keys in the same order on all ranks.
    Collectives: an all-reduce over each of the groups, and another one if there is a problem.
    """
    group_sets = [wrapper._groups for wrapper in wrappers]
    groups = {
        group: order_checker_of(group)
        for group_set in group_sets
        for group in (*group_set.order_checkers, *group_set.parallel)
    }
    if not groups:
        return problem
    device = wrappers[0].compute_device
    rank = dist.get_rank()
    codes = [zlib.crc32(source.encode()) for _, source in sources]
    values = [-rank if problem else -_NO_RANK, *codes, *(-code for code in codes)]
    maxima = _highest(torch.tensor(values, dtype=torch.int64, device=device), groups.items()).tolist()
    first, highest, lowest = -maxima[0], maxima[1 : len(codes) + 1], maxima[len(codes) + 1 :]
    if first == _NO_RANK:
        for (key, source), high, low in zip(sources, highest, lowest, strict=True):
            if high != -low:
                return (
                    f"rank {rank} got {source} for {key}, but another rank got something else; nothing was loaded, "
                    "because ranks exchange the shards that they load"
                )
        return ""
    text = problem.encode()[:_TEXT_BYTES] if first == rank else b""
    letters = torch.tensor(list(text.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8, device=device)
    reported = bytes(_highest(letters, groups.items()).tolist()).rstrip(b"\0").decode(errors="replace")
    return (
        problem
        or f"rank {first} could not load its state dict, so no rank has loaded any of its own: {reported}"
    )


def gather_reports(
    problem: Exception | None,
    group: dist.ProcessGroup | None,
    reported: object = None,
    action: str = "load the optimizer's state dict",
) -> list[Any]:
    """Gather a report of every rank of the group. Raise on all ranks if any of them has a problem.

    Raises:
        Exception: this rank's problem.
        RuntimeError: another rank's problem.
    """
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    notes: list[str] = getattr(problem, "__notes__", [])
    text = None if problem is None else "; ".join([f"{type(problem).__name__}: {problem}", *notes])
    dist.all_gather_object(by_rank, (text, reported), group=group)
    if problem is not None:
        raise problem
    for rank, (text, _) in enumerate(by_rank):
        if text is not None:
            raise RuntimeError(f"rank {rank} cannot {action}: {text}. Nothing was changed on any rank")
    return [report for _, report in by_rank]


def _highest(values: Tensor, groups: Iterable[tuple[dist.ProcessGroup, CollectiveOrderChecker]]) -> Tensor:
    """Return the maximum over all ranks that any of the groups connects."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    for group, order_checker in groups:
        order_checker.run("agreed on a state dict", all_reduce, group, [values], options)
    return values
