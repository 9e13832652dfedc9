"""Growth of the cost of a fused AMP step with the number of tensors and of parameter groups.

The tensors are tiny, so that the time that each tensor or group takes is measured. bench_dtensors has the growth with
ranks and meshes.
"""

import torch

from benchmarks import comparison
from benchmarks.common import SEED, require, scaler_of
from benchmarks.timing import Workload

_DEVICES = ["cpu"]
_ELEMENTS = 8


def fused_amp_step(subject: str, tensors: int, groups: int, device: str) -> Workload:
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
    scaler = scaler_of(subject, device)

    def four_calls() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1e9)
        scaler.step(optimizer)
        scaler.update()

    def one_call() -> None:
        scaler.fused_step(optimizer, max_norm=1e9)

    if subject != "torch" and not hasattr(scaler, "fused_step"):
        raise NotImplementedError(f"{subject} has no fused_step")
    call = four_calls if subject == "torch" else one_call

    def effect() -> list[torch.Tensor]:
        call()
        return [values[0].clone()]

    return Workload(call, effect=effect)


class RatioGrowthTensors(comparison.Ratio):
    title = "Fused AMP step, by the number of tensors"
    area, curve = "Growth of the cost", "{tensors} tensors"
    params = [[1, 100, 1_000, 10_000, 100_000], [1], _DEVICES]
    param_names = ["tensors", "groups", "device"]
    workload = staticmethod(fused_amp_step)
    measure = classmethod(comparison.measure_briefly)

    def setup_cache(self):
        return self.measure_all()


class RatioGrowthGroups(comparison.Ratio):
    title = "Fused AMP step of 1,000 tensors, by the number of parameter groups"
    area, curve = "Growth of the cost", "1,000 tensors in {groups} groups"
    params = [[1_000], [100, 1_000], _DEVICES]
    param_names = ["tensors", "groups", "device"]
    workload = staticmethod(fused_amp_step)
    measure = classmethod(comparison.measure_briefly)

    def setup_cache(self):
        return self.measure_all()
