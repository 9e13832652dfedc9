"""Published figures of a real training. One parameter is fitted to them, and the others show the error of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from conformance.simulator.cost.durations import Hardware
from conformance.simulator.cost.llama import LlamaConfig
from conformance.simulator.cost.timeline import schedule, step_cost
from conformance.simulator.cost.trace import Entry
from conformance.simulator.cost.training_step import CostedTraining


@dataclass(frozen=True)
class Published:
    tokens_per_s: float  # per rank
    memory_gib: float  # reserved

    def compared(self, tokens_per_s: float, reserved_bytes: int) -> str:
        speed, memory = tokens_per_s / self.tokens_per_s - 1, reserved_bytes / 2**30 / self.memory_gib - 1
        return (
            f"published {self.tokens_per_s:.0f} tokens/s a rank and {self.memory_gib} GiB reserved; "
            f"simulated {speed:+.1%} and {memory:+.1%}"
        )


# torchtitan: Llama 3.1 8B, 8 H100 (96 GB), local batch 2, sequences of 8192, selective checkpointing by operator.
SUBJECT, RANKS, ACCELERATOR = "torch fully_shard", 8, "h100_96gb"
PUBLISHED = {
    CostedTraining(): Published(5762, 82.4),
    CostedTraining(LlamaConfig(fused=True)): Published(6667, 77.0),  # compiled
}


def published(training: CostedTraining, subject: str, ranks: int, accelerator: str) -> Published | None:
    """Return the published figures of exactly this training, or None."""
    return PUBLISHED.get(training) if (subject, ranks, accelerator) == (SUBJECT, RANKS, ACCELERATOR) else None


def fitted_efficiency(entries: Sequence[Entry], hardware: Hardware, seconds: float) -> float:
    """Return the share of the peak that products reach if the step of `entries` takes `seconds`."""
    low, high = 0.05, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        tried = replace(hardware, kernels=hardware.kernels | {"product_efficiency": middle})
        if step_cost(schedule(entries, tried.seconds, tried.host_s)).seconds > seconds:
            low = middle
        else:
            high = middle
    return (low + high) / 2
