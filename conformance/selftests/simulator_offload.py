"""Activations on the host until backward, as a script for the simulator: `simulator_offload.py [MISTAKE]`.

With `unrecorded`, memory of an activation is used again while it is copied to the host. With `early`, backward does not
wait for the copy back.
"""

import sys

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

mistake = "".join(sys.argv[1:])
device = torch.accelerator.current_accelerator()
torch.manual_seed(0)
main, side = torch.accelerator.current_stream(), torch.Stream(device)


def to_host(activation: torch.Tensor) -> torch.Tensor:
    if activation.shape != (64, 8):
        return activation
    side.wait_stream(main)
    if mistake != "unrecorded":
        activation.record_stream(side)
    with side:
        host = torch.empty(activation.shape, pin_memory=True)
        return host.copy_(activation, non_blocking=True)


def to_device(packed: torch.Tensor) -> torch.Tensor:
    if packed.device.type != "cpu":
        return packed
    with side:
        activation = packed.to(device, non_blocking=True)
    if mistake != "early":
        main.wait_stream(side)
    activation.record_stream(main)
    return activation


model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    with saved_tensors_hooks(to_host, to_device):
        loss = model(torch.randn(64, 8).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "model.pt")
