"""torch 2.13 and later: GradScaler unscales gradients on the host before the scale has arrived from the device.

`inv_scale.to("cpu", non_blocking=True)` returns pinned memory that is still being filled, and the CPU's kernel reads it
at once. Gradients become arbitrary, or a step is lost. ShardedGradScaler with CPUOffload does the same.

    python -m conformance.simulator conformance/simulator/findings/grad_scaler_host_copy.py
"""

import torch

device = torch.accelerator.current_accelerator()
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.full((3,), 1024.0)
scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
scaler.scale(torch.ones((), device=device))
scaler.unscale_(torch.optim.SGD([weight], 0.5))
print(weight.grad.tolist())
