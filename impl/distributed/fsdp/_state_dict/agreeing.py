"""Whether all ranks can do what each of them was asked to, before any of them does."""

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


def problem_of_any(wrappers: Sequence[Wrapper], problem: str, given: Sequence[tuple[str, str]]) -> str:
    """A problem that any rank has, in words; or a key for which they were given something different; or nothing.

    Args:
        wrappers: of the units whose groups are asked, the same on all ranks.
        problem: this rank's own.
        given: for the same keys in the same order on all ranks, what was given for them.
    Collectives: an all-reduce over each of the groups, and another one if there is a problem.
    """
    sharding = [one._groups for one in wrappers]
    groups = {
        group: order_checker_of(group) for one in sharding for group in (*one.order_checkers, *one.parallel)
    }
    if not groups:
        return problem
    device = wrappers[0].compute_device
    mine = dist.get_rank()
    codes = [zlib.crc32(what.encode()) for _, what in given]
    said = [-mine if problem else -_NO_RANK, *codes, *(-code for code in codes)]
    heard = _highest(torch.tensor(said, dtype=torch.int64, device=device), groups.items()).tolist()
    first, highest, lowest = -heard[0], heard[1 : len(codes) + 1], heard[len(codes) + 1 :]
    if first == _NO_RANK:
        for (key, what), high, low in zip(given, highest, lowest, strict=True):
            if high != -low:
                return (
                    f"rank {mine} was given {what} for {key}, and another rank something else; nothing was loaded, "
                    "since ranks send each other what they load"
                )
        return ""
    text = problem.encode()[:_TEXT_BYTES] if first == mine else b""
    letters = torch.tensor(list(text.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8, device=device)
    reported = bytes(_highest(letters, groups.items()).tolist()).rstrip(b"\0").decode(errors="replace")
    return (
        problem
        or f"rank {first} could not load its state dict, so no rank has loaded any of its own: {reported}"
    )


def reported_by_all(
    problem: Exception | None,
    group: dist.ProcessGroup | None,
    reported: Any = None,
    doing: str = "load the optimizer's state dict",
) -> list[Any]:
    """What all ranks of the group tell; raises on all of them if one has a problem.

    Raises:
        Exception: this rank's problem.
        RuntimeError: another rank's.
    """
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    notes: list[str] = getattr(problem, "__notes__", [])
    mine = None if problem is None else "; ".join([f"{type(problem).__name__}: {problem}", *notes])
    dist.all_gather_object(by_rank, (mine, reported), group=group)
    if problem is not None:
        raise problem
    for rank, (text, _) in enumerate(by_rank):
        if text is not None:
            raise RuntimeError(f"rank {rank} cannot {doing}: {text}. Nothing was changed on any rank")
    return [said for _, said in by_rank]


def _highest(values: Tensor, groups: Iterable[tuple[dist.ProcessGroup, CollectiveOrderChecker]]) -> Tensor:
    """Over all ranks that any of the groups leads to."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    for group, order_checker in groups:
        order_checker.run("agreed on a state dict", all_reduce, group, [values], options)
    return values
