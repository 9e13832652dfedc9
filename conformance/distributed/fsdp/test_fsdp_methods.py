"""The methods and attributes of a wrapped module: names, units, roots, apply, and conversions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, clean
from conformance.distributed.fsdp.scenes.module_trees import Batch, call, loss_of
from conformance.distributed.fsdp.scenes.optimizer_states import Optimized, StateDictMethod, copied, described
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.scenes.scene import SIMPLE, Scene, filled, named
from conformance.distributed.fsdp.scenes.twins import (
    STRATEGIES,
    Twins,
    Wrapping,
    both_kinds,
    each_strategy,
    each_wrapping,
    flat_or_originals,
    leaf_by_leaf,
)
from conformance.judge.clauses import clause
from conformance.judge.sandbox.global_state import default_dtype
from conformance.judge.tolerances import EXACT, Tolerance

IN_LOW_PRECISION = Tolerance(
    8, "three gradients in bfloat16, each a sum over rows and ranks", torch.bfloat16, of_largest=True
)
each_wrap = pytest.mark.parametrize("wrap", ["root", "leaves", "manual"])


def attributes(scene: Scene) -> dict[str, Any]:
    """Return names, units and attributes of a wrapped model, with and without prefixes."""
    model = scene.model
    return {
        "module": type(model.module).__name__,
        "wrapped": model.module is model._fsdp_wrapped_module,
        "attribute": model.tree == scene.tree,
        "inner attribute": model.body.out_width,
        "missing": hasattr(model, "no_such_name"),
        "units": [type(unit.module).__name__ for unit in scene.units],
        "root only": [unit is model for unit in scene.fsdp.fsdp_modules(model, root_only=True)],
        "root of a part": len(scene.fsdp.fsdp_modules(model.body.parts[0])),
        "names": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "prefixed": [name for name, _ in model.named_parameters(prefix="a")],
        "own": [name for name, _ in model.named_parameters("a", False)],
        "prefixed buffers": [name for name, _ in model.named_buffers("a")],
        "buffers prefixed by keyword": [name for name, _ in model.named_buffers(prefix="a")],
        "own buffers": [name for name, _ in model.named_buffers("a", recurse=False)],
        "repr": repr(model),
    }


@clause("distributed.fsdp.fully_sharded_data_parallel.attributes")
@both_kinds
@each_wrap
def test_names_attributes_and_units_match_torch(twins: Twins, wrap: str, use_orig_params: bool) -> None:
    setup = Setup(wrap=wrap, arguments={"use_orig_params": use_orig_params})
    twins.agree(attributes, setup)


def roots(scene: Scene) -> dict[str, Any]:
    """Return which units are roots, before and after a call of `check_is_root`."""
    before = [unit._is_root for unit in scene.units]
    return {
        "before": before,
        "asked": scene.model.check_is_root(),
        "inner": [unit.check_is_root() for unit in scene.units[1:]],
        "root only": len(scene.fsdp.fsdp_modules(scene.model, root_only=True)),
        "by body": len(scene.fsdp.fsdp_modules(scene.model.body, root_only=True)),
    }


@clause("distributed.fsdp.fully_sharded_data_parallel.roots")
@each_wrap
def test_outermost_unit_is_root(twins: Twins, wrap: str) -> None:
    twins.agree(roots, Setup(wrap=wrap))


def indexed(scene: Scene) -> list[Any]:
    """Index a wrapped Sequential. Return the types of its modules."""
    model = scene.wrap(nn.Sequential(nn.Linear(2, 3), nn.Tanh()))
    return [type(model[0]).__name__, type(model[1]).__name__, len(list(model.named_modules()))]


@clause("distributed.fsdp.fully_sharded_data_parallel.attributes")
def test_wrapped_sequential_takes_indices(twins: Twins) -> None:
    assert twins.agree(indexed)[0].value[:2] == ["Linear", "Tanh"]


def applied(scene: Scene) -> dict[str, Any]:
    """Call `apply` with a function that reads the shapes of parameters and writes to them, then run a step."""
    visits: list[Any] = []

    def visit(module: nn.Module) -> None:
        visits.append([type(module).__name__, [tuple(p.shape) for p in module.parameters(recurse=False)]])
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(0.5)

    returned = scene.model.apply(visit)
    return {
        "visits": visits,
        "is itself": returned is scene.model,
        "whole": scene.whole_parameters(),
        "loss": scene.backward(),
    }


@clause("distributed.fsdp.fully_sharded_data_parallel.apply")
@each_wrapping
def test_apply_shows_whole_parameters(twins: Twins, wrapping: Wrapping) -> None:
    twins.agree(applied, leaf_by_leaf(**wrapping))


def converted(scene: Scene, *, how: str) -> dict[str, Any]:
    """Change the dtype or the device after wrapping and before the first step, then run a step."""
    conversions: dict[str, Callable[[nn.Module], Any]] = {
        "double": lambda model: model.double(),
        "to": lambda model: model.to(torch.float64),
        "cpu": lambda model: model.cpu(),
        "cpu and back": lambda model: model.cpu().to(scene.rank.device),
    }
    returned = conversions[how](scene.model)
    dtype = next(scene.model.parameters()).dtype
    batch = scene.batch()
    loss_of(call(scene.model, scene.tree, Batch(batch.x.detach().to(dtype), batch.ids))).backward()
    return {
        "is itself": returned is scene.model,
        "shards": named(scene.model),
        "gradients": scene.gradients(),
        "whole": scene.whole_parameters(),
    }


@clause("distributed.fsdp.fully_sharded_data_parallel.conversions")
@pytest.mark.parametrize("how", ["double", "to", "cpu", "cpu and back"])
@each_wrapping
def test_wrapped_model_can_be_converted(twins: Twins, device: str, wrapping: Wrapping, how: str) -> None:
    is_off_device = how == "cpu" and device != "cpu"
    for outcome in twins.agree(converted, leaf_by_leaf(**wrapping), how=how, may_raise=is_off_device):
        assert (outcome.raised is not None) is is_off_device


def converted_after_backward(scene: Scene) -> dict[str, torch.Tensor | None]:
    """Change the dtype between a backward and the optimizer's step. Return the gradients."""
    scene.backward()
    scene.model.double()
    return scene.gradients()


