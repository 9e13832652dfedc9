"""The run's seed, `--seed`: what is random outside Hypothesis follows from it, in the test processes and in the ranks.

Without one it is 0, and every run draws the same.
"""

from __future__ import annotations

import random

import torch

from conformance import simulator

_run_seed = 0


def set_run_seed(seed: int) -> None:
    global _run_seed  # noqa: PLW0603 one a process, set as it starts
    _run_seed = seed


def run_seed() -> int:
    return _run_seed


def generator(number: int = 0) -> torch.Generator:
    """Equal draws for equal numbers within a run, others in a run with another seed."""
    return torch.Generator().manual_seed(_of(number))


def seed_all(number: int = 0) -> None:
    """Set the generators of torch and of Python."""
    random.seed(_of(number))
    if torch.accelerator.is_available():
        torch.manual_seed(_of(number))
    else:  # the same for the CPU, without importing Dynamo, and without noting where each absent device was seeded
        torch.default_generator.manual_seed(_of(number))


def begin(rank: int = 0) -> None:
    """A test, or a rank's case, begins: the generators, and the order of the simulated device where one is in use.

    Without `--seed` its streams are as late as the host allows.
    """
    seed_all()
    if simulator.device_is_enabled():
        simulator.set_schedule(1 + _run_seed, rank)


def _of(number: int) -> int:
    return ((_run_seed << 20) + number) % 2**63
