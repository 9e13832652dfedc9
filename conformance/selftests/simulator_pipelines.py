"""Pipelines of torch, as a script for the simulator: `simulator_pipelines.py SCHEDULE ... [overwritten]`.

Their gradients must be those of the same layers on the CPU. With `overwritten`, the first stage overwrites its
activations before they are sent.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

MICRO_BATCHES = 4


def make_layers(count: int) -> list[nn.Sequential]:
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]


def overwrite_what_is_sent(stage: pipelining.PipelineStage) -> None:
    send_ops = stage.get_fwd_send_ops

    def overwriting(index: int) -> list[dist.P2POp]:
        operations = send_ops(index)
        for operation in operations:
            dist.isend(operation.tensor, operation.peer)
            # Write through .data, because autograd would otherwise reject the backward.
            operation.tensor.data.zero_()
        return []

    stage.get_fwd_send_ops = overwriting  # type: ignore[method-assign]


def train(schedule_name: str, rank: int, ranks: int, overwrites: bool) -> None:
    device = torch.device("sim", rank)
    schedule_class = getattr(pipelining, schedule_name)
    is_single = issubclass(schedule_class, PipelineScheduleSingle)
    layers = make_layers(ranks if is_single else 2 * ranks)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    reference = nn.Sequential(*copy.deepcopy(layers))
    loss = nn.functional.mse_loss(reference(x), y)
    loss.backward()

    indices = range(rank, len(layers), ranks)
    stages = [pipelining.PipelineStage(layers[i].to(device), i, len(layers), device) for i in indices]
    if overwrites and rank == 0:
        overwrite_what_is_sent(stages[0])
    schedule = schedule_class(
        stages[0] if is_single else stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss
    )
    losses: list[torch.Tensor] = []
    is_last = rank == ranks - 1
    schedule.step(
        *([x.to(device)] if rank == 0 else []),
        **({"target": y.to(device), "losses": losses} if is_last else {}),
    )
    gradients = [parameter.grad for index in indices for parameter in layers[index].parameters()]
    torch.save(gradients, f"{schedule_name}{rank}.pt")
    if overwrites:
        return
    expected = [parameter.grad for index in indices for parameter in reference[index].parameters()]
    torch.testing.assert_close([gradient.cpu() for gradient in gradients], expected)
    if is_last:
        torch.testing.assert_close(torch.stack(losses).mean().cpu(), loss.detach())


def main() -> None:
    *schedules, last = sys.argv[1:]
    dist.init_process_group("simccl")
    overwrites = last == "overwritten"
    for name in schedules if overwrites else [*schedules, last]:
        train(name, dist.get_rank(), dist.get_world_size(), overwrites)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
