"""Nested units with different mixed precision, or with none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, average_gradients, clean, states_of
from conformance.distributed.fsdp.scenes.rank_judging import assert_all_close
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import Twins, both_kinds
from conformance.judge.clauses import clause
from conformance.judge.tolerances import Tolerance

FLOAT16, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32
Precision = Mapping[str, Any]

POLICIES: dict[str, tuple[Precision, Precision]] = {
    "outer alone": ({"param_dtype": BFLOAT16}, {}),
    "inner alone": ({}, {"param_dtype": BFLOAT16}),
    "two dtypes": ({"param_dtype": BFLOAT16}, {"param_dtype": FLOAT16, "reduce_dtype": FLOAT32}),
    "inner in full": ({"param_dtype": BFLOAT16, "reduce_dtype": BFLOAT16}, {"param_dtype": FLOAT32}),
    "inner reduces": ({"param_dtype": FLOAT16, "reduce_dtype": FLOAT32}, {"reduce_dtype": BFLOAT16}),
    "inner casts": ({"param_dtype": BFLOAT16}, {"param_dtype": FLOAT16, "cast_forward_inputs": True}),
    "outer keeps": ({"param_dtype": BFLOAT16, "keep_low_precision_grads": True}, {}),
}


def tolerance_of_units(*precisions: Precision) -> Tolerance:
    """Return a tolerance for units of these precisions, by the coarsest dtype. Each unit rounds to its own dtypes."""
    dtypes = [
        precision.get(name, FLOAT32) for precision in precisions for name in ("param_dtype", "reduce_dtype")
    ]
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return Tolerance(8, "two backwards, each with a sum over the ranks and a quotient", coarsest, terms=1.0)


@dataclass(frozen=True)
class Nesting:
    """Arguments of MixedPrecision for two units. A unit with empty arguments has no mixed precision."""

    outer: Precision = field(default_factory=dict)
    inner: Precision = field(default_factory=dict)
    inner_strategy: str = "FULL_SHARD"


class CastingLinear(nn.Linear):
    """Linear layer that computes in the dtype of its weight, or in `computes_in` if that is set."""

    computes_in: torch.dtype | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = self.computes_in or self.weight.dtype
        return functional.linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


def built() -> nn.Sequential:
    return filled(
        nn.Sequential(
            CastingLinear(3, 4), nn.Sequential(CastingLinear(4, 5), CastingLinear(5, 3)), CastingLinear(3, 2)
        )
    )


def train_nested(scene: Scene, *, nesting: Nesting, use_orig_params: bool) -> dict[str, Any]:
    """Run backwards of a model whose inner unit has its own mixed precision. Return gradients and outputs."""

    def wrap(module: nn.Module, precision: Precision, strategy: str = "FULL_SHARD") -> Any:
        mixed = scene.api.MixedPrecision(**precision) if precision else None
        return scene.wrap(module, strategy=strategy, mixed_precision=mixed, use_orig_params=use_orig_params)

    model = built()
    model[1] = wrap(model[1], nesting.inner, nesting.inner_strategy)
    whole = wrap(model, nesting.outer)
    return {
        **_run(whole, scene.rank.rank),
        "shards": states_of(whole),
        "whole_gradients": scene.whole_gradients(whole),
    }


def trained_unsharded(nesting: Nesting, world_size: int) -> list[dict[str, Any]]:
    """Train unsharded: one replica for each rank, whose gradients are averaged in full precision."""
    replicas = [built() for _ in range(world_size)]
    for replica in replicas:
        for name, module in replica.named_modules():
            if isinstance(module, CastingLinear):
                precision = nesting.inner if name.startswith("1.") else nesting.outer
                module.computes_in = precision.get("param_dtype")
    results = [_run(replica, rank) for rank, replica in enumerate(replicas)]
    average_gradients(replicas, Setup())
    gradients = {name: parameter.grad for name, parameter in replicas[0].named_parameters()}
    return [{**result, "whole_gradients": gradients} for result in results]


def _run(model: nn.Module, rank: int) -> dict[str, Any]:
    outputs, input_gradients = [], []
    for number in range(2):
        x = (torch.linspace(0, 1 + number, 15).view(5, 3) - rank * 0.25).requires_grad_()
        output = model(x)
        output.float().square().mean().backward()
        outputs.append(output.detach())
        input_gradients.append(x.grad)
    return {"outputs": outputs, "input_gradients": input_gradients}


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.nested")
@pytest.mark.parametrize(("inner_strategy", "use_orig_params"), [("FULL_SHARD", True), ("NO_SHARD", False)])
@pytest.mark.parametrize("policy", POLICIES)
def test_each_unit_has_its_own_mixed_precision(
    cpu_twins: Twins, policy: str, inner_strategy: str, use_orig_params: bool
) -> None:
    nesting = Nesting(*POLICIES[policy], inner_strategy)
    both = tolerance_of_units(nesting.outer, nesting.inner)
    arguments = {"nesting": nesting, "use_orig_params": use_orig_params}
    actual = cpu_twins.agree(train_nested, tolerance=both, **arguments)
    for unsharded, outcome in zip(trained_unsharded(nesting, len(actual)), actual, strict=True):
        for key in ("outputs", "input_gradients"):
            assert_all_close(key, unsharded[key], outcome.value[key], both)
        for is_inner, precision in ((True, nesting.inner), (False, nesting.outer)):
            expected_gradients, whole = (
                {name: grad for name, grad in gradients.items() if name.startswith("1.") is is_inner}
                for gradients in (unsharded["whole_gradients"], outcome.value["whole_gradients"])
            )
            assert_all_close("whole_gradients", expected_gradients, whole, tolerance_of_units(precision))


def train_without_some_classes(scene: Scene, *, kind: str, use_orig_params: bool) -> dict[str, Any]:
    """Run two steps in bfloat16 except for modules of one class.

    Return the dtypes in each forward and the parameters.
    """
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    plain = filled(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), block))
    precision = scene.api.MixedPrecision(torch.bfloat16, _module_classes_to_ignore=(getattr(nn, kind),))
    arguments = {"mixed_precision": precision, "use_orig_params": use_orig_params}
    model = scene.wrap(plain, units=[nn.Sequential], **arguments)
    dtypes: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_hook(_record_dtypes(dtypes, clean(name)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for number in range(2):
        x = torch.linspace(0, 1 + number, 6).view(2, 3) - scene.rank.rank * 0.25
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [clean(name) for name, _ in model.named_modules()]
    return {"dtypes": dtypes, "modules": names, "whole": scene.whole_parameters(model)}


def _record_dtypes(events: list[Any], name: str) -> Any:
    return lambda module, args, output: events.append(
        [name, type(module).__name__, args[0].dtype, module.weight.dtype, output.dtype]
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.nested")
@both_kinds
@pytest.mark.parametrize("kind", ["LayerNorm", "Linear"])
def test_ignored_module_classes_stay_in_float32(cpu_twins: Twins, kind: str, use_orig_params: bool) -> None:
    tolerance = tolerance_of_units({"param_dtype": BFLOAT16})
    arguments = {"kind": kind, "use_orig_params": use_orig_params}
    outcomes = cpu_twins.agree(train_without_some_classes, tolerance=tolerance, **arguments)
    forwards = outcomes[0].value["dtypes"]
    assert {class_name for _, class_name, *_ in forwards} == {"LayerNorm", "Linear"}
    assert all((weight is FLOAT32) == (class_name == kind) for _, class_name, _, weight, _ in forwards), (
        forwards
    )
