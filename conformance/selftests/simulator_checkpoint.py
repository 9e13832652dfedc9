"""Asynchronous checkpoints of DCP, as a script for the simulator: `simulator_checkpoint.py [MISTAKE]`.

With `overtaken`, the optimizer does not wait for the copy of the weights to the host. With `unfinished`, the
checkpoint is written before the copy has ended.
"""

import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

mistake = "".join(sys.argv[1:])
device = torch.accelerator.current_accelerator()
torch.manual_seed(0)
main, side = torch.accelerator.current_stream(), torch.Stream(device)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loaded = {}
for step in range(2):
    side.wait_stream(main)
    with side, torch.no_grad():
        copies = {name: weight.to("cpu", non_blocking=True) for name, weight in model.named_parameters()}
    model(torch.randn(4, 8).to(device)).square().mean().backward()
    if mistake != "overtaken":
        main.wait_stream(side)
    optimizer.step()
    optimizer.zero_grad()
    if mistake != "unfinished":
        side.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        dcp.async_save(copies, checkpoint_id=folder, no_dist=True).result()
        values = {name: torch.empty_like(copy) for name, copy in copies.items()}
        dcp.load(values, checkpoint_id=folder, no_dist=True)
    loaded[f"step {step}"] = values
torch.save(loaded, "loaded.pt")
