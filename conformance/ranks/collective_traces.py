"""Traces of the collectives that ranks issue, recorded at the operators of torch's `c10d` namespace.

Python's `all_reduce`, the functional collectives of DTensor and calls from C++ all use these operators, so a kernel in
front of each operator sees every collective, whatever name the caller imported and when. The kernel is registered at
the `BackendSelect` key, which collectives do not use otherwise and which is active in every thread. It reports the call
and redispatches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

# For each operator, the argument whose tensors have equal sizes on all ranks, even if the ranks' shares differ in
# length. Sends and receives differ between ranks and are left out.
_EQUAL_ARGUMENTS = {
    "_allgather_base_": "input_tensor",
    "_reduce_scatter_base_": "input_tensor",
    "allgather_": "output_tensors",
    "allgather_coalesced_": "output_lists",
    "allgather_into_tensor_coalesced_": "inputs",
    "allreduce_": "tensors",
    "allreduce_coalesced_": "tensors",
    "alltoall_": None,
    "alltoall_base_": "input",
    "barrier": None,
    "broadcast_": "tensors",
    "gather_": "input_tensors",
    "monitored_barrier_": None,
    "reduce_": "tensors",
    "reduce_scatter_": "input_tensors",
    "reduce_scatter_tensor_coalesced_": "inputs",
    "scatter_": "output_tensors",
}
_KEY = torch._C.DispatchKey.BackendSelect


@dataclass(frozen=True)
class Collective:
    """A call of a collective, described by what must be equal on all of its ranks."""

    name: str
    group: str
    members: tuple[int, ...]  # global ranks
    tensors: tuple[tuple[str, int], ...]  # dtype and number of elements
    reduce_op: str = ""
    root: int | None = None
    # On the clock that all processes of a machine share.
    when_ns: int = field(default_factory=time.monotonic_ns, compare=False, repr=False)

    def __str__(self) -> str:
        tensors = ", ".join(f"{dtype}[{numel}]" for dtype, numel in self.tensors)
        options = [self.reduce_op] if self.reduce_op else []
        options += [f"root {self.root}"] if self.root is not None else []
        options += [f"ranks {list(self.members)}"]
        return f"{self.name.strip('_')}({'; '.join([tensors, *options] if tensors else options)})"


def report_collectives(report: Callable[[Collective], None]) -> torch.library.Library:
    """Call `report` in the calling thread before each collective, as long as the returned object exists."""
    hooks = torch.library.Library("c10d", "IMPL")
    for name in _EQUAL_ARGUMENTS:
        # An operator that this torch does not have cannot be called either.
        if hasattr(torch.ops.c10d, name):
            hooks.impl(name, _reporting_kernel(name, report), _KEY.name, with_keyset=True)
    return hooks


def _reporting_kernel(name: str, report: Callable[[Collective], None]) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        report(_describe(name, dict(zip(names, args, strict=False))))
        return operator.redispatch(keys.remove(_KEY), *args)

    return kernel


def _describe(name: str, arguments: dict[str, Any]) -> Collective:
    group = ProcessGroup.unbox(arguments["process_group"])
    equal_argument = None if _splits_unevenly(arguments) else _EQUAL_ARGUMENTS[name]
    reduce_op = arguments.get("reduce_op")
    return Collective(
        name=name,
        group=group.group_name,
        members=_members(group),
        tensors=tuple(_dtypes_and_sizes(arguments[equal_argument])) if equal_argument else (),
        reduce_op="" if reduce_op is None else dist.ReduceOp.RedOpType(reduce_op.op()).name,
        root=arguments.get("root_rank"),
    )


def _members(group: ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:  # a group that is not registered with torch
        return tuple(range(group.size()))


def _splits_unevenly(arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("input_split_sizes") or arguments.get("output_split_sizes"))


def _dtypes_and_sizes(nested: Any) -> Iterable[tuple[str, int]]:
    if isinstance(nested, torch.Tensor):
        yield str(nested.dtype).removeprefix("torch."), nested.numel()
    else:
        for inner in nested:
            yield from _dtypes_and_sizes(inner)


class CollectiveTraces:
    """Comparison of the collectives of all ranks while they are issued, for each group call by call."""

    def __init__(self, world_size: int) -> None:
        self.traces: list[list[Collective]] = [[] for _ in range(world_size)]
        self.divergence = ""  # text about the first difference between two ranks
        self.diverged_ns = 0  # time of the later one of the two calls
        self._calls: dict[str, list[list[Collective]]] = {}  # calls by group and rank
        self._longest: dict[str, list[Collective]] = {}  # longest known sequence of each group
        self._ended: set[int] = set()

    def add(self, rank: int, call: Collective) -> None:
        self.traces[rank].append(call)
        calls = self._calls.setdefault(call.group, [[] for _ in self.traces])
        longest = self._longest.setdefault(call.group, [])
        index = len(calls[rank])
        calls[rank].append(call)
        if index == len(longest):
            longest.append(call)
        is_alone = any(other in self._ended and len(calls[other]) <= index for other in call.members)
        if is_alone or longest[index] != call:
            self._note(call.group, index, max(call.when_ns, longest[index].when_ns))

    def end_case(self, rank: int) -> None:
        """Record that `rank` finished its case. It will issue no more collectives."""
        self._ended.add(rank)
        for group, longest in self._longest.items():
            issued = len(self._calls[group][rank])
            if rank in longest[0].members and issued < len(longest):
                self._note(group, issued, time.monotonic_ns())

    def _note(self, group: str, index: int, when_ns: int) -> None:
        if self.divergence:
            return
        self.diverged_ns = when_ns
        lines = [f"collective {index} of group {group!r} differs:"]
        for rank in self._longest[group][0].members:
            calls = self._calls[group][rank]
            if index < len(calls):
                lines.append(f"  rank {rank}: {calls[index]}")
            elif rank in self._ended:
                lines.append(f"  rank {rank}: none, its case ended after {len(calls)}")
        self.divergence = "\n".join(lines)
