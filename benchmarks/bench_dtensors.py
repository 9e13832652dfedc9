"""Unscaling, clipping and an optimizer's step over 2,000 sharded DTensors of 1,000 elements, on ranks.

torch dispatches each operator on DTensors in Python. impl looks up the local tensors once and passes them to kernels.
`RatioDtensorAdamW` times `GradScaler.fused_step`, which unscales and checks the gradients besides, against the plain
step of torch's foreach AdamW.
"""

import functools
from typing import Any

from benchmarks import comparison
from benchmarks.common import ranks
from benchmarks.timing import Workload

_DEVICES = ["cpu"]
_RANKS = "benchmarks.dtensor_ranks"


def on_ranks(operation: str, subject: str, world_size: int, device: str, meshes: int = 1) -> Workload:
    case = {"operation": operation, "subject": subject, "meshes": meshes}
    arguments: dict[str, Any] = {**case, "deadline_s": 300}
    pool = ranks(world_size)
    return Workload(
        functools.partial(pool.run, f"{_RANKS}:run", **arguments),
        effect=lambda: pool.run(f"{_RANKS}:effect", **arguments)[0],
    )


class RatioDtensorUnscale(comparison.BriefRatio):
    title = "GradScaler.unscale_ of 2,000 DTensors"
    area, curve = "GradScaler", "unscale_ of 2,000 DTensors, {world_size} ranks"
    params = [[2], _DEVICES]
    param_names = ["world_size", "device"]
    workload = staticmethod(functools.partial(on_ranks, "unscale"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioDtensorClip(comparison.Ratio):
    title = "clip_grad_norm_ of 2,000 DTensors"
    area, curve = "Clipping", "of 2,000 DTensors, {world_size} ranks"
    params = [[1, 2, 4, 8], _DEVICES]
    param_names = ["world_size", "device"]
    workload = staticmethod(functools.partial(on_ranks, "clip"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioDtensorClipMeshes(comparison.BriefRatio):
    """torch clips over one mesh only, so its DTensors are all on one."""

    title = "clip_grad_norm_ of 2,000 DTensors on several meshes of 2 ranks"
    area, curve = "Clipping", "of 2,000 DTensors, {meshes} meshes"
    params = [[2, 4], _DEVICES]
    param_names = ["meshes", "device"]

    @staticmethod
    def workload(subject: str, *case: Any) -> Workload:
        meshes, device = case
        return on_ranks("clip", subject, 2, device, meshes)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioDtensorAdamW(comparison.Ratio):
    title = "AdamW over 2,000 DTensors: fused_step against torch's foreach step"
    area, curve = "Fused AMP step", "AdamW over 2,000 DTensors, {world_size} ranks"
    params = [[2], _DEVICES]
    param_names = ["world_size", "device"]
    workload = staticmethod(functools.partial(on_ranks, "adamw"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800
