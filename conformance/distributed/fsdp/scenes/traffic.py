"""Traffic between ranks in training, counted between the barriers that `fsdp_training` puts around each step.

Operators with the same effect are counted together. A gather into a list of tensors counts like one into a single
tensor, and an all-to-all whose receivers add up counts like a reduce-scatter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import torch

from conformance.ranks.collective_traces import Collective

_KINDS = {
    "gather": re.compile("_?allgather"),
    "scatter": re.compile("_?reduce_scatter|alltoall_base"),
    "reduce": re.compile("allreduce"),
}
# Operators whose traced tensors are one rank's shard of the result.
_OF_PARTS = ("_allgather_base_", "allgather_into_tensor_coalesced_")


def kind(call: Collective) -> str:
    return next((kind for kind, names in _KINDS.items() if names.match(call.name)), call.name)


def moved_bytes(call: Collective) -> int:
    """Return the size in bytes of the full buffer that is gathered, scattered or reduced."""
    parts = len(call.members) if call.name in _OF_PARTS else 1
    return parts * sum(getattr(torch, dtype).itemsize * numel for dtype, numel in call.tensors)


def steps_of(trace: Sequence[Collective]) -> list[list[Collective]]:
    """Split a rank's trace into steps. A step lasts from before its first forward to after its last backward."""
    steps: list[list[Collective]] = [[]]
    for call in trace:
        if call.name == "barrier":
            steps.append([])
        else:
            steps[-1].append(call)
    return steps[1::2]


def counts(step: Sequence[Collective]) -> Counter[str]:
    return Counter(kind(call) for call in step)


def bytes_by_kind(step: Sequence[Collective]) -> Counter[str]:
    total: Counter[str] = Counter()
    for call in step:
        total[kind(call)] += moved_bytes(call)
    return total


def gathers_before_barriers(trace: Sequence[Collective]) -> list[int]:
    kinds = [kind(call) for call in trace]
    return [kinds[:place].count("gather") for place, name in enumerate(kinds) if name == "barrier"]


def are_at_most(traces: Sequence[Sequence[Collective]], most: Sequence[Sequence[Collective]]) -> bool:
    """Return whether no trace has more collectives or bytes of any kind than its bound."""
    return all(
        counts(trace) <= counts(bound) and bytes_by_kind(trace) <= bytes_by_kind(bound)
        for trace, bound in zip(traces, most, strict=True)
    )
