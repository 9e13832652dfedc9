"""An optimizer that is sharded like ZeRO, as a script for the simulator: `simulator_zero.py [MISTAKE]`.

With `gather`, the all-gather of the weights does not wait for the update. With `overwritten`, the gradients are cleared
while they are sent.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
mistake = "".join(sys.argv[1:])
dist.init_process_group("simccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device(torch.accelerator.current_accelerator().type, rank)
torch.accelerator.set_device_index(rank)
torch.manual_seed(0)
main, side = torch.accelerator.current_stream(), torch.Stream(device)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
weights = nn.utils.parameters_to_vector(model.parameters()).detach()
nn.utils.vector_to_parameters(weights, model.parameters())
gradients = torch.zeros_like(weights)
start = 0
for parameter in model.parameters():
    parameter.grad = gradients[start : start + parameter.numel()].view_as(parameter)
    start += parameter.numel()
shard = weights.chunk(ranks)[rank].clone()
gradient_shard, momentum = torch.empty_like(shard), torch.zeros_like(shard)
for _ in range(3):
    model(torch.randn(4, 8).to(device)).square().mean().backward()
    work = dist.reduce_scatter_tensor(gradient_shard, gradients, async_op=True)
    if mistake != "overwritten":
        work.wait()
    gradients.zero_()
    work.wait()
    side.wait_stream(main)
    with side:
        momentum.lerp_(gradient_shard, 0.5)
        shard.sub_(momentum, alpha=0.1)
    if mistake != "gather":
        main.wait_stream(side)
    dist.all_gather_into_tensor(weights, shard)
main.wait_stream(side)
torch.save(model.state_dict(), f"model{rank}.pt")
dist.destroy_process_group()
