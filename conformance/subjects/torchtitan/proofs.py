"""Proofs that torchtitan's clipping differs from torch's."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.distributed.utils import clip_grad_norm_

from conformance.subjects.proof import Proofs, mesh_of_one, parameter, warnings_of

PROOFS = Proofs(clip_grad_norm_, torch.nn.utils.clip_grad_norm_)


@PROOFS.keep
def norm_of_dtensors(clip: Any) -> object:
    """The norm of DTensors is a plain tensor. torch's norm is a DTensor."""
    sharded = parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Shard(0)]))
    return type(clip([sharded], 1.0))


@PROOFS.keep
def an_empty_generator(clip: Any) -> object:
    """An empty or exhausted generator is clipped silently. torch warns."""
    return warnings_of(lambda: clip((tensor for tensor in ()), 1.0))


if __name__ == "__main__":
    sys.exit(PROOFS.show())
