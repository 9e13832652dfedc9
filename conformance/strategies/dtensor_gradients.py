"""Gradients that are DTensors, and programs in which ranks clip them.

A gradient is sent to ranks as its full value and its placement, and a library as its spec.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from conformance.judge.library import load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank


@dataclass(frozen=True)
class PlacedGradient:
    """A gradient as its full value and its placement.

    `shard_dim` is its sharded dimension on a mesh with one dimension, or None if every rank has a copy. `placements`
    are its placements on other meshes. `mesh_shape` is the shape of its own mesh, if it has one.
    """

    value: torch.Tensor
    shard_dim: int | None
    is_dtensor: bool = True
    placements: tuple[Placement, ...] = ()
    mesh_shape: tuple[int, ...] = ()

    def on(self, mesh: DeviceMesh) -> torch.Tensor:
        value = self.value.to(mesh.device_type)
        if not self.is_dtensor:
            return value.clone()
        placements = self.placements or (Replicate() if self.shard_dim is None else Shard(self.shard_dim),)
        if not {*map(type, placements)} <= {Replicate, Shard}:
            # `distribute_tensor` does not support these placements. A partial sum is the value, others are its rows.
            is_partial = any(placement.is_partial() for placement in placements)
            local = value if is_partial else value.chunk(mesh.size())[mesh.get_rank()]
            return DTensor.from_local(
                local.clone(), mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        # Every rank has the full value, so nothing needs to be sent.
        return distribute_tensor(value.clone(), mesh, placements, src_data_rank=None)


def clip(
    rank: Rank,
    *,
    library: str,
    function: str,
    gradients: Sequence[PlacedGradient],
    arguments: Mapping[str, Any],
    mesh_shape: tuple[int, ...] = (),
) -> Outcome:
    """Call a clipping function of `nn.utils` with gradients on a mesh of all ranks.

    The outcome has the result, unsharded, as its value, and watches this rank's local gradients.
    """
    sizes = mesh_shape or (rank.world_size,)
    mesh = rank.mesh(*sizes, names=tuple("abc"[: len(sizes)]))
    grads = [gradient.on(mesh) for gradient in gradients]
    local_grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    clip_function = load_library(library).find(f"nn.utils.{function}")
    tensors = grads if function == "get_total_norm" else [_parameter(grad) for grad in grads]
    return observe(lambda: _unshard(clip_function(tensors, **arguments)), watch=local_grads)


def clip_over_meshes(
    rank: Rank, *, library: str, gradients: Sequence[PlacedGradient], arguments: Mapping[str, Any]
) -> Outcome:
    """Clip gradients that are each on a mesh of its own.

    The value is the gradients before, the norm, and the gradients afterwards. The gradients are unsharded, or None on
    ranks that are not in their mesh.
    """
    parameters = [_parameter(gradient.on(rank.mesh(*gradient.mesh_shape))) for gradient in gradients]

    def full_gradients() -> list[torch.Tensor | None]:
        return [None if parameter.grad is None else full_tensor(parameter.grad) for parameter in parameters]

    before = [None if grad is None else grad.clone() for grad in full_gradients()]

    def clipped() -> tuple[list[torch.Tensor | None], torch.Tensor, list[torch.Tensor | None]]:
        norm = load_library(library).find("nn.utils.clip_grad_norm_")(parameters, **arguments)
        return before, norm, full_gradients()

    return observe(clipped)


def use_norm(rank: Rank, *, library: str, gradients: Sequence[PlacedGradient], use: str) -> Outcome:
    """Clip gradients on a mesh of all ranks to norm 1.0, and use the norm in a way of `USES_OF_NORMS`.

    The value is the result.
    """
    parameters = [_parameter(gradient.on(rank.mesh(rank.world_size))) for gradient in gradients]
    norm = load_library(library).find("nn.utils.clip_grad_norm_")(parameters, 1.0)
    return observe(lambda: _unshard(USES_OF_NORMS[use](norm)))


def _save_and_load(norm: torch.Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(norm, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@torch.compile(backend="aot_eager", fullgraph=True)
def _double(norm: torch.Tensor) -> torch.Tensor:
    return norm * 2


USES_OF_NORMS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "formatted": "{:.3f}".format,
    "copied": copy.deepcopy,
    "pickled": lambda norm: pickle.loads(pickle.dumps(norm)),
    "saved": _save_and_load,
    "compiled": _double,
}


def full_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the unsharded tensor, or None if this rank is not in its mesh."""
    if not isinstance(tensor, DTensor):
        return tensor
    return None if tensor.device_mesh.get_coordinate() is None else tensor.full_tensor()


def _parameter(grad: torch.Tensor) -> torch.Tensor:
    parameter = torch.zeros_like(grad)
    if isinstance(grad, DTensor):
        # On a rank outside the mesh, operators and Parameter return a DTensor whose local tensor is on the CPU.
        parameter = DTensor.from_local(
            torch.zeros_like(grad.to_local()),
            grad.device_mesh,
            grad.placements,
            run_check=False,
            shape=grad.shape,
            stride=grad.stride(),
        )
    parameter.requires_grad_()
    parameter.grad = grad
    return parameter


def _unshard(result: Any) -> Any:
    if isinstance(result, DTensor):
        return {"mesh": tuple(result.device_mesh.shape), "dtype": result.dtype, "full": result.full_tensor()}
    return result