@clause("distributed.fsdp.fully_sharded_data_parallel.conversions")
@both_kinds
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@pytest.mark.world_sizes(fewest=2)
def test_sharded_gradients_are_converted_with_model(
    twins: Twins, strategy: str, use_orig_params: bool
) -> None:
    for outcome in twins.agree(converted_after_backward, leaf_by_leaf(strategy, use_orig_params)):
        dtypes = {grad.dtype for grad in outcome.value.values() if grad is not None}
        assert dtypes == {torch.float64}


def classes(scene: Scene) -> dict[str, bool]:
    """Return whether each parameter is exactly an `nn.Parameter`, the class that optimizers update in groups."""
    return {
        clean(name): type(parameter) is nn.Parameter for name, parameter in scene.model.named_parameters()
    }


@clause("distributed.fsdp.fully_sharded_data_parallel.class_of_parameters")
@flat_or_originals
def test_parameters_have_class_nn_parameter(twins: Twins, setup: Setup) -> None:
    assert all({*outcome.value.values()} == {True} for outcome in twins.agree(classes, setup))


def moved_between(scene: Scene) -> dict[str, Any]:
    """Move the model to the device of its parameters between a forward and its backward."""
    loss = loss_of(scene.forward())
    scene.model.to(scene.rank.device)
    loss.backward()
    return {"gradients": scene.gradients(), "whole": scene.whole_parameters()}


@clause("distributed.fsdp.fully_sharded_data_parallel.conversions")
@each_wrapping
def test_move_to_same_device_keeps_graph(twins: Twins, wrapping: Wrapping) -> None:
    twins.agree(moved_between, leaf_by_leaf(**wrapping))


