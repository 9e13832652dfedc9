"""The dtypes in which gradients accumulate and are reduced, compared bit by bit for both APIs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.distributed.fsdp.scenes.fsdp_training import gathered_gradients, mesh_of
from conformance.distributed.fsdp.scenes.fully_shard_training import full_value
from conformance.distributed.fsdp.scenes.rank_judging import holds
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.twins import (
    PlainTwins,
    RankOutcomes,
    Twins,
    TwinsOf,
    each,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.surface import is_torch_in
from conformance.judge.tolerances import EXACT

_FOLLOWS_PARAM = is_torch_in(">=2.15")
LOW, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
BACKWARDS = 3
_NUMEL = 24


class Weighted(nn.Module):
    """Module whose weight gets the input as its gradient, in the dtype of the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, _NUMEL, dtype=SINGLE))

    def forward(self, coefficients: Tensor) -> Tensor:
        return (self.weight * coefficients.to(self.weight.dtype)).sum()


@dataclass(frozen=True)
class Layers:
    """Description of `Stacked`. If each layer is a unit, the root has no parameters."""

    frozen: Sequence[int] = ()
    are_units: bool = False


class Stacked(nn.Module):
    """Two layers whose weights both get the input as their gradient. Those with a number in `frozen` are frozen."""

    def __init__(self, frozen: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Weighted().requires_grad_(at not in frozen) for at in range(2))

    def forward(self, coefficients: Tensor) -> Tensor:
        return torch.stack([layer(coefficients).float() for layer in self.layers]).sum()


def coefficients(rank: int) -> Tensor:
    """Return the gradients [K, N] of a rank. Their sums and the sums over ranks are not exact in float32."""
    backward, element = torch.arange(BACKWARDS).view(-1, 1), torch.arange(_NUMEL)
    steps = 1 + (7 * element + 31 * backward + 57 * rank) % 101
    return (steps.to(DOUBLE) / 3) * 2.0 ** (4 * ((element + backward + rank) % 3) - 9)


