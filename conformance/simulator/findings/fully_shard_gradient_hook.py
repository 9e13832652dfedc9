"""Fixed in torch 2.13: hooks of CPU-offloaded gradients read them before they have arrived.

A hook of `register_post_accumulate_grad_hook` that steps its parameter read pinned memory that was still being filled.
The bug is planted again unless the script gets the word `fixed`.

    python -m conformance.simulator conformance/simulator/findings/fully_shard_gradient_hook.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from conformance.simulator.rewriting import rewritten

if "fixed" not in sys.argv:
    rewritten(_fsdp_param_group, "foreach_reduce", ("and not has_post_acc_grad_hook", "")).start()
device = torch.accelerator.current_accelerator()
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
mesh = init_device_mesh(device.type, (1,))
model = fully_shard(nn.Linear(16, 16), mesh=mesh, offload_policy=CPUOffloadPolicy())


@torch.no_grad()
def step(parameter: torch.Tensor) -> None:
    parameter.sub_(parameter.grad, alpha=0.1)


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
model(torch.ones(4, 16, device=device)).square().mean().backward()
print([parameter.to_local().sum().item() for parameter in model.parameters()])
