"""Fixed in torch 2.13 (pytorch#181218): a loss in chunks accumulates gradients in memory that is used again.

Each chunk calls the last layer of a group. Its gradients were accumulated on another stream, which the next chunk did
not wait for. The bug is planted again unless the script gets the word `fixed`.

    python -m conformance.simulator conformance/simulator/findings/fully_shard_chunked_loss.py --ranks 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from conformance.simulator.rewriting import rewritten

if "fixed" not in sys.argv:
    memory = ("ReduceScatterState(reduce_scatter_input,", "ReduceScatterState(None,")
    wait = (
        "self.device_handle.current_stream().wait_event(self._post_reduce_event)",
        "del reduce_scatter_input",
    )
    rewritten(_fsdp_param_group.FSDPParamGroup, "post_backward", memory, wait).start()
dist.init_process_group("simccl")
device = torch.device(torch.accelerator.current_accelerator().type, dist.get_rank())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
model.head = nn.Linear(16, 16)
model.forward = lambda x: model[2](model[1](model[0](x)))
mesh = init_device_mesh(device.type, (2,))
for modules in (model[0], [model[2], model.head], model):
    fully_shard(modules, mesh=mesh)
for _ in range(2):
    chunks = model(torch.randn(24, 16).to(device)).chunk(4)
    torch.stack([model.head(chunk).square().mean() for chunk in chunks]).sum().backward()
print([parameter.grad.to_local().sum().item() for parameter in model.parameters()])
