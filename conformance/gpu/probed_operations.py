"""Cases that the ranks of a probe run, and their expected results."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from conformance.ranks import Rank

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
)
TRAININGS = {"fsdp": "fsdp", "fully_shard": "sharded_by_parameter"}  # names of their cases
_WIDTH = 6
_RATE = 0.1


def _brought(rank: int, length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32) + 10.0 * rank


def all_reduce(rank: Rank) -> list[Tensor]:
    tensor = _brought(rank.rank, _WIDTH).to(rank.device)
    dist.all_reduce(tensor)
    return [tensor.cpu()]


def broadcast(rank: Rank) -> list[Tensor]:
    tensor = _brought(rank.rank, _WIDTH).to(rank.device)
    dist.broadcast(tensor, src=0)
    return [tensor.cpu()]


def all_gather_into_tensor(rank: Rank) -> list[Tensor]:
    whole = torch.empty(_WIDTH * rank.world_size, device=rank.device)
    dist.all_gather_into_tensor(whole, _brought(rank.rank, _WIDTH).to(rank.device))
    return [whole.cpu()]


def reduce_scatter_tensor(rank: Rank) -> list[Tensor]:
    part = torch.empty(_WIDTH, device=rank.device)
    dist.reduce_scatter_tensor(part, _brought(rank.rank, _WIDTH * rank.world_size).to(rank.device))
    return [part.cpu()]


def all_to_all_single(rank: Rank) -> list[Tensor]:
    actual = torch.empty(_WIDTH * rank.world_size, device=rank.device)
    dist.all_to_all_single(actual, _brought(rank.rank, _WIDTH * rank.world_size).to(rank.device))
    return [actual.cpu()]


def barrier(rank: Rank) -> list[Tensor]:
    dist.barrier()
    return []


def fsdp(rank: Rank) -> list[Tensor]:
    """Run one step of SGD on a sharded model. Return the full parameters."""
    model = FullyShardedDataParallel(_model().to(rank.device), device_id=rank.device, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    _loss(model, rank.rank).backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def sharded_by_parameter(rank: Rank) -> list[Tensor]:
    """Run the same step on a `fully_shard` model. Return its full parameters."""
    model = _model().to(rank.device)
    fully_shard(model, mesh=rank.mesh(rank.world_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    _loss(model, rank.rank).backward()
    optimizer.step()
    return [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(_WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def _loss(model: torch.nn.Module, rank: int) -> Tensor:
    device = next(model.parameters()).device
    return model(_brought(rank, 4 * _WIDTH).view(4, _WIDTH).to(device) / 10).square().mean()


def expected(operation: str, world_size: int) -> list[list[Tensor]]:
    """Return the expected tensors of each rank, computed without a process group."""
    ranks = range(world_size)
    whole = [_brought(rank, _WIDTH * world_size) for rank in ranks]
    match operation:
        case "all_reduce":
            return [[sum((_brought(rank, _WIDTH) for rank in ranks), torch.zeros(_WIDTH))] for _ in ranks]
        case "broadcast":
            return [[_brought(0, _WIDTH)] for _ in ranks]
        case "all_gather_into_tensor":
            return [[torch.cat([_brought(rank, _WIDTH) for rank in ranks])] for _ in ranks]
        case "reduce_scatter_tensor":
            return [[part] for part in sum(whole, torch.zeros(_WIDTH * world_size)).chunk(world_size)]
        case "all_to_all_single":
            return [[torch.cat([brought.chunk(world_size)[rank] for brought in whole])] for rank in ranks]
        case "barrier":
            return [[] for _ in ranks]
        case "fsdp" | "fully_shard":
            return [_trained_unsharded(world_size)] * world_size
        case _:
            raise AssertionError(f"there is no probe {operation!r}")


def _trained_unsharded(world_size: int) -> list[Tensor]:
    """Run the same step in one process. FSDP takes the mean of the ranks' gradients."""
    model = _model()
    torch.stack([_loss(model, rank) for rank in range(world_size)]).mean().backward()
    torch.optim.SGD(model.parameters(), lr=_RATE).step()
    return [parameter.detach().clone() for parameter in model.parameters()]
