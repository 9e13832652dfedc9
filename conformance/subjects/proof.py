"""Proofs: functions that each show one difference between a package and torch, without the suite.

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

# A function that calls the package's function or class, or torch's, and returns what differs.
Proof = Callable[[Any], object]


class Proofs:
    """The proofs of a subject. Its claims file links each expected failure to one of them."""

    def __init__(self, package_object: Any, torch_object: Any) -> None:
        self._sides = package_object, torch_object
        self._kept: list[Proof] = []

    def keep(self, proof: Proof) -> Proof:
        self._kept.append(proof)
        return proof

    def show(self) -> int:
        """Print both sides of each proof. Return the number of proofs whose sides no longer differ."""
        same = 0
        for proof in self._kept:
            package_result, torch_result = (
                reported(lambda side=side, proof=proof: proof(side)) for side in self._sides
            )
            same += package_result == torch_result
            print(f"{'SAME' if package_result == torch_result else 'differs'}: {proof.__doc__}")  # noqa: T201 its output
            print(f"    package: {package_result}\n    torch:   {torch_result}")  # noqa: T201 its output
        return same


def parameter(gradient: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter with this gradient."""
    created = torch.nn.Parameter(torch.zeros_like(gradient))
    created.grad = gradient.clone()
    return created


def mesh_of_one(shape: tuple[int, ...] = (1,)) -> DeviceMesh:
    """Return a mesh whose only rank is this process. It may have several dimensions."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", shape)


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        call()
    return [str(warning.message) for warning in caught]


def reported(call: Callable[[], Any]) -> str:
    """Return the result or the error of a call, as one line."""
    try:
        return repr(call())
    except Exception as error:
        return describe(error).splitlines()[0]
