"""Proofs: each shows one difference between a package and torch by a call or two, without the suite.

python -m conformance.subjects.torchtitan.proofs
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance.judge.errors import describe

# What the package does and what torch does, as text.
Sides = tuple[str, str]
Proof = Callable[[], Sides]


class Proofs:
    """The proofs of a subject: functions that its claims file links to, each from what it expects to be red."""

    def __init__(self) -> None:
        self._kept: list[Proof] = []

    def keep(self, proof: Proof) -> Proof:
        self._kept.append(proof)
        return proof

    def show(self) -> int:
        """Print both sides of each; how many prove nothing any more, because they are the same."""
        same = 0
        for proof in self._kept:
            theirs, torchs = proof()
            same += theirs == torchs
            print(f"{'SAME' if theirs == torchs else 'differs'}: {proof.__doc__}")  # noqa: T201 its output
            print(f"    package: {theirs}\n    torch:   {torchs}")  # noqa: T201 its output
        return same


def beside(theirs: Any, torchs: Any) -> Callable[[Callable[[Any], Any]], Sides]:
    """What shows both sides of a call, which is handed the package's function or class, and torch's."""
    return lambda call: (reported(lambda: call(theirs)), reported(lambda: call(torchs)))


def parameter(gradient: torch.Tensor) -> torch.nn.Parameter:
    """A parameter that has this gradient."""
    made = torch.nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient.clone()
    return made


def mesh_of_one(shape: tuple[int, ...] = (1,)) -> DeviceMesh:
    """This process as the one rank of a mesh, which may have several dimensions."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", shape)


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        call()
    return [str(each.message) for each in caught]


def reported(call: Callable[[], Any]) -> str:
    """What a call returned, or raised, in a line."""
    try:
        return repr(call())
    except Exception as error:
        return describe(error).splitlines()[0]
