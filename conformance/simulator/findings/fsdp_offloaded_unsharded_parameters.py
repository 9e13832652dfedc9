"""torch 2.13 to 2.14: FSDP with NO_SHARD, CPUOffload and use_orig_params computes with another unit's parameters.

FSDP copies them into memory of the stream of gathers. The backward frees that memory while another stream still has to
read it, and no record_stream keeps it. The next unit's copy then overwrites it.

    python -m conformance.simulator conformance/simulator/findings/fsdp_offloaded_unsharded_parameters.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy, wrap

device = torch.accelerator.current_accelerator()
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = FullyShardedDataParallel(
    nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)),
    sharding_strategy=ShardingStrategy.NO_SHARD,
    cpu_offload=CPUOffload(offload_params=True),
    auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Sequential}),
    device_id=torch.device(device.type, 0),
    use_orig_params=True,
)
output = model(torch.ones(1, 4, device=device))
output.sum().backward()
print(output.tolist())
