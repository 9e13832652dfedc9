"""Configuration of a training run: everything except for the library."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from conformance.training.gpt import Shape

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Each row: arguments of AdamW, and `foreach` of clip_grad_norm_.
OPTIMIZERS: dict[str, tuple[dict[str, bool], bool | None]] = {
    "adamw": ({}, None),
    "foreach": ({"foreach": True}, True),
    "fused": ({"fused": True}, False),
}


@dataclass(frozen=True)
class TrainingConfig:
    """Configuration of a training run. Two runs of equal configs differ only by their libraries."""

    shape: Shape
    dtype: str = "fp16"  # a key of DTYPES
    device: str = "cpu"
    optimizer: str = "adamw"  # a key of OPTIMIZERS
    steps: int = 36
    batch: int = 4  # windows in one backward pass
    accumulate: int = 2  # backward passes in one step
    learning_rate: float = 2e-3
    warmup: int = 4  # steps until the learning rate is reached; it then stays
    weight_decay: float = 0.1
    max_norm: float = 0.5
    init_scale: float = 2.0**27
    growth_factor: float = 16.0
    backoff_factor: float = 1 / 16
    growth_interval: int = 9
    inject_inf_at: int | None = 18  # step whose last gradient gets an inf
    evaluate_every: int = 12
    held_out_windows: int = 16
    seed: int = 1
    # Sums are split among threads, so the number of threads changes results.
    threads: int = 1
    rounded_towards: float | None = None  # training begins with the next weights in this direction

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}; it must be one of {', '.join(OPTIMIZERS)}")
        for name in ("steps", "batch", "accumulate", "growth_interval", "evaluate_every", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def learning_rate_at(self, step: int) -> float:
        return self.learning_rate * min(1.0, (step + 1) / (self.warmup + 1))

    def neighbours(self) -> tuple[TrainingConfig, TrainingConfig]:
        """Return the same config from weights that are the next smaller and the next larger numbers."""
        below, above = (dataclasses.replace(self, rounded_towards=limit) for limit in (-math.inf, math.inf))
        return below, above


def small_config(dtype: str, **changes: object) -> TrainingConfig:
    """Return a config with 0.1 million parameters, which takes seconds on one CPU core.

    fp16 products take twenty times as long as fp32 ones on a core without half-precision instructions.
    """
    config = TrainingConfig(Shape(layers=2, heads=2, width=48, context=32), dtype=dtype, **_SCALING[dtype])
    return dataclasses.replace(config, **changes)  # pyright: ignore[reportArgumentType]


def full_config(dtype: str, **changes: object) -> TrainingConfig:
    """Return a config with 4.8 million parameters, for a GPU or a CPU with half-precision instructions."""
    config = TrainingConfig(
        Shape(layers=6, heads=4, width=256, context=256),
        dtype=dtype,
        steps=500,
        batch=32,
        accumulate=4,
        learning_rate=1e-3,
        warmup=20,
        **_SCALING[dtype],
        growth_interval=100,
        inject_inf_at=150,
        evaluate_every=50,
        held_out_windows=64,
    )
    return dataclasses.replace(config, **changes)  # pyright: ignore[reportArgumentType]


# The first scale overflows at once: fp16 in its gradients, bf16 (which has float32's range) in the scaled loss. The
# factors are large, so that the scale is seldom close to the largest one that fits. There one rounding would decide
# whether a step is skipped.
_SCALING = {
    "fp16": {"init_scale": 2.0**27, "growth_factor": 2.0**4, "backoff_factor": 2.0**-4},
    "bf16": {"init_scale": 2.0**127, "growth_factor": 2.0, "backoff_factor": 2.0**-8},
}
