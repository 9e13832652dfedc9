"""Modules and groups of ranks that torch's class refuses, or trains or reads wrongly."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes import prompted_model
from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training, mesh_of
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.prompted_model import Prompted, Regions
from conformance.distributed.fsdp.scenes.rank_judging import trains_like_unsharded
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.traffic import counts
from conformance.distributed.fsdp.scenes.twins import STRATEGIES, Twins, both_kinds, each_strategy, raises
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable
from conformance.judge.tolerances import TRAINED


class TwoDtypes(nn.Module):
    """Module with parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.shift = nn.Parameter(torch.zeros(5, 1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).double() + self.shift.sum()


class OneElement(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Position(nn.Module):
    """Module that returns a slice of its parameter, which the outer module adds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, 3))

    def forward(self, rows: int) -> torch.Tensor:
        return self.weight[:rows]


class Positioned(nn.Module):
    """Module that returns its result together with a slice of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.position = Position()
        self.last = nn.Linear(3, 2)
        self.added = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.both(x))

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(x + self.position(len(x))), self.added[: len(x)]


class Description:
    """Object that is not a container of torch or Python, with references to itself."""

    def __init__(self, mean: torch.Tensor, spread: torch.Tensor) -> None:
        self.parts = {"mean": mean}
        self.inner = _Spread(spread)
        self.itself = self
        self.circle: list[Any] = [self]
        self.circle.append(self.circle)

    def square(self) -> torch.Tensor:
        return (self.parts["mean"] * self.inner.spread).square()


@dataclass(frozen=True)
class _Spread:
    spread: torch.Tensor


class Describing(nn.Module):
    """Module that returns an object, which may hold a parameter."""

    def __init__(self, holds_parameter: bool) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.spread = nn.Parameter(torch.ones(2))
        self.holds_parameter = holds_parameter

    def forward(self, x: torch.Tensor) -> Description:
        spread = self.spread.expand(len(x), 2)
        return Description(self.mean(x), spread if self.holds_parameter else spread.exp())


class Described(nn.Module):
    """Module that computes with the contents of an object that its inner module returns."""

    def __init__(self, holds_parameter: bool) -> None:
        super().__init__()
        self.describing = Describing(holds_parameter)
        self.last = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.describing(x).square())


def _half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    return module


def _normed() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.utils.weight_norm(nn.Linear(3, 4))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "half frozen": _half_frozen,
    "several dtypes": TwoDtypes,
    "one element": OneElement,
    "float64": lambda: nn.Linear(3, 4).double(),
    "plain": lambda: nn.Linear(3, 4),
    "normed": _normed,
    "returned": Positioned,
    "object": lambda: Describing(holds_parameter=False),
    "object with a parameter": lambda: Describing(holds_parameter=True),
    "object inside": lambda: Described(holds_parameter=False),
    "object inside with a parameter": lambda: Described(holds_parameter=True),
}


def built(module: str) -> Any:
    return filled(MODULES[module]())