def trained_under_defaults(scene: Scene, *, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Train, save and load while `device` is the default device and `dtype` the default dtype."""
    plain_model, batch = scene.plain, scene.batch()
    kinds = ("FULL", "SHARDED") if scene.setup.uses_orig_params else ("FULL", "SHARDED", "LOCAL")
    ways = [StateDictMethod(kind, offloads=False) for kind in kinds]
    with torch.device(device), default_dtype(dtype):
        model = scene.model = scene.wrapped(plain_model)
        loss = loss_of(call(model, scene.tree, batch))
        loss.backward()
        norms = [model.clip_grad_norm_(0.25, norm_type) for norm_type in (2.0, torch.inf)]
    optimizer = Optimized("momentum").optimizer(model)
    optimizer.step()
    with torch.device(device), default_dtype(dtype):
        saved = [way.save(scene, optimizer) for way in ways]
        loaded = [
            described(way.load(scene, optimizer, saved_state))
            for way, saved_state in zip(ways, saved, strict=True)
        ]
        states = []
        for way in ways:
            with way.set_on(scene):
                state = model.state_dict()
                states.append(copied(described(state)))
                model.load_state_dict(state)
        with scene.fsdp.summon_full_params(model, with_grads=scene.setup.uses_orig_params):
            whole = named(model), scene.gradients()
    return {
        "loss": loss.detach(),
        "norms": norms,
        "states": [described(saved), loaded, states],
        "whole": whole,
    }


@clause("distributed.fsdp.fully_sharded_data_parallel.defaults")
@each_wrapping
def test_default_device_and_dtype_have_no_effect(cpu_twins: Twins, wrapping: Wrapping) -> None:
    arguments = {"program": trained_under_defaults, "setup": leaf_by_leaf(**wrapping), "tree": SIMPLE}
    usual = cpu_twins.of_subject(device="cpu", dtype=torch.float32, **arguments)
    changed = cpu_twins.agree(device="meta", dtype=torch.float64, **arguments)
    assert_ranks_agree(usual, changed, EXACT)


class _Penalized(nn.Module):
    """Layer whose forward reads its own parameters, and adds a penalty on them to its output.

    Many models ask for the dtype of their first parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.described: list[Any] = []
        self.hook: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = [*self.parameters()]
        self.described.append([(p.dtype, p.device.type, tuple(p.shape), p.requires_grad) for p in parameters])
        if self.hook is not None:
            parameters[0].register_hook(self.hook)
            self.hook = None
        offset = torch.ones(3, device=x.device).to(parameters[0].dtype)
        squares = [parameter.square().sum() for parameter in parameters]
        return self.linear(x + offset) + 0.5 * torch.stack(squares).sum()


def parameters_in_forward(
    scene: Scene, *, low_precision: bool = False, frozen: bool = False, hook: Any = None, **wrapping: Any
) -> dict[str, Any]:
    """Train a model whose modules read their own parameters, also without synchronisation and in evaluation."""
    precision = scene.api.MixedPrecision(param_dtype=torch.bfloat16) if low_precision else None
    modules = [_Penalized(), _Penalized()]
    plain = filled(nn.Sequential(*modules, nn.Linear(3, 2)))
    modules[1].requires_grad_(not frozen)
    modules[0].hook = hook
    model = scene.wrap(plain, units=[_Penalized], mixed_precision=precision, **wrapping)
    losses = []
    x = torch.linspace(-1, 1, 6, device=scene.rank.device).view(2, 3) - scene.rank.rank * 0.25
    for number in range(3):
        with model.no_sync() if number == 0 else contextlib.nullcontext():
            loss = model(x + number).float().square().mean()
            loss.backward()
        losses.append(loss.detach())
    gradients = scene.whole_gradients(model)
    with torch.no_grad():
        losses.append(model.eval()(x).float())
    return {
        "described": [module.described for module in modules],
        "losses": losses,
        "gradients": gradients,
        "after": [(p.dtype, tuple(p.shape)) for p in model.parameters()],
    }


@clause("distributed.fsdp.fully_sharded_data_parallel.parameters_in_forward")
@pytest.mark.parametrize("low_precision", [False, True], ids=["", "low precision"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@each_wrapping
def test_parameters_in_forward_match_torch(
    twins: Twins, wrapping: Wrapping, low_precision: bool, frozen: bool
) -> None:
    tolerance = IN_LOW_PRECISION if low_precision else None
    twins.agree(
        parameters_in_forward, tolerance=tolerance, low_precision=low_precision, frozen=frozen, **wrapping
    )


def _tripled(grad: torch.Tensor) -> torch.Tensor:
    return grad * 3


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.gradients")
@each_strategy
def test_hook_on_flat_parameter_of_forward_gets_gradient(twins: Twins, strategy: str) -> None:
    twins.agree(parameters_in_forward, hook=_tripled, strategy=strategy)
