"""torch 2.13 and later: with CPUOffloadPolicy, a forward without a backward may read parameters of the next update.

They are copied to the device from pinned memory without blocking, and nothing waits for the copies. If the host writes
to the parameters next, the copies may read the new values.

    python -m conformance.simulator conformance/simulator/findings/fully_shard_offloaded_parameters.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

device = torch.accelerator.current_accelerator()
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = fully_shard(
    nn.Linear(2, 2), mesh=init_device_mesh(device.type, (1,)), offload_policy=CPUOffloadPolicy()
)
shards = list(model.parameters())
with torch.no_grad():
    output = model(torch.ones(1, 2, device=device))
    for shard in shards:
        shard.to_local().zero_()
print(output.tolist())
