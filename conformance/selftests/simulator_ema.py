"""A moving average of the weights on a side stream, as a script for the simulator: `simulator_ema.py [MISTAKE]`.

With `early`, the average does not wait for the optimizer. With `late`, the optimizer does not wait for the average.
"""

import sys

import torch
from torch import nn

mistake = "".join(sys.argv[1:])
device = torch.accelerator.current_accelerator()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
weights = list(model.parameters())
averages = [weight.detach().clone() for weight in weights]
main, side = torch.accelerator.current_stream(), torch.Stream(device)
side.wait_stream(main)
for _ in range(3):
    model(torch.randn(4, 8).to(device)).square().mean().backward()
    if mistake != "late":
        main.wait_stream(side)
    optimizer.step()
    optimizer.zero_grad()
    if mistake != "early":
        side.wait_stream(main)
    with side, torch.no_grad():
        torch._foreach_lerp_(averages, weights, 0.1)
main.wait_stream(side)
torch.save({"weights": weights, "averages": averages}, "ema.pt")
