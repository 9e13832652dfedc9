"""DistributedDataParallel, fed from a pinned buffer, as a script for the simulator: `simulator_ddp.py [MISTAKE]`.

With `refill`, the host refills the buffer before it was copied to the device. With `hook`, a communication hook returns
a bucket before its all-reduce has ended.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

mistake = "".join(sys.argv[1:])
dist.init_process_group("simccl")
rank = dist.get_rank()
device = torch.device(torch.accelerator.current_accelerator().type, rank)
torch.accelerator.set_device_index(rank)
layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
model = DistributedDataParallel(layers, bucket_cap_mb=1e-4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def sum_without_wait(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer(), async_op=True)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


if mistake == "hook":
    model.register_comm_hook(None, sum_without_wait)
buffer, copied = torch.empty(4, 8).pin_memory(), torch.Event(device)
for _ in range(3):
    if mistake != "refill":
        copied.synchronize()
    buffer.copy_(torch.randn(4, 8))
    x = buffer.to(device, non_blocking=True)
    copied.record()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(layers.state_dict(), f"model{rank}.pt")
dist.destroy_process_group()