# Layers of which each is a unit, or of which some are frozen.
LAYERS = {
    "units": Layers(are_units=True),
    "first frozen": Layers((0,)),
    "first unit frozen": Layers((0,), are_units=True),
    "last unit frozen": Layers((1,), are_units=True),
}


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of gradients: as computed, accumulated without synchronisation, reduced and shown."""

    computed: torch.dtype
    accumulated: torch.dtype
    reduced: torch.dtype
    shown: torch.dtype = SINGLE
    rounds_before_sum: bool = False


Policy = tuple[torch.dtype | None, torch.dtype | None]  # param_dtype and reduce_dtype


def _of_fully_shard(policy: Policy) -> Dtypes:
    computed, reduced = policy[0] or SINGLE, policy[1]
    reduced = reduced or (SINGLE if _FOLLOWS_PARAM else computed)
    return Dtypes(computed, reduced, reduced, rounds_before_sum=_FOLLOWS_PARAM)


def _of_fsdp(policy: Policy) -> Dtypes:
    computed = policy[0] or SINGLE
    return Dtypes(computed, computed, policy[1] or computed)


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


POLICIES: dict[str, Policy] = {
    "none": (None, None),
    "low": (LOW, None),
    "low, reduced in low": (LOW, LOW),
    "low, reduced in full": (LOW, SINGLE),
    "reduced in low": (None, LOW),
    "low, reduced in double": (LOW, DOUBLE),
}


def assert_rounded_by_dtypes(
    outcomes: RankOutcomes, dtypes_of: Callable[[Policy], Dtypes], schedule: str
) -> None:
    for name, policy in POLICIES.items():
        dtypes = dtypes_of(policy)
        expected = expected_gradient(dtypes, len(outcomes), schedule)
        for gradients in values_of(outcomes):
            for gradient in gradients[name]:
                assert gradient.values.dtype is dtypes.shown
                assert torch.equal(gradient.values.double(), expected), f"{name}: not rounded by {dtypes}"


def gradients_of_fully_shard(
    scene: Scene, schedule: str, replicates: bool, layers: Layers = Layers()
) -> dict[str, list[Tensor]]:
    """Return the gradients of trained float32 parameters under each policy."""
    return {
        name: _by_fully_shard(scene, policy, schedule, replicates, layers)
        for name, policy in POLICIES.items()
    }


def _by_fully_shard(
    scene: Scene, policy: Policy, schedule: str, replicates: bool, layers: Layers
) -> list[Tensor]:
    model: Any = Stacked(layers.frozen).to(scene.rank.device)
    options: dict[str, Any] = {"mesh": mesh_of(scene.rank, 1)} if replicates else {}
    options["mp_policy"] = scene.api.MixedPrecisionPolicy(*policy, cast_forward_inputs=False)
    for layer in model.layers if layers.are_units else ():
        scene.shard(layer, **options)
    scene.shard(model, **options)
    return _gradients(scene, model, schedule)


def _gradients(scene: Scene, model: Any, schedule: str) -> list[Tensor]:
    """Return the full gradients after `one` backward, or after several of another schedule.

    Only the last one synchronises if they are `accumulated`, and only the last one reduces over replicas if they are
    `deferred`. None reduces before `finalize_backward` if they are `finalized`.
    """
    count = _count(schedule)
    if schedule == "finalized":
        model.set_manual_backward_finalization(True)
    for number, grad in enumerate(coefficients(scene.rank.rank)[:count]):
        if schedule == "deferred":
            model.set_requires_all_reduce(number == count - 1)
        elif schedule != "finalized":
            model.set_requires_gradient_sync(number == count - 1)
        model(grad.to(scene.rank.device)).backward()
    if schedule == "finalized":
        model.finalize_backward()
    return [full_value(param.grad).cpu() for param in model.parameters() if param.requires_grad]


@clause("distributed.fsdp.fully_shard.reduction_dtype")
@pytest.mark.parametrize(
    ("schedule", "replicates", "layers"),
    [
        pytest.param("one", False, Layers(), id="sharded"),
        pytest.param("accumulated", False, Layers(), id="accumulated"),
        pytest.param("accumulated", True, Layers(), id="replicated"),
        *(pytest.param("accumulated", False, layers, id=name) for name, layers in LAYERS.items()),
    ],
)
def test_fully_shard_rounds_by_its_policy(
    plain_twins: PlainTwins, schedule: str, replicates: bool, layers: Layers
) -> None:
    arguments: dict[str, Any] = {"schedule": schedule, "replicates": replicates, "layers": layers}
    outcomes = plain_twins.agree(gradients_of_fully_shard, tolerance=EXACT, **arguments)
    assert_rounded_by_dtypes(outcomes, _of_fully_shard, schedule)


@clause("distributed.fsdp.fully_shard.finalization_dtype")
@pytest.mark.deviation("fully_shard.finalization_dtype")
@pytest.mark.parametrize("replicates", [False, True], ids=["sharded", "replicated"])
def test_backwards_before_finalization_accumulate_like_unsynchronised_ones(
    plain_twins: PlainTwins, replicates: bool
) -> None:
    def is_rounded_by(dtypes_of: Callable[[Policy], Dtypes]) -> Callable[[RankOutcomes], bool]:
        return lambda outcomes: holds(assert_rounded_by_dtypes, outcomes, dtypes_of, "accumulated")

    def in_param_dtype(policy: Policy) -> Dtypes:
        dtypes = _of_fully_shard(policy)
        return dtypes if policy[0] is None else replace(dtypes, accumulated=policy[0])

    plain_twins.deviate(
        gradients_of_fully_shard,
        schedule="finalized",
        replicates=replicates,
        we_do=is_rounded_by(_of_fully_shard),
        torch_does=is_rounded_by(in_param_dtype),
    )


@clause("distributed.fsdp.fully_shard.reduction_dtype")
def test_replicas_accumulate_reduced_gradients_in_reduction_dtype(plain_twins_of: TwinsOf) -> None:
    outcomes = plain_twins_of(2).agree(
        gradients_of_fully_shard, tolerance=EXACT, schedule="deferred", replicates=True
    )
    assert_rounded_by_dtypes(outcomes, _of_fully_shard, "deferred")


class _Replicated(nn.Module):
    """Module whose weight is replicated over a mesh of tensor parallelism, and gets a partial gradient."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        weight = torch.linspace(-1, 1, _NUMEL, dtype=SINGLE)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))

    def forward(self, rows: Any) -> Tensor:
        return (self.weight * rows.to(self.weight.dtype)).sum().full_tensor().clone()  # no view


def gradients_of_tensor_parallelism(scene: Scene, backwards: int = 1) -> dict[str, Tensor]:
    """Return the gradient under each policy. All ranks are in one group of tensor parallelism.

    Several backwards run under policies with a wide `reduce_dtype`, since narrow sums depend on their order.
    """
    policies = {
        name: policy for name, policy in POLICIES.items() if backwards == 1 or policy[1] in (SINGLE, DOUBLE)
    }
    return {name: _of_partial_gradient(scene, policy, backwards) for name, policy in policies.items()}


