"""torch 2.13 and later: summon_full_params(writeback=False) shows CPU-offloaded parameters that still change.

They are copied to the device without blocking, and leaving the context does not wait for the copy. If the host writes
to the parameters next, the copy may read the new values. The same happens after a forward without a backward.

    python -m conformance.simulator conformance/simulator/findings/fsdp_summoned_offloaded_parameters.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

device = torch.accelerator.current_accelerator()
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
offload, place = CPUOffload(offload_params=True), torch.device(device.type, 0)
model = FullyShardedDataParallel(nn.Linear(2, 2), cpu_offload=offload, device_id=place, use_orig_params=True)
for _ in range(2):  # only then are they pinned
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        shown = [parameter.detach().clone() for parameter in model.parameters()]
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
print([values.tolist() for values in shown])
