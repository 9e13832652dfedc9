"""Modules that torch's class cannot train because of what they return, pass on or hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.distributed.fsdp.scenes import special_modules
from conformance.distributed.fsdp.scenes.fsdp_training import gathered_gradients
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.special_modules import Nothing, Positioned, accumulated
from conformance.distributed.fsdp.scenes.traffic import counts
from conformance.distributed.fsdp.scenes.twins import (
    STRATEGIES,
    Twins,
    both_kinds,
    each,
    each_strategy,
    raises,
)
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import averaged, gave
from conformance.judge.clauses import clause
from conformance.judge.tolerances import TRAINED

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
    outcomes = cpu_twins.of_subject(special_modules.accumulate, module="returned", strategy=strategy)
    assert averaged("returned")(outcomes), outcomes


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
    cpu_twins.deviate(
        special_modules.accumulate,
        module=module,
        strategy=strategy,
        we_do=averaged(module),
        may_agree=strategy == "NO_SHARD" or cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.objects_with_parameters")
@pytest.mark.parametrize("module", ["object with a parameter", "object inside with a parameter"])
@each_strategy
def test_returned_object_may_hold_parameters(cpu_twins: Twins, strategy: str, module: str) -> None:
    outcomes = cpu_twins.of_subject(special_modules.accumulate, module=module, strategy=strategy)
    assert averaged(module)(outcomes), outcomes


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

    assert issued(keeps=True) == issued(keeps=False)


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_elements")
@pytest.mark.deviation("fsdp.without_elements")
@each_strategy
def test_unit_without_elements_trains(cpu_twins: Twins, strategy: str) -> None:
    cpu_twins.deviate(
        special_modules.accumulate,
        module="no elements",
        strategy=strategy,
        torch_does=raises(AssertionError, "unsharded_end_idx"),
        we_do=averaged("no elements"),
    )


def states_without_elements(scene: Scene) -> dict[str, Any]:
    """Return the shapes of gradients and the names of saved states. The last parameter has no elements."""
    whole = nn.Sequential(nn.Linear(3, 4), Nothing())
    model = scene.wrap(filled(whole), strategy="NO_SHARD", use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    accumulated(model, scene.rank.rank)
    gradients = [
        parameter.grad is not None and tuple(parameter.grad.shape) for parameter in model.parameters()
    ]
    optimizer.step()
    return {"gradients": gradients, "saved": sorted(scene.fsdp.optim_state_dict(model, optimizer)["state"])}


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_elements")
@pytest.mark.deviation("fsdp.without_elements")
def test_last_unsharded_parameter_may_have_no_elements(cpu_twins: Twins) -> None:
    expected = {"gradients": [(4, 3), (4,), (0, 4)], "saved": ["0.bias", "0.weight", "1.weight"]}
    cpu_twins.deviate(
        states_without_elements,
        torch_does=raises(RuntimeError, "1.weight is not in the optimizer state"),
        we_do=each(lambda value: value == expected),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.hooks_of_inner_modules")
def test_hooks_of_inner_module_may_read_parameters(cpu_twins: Twins) -> None:
    with torch.no_grad():
        expected = special_modules.built("normed")(torch.ones(1, 3))
    outcomes = cpu_twins.of_subject(special_modules.output_of_an_inner_module, module="normed")
    assert gave(expected)(outcomes), outcomes


class Full(nn.Module):
    """Model that passes float32 inputs to a unit, whose forward may be checkpointed."""

    def __init__(self, computed_again: bool) -> None:
        super().__init__()
        self.first, self.unit = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.computed_again = computed_again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).float()
        return checkpoint(self.unit, x, use_reentrant=False) if self.computed_again else self.unit(x)


def computed_again_in_low_precision(scene: Scene, *, around: str) -> list[dict[str, torch.Tensor]]:
    """Return the gradients without and with activation checkpointing, around a `unit` or the `root`."""
    precision = scene.api.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)

    def gradients(computed_again: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        plain = Full(computed_again and around == "unit")
        model = scene.wrap(plain, units=[nn.Sequential], mixed_precision=precision)
        x = torch.linspace(-1, 1, 15).view(5, 3).requires_grad_()
        is_around_root = computed_again and around == "root"
        output = checkpoint(model, x, use_reentrant=False) if is_around_root else model(x)
        output.float().square().mean().backward()
        return gathered_gradients(scene.library, model)

    return [gradients(False), gradients(True)]


@clause("distributed.fsdp.fsdp_torch_limit_removed.computed_again_in_low_precision")
@pytest.mark.deviation("fsdp.recomputed_without_cast")
@pytest.mark.parametrize("around", ["unit", "root"])
def test_recomputed_unit_casts_its_inputs(cpu_twins: Twins, around: str) -> None:
    cpu_twins.deviate(
        computed_again_in_low_precision,
        around=around,
        torch_does=raises(RuntimeError, "must have the same dtype"),
        we_do=each(lambda gradients: _are_equal(*gradients)),
        may_agree=around == "root",
    )


def _are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name].values, second[name].values) for name in first
    )


def mapped(scene: Scene, *, use_orig_params: bool) -> torch.Tensor:
    """Return the output of torch.vmap for a model that was never called before."""
    plain = filled(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    model = scene.wrap(plain, use_orig_params=use_orig_params)
    return torch.vmap(model)(torch.linspace(-1, 1, 12).view(2, 2, 3)).detach()


@clause("distributed.fsdp.fully_sharded_data_parallel.transforms")
@both_kinds
def test_model_works_under_vmap(twins: Twins, use_orig_params: bool) -> None:
    twins.agree(mapped, tolerance=TRAINED, use_orig_params=use_orig_params)