def _backward(scene: Scene, model: nn.Module, number: int) -> None:
    dtype = min((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)

    def loss(rank: int) -> torch.Tensor:
        x = torch.linspace(0, 1 + number, 15, dtype=dtype).view(5, 3) - rank * 0.25
        return model(x).square().mean()

    scene.mean(loss).backward()


def accumulate(scene: Scene, **arguments: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of two backwards."""
    return scene.whole_gradients(_accumulated(scene, **arguments))


def _accumulated(
    scene: Scene, *, module: str, replicas: str = "", strategy: str = "FULL_SHARD", **arguments: Any
) -> Any:
    """Return a model after two backwards. Inner modules with unusual parameters become units.

    With `replicas`, each rank has a full replica, either by a `mesh` or by the `default` of a hybrid strategy.
    """
    if replicas == "mesh":
        arguments["device_mesh"] = mesh_of(scene.rank, 1)
    else:
        arguments["units"] = [nn.Sequential] if replicas else [Position, Describing]
    model = scene.wrap(built(module), strategy="HYBRID_SHARD" if replicas else strategy, **arguments)
    for number in range(2):
        _backward(scene, model, number)
    return model


@clause("distributed.fsdp.fsdp_torch_limit_removed.frozen_in_part")
@pytest.mark.deviation("fsdp.frozen_in_part")
def test_frozen_and_trained_parameters_share_a_unit(twins: Twins) -> None:
    refuses = raises(ValueError, "uniform `requires_grad`")
    twins.deviate_to_unsharded(accumulate, module="half frozen", torch_does=refuses)


@clause("distributed.fsdp.fsdp_torch_limit_removed.several_dtypes")
@pytest.mark.deviation("fsdp.several_dtypes")
def test_parameters_of_several_dtypes_share_a_unit(twins: Twins) -> None:
    refuses = raises(ValueError, "uniform dtype")
    twins.deviate_to_unsharded(accumulate, module="several dtypes", torch_does=refuses)


@clause("distributed.fsdp.fsdp_torch_limit_removed.one_element")
@pytest.mark.deviation("fsdp.unit_of_one_element")
def test_unit_of_one_element_accumulates_gradients(cpu_twins: Twins) -> None:
    """torch reduces the gradient of the first backward again in the second backward."""
    may_agree = cpu_twins.is_alone
    cpu_twins.deviate_to_unsharded(accumulate, module="one element", may_agree=may_agree)


def clipped(scene: Scene) -> torch.Tensor:
    """Return the norm of float64 gradients."""
    return _accumulated(scene, module="float64").clip_grad_norm_(0.5)


@clause("distributed.fsdp.fsdp_torch_limit_removed.float64_clipped")
@pytest.mark.deviation("fsdp.float64_clipped")
def test_float64_gradients_are_clipped(cpu_twins: Twins) -> None:
    cpu_twins.deviate_to_unsharded(
        clipped, torch_does=raises(RuntimeError, "without narrowing"), may_agree=cpu_twins.is_alone
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.replicas_of_one")
@pytest.mark.deviation("fsdp.replicas_of_one")
@pytest.mark.parametrize("replicas", ["mesh", "default"])
@pytest.mark.world_sizes(fewest=2)
def test_replicas_of_one_rank_are_averaged(cpu_twins: Twins, replicas: str) -> None:
    """The default groups assume as many ranks on a host as devices, which is one rank on the CPU.

    torch never averages the gradients of the replicas.
    """
    cpu_twins.deviate_to_unsharded(accumulate, module="plain", replicas=replicas)


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_accelerator")
@pytest.mark.deviation("fsdp.without_accelerator")
def test_wrapping_needs_no_accelerator(twins: Twins, device: str) -> None:
    if device != "cpu" or torch.accelerator.is_available():
        unavailable("a machine without accelerator")
    refuses = raises(RuntimeError, "no accelerator device is detected")
    twins.deviate_to_unsharded(accumulate, module="plain", device_id=None, torch_does=refuses)


@clause("distributed.fsdp.fsdp_torch_limit_removed.reentrant_regions")
@pytest.mark.deviation("fsdp.reentrance_anywhere")
@both_kinds
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_reentrant_regions_follow_each_other_in_a_unit(
    cpu_twins: Twins, strategy: str, use_orig_params: bool
) -> None:
    tree = ModuleTree(
        ModuleGroup((Leaf("affine", 4), Leaf("tied"), Leaf("affine", 3)), checkpointing="reentrant")
    )
    setup = Setup(strategy, arguments={"use_orig_params": use_orig_params})
    training = Training(tree, setup, (Step(), Step()))
    cpu_twins.judge(
        lambda library: cpu_twins.trained(library, training),
        torch_does=raises(RuntimeError),
        we_do=lambda outcomes: trains_like_unsharded(outcomes, training),
        may_agree=cpu_twins.is_alone,
    )


def gradients_of_regions(scene: Scene, is_mixed: bool, **wrapping: Any) -> dict[str, torch.Tensor]:
    model = scene.wrap(filled(Prompted(is_mixed).double()), units=[Regions], **wrapping)
    for _ in range(2):
        prompted_model.backward(scene, model)
    return scene.whole_gradients(model)


@clause("distributed.fsdp.fsdp_torch_limit_removed.reentrant_regions")
@pytest.mark.deviation("fsdp.reentrance_anywhere")
@both_kinds
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_reentrant_regions_train_unit_with_parameter_as_input(
    cpu_twins: Twins, is_mixed: bool, strategy: str, use_orig_params: bool
) -> None:
    cpu_twins.deviate_to_unsharded(
        gradients_of_regions,
        is_mixed=is_mixed,
        strategy=strategy,
        use_orig_params=use_orig_params,
        torch_does=raises(RuntimeError),
        may_agree=cpu_twins.is_alone,
    )


torchs_limit = clause("distributed.fsdp.fsdp_torch_limit_removed.returned_parameters")
sharded_or_not = pytest.mark.parametrize(
    "strategy",
    [
        # torch reads freed memory of a unit here, which may end the process.
        *(pytest.param(strategy, marks=torchs_limit) for strategy in STRATEGIES[:2]),
        pytest.param(
            "NO_SHARD", marks=clause("distributed.fsdp.fully_sharded_data_parallel.returned_parameters")
        ),
    ],
)


@sharded_or_not
def test_parameters_that_are_returned_are_trained(cpu_twins: Twins, strategy: str) -> None:
    cpu_twins.agree_with_unsharded(accumulate, module="returned", strategy=strategy)


class Both(Positioned):
    def forward(self, x: torch.Tensor) -> Any:
        return self.both(x)


def returned_parameters(scene: Scene, *, strategy: str, inference: bool) -> torch.Tensor:
    """Return parameters that a forward without gradients returned, after other memory of their size was written to."""
    model = scene.wrap(Both(), strategy=strategy)
    with torch.inference_mode() if inference else torch.no_grad():
        returned = model(torch.ones(5, 3))[1]
    _others = [torch.zeros(numel) for numel in range(1, 64)]
    return returned.clone()


@pytest.mark.parametrize("inference", [False, True])
@sharded_or_not
def test_parameters_that_are_returned_can_be_read(cpu_twins: Twins, strategy: str, inference: bool) -> None:
    for read in cpu_twins.values(returned_parameters, strategy=strategy, inference=inference):
        assert torch.equal(read.values, torch.ones(5, 2)), read


@clause("distributed.fsdp.fsdp_torch_limit_removed.objects")
@pytest.mark.deviation("fsdp.objects")
@pytest.mark.parametrize("module", ["object", "object inside"])
@each_strategy
def test_unit_may_return_object(cpu_twins: Twins, strategy: str, module: str) -> None:
    """torch raises ValueError about a training state, or RuntimeError about a storage of size 0."""
    cpu_twins.deviate_to_unsharded(
        accumulate, module=module, strategy=strategy, may_agree=strategy == "NO_SHARD" or cpu_twins.is_alone
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.objects_with_parameters")
@pytest.mark.parametrize("module", ["object with a parameter", "object inside with a parameter"])
@each_strategy
def test_returned_object_may_hold_parameters(cpu_twins: Twins, strategy: str, module: str) -> None:
    cpu_twins.agree_with_unsharded(accumulate, module=module, strategy=strategy)


class OutputRecord:
    """Object that is passed from unit to unit and keeps the output of each."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(
        self, inputs: tuple[torch.Tensor, OutputRecord | None]
    ) -> tuple[torch.Tensor, OutputRecord | None]:
        x, record = inputs
        x = self.layer(x).tanh()
        if record is not None:
            record.outputs.append(x)
        return x, record


def one_step_of_many_units(scene: Scene, *, keeps: bool) -> None:
    model = scene.wrap(nn.Sequential(*(Keeping() for _ in range(4))), units=[Keeping])
    output, _ = model((torch.ones(2, 3), OutputRecord() if keeps else None))
    output.sum().backward()


@clause("distributed.fsdp.fsdp_torch_limit_removed.objects")
def test_object_passed_between_units_adds_no_gathers(twins: Twins) -> None:
    def issued(keeps: bool) -> list[Counter[str]]:
        twins.values(one_step_of_many_units, keeps=keeps)
        return [counts(trace) for trace in twins.pool.traces]

    with_record, without = issued(keeps=True), issued(keeps=False)
    assert with_record == without
    assert all((trace["gather"] > 0) is not twins.is_alone for trace in without)


def output_of_an_inner_module(scene: Scene, *, module: str) -> torch.Tensor:
    """Call a module inside a unit by itself."""
    inner = built(module)
    _model = scene.wrap(nn.Sequential(inner, nn.Linear(4, 2)), use_orig_params=True)  # owns the unit
    return inner(torch.ones(1, 3)).detach()


@clause("distributed.fsdp.fsdp_torch_limit_removed.inner_modules")
@pytest.mark.deviation("fsdp.forward_of_an_inner_module")
def test_inner_module_of_unit_can_be_called(cpu_twins: Twins) -> None:
    cpu_twins.deviate_to_unsharded(
        output_of_an_inner_module,
        module="plain",
        torch_does=raises(RuntimeError),
        may_agree=cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.hooks_of_inner_modules")
def test_hooks_of_inner_module_may_read_parameters(cpu_twins: Twins) -> None:
    cpu_twins.agree_with_unsharded(output_of_an_inner_module, module="normed")


def mapped(scene: Scene, *, use_orig_params: bool) -> torch.Tensor:
    """Return the output of torch.vmap for a model that was never called before."""
    plain = filled(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    model = scene.wrap(plain, use_orig_params=use_orig_params)
    return torch.vmap(model)(torch.linspace(-1, 1, 12).view(2, 2, 3)).detach()


@clause("distributed.fsdp.fully_sharded_data_parallel.transforms")
@both_kinds
def test_model_works_under_vmap(twins: Twins, use_orig_params: bool) -> None:
    twins.agree(mapped, tolerance=TRAINED, use_orig_params=use_orig_params)
