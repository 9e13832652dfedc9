"""Cases of `nonfinite_parameters`: gradients whose elements some ranks spoil, in parameters of every layout."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD

from conformance.distributed.fsdp.fused_step_cases import on_meshes, plain_model
from conformance.distributed.fsdp.lab import Lab, tried

LAYOUTS = (
    "flat", "original", "hybrid", "flat parallel", "original parallel", "dtensor", "hybrid dtensor", "meshes",
    "disjoint meshes",
)  # fmt: skip
Entry = tuple[str, int, int]  # name, rank, number of elements


def entries(
    lab: Lab, *, scaler: str, layout: str, bad_ranks: tuple[int, ...], how: str, has_group: bool = False
) -> Any:
    """Check gradients of which some ranks spoil elements.

    Args:
        lab: the rank.
        scaler: name of the scaler.
        layout: one of `LAYOUTS`, or "plain".
        bad_ranks: ranks that spoil all gradients, or on other layouts than disjoint meshes all but the second. Higher
            ranks spoil more elements.
        how: the method that checks the gradients.
        has_group: whether the scaler gets a group that has a backend only for the device.

    Returns:
        This rank's expected entries with the number of the parameter, and the result of `nonfinite_parameters`.
    """
    named = named_params(lab, layout)
    optimizer = SGD(named, lr=0.125)
    more = {"process_group": lab.rank.group_of_device()} if has_group else {}
    its_scaler = lab.library.find(scaler)(lab.rank.device.type, init_scale=2.0, **more)
    its_scaler.scale(torch.ones((), device=lab.rank.device))
    own: list[tuple[int, Entry]] = []
    for number, (name, param) in enumerate(named):
        param.grad = torch.ones_like(param)
        local = _local(param.grad)
        if (number != 1 or layout == "disjoint meshes") and lab.rank.rank in bad_ranks:
            spoilt = min(local.numel(), 1 + number + lab.rank.rank)
            local.view(-1)[:spoilt] = math.nan if number % 2 else math.inf
            own += [(number, (name, lab.rank.rank, spoilt))] if spoilt else []
    getattr(its_scaler, how)(optimizer)
    return own, tried(lambda: [tuple(entry) for entry in its_scaler.nonfinite_parameters(optimizer)])


def after_clearing(lab: Lab, *, scaler: str) -> Any:
    """Return the result of `nonfinite_parameters` after rank 0, which found inf, has cleared its gradients."""
    named = named_params(lab, "dtensor")
    optimizer, its_scaler = SGD(named, lr=0.125), lab.library.find(scaler)(lab.rank.device.type)
    its_scaler.scale(torch.ones((), device=lab.rank.device))
    for _, param in named:
        param.grad = torch.ones_like(param)
        _local(param.grad)[:1].fill_(math.inf if lab.rank.rank == 0 else 1.0)
    its_scaler.unscale_(optimizer)
    if lab.rank.rank == 0:
        optimizer.zero_grad()
    return tried(lambda: its_scaler.nonfinite_parameters(optimizer))


def one_fails(lab: Lab, *, scaler: str) -> Any:
    """Return the result of `nonfinite_parameters` if rank 0 has written a gradient into a master and its copy."""
    device = lab.rank.device
    master, copy = nn.Parameter(torch.ones(3, device=device)), torch.ones(3, device=device).bfloat16()
    copy.requires_grad_()
    optimizer, its_scaler = SGD([master], lr=0.125), lab.library.find(scaler)(device.type)
    its_scaler.scale(copy.sum()).backward()
    its_scaler.fused_step(optimizer, low_precision_params=[copy])
    if lab.rank.rank == 0:
        master.grad = torch.ones_like(master)
    return tried(lambda: its_scaler.nonfinite_parameters(optimizer))


def named_params(lab: Lab, layout: str) -> list[tuple[str, Any]]:
    if layout == "meshes":
        return [
            (f"mesh.{number}", nn.Parameter(value.on(lab.rank.mesh(*value.mesh_shape))))
            for number, value in enumerate(on_meshes(0))
        ]
    if layout == "disjoint meshes":
        halves = lab.rank.mesh(2), _mesh_of_last_ranks(dist.group.WORLD, lab.rank.device.type)
        return [
            (
                f"half.{number}",
                nn.Parameter(
                    distribute_tensor(
                        torch.ones(6, device=lab.rank.device), mesh, [Shard(0)], src_data_rank=None
                    )
                ),
            )
            for number, mesh in enumerate(halves)
        ]
    model: nn.Module = plain_model().to(lab.rank.device)
    world = lab.rank.world_size
    if layout in ("dtensor", "hybrid dtensor"):
        sizes = (world,) if layout == "dtensor" else (2, world // 2)
        fully_shard(model, mesh=lab.rank.mesh(*sizes, names=("replicas", "shards")[-len(sizes) :]))
    elif layout == "hybrid":
        mesh = lab.rank.mesh(2, world // 2)
        groups = mesh.get_group(1), mesh.get_group(0)
        model = lab.wrap(model, use_orig_params=True, strategy="HYBRID_SHARD", process_group=groups)
    elif layout in ("flat parallel", "original parallel"):
        mesh = lab.rank.mesh(2, world // 2, names=("data", "model"))
        parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        originals = layout == "original parallel"
        model = lab.wrap(model, use_orig_params=originals, device_mesh=mesh["data"])
    elif layout in ("flat", "original"):
        model = lab.wrap(model, use_orig_params=layout == "original")
    return [*model.named_parameters()]


@functools.cache
def _mesh_of_last_ranks(_: Any, device: str) -> DeviceMesh:
    return DeviceMesh(device, [2, 3])


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
