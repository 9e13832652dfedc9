"""Every torch (torchtitan#2581): a stream that waits for itself waits for nothing, without an error.

In the context of a side stream, `current_stream()` is the side stream. The wait was meant for the stream outside.

    python -m conformance.simulator conformance/simulator/findings/wait_stream_of_itself.py
"""

import torch

device = torch.accelerator.current_accelerator()
side = torch.Stream(device)
batch = torch.full((1000,), 2.0, device=device)
with side:
    side.wait_stream(torch.accelerator.current_stream())
    doubled = batch * 2
torch.accelerator.current_stream().wait_stream(side)
print(doubled.sum().item())