def _of_partial_gradient(scene: Scene, policy: Policy, backwards: int) -> Tensor:
    mesh = scene.rank.mesh(1, scene.rank.world_size, names=("data", "model"))
    model: Any = _Replicated(mesh["model"])
    precision = scene.api.MixedPrecisionPolicy(*policy, cast_forward_inputs=False)
    scene.shard(model, mesh=mesh["data"], mp_policy=precision)
    rows = coefficients(scene.rank.rank).to(scene.rank.device)
    for number in range(backwards):
        model.set_requires_gradient_sync(number == backwards - 1)
        row = rows[number : number + 1]
        model(DTensor.from_local(row, mesh["model"], [Shard(0)])).backward()
    return full_value(model.weight.grad).cpu()


def expected_of_tensor_parallelism(summed: torch.dtype, dtypes: Dtypes, world_size: int) -> Tensor:
    """Return the gradient [N] in float64, if tensor parallelism sums gradients in the dtype `summed`."""
    grads = [_rounded(coefficients(rank)[0].to(dtypes.computed), summed) for rank in range(world_size)]
    return _rounded(_rounded(torch.stack(grads).sum(0), summed), dtypes.reduced)


@clause("distributed.fsdp.fully_shard.tensor_parallel_reduction_dtype")
def test_tensor_parallelism_sums_gradients_in_their_dtype(plain_twins_of: TwinsOf) -> None:
    outcomes = plain_twins_of(2).agree(gradients_of_tensor_parallelism, tolerance=EXACT)
    for name, policy in POLICIES.items():
        dtypes = _of_fully_shard(policy)
        summed = dtypes.accumulated if _FOLLOWS_PARAM else dtypes.computed
        expected = expected_of_tensor_parallelism(summed, dtypes, len(outcomes))
        for gradients in values_of(outcomes):
            assert torch.equal(gradients[name].values.double(), expected), f"{name}: not summed in {summed}"


@clause("distributed.fsdp.fully_shard.tensor_parallel_reduction_dtype")
def test_tensor_parallelism_accumulates_gradients_in_reduce_dtype(plain_twins_of: TwinsOf) -> None:
    plain_twins_of(2).agree(gradients_of_tensor_parallelism, backwards=BACKWARDS)


