"""Fixed in torch 2.13 (pytorch#180665): offloaded gradients of replicas change while they are copied to the host.

The all-reduced memory was freed before its copy to the host had ended, and the next layer's reduction overwrote it. The
bug is planted again unless the script gets the word `fixed`.

    python -m conformance.simulator conformance/simulator/findings/fully_shard_offloaded_replicas.py
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
    words = ("AllReduceState(all_reduce_input,", "AllReduceState(None,")
    rewritten(_fsdp_param_group.FSDPParamGroup, "post_backward", words).start()
device = torch.accelerator.current_accelerator()
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("replicas", "shards"))
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
for module in (*model, model):
    fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy())
model(torch.ones(4, 16, device=device)).square().mean().backward()
print([parameter.grad.to_local().sum().item() for parameter in model.parameters()])
