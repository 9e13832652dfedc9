"""What collectives a rank issues, seen where every route ends: the operators of torch's `c10d` namespace.

Python's `all_reduce`, the functional collectives of DTensor and calls from C++ all pass through these operators,
so one kernel in front of each sees them all, whatever name the caller imported and when. The kernel sits at the
`BackendSelect` key, which no collective uses otherwise and which every thread has on; it reports the call, then
dispatches further.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

# The tensors, by the operator's own argument names, that are alike on every rank even where a rank's part may be
# longer or shorter than its peers'. Sends and receives differ by nature and are left out.
_ALIKE = {
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
    """One call of a collective, in so far as its peers must issue the same."""

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
    """Have `report` called, in the calling thread, before each collective, as long as the returned object lives."""
    hooks = torch.library.Library("c10d", "IMPL")
    for name in _ALIKE:
        # An operator that this torch does not have cannot be called either.
        if hasattr(torch.ops.c10d, name):
            hooks.impl(name, _reporting(name, report), _KEY.name, with_keyset=True)
    return hooks


def _reporting(name: str, report: Callable[[Collective], None]) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        report(_described(name, dict(zip(names, args, strict=False))))
        return operator.redispatch(keys.remove(_KEY), *args)

    return kernel


def _described(name: str, arguments: dict[str, Any]) -> Collective:
    group = ProcessGroup.unbox(arguments["process_group"])
    alike = None if _splits_unevenly(arguments) else _ALIKE[name]
    reduce_op = arguments.get("reduce_op")
    return Collective(
        name=name,
        group=group.group_name,
        members=_members(group),
        tensors=tuple(_kinds(arguments[alike])) if alike else (),
        reduce_op="" if reduce_op is None else dist.ReduceOp.RedOpType(reduce_op.op()).name,
        root=arguments.get("root_rank"),
    )


def _members(group: ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:  # torch was not told of it
        return tuple(range(group.size()))


def _splits_unevenly(arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("input_split_sizes") or arguments.get("output_split_sizes"))


def _kinds(nested: Any) -> Iterable[tuple[str, int]]:
    if isinstance(nested, torch.Tensor):
        yield str(nested.dtype).removeprefix("torch."), nested.numel()
    else:
        for inner in nested:
            yield from _kinds(inner)


class CollectiveTraces:
    """Compares what the ranks issue while they issue it, group by group and call by call."""

    def __init__(self, world_size: int) -> None:
        self.traces: list[list[Collective]] = [[] for _ in range(world_size)]
        self.divergence = ""  # the first place where two ranks differ, with what each did there
        self.diverged_ns = 0  # when both had done so
        self._calls: dict[str, list[list[Collective]]] = {}  # by group, then by rank
        self._longest: dict[str, list[Collective]] = {}  # by group: what all its members must issue
        self._ended: set[int] = set()

    def issued(self, rank: int, call: Collective) -> None:
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

    def ended(self, rank: int) -> None:
        """`rank` has left its case well: whatever it has not issued by now it never will."""
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
