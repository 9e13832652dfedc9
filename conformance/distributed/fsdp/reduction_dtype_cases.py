"""Cases of the dtypes in which gradients accumulate and are reduced.

The coefficients are chosen so that each dtype gives different bits. K = backwards, N = elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.distributed.fsdp.fsdp_cases import gathered_gradients, mesh_of
from conformance.distributed.fsdp.fully_shard_cases import full_value
from conformance.distributed.fsdp.fully_shard_construct_cases import Site
from conformance.distributed.fsdp.lab import Lab, tried

LOW, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64
BACKWARDS = 3
_NUMEL = 24


class Weighted(nn.Module):
    """Module whose weight gets the input as its gradient, in the dtype of the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, _NUMEL, dtype=FULL))

    def forward(self, coefficients: Tensor) -> Tensor:
        return (self.weight * coefficients.to(self.weight.dtype)).sum()


@dataclass(frozen=True)
class Layers:
    """Two layers, of which some are frozen. If each is a unit, the root has no parameters."""

    frozen: Sequence[int] = ()
    are_units: bool = False

    def build(self) -> Stacked:
        model = Stacked()
        for number in self.frozen:
            model.layers[number].requires_grad_(False)
        return model


class Stacked(nn.Module):
    """Layers whose weights all get the input as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Weighted(), Weighted()])

    def forward(self, coefficients: Tensor) -> Tensor:
        return torch.stack([layer(coefficients).float() for layer in self.layers]).sum()


def coefficients(rank: int) -> Tensor:
    """Return the gradients [K, N] of a rank. Their sums and the sums over ranks are not exact in float32."""
    backward, element = torch.arange(BACKWARDS).view(-1, 1), torch.arange(_NUMEL)
    steps = 1 + (7 * element + 31 * backward + 57 * rank) % 101
    return (steps.to(DOUBLE) / 3) * 2.0 ** (4 * ((element + backward + rank) % 3) - 9)


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of gradients: as computed, accumulated without synchronisation, reduced and shown."""

    computed: torch.dtype
    accumulated: torch.dtype
    reduced: torch.dtype
    shown: torch.dtype = FULL
    rounds_before_sum: bool = False


def expected_gradient(dtypes: Dtypes, world_size: int, schedule: str) -> Tensor:
    """Return the averaged gradient [N] in float64, rounded after each step to the dtype of that step."""
    grads = [coefficients(rank).to(dtypes.computed) for rank in range(world_size)]
    if schedule == "deferred":
        partial = torch.zeros(world_size, _NUMEL, dtype=DOUBLE)
        for number in range(BACKWARDS):
            own = [_rounded(grad[number], dtypes.reduced) for grad in grads]
            partial = torch.stack(
                [_rounded(p + g, dtypes.reduced) for p, g in zip(partial, own, strict=True)]
            )
        return _average(list(partial), dtypes)
    return _average([_accumulated(grad[: _count(schedule)], dtypes) for grad in grads], dtypes)


def _count(schedule: str) -> int:
    return 1 if schedule == "one" else BACKWARDS


def _accumulated(grads: Tensor, dtypes: Dtypes) -> Tensor:
    total = _rounded(grads[0], dtypes.accumulated)
    for grad in grads[1:]:
        added = _rounded(grad, dtypes.accumulated) if dtypes.rounds_before_sum else grad.to(DOUBLE)
        total = _rounded(total + added, dtypes.accumulated)
    return total


def _average(ranks: Sequence[Tensor], dtypes: Dtypes) -> Tensor:
    """Return the average over ranks. A sum over two ranks is rounded once in any order, and halving is exact."""
    total = _rounded(ranks[0], dtypes.reduced)
    for own in ranks[1:]:
        total = _rounded(total + _rounded(own, dtypes.reduced), dtypes.reduced)
    return _rounded(total / len(ranks), dtypes.shown)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).to(DOUBLE)


# -- fully_shard

Policy = tuple[torch.dtype | None, torch.dtype | None]  # param_dtype and reduce_dtype
POLICIES: dict[str, Policy] = {
    "none": (None, None),
    "low": (LOW, None),
    "low, reduced in low": (LOW, LOW),
    "low, reduced in full": (LOW, FULL),
    "reduced in low": (None, LOW),
    "low, reduced in double": (LOW, DOUBLE),
}


def of_fully_shard(
    site: Site, schedule: str, replicates: bool, layers: Layers = Layers()
) -> dict[str, list[Tensor]]:
    """Return the gradients of trained float32 parameters under each policy."""
    return {
        name: _by_fully_shard(site, policy, schedule, replicates, layers) for name, policy in POLICIES.items()
    }


def _by_fully_shard(
    site: Site, policy: Policy, schedule: str, replicates: bool, layers: Layers
) -> list[Tensor]:
    model: Any = layers.build().to(site.rank.device)
    options: dict[str, Any] = {"mesh": mesh_of(site.rank, 1)} if replicates else {}
    options["mp_policy"] = site.fsdp.MixedPrecisionPolicy(*policy, cast_forward_inputs=False)
    for layer in model.layers if layers.are_units else ():
        site.shard(layer, **options)
    site.shard(model, **options)
    return _gradients(site, model, schedule)


def _gradients(site: Site, model: Any, schedule: str) -> list[Tensor]:
    count = _count(schedule)
    if schedule == "finalized":
        model.set_manual_backward_finalization(True)
    for number, grad in enumerate(coefficients(site.rank.rank)[:count]):
        if schedule == "deferred":
            model.set_requires_all_reduce(number == count - 1)
        elif schedule != "finalized":
            model.set_requires_gradient_sync(number == count - 1)
        model(grad.to(site.rank.device)).backward()
    if schedule == "finalized":
        model.finalize_backward()
    return [full_value(param.grad).cpu() for param in model.parameters() if param.requires_grad]


