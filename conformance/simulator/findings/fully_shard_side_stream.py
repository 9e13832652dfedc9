"""torch 2.13 to 2.14: fully_shard releases gradients of a forward on a side stream before they are reduced.

The gradients belong to the stream of the forward. At the end of a backward, the stream of its caller waits for their
reduction, but not the stream that uses their memory next.

    python -m conformance.simulator conformance/simulator/findings/fully_shard_side_stream.py --ranks 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("simccl")
device = torch.device(torch.accelerator.current_accelerator().type, dist.get_rank())
torch.accelerator.set_device_index(dist.get_rank())
torch.manual_seed(0)
main, side = torch.accelerator.current_stream(), torch.Stream(device)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
for module in (*model, model):
    fully_shard(module, mesh=init_device_mesh(device.type, (2,)))
side.wait_stream(main)
for _ in range(2):
    with side:
        loss = model(torch.ones(17, 16, device=device, requires_grad=True)).square().mean()
    main.wait_stream(side)
    loss.backward()
    with side:
        noise = [torch.full((16 * 17,), 7.0, device=device) for _ in range(12)]
print([parameter.grad.to_local().sum().item() for parameter in model.parameters()])
