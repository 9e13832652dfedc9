"""torch 2.13: with its scale on a device, GradScaler unscales gradients on the host before the scale has come there.

`inv_scale.to("cpu", non_blocking=True)` is pinned memory that is still being filled, and the CPU's kernel reads it at
once: gradients become anything, or a whole step is lost. Likewise through ShardedGradScaler with CPUOffload.

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
