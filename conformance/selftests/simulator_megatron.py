"""Megatron-FSDP, as a script for the simulator: `simulator_megatron.py [MISTAKE]`.

The installed source runs, except that it names `sim` instead of `cuda`. With `gather`, its all-gathers do not wait for
what reads their memory. With `reduce`, its reduce-scatters do not wait for the gradients.
"""

import re
import sys
import tempfile
import warnings
from importlib.metadata import distribution
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

MISTAKES = {
    "gather": "all_gather_stream.wait_stream(torch.sim.current_stream())",
    "reduce": "reduce_scatter_stream.wait_stream(current_stream)",
}
NAMES = (
    r"(?<!from )torch\.cuda|\"cuda\"|cuda:(?=\{)|\.cuda\(\)",
    lambda name: name[0].replace("cuda", "sim"),
)


def adapt_source(to: Path, left_out: str | None) -> None:
    package = Path(
        str(distribution("megatron-core").locate_file("megatron/core/distributed/fsdp/src/megatron_fsdp"))
    )
    (to / package.name).mkdir()
    for file in package.glob("*.py"):
        text = re.sub(*NAMES, file.read_text())
        (to / package.name / file.name).write_text(text.replace(left_out, "pass") if left_out else text)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


warnings.simplefilter("ignore")
with tempfile.TemporaryDirectory() as folder:
    adapt_source(Path(folder), MISTAKES.get("".join(sys.argv[1:])))
    sys.path.insert(0, folder)
    from megatron_fsdp import fully_shard

dist.init_process_group("simccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.accelerator.set_device_index(rank)
device = torch.device("sim", rank)
torch.manual_seed(0)
layers = nn.Sequential(*(Layer() for _ in range(4))).to(device)
model, optimizer = fully_shard(
    layers,
    torch.optim.SGD(layers.parameters(), 0.5),
    device_mesh=init_device_mesh("sim", (ranks,), mesh_dim_names=("dp",)),
    dp_shard_dim="dp",
    fsdp_unit_modules=[Layer],
    device=device,
)
for _ in range(3):
    loss = model(torch.randn(4, 8).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save([parameter.to_local() for parameter in model.parameters()], f"model{rank}.pt")
dist.destroy_process_group()
