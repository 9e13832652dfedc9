"""The run's seed, `--seed`, which determines all random draws outside Hypothesis, in test processes and on ranks.

The default is 0, so every run without the option draws the same.
"""

from __future__ import annotations

import random

import torch

from conformance.judge import providers

_run_seed = 0


def set_run_seed(seed: int) -> None:
    global _run_seed  # noqa: PLW0603 set once, at the start of a process
    _run_seed = seed


def run_seed() -> int:
    return _run_seed


def generator(number: int = 0) -> torch.Generator:
    """Return a generator seeded by `number` and the run's seed."""
    return torch.Generator().manual_seed(_of(number))


def seed_all(number: int = 0) -> None:
    """Seed the generators of torch and of Python by `number` and the run's seed."""
    random.seed(_of(number))
    if torch.accelerator.is_available():
        torch.manual_seed(_of(number))
    else:
        # `torch.manual_seed` would import Dynamo and record a stack for each device that this machine lacks.
        torch.default_generator.manual_seed(_of(number))


def begin(rank: int = 0) -> None:
    """Seed the generators and the schedule of the simulated device. Called before each test and each case of a rank.

    Without `--seed` the device runs its streams as late as the host allows.
    """
    seed_all()
    simulator = providers.provider("simulator")
    if simulator.device_is_enabled():
        simulator.set_schedule(1 + _run_seed, rank)


def _of(number: int) -> int:
    return ((_run_seed << 20) + number) % 2**63
