"""Private names of torch that clients rely on: the rows of `compat_names.toml` that need ranks."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.fsdp_training import FSDP, states_of
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import Twins, both_kinds, each_strategy
from conformance.judge.clauses import clause
from conformance.judge.files.compat import COMPAT_NAMES, CompatName
from conformance.judge.tolerances import TRAINED, Tolerance

_ROWS = [row for row in COMPAT_NAMES if row.on_ranks]
LOW = torch.bfloat16
_MIXED = {"param_dtype": LOW, "reduce_dtype": LOW, "buffer_dtype": LOW}
TOLERANCE = Tolerance(8, "three steps of Adam with bfloat16 gradients, each a sum over ranks", LOW, terms=1.0)


def three_layers() -> Any:
    """Build a model of layers with and without parameters."""
    layers = {"first": nn.Linear(3, 4), "act": nn.Tanh(), "last": nn.Linear(4, 2)}
    return filled(nn.Sequential(OrderedDict(layers)))


def read(scene: Scene, *, path: str, name: str, use_orig_params: bool) -> list[Any]:
    """Read an attribute of the object at `path` of each unit.

    If the path leads to a method, read the attribute of each object that the method yields.
    """
    plain = three_layers()
    units, ignored = [nn.Linear, nn.Tanh], [plain.last]
    model = scene.wrap(plain, units=units, use_orig_params=use_orig_params, ignored_modules=ignored)
    attributes = []
    for unit in scene.fsdp.fsdp_modules(model):
        carriers = unit
        for step in path.split(".") if path else ():
            carriers = getattr(carriers, step)
        several = list(carriers()) if inspect.ismethod(carriers) else [carriers]
        attributes.append([_described(getattr(carrier, name, "missing")) for carrier in several])
    return attributes


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [value.dtype, tuple(value.shape), value.requires_grad]
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, (list, tuple)):
        return list(value)
    return value if value is None or isinstance(value, (bool, str, torch.dtype)) else bool(value)


@clause("distributed.fsdp.fully_sharded_data_parallel.private_names")
@both_kinds
@pytest.mark.parametrize(
    "row", _ROWS, ids=lambda row: f"{row.owner.removeprefix(FSDP)}.{row.name}".lstrip(".")
)
def test_private_name_has_value_of_torch(twins: Twins, row: CompatName, use_orig_params: bool) -> None:
    path = row.owner.removeprefix(FSDP).lstrip(".")
    arguments = {"path": path, "name": row.name, "use_orig_params": use_orig_params}
    for outcome in twins.agree(read, tolerance=TRAINED, **arguments):
        assert any(value != "missing" for unit in outcome.value for value in unit)


def upcast(
    scene: Scene, *, mixed_precision: Mapping[str, Any] | None, frozen: bool, **wrapping: Any
) -> dict[str, Any]:
    """Train a bfloat16 model that is cast to float32 after wrapping, as accelerate's `prepare_model` does."""
    plain = three_layers().to(torch.bfloat16)
    if frozen:
        plain.first.weight.requires_grad_(False)
    precision = None if mixed_precision is None else scene.api.MixedPrecision(**mixed_precision)
    model = scene.wrap(plain, units=[] if frozen else [nn.Linear], mixed_precision=precision, **wrapping)
    for unit in scene.fsdp.fsdp_modules(model):
        if unit._has_params and unit._flat_param.requires_grad:
            unit._flat_param.data = unit._flat_param.data.to(torch.float32)
            unit._handle._orig_param_dtype = torch.float32
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    computed: list[tuple[torch.dtype, torch.dtype]] = []
    steps = []
    plain.last.register_forward_hook(lambda _, args, output: computed.append((args[0].dtype, output.dtype)))
    for number in range(3):
        x = torch.linspace(0, 1 + number, 6).view(2, 3) - scene.rank.rank * 0.25
        model(x.to(torch.bfloat16)).float().square().sum().backward()
        steps.append(states_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return {
        # A library may choose which rank has which element of a partly frozen unit.
        "seen": {
            state["grad"].dtype for step in steps for state in step.values() if state["grad"] is not None
        }
        if frozen
        else steps,
        "dtypes": [parameter.dtype for parameter in model.parameters()],
        "computed": computed,
        "whole": scene.whole_parameters(model),
        "state": model.state_dict(),
    }


@clause("distributed.fsdp.fully_sharded_data_parallel.upcast")
@pytest.mark.parametrize("mixed_precision", [None, _MIXED], ids=["as loaded", "mixed precision"])
@pytest.mark.parametrize(
    ("use_orig_params", "frozen"),
    [(False, False), (True, False), pytest.param(True, True, id="frozen in part")],
)
@each_strategy
def test_low_precision_model_trains_in_full_precision(
    twins: Twins, strategy: str, use_orig_params: bool, mixed_precision: dict[str, Any] | None, frozen: bool
) -> None:
    wrapping = {"strategy": strategy, "use_orig_params": use_orig_params}
    twins.agree(upcast, tolerance=TOLERANCE, mixed_precision=mixed_precision, frozen=frozen, **wrapping)
