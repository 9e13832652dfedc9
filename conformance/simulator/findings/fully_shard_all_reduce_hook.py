"""torch 2.13 to 2.14 (pytorch#180900): fully_shard reuses memory that an all-reduce hook still reduces.

With `reduce_dtype`, the memory is freed as soon as the cast of its result is queued. The next layer's reduce-scatter
writes to it on another stream, which does not wait for the hook.

    python -m conformance.simulator conformance/simulator/findings/fully_shard_all_reduce_hook.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

device = torch.accelerator.current_accelerator()
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
mesh, stream = init_device_mesh(device.type, (1,)), torch.Stream(device)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
for module in (*model, model):
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
for layer in model:
    layer.set_all_reduce_hook(dist.all_reduce, stream=stream)
model(torch.ones(4, 16, device=device)).square().mean().backward()
print([parameter.grad.to_local().sum().item() for parameter in model.parameters()])
