"""Backward and step with parameters that FSDP keeps on the host, against torch's FSDP, clipping and fused AdamW.

On the CPU nothing runs at the same time. The benchmark shows what the early updates of `overlapped_step` cost, and what
it saves that a unit's gradients are read once. The cost model in `conformance/simulator` has the times on a device.
"""

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import comparison
from benchmarks.bench_fsdp import group_of_eight
from benchmarks.common import SEED, member, scaler_of
from benchmarks.timing import Workload

_UNITS, _ROWS = 8, 4


@functools.cache
def _alone() -> Any:
    group_of_eight()
    return dist.new_group([0])


def offloaded_step(subject: str, method: str, width: int, device: str) -> Workload:
    torch.manual_seed(SEED)
    fsdp = member(subject, "distributed.fsdp.FullyShardedDataParallel")
    options: dict[str, Any] = {"process_group": _alone()}
    # torch offloads to the host from an accelerator only. On the CPU the parameters are there anyway.
    if subject != "torch":
        options["cpu_offload"] = member(subject, "distributed.fsdp.CPUOffload")(offload_params=True)
    options |= {"device_id": torch.device(device), "use_orig_params": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fsdp(
            nn.Sequential(*(fsdp(nn.Linear(width, width), **options) for _ in range(_UNITS))), **options
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = scaler_of(subject, device)
    if subject != "torch" and not hasattr(scaler, method):
        raise NotImplementedError(f"{subject} has no {method}")
    inputs = torch.randn(_ROWS, width, device=device)

    def backward() -> None:
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean()).backward()

    def call() -> None:
        if subject != "torch" and method == "overlapped_step":
            with scaler.overlapped_step(optimizer, max_norm=1e3):
                backward()
            return
        backward()
        if subject != "torch":
            scaler.fused_step(optimizer, max_norm=1e3)
            return
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        scaler.step(optimizer)
        scaler.update()

    def effect() -> list[torch.Tensor]:
        call()
        return [param.detach().clone() for param in model.parameters()]

    return Workload(call, effect=effect)


class RatioOffloadedStep(comparison.Ratio):
    title = "Backward and step of offloaded parameters"
    area = "Fused AMP step"
    params = [["fused_step", "overlapped_step"], [512, 2048], ["cpu"]]
    param_names = ["method", "width", "device"]
    workload = staticmethod(offloaded_step)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800