class TwoGradDtypes(nn.Module):
    """Two parameters of bfloat16 in one unit. Gradients of the first one have `grad_dtype` float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Weighted().to(LOW), Weighted().to(LOW)
        self.first.weight.grad_dtype = FULL

    def forward(self, coefficients: Tensor) -> Tensor:
        return self.first(coefficients).float() + self.second(coefficients).float()


def of_grad_dtype(site: Site, schedule: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of both parameters."""
    model: Any = TwoGradDtypes().to(site.rank.device)
    site.shard(model)
    count = _count(schedule)
    for number, grad in enumerate(coefficients(site.rank.rank)[:count]):
        model.set_requires_gradient_sync(number == count - 1)
        model(grad.to(site.rank.device)).backward()
    first, second = (full_value(layer.weight.grad).cpu() for layer in (model.first, model.second))
    return first, second


def of_kept_grad_dtype(site: Site, changes: str) -> list[str]:
    """Return the dtypes of gradients after the parameters were cast or assigned."""
    model: Any = TwoGradDtypes().to(site.rank.device)
    site.shard(model)
    if changes == "cast":
        model.half()
    else:
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    model(coefficients(site.rank.rank)[0].to(site.rank.device)).backward()
    return [str(layer.weight.grad.dtype) for layer in (model.first, model.second)]


def of_unused_with_any_dtype(
    site: Site, reduce_dtype: torch.dtype | None
) -> tuple[str | None, Tensor | None]:
    """Reduce unused parameters of which one has `grad_dtype=None`. Return the error, or the first one's gradient."""
    model: Any = TwoGradDtypes().to(site.rank.device)
    model.second.weight.grad_dtype = None
    site.shard(model, mp_policy=site.fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    model.set_reduce_scatter_unused_params(True)
    grad = coefficients(site.rank.rank)[0].to(site.rank.device)
    if (error := tried(model(grad).backward)) is not None:
        return error, None
    return None, full_value(model.first.weight.grad).cpu()


# -- FullyShardedDataParallel


def of_fsdp(lab: Lab, *, schedule: str, strategy: str, layers: Layers = Layers()) -> dict[str, list[Tensor]]:
    return {name: _by_fsdp(lab, policy, schedule, strategy, layers) for name, policy in POLICIES.items()}


def _by_fsdp(lab: Lab, policy: Policy, schedule: str, strategy: str, layers: Layers) -> list[Tensor]:
    mixed = lab.api.MixedPrecision(*policy, cast_forward_inputs=False)
    units = {Weighted} if layers.are_units else ()
    model = lab.wrap(
        layers.build(), strategy=strategy, units=units, mixed_precision=mixed, use_orig_params=True
    )
    count = _count(schedule)
    for number, grad in enumerate(coefficients(lab.rank.rank)[:count]):
        with model.no_sync() if number < count - 1 else contextlib.nullcontext():
            model(grad.to(lab.rank.device)).backward()
    gradients = gathered_gradients(lab.library, model)
    return [gradients[f"layers.{number}.weight"].cpu() for number in (0, 1) if number not in layers.frozen]


def of_existing_gradient(lab: Lab, *, strategy: str) -> Tensor:
    """Return the gradient after a backward that adds to a `.grad` of 1 / 3, which no low precision can hold."""
    mixed = lab.api.MixedPrecision(LOW, cast_forward_inputs=False)
    model = lab.wrap(Weighted(), strategy=strategy, mixed_precision=mixed, use_orig_params=True)
    for _ in range(2):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(1 / 3)
        model(coefficients(lab.rank.rank)[0].to(lab.rank.device)).backward()
    (gradient,) = gathered_gradients(lab.library, model).values()
    return gradient.cpu()


# -- tensor parallelism


class _Replicated(nn.Module):
    """Module whose weight is replicated over a mesh of tensor parallelism, and gets a partial gradient."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        weight = torch.linspace(-1, 1, _NUMEL, dtype=FULL)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))

    def forward(self, rows: Any) -> Tensor:
        return (self.weight * rows.to(self.weight.dtype)).sum().full_tensor().clone()  # no view


def of_tensor_parallelism(site: Site) -> dict[str, Tensor]:
    """Return the gradient under each policy. All ranks are in one group of tensor parallelism."""
    return {name: _of_partial_gradient(site, policy) for name, policy in POLICIES.items()}


def _of_partial_gradient(site: Site, policy: Policy) -> Tensor:
    mesh = site.rank.mesh(1, site.rank.world_size, names=("data", "model"))
    model: Any = _Replicated(mesh["model"])
    precision = site.fsdp.MixedPrecisionPolicy(*policy, cast_forward_inputs=False)
    site.shard(model, mesh=mesh["data"], mp_policy=precision)
    row = coefficients(site.rank.rank)[:1].to(site.rank.device)
    model(DTensor.from_local(row, mesh["model"], [Shard(0)])).backward()
    return full_value(model.weight.grad).cpu()


def expected_of_tensor_parallelism(summed: torch.dtype, dtypes: Dtypes, world_size: int) -> Tensor:
    """Return the gradient [N] in float64, if tensor parallelism sums gradients in the dtype `summed`."""
    grads = [_rounded(coefficients(rank)[0].to(dtypes.computed), summed) for rank in range(world_size)]
    return _rounded(_rounded(torch.stack(grads).sum(0), summed), dtypes.reduced)