class TwoGradDtypes(nn.Module):
    """Two parameters of bfloat16 in one unit. Gradients of the first one have `grad_dtype` float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Weighted().to(LOW), Weighted().to(LOW)
        self.first.weight.grad_dtype = SINGLE

    def forward(self, coefficients: Tensor) -> Tensor:
        return self.first(coefficients).float() + self.second(coefficients).float()


def gradients_by_grad_dtype(scene: Scene, schedule: str) -> list[Tensor]:
    """Return the gradients of both parameters."""
    model: Any = TwoGradDtypes().to(scene.rank.device)
    scene.shard(model)
    return _gradients(scene, model, schedule)


@clause("distributed.fsdp.fully_shard.grad_dtype")
@pytest.mark.parametrize("schedule", ["one", "accumulated"])
def test_gradients_follow_grad_dtype_of_each_parameter(plain_twins: PlainTwins, schedule: str) -> None:
    if _FOLLOWS_PARAM:
        outcomes = plain_twins.agree(gradients_by_grad_dtype, tolerance=EXACT, schedule=schedule)
    else:  # torch ignores `grad_dtype`
        outcomes = plain_twins.of_subject(gradients_by_grad_dtype, schedule=schedule)
    dtypes = (Dtypes(LOW, SINGLE, SINGLE, SINGLE), Dtypes(LOW, LOW, SINGLE, LOW))
    for gradients in values_of(outcomes):
        for gradient, expected_by in zip(gradients, dtypes, strict=True):
            expected = expected_gradient(expected_by, len(outcomes), schedule)
            assert gradient.values.dtype is expected_by.shown
            assert torch.equal(gradient.values.double(), expected), expected_by


def grad_dtypes_after_change(scene: Scene, changes: str) -> list[str]:
    """Return the dtypes of gradients after the parameters were cast or assigned."""
    model: Any = TwoGradDtypes().to(scene.rank.device)
    scene.shard(model)
    if changes == "cast":
        model.half()
    else:
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    model(coefficients(scene.rank.rank)[0].to(scene.rank.device)).backward()
    return [str(layer.weight.grad.dtype) for layer in (model.first, model.second)]


@clause("distributed.fsdp.fully_shard.grad_dtype_kept")
@pytest.mark.parametrize(("changes", "own"), [("cast", torch.float16), ("assigned", LOW)])
def test_grad_dtype_outlives_changes_of_parameters(
    plain_twins: PlainTwins, changes: str, own: torch.dtype
) -> None:
    if _FOLLOWS_PARAM:
        plain_twins.agree(grad_dtypes_after_change, tolerance=EXACT, changes=changes)
    for dtypes in plain_twins.values(grad_dtypes_after_change, changes=changes):
        assert dtypes == [str(SINGLE), str(own)]


def reduce_unused_with_any_dtype(
    scene: Scene, reduce_dtype: torch.dtype | None
) -> tuple[str | None, Tensor | None]:
    """Reduce unused parameters of which one has `grad_dtype=None`. Return the error, or the first one's gradient."""
    model: Any = TwoGradDtypes().to(scene.rank.device)
    model.second.weight.grad_dtype = None
    scene.shard(model, mp_policy=scene.api.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    model.set_reduce_scatter_unused_params(True)
    grad = coefficients(scene.rank.rank)[0].to(scene.rank.device)
    if (error := tried(model(grad).backward)) is not None:
        return error, None
    return None, full_value(model.first.weight.grad).cpu()


@clause("distributed.fsdp.fully_shard.grad_dtype")
@pytest.mark.parametrize("reduce_dtype", [None, SINGLE], ids=str)
def test_zeros_for_unused_parameters_need_one_dtype(
    plain_twins: PlainTwins, reduce_dtype: torch.dtype | None
) -> None:
    if _FOLLOWS_PARAM:
        plain_twins.agree(reduce_unused_with_any_dtype, tolerance=EXACT, reduce_dtype=reduce_dtype)
    for error, _ in plain_twins.values(reduce_unused_with_any_dtype, reduce_dtype=reduce_dtype):
        assert (error is None) == (reduce_dtype is not None)
        assert (
            error is None or "grad_dtype=None requires an explicit MixedPrecisionPolicy.reduce_dtype" in error
        )


def gradients_of_fsdp(
    scene: Scene, *, schedule: str, strategy: str, layers: Layers = Layers()
) -> dict[str, list[Tensor]]:
    return {name: _by_fsdp(scene, policy, schedule, strategy, layers) for name, policy in POLICIES.items()}


def _by_fsdp(scene: Scene, policy: Policy, schedule: str, strategy: str, layers: Layers) -> list[Tensor]:
    mixed = scene.api.MixedPrecision(*policy, cast_forward_inputs=False)
    units = {Weighted} if layers.are_units else ()
    how: dict[str, Any] = {"strategy": strategy, "units": units, "mixed_precision": mixed}
    model = scene.wrap(Stacked(layers.frozen), use_orig_params=True, **how)
    count = _count(schedule)
    for number, grad in enumerate(coefficients(scene.rank.rank)[:count]):
        with model.no_sync() if number < count - 1 else contextlib.nullcontext():
            model(grad.to(scene.rank.device)).backward()
    gradients = gathered_gradients(scene.library, model)
    return [gradients[f"layers.{number}.weight"].cpu() for number in (0, 1) if number not in layers.frozen]


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.reduction_dtype")
@pytest.mark.parametrize(
    ("schedule", "strategy", "layers"),
    [
        *(
            pytest.param(schedule, strategy, Layers(), id=f"{schedule}-{strategy}")
            for schedule in ("one", "accumulated")
            for strategy in ("FULL_SHARD", "NO_SHARD")
        ),
        *(pytest.param("accumulated", "FULL_SHARD", layers, id=name) for name, layers in LAYERS.items()),
    ],
)
def test_fsdp_rounds_by_its_mixed_precision(
    twins: Twins, schedule: str, strategy: str, layers: Layers
) -> None:
    arguments: dict[str, Any] = {"schedule": schedule, "strategy": strategy, "layers": layers}
    outcomes = twins.agree(gradients_of_fsdp, tolerance=EXACT, **arguments)
    assert_rounded_by_dtypes(outcomes, _of_fsdp, schedule)


def gradient_added_to_existing(scene: Scene, *, strategy: str) -> Tensor:
    """Return the gradient after a backward that adds to a `.grad` of 1 / 3, which no low precision can hold."""
    mixed = scene.api.MixedPrecision(LOW, cast_forward_inputs=False)
    model = scene.wrap(Weighted(), strategy=strategy, mixed_precision=mixed, use_orig_params=True)
    for _ in range(2):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(1 / 3)
        model(coefficients(scene.rank.rank)[0].to(scene.rank.device)).backward()
    (gradient,) = gathered_gradients(scene.library, model).values()
    return gradient.cpu()


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.existing_gradients")
@pytest.mark.deviation("fsdp.existing_gradients_rounded")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_existing_gradients_keep_their_precision(twins: Twins, strategy: str) -> None:
    added = expected_gradient(_of_fsdp((LOW, None)), twins.world_size, "one").float()
    twins.deviate(
        gradient_added_to_existing,
        strategy=strategy,
        torch_does=each(lambda gradient: torch.equal(gradient.values, gradient.values.to(LOW).float())),
        we_do=each(lambda gradient: torch.equal(gradient.values, added + 1 / 3)),
        may_agree=strategy == "FULL_SHARD" and not twins.is_alone,
    )
