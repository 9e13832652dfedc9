"""Growth of the cost of a fused AMP step with the number of tensors and of parameter groups.

The tensors are tiny, so that the time that each tensor or group takes is measured. bench_dtensors has the growth with
ranks and meshes.
"""

import torch

from benchmarks import comparison
from benchmarks.bench_fused_amp_step import step_call
from benchmarks.common import SEED, require
from benchmarks.timing import Workload

_DEVICES = ["cpu"]
_ELEMENTS = 8


def step_of_tiny_tensors(subject: str, tensors: int, groups: int, device: str) -> Workload:
    """Return the fused step of `tensors` tensors in equal groups, or torch's four calls that do the same."""
    require(device)
    random = torch.Generator(device).manual_seed(SEED)
    values = torch.randn(2, tensors, _ELEMENTS, generator=random, device=device).mul_(0.01)
    params = [torch.nn.Parameter(row) for row in values[0]]
    for param, grad in zip(params, values[1], strict=True):
        param.grad = grad
    size = tensors // groups
    optimizer = torch.optim.AdamW(
        [{"params": params[start : start + size]} for start in range(0, tensors, size)], lr=1e-4, fused=True
    )
    call = step_call(subject, optimizer, params, device)

    def effect() -> list[torch.Tensor]:
        call()
        return [values[0].clone()]

    return Workload(call, effect=effect)


class RatioGrowthTensors(comparison.BriefRatio):
    title = "Fused AMP step, by the number of tensors"
    area, curve = "Growth of the cost", "{tensors} tensors"
    params = [[1, 100, 1_000, 10_000, 100_000], [1], _DEVICES]
    param_names = ["tensors", "groups", "device"]
    workload = staticmethod(step_of_tiny_tensors)

    def setup_cache(self):
        return self.measure_all()


class RatioGrowthGroups(comparison.BriefRatio):
    title = "Fused AMP step of 1,000 tensors, by the number of parameter groups"
    area, curve = "Growth of the cost", "1,000 tensors in {groups} groups"
    params = [[1_000], [100, 1_000], _DEVICES]
    param_names = ["tensors", "groups", "device"]
    workload = staticmethod(step_of_tiny_tensors)

    def setup_cache(self):
        return self.measure_all()
