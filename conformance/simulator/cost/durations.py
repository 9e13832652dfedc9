"""Durations of operators and collectives: a latency, and the longer of the times of computation and of transfer."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from torch.utils.flop_counter import (
    addmm_flop,
    baddbmm_flop,
    bmm_flop,
    mm_flop,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from conformance.simulator.cost.trace import Entry

_FILE = Path(__file__).with_name("hardware.toml")
_PRODUCTS = {
    "aten::mm": mm_flop,
    "aten::addmm": addmm_flop,
    "aten::bmm": bmm_flop,
    "aten::baddbmm": baddbmm_flop,
    # Causal: half of the scores are neither computed nor read.
    "aten::_scaled_dot_product_flash_attention": lambda q, k, v: sdpa_flop_count(q, k, v) / 2,
    "aten::_scaled_dot_product_flash_attention_backward": lambda grad, q, k, v, *_: (
        sdpa_backward_flop_count(grad, q, k, v) / 2
    ),
}
# In place, but the former values are not read.
_OVERWRITES = ("copy_", "zero_", "fill_", "normal_", "uniform_")
# Look-ups read as many bytes of a larger table as they write. The losses read next to nothing.
_LOOK_UPS = {"aten::embedding", "aten::index_select", "aten::gather"}
_READ_NOTHING = {"aten::nll_loss_forward", "aten::nll_loss_backward"}
_COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"}


def kind_of(entry: Entry) -> str:
    """Return `collective`, `product` (of matrices, including attention) or `other`."""
    if entry.name in _COLLECTIVES:
        return "collective"
    return "product" if entry.name in _PRODUCTS else "other"


def flops_of(entry: Entry) -> float:
    return _PRODUCTS[entry.name](*(entry.sizes or ())) if entry.name in _PRODUCTS else 0


def bytes_of(entry: Entry) -> int:
    """Return how many bytes of its tensors an operator reads and writes."""
    if entry.name in _LOOK_UPS:
        return 2 * entry.writes
    if entry.name in _READ_NOTHING:
        return entry.writes
    # Only the first and last address of a source are known. No dtype here is more than twice another, so of a longer
    # source only the parts between strides are read.
    if entry.name == "copy_" and entry.reads > 2 * entry.writes:
        return 2 * entry.writes
    in_place = entry.name.endswith("_") and not entry.name.endswith(_OVERWRITES)
    return entry.reads + entry.writes * (2 if in_place else 1)


@dataclass(frozen=True)
class Hardware:
    """An accelerator in a cluster."""

    flops_per_s: float
    bytes_per_s: float
    kernels: dict[str, float]
    cluster: dict[str, float]
    nccl: dict[str, float]

    @property
    def host_s(self) -> float:
        return self.kernels["host_s"]

    def seconds(self, entry: Entry) -> float:
        if entry.name in _COLLECTIVES:
            return self._collective_s(entry)
        computing = flops_of(entry) / (self.flops_per_s * self.kernels["product_efficiency"])
        moving = bytes_of(entry) / (self.bytes_per_s * self.kernels["memory_efficiency"])
        return max(computing, moving) + self.kernels["latency_s"]

    def _collective_s(self, entry: Entry) -> float:
        ((ranks,),) = entry.sizes or ((1,),)
        passes = 2 if entry.name == "all_reduce" else 1
        whole = max(entry.reads, entry.writes)
        moved = passes * whole * (ranks - 1) / ranks
        return (
            moved / self._ring_bytes_per_s(ranks) + self.nccl["base_s"] + passes * self._hops_s(entry, ranks)
        )

    def _ring_bytes_per_s(self, ranks: int) -> float:
        inside = self.cluster["nvlink_bytes_per_s"]
        if ranks <= self.cluster["ranks_per_node"]:
            return inside
        return min(inside, self.cluster["ranks_per_node"] * self.cluster["network_bytes_per_s"])

    def _hops_s(self, entry: Entry, ranks: int) -> float:
        nodes = math.ceil(ranks / self.cluster["ranks_per_node"])
        ring = (ranks - nodes) * self.nccl["ring_nvlink_s"] + (nodes - 1) * self.nccl["network_s"]
        if entry.name != "all_reduce":
            return ring
        inside = ranks / nodes - 1
        tree = inside * self.nccl["tree_nvlink_s"] + math.ceil(math.log2(nodes)) * self.nccl["network_s"]
        return min(ring, tree)


def hardware(accelerator: str) -> Hardware:
    figures = tomllib.loads(_FILE.read_text())
    known = figures["accelerators"]
    if accelerator not in known:
        raise ValueError(f"got accelerator {accelerator!r}, but hardware.toml has {', '.join(known)}")
    return Hardware(
        **known[accelerator],
        kernels=figures["kernels"],
        cluster=figures["cluster"],
        nccl=figures["nccl"],
    )
