"""`gradient_norms` and `update_ratios` of a fused step, which change no bit of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, RMSprop

from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.sandbox import seeding

SCALE = 6.0
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "scale"]
OWNERS = ["0", "0", "2", "2", ""]
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda params: AdamW(params, lr=0.125),
    "momentum": lambda params: SGD(params, lr=0.125, momentum=0.5),
    "rmsprop": lambda params: RMSprop(params, lr=0.125),
}


class NormedStep:
    """A scaler, an optimizer of parameters of several modules and sizes, and their scaled gradients."""

    def __init__(
        self,
        library: Library,
        device: str,
        optimizer: Callable[[Any], Any],
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        generator = seeding.generator(5)
        # 60,000 elements are several chunks of every kernel.
        model = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3))
        model.scale = nn.Parameter(torch.ones(()))
        named = dict(model.to(device, dtype).named_parameters())
        self.params = {name: named[name] for name in NAMES}
        self.optimizer = optimizer([*self.params.items()])
        self.scaler = library.amp.GradScaler(device, init_scale=SCALE, **settings)
        self.scaler.scale(torch.ones((), device=device))
        self.true_grads = {
            name: torch.randn(param.shape, generator=generator) for name, param in self.params.items()
        }
        for name, param in self.params.items():
            param.data.copy_(torch.randn(param.shape, generator=generator))
            factor = SCALE if self.scaler.is_enabled() else 1.0
            param.grad = (self.true_grads[name] * factor).to(device, dtype)

    def expected(self, norm_type: float) -> dict[str, float]:
        return {name: norm_of([grad], norm_type) for name, grad in self.true_grads.items()}

    def values(self) -> list[Tensor]:
        return [param.detach().cpu().clone() for param in self.params.values()]


def norm_of(grads: list[Tensor], norm_type: float) -> float:
    """Return the norm in float64. That of order 0 counts the tensors with a non-zero element, like torch."""
    if norm_type == 0:
        return float(sum(bool(grad.any()) for grad in grads))
    elements = torch.cat([grad.double().reshape(-1) for grad in grads])
    return torch.linalg.vector_norm(elements, norm_type).item()


def numbers(norms: dict[str, Tensor]) -> dict[str, float]:
    assert all(norm.dim() == 0 for norm in norms.values()), norms
    return {name: norm.item() for name, norm in norms.items()}


def near(norms: dict[str, float]) -> Any:
    # Torch's operators sum up to 60,000 elements in float32.
    return pytest.approx(norms, rel=1e-4)


@clause("amp.grad_scaler.fused_step.gradient_norms")
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf, 0.0, -1.0])
def test_norms_of_unscaled_gradients(subject: Library, device: str, kind: str, norm_type: float) -> None:
    """Parameters and the joint norm are those of a step that keeps no norms, to the bit."""
    step, plain = (NormedStep(subject, device, OPTIMIZERS[kind]) for _ in range(2))
    joint = step.scaler.fused_step(step.optimizer, 0.5, norm_type, keep_norms=True)
    plain_joint = plain.scaler.fused_step(plain.optimizer, 0.5, norm_type)
    norms = step.scaler.gradient_norms(step.optimizer)
    assert numbers(norms) == near(step.expected(norm_type))
    assert {norm.device for norm in norms.values()} == {joint.device}
    assert torch.equal(joint, plain_joint)
    assert all(map(torch.equal, step.values(), plain.values()))


@clause("amp.grad_scaler.fused_step.gradient_norms")
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 0.0])
def test_norms_of_modules(subject: Library, device: str, kind: str, norm_type: float) -> None:
    """A module has the norm of the parameters that it owns, also if they are in two parameter groups."""

    def grouped(named: Any) -> Any:
        matrices = [(name, param) for name, param in named if param.dim() > 1]
        others = [(name, param) for name, param in named if param.dim() <= 1]
        optimizer = OPTIMIZERS[kind](matrices)
        optimizer.add_param_group({"params": others})
        return optimizer

    step = NormedStep(subject, device, grouped)
    step.scaler.fused_step(step.optimizer, math.inf, norm_type, keep_norms=True)
    by_module: dict[str, list[Tensor]] = {}
    for owner, grad in zip(OWNERS, step.true_grads.values(), strict=True):
        by_module.setdefault(owner, []).append(grad)
    expected = {owner: norm_of(grads, norm_type) for owner, grads in by_module.items()}
    assert numbers(step.scaler.gradient_norms(step.optimizer, per="module")) == near(expected)


STATES = ["disabled", "unscaled", "skipped", "absent gradient", "weights of zeros", "low precision copies"]


def in_state(library: Library, device: str, kind: str, state: str) -> tuple[NormedStep, dict[str, Any]]:
    """Return a step in one of `STATES`, and the arguments of its `fused_step`."""
    step = NormedStep(library, device, OPTIMIZERS[kind], enabled=state != "disabled")
    if state == "unscaled":
        step.scaler.unscale_(step.optimizer)
    elif state == "skipped":
        step.params["2.bias"].grad[1] = math.inf
    elif state == "absent gradient":
        step.params["0.weight"].grad = None
    elif state == "weights of zeros":
        step.params["2.bias"].data.zero_()
    elif state == "low precision copies":
        copies = [param.detach().half() for param in step.params.values()]
        for copy, param in zip(copies, step.params.values(), strict=True):
            copy.grad, param.grad = param.grad.half(), None
        return step, {"low_precision_params": copies}
    return step, {}


@clause("amp.grad_scaler.fused_step.gradient_norms")
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("state", STATES)
def test_norms_in_other_states(subject: Library, device: str, kind: str, state: str) -> None:
    step, arguments = in_state(subject, device, kind, state)
    expected = step.expected(2.0)
    if state == "skipped":
        expected["2.bias"] = math.inf
    elif state == "absent gradient":
        expected["0.weight"] = 0.0
    step.scaler.fused_step(step.optimizer, 0.5, keep_norms=True, **arguments)
    assert numbers(step.scaler.gradient_norms(step.optimizer)) == pytest.approx(expected, rel=1e-3)


@clause("amp.grad_scaler.fused_step.gradient_norms")
def test_norms_of_sparse_gradient(subject: Library, device: str) -> None:
    """A row that is listed twice counts as its sum."""
    step = NormedStep(subject, device, lambda params: SGD(params, lr=0.125))
    param = step.params["2.weight"]
    values = torch.full((2, 200), SCALE, device=device)
    rows = torch.tensor([[1, 1]], device=device)
    param.grad = torch.sparse_coo_tensor(rows, values, param.shape, check_invariants=True)
    step.scaler.fused_step(step.optimizer, keep_norms=True)
    expected = step.expected(2.0) | {"2.weight": 2 * math.sqrt(200)}
    assert numbers(step.scaler.gradient_norms(step.optimizer)) == near(expected)


@clause("amp.grad_scaler.fused_step.gradient_norms")
@pytest.mark.parametrize("enabled", [True, False])
def test_norms_raise_unless_last_step_kept_them(subject: Library, device: str, enabled: bool) -> None:
    step = NormedStep(subject, device, OPTIMIZERS["adamw"], enabled=enabled)
    with pytest.raises(RuntimeError, match="keep_norms=True"):
        step.scaler.gradient_norms(step.optimizer)
    step.scaler.fused_step(step.optimizer, keep_norms=True)
    with pytest.raises(ValueError, match="per is 'layer'; pass 'parameter' or 'module'"):
        step.scaler.gradient_norms(step.optimizer, per="layer")
    with pytest.raises(TypeError, match="param_groups"):
        step.scaler.gradient_norms(nn.Linear(1, 1))
    step.scaler.fused_step(step.optimizer)
    with pytest.raises(RuntimeError, match="keep_norms=True"):
        step.scaler.gradient_norms(step.optimizer)


@clause("amp.grad_scaler.fused_step.gradient_norms")
def test_modules_need_names(subject: Library, device: str) -> None:
    step = NormedStep(subject, device, lambda named: SGD([param for _, param in named], lr=0.125))
    step.scaler.fused_step(step.optimizer, keep_norms=True)
    with pytest.raises(ValueError, match="named_parameters"):
        step.scaler.gradient_norms(step.optimizer, per="module")
    first = "param_groups[0]['params'][0] of shape (200, 300)"
    assert first in step.scaler.gradient_norms(step.optimizer)


@clause("amp.grad_scaler.fused_step.gradient_norms")
def test_norms_of_equal_names_raise(subject: Library, device: str) -> None:
    optimizer = SGD([("weight", nn.Parameter(torch.ones(2, device=device)))], lr=0.125)
    optimizer.add_param_group({"params": [("weight", nn.Parameter(torch.ones(3, device=device)))]})
    scaler = subject.amp.GradScaler(device)
    losses = [param.sum() for group in optimizer.param_groups for param in group["params"]]
    scaler.scale(torch.stack(losses).sum()).backward()
    scaler.fused_step(optimizer, keep_norms=True)
    with pytest.raises(ValueError, match="two parameters of the optimizer have the name weight"):
        scaler.gradient_norms(optimizer)


@clause("amp.grad_scaler.fused_step.gradient_norms")
def test_norms_of_changed_parameters_raise(subject: Library, device: str) -> None:
    step = NormedStep(subject, device, OPTIMIZERS["adamw"])
    step.scaler.fused_step(step.optimizer, keep_norms=True)
    step.optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(2, device=device)))]})
    with pytest.raises(ValueError, match="norms of 5 parameters, and the optimizer has 6 now"):
        step.scaler.gradient_norms(step.optimizer)


RATIOS = {"keep_update_norms": True}


def expected_ratios(step: NormedStep, before: list[Tensor], owners: list[str]) -> dict[str, float]:
    """Return the ratios of parameters, joined by their owners. The ratio is inf if the weights were zeros."""
    weights: dict[str, list[Tensor]] = {}
    updates: dict[str, list[Tensor]] = {}
    for owner, old, new in zip(owners, before, step.values(), strict=True):
        weights.setdefault(owner, []).append(old)
        updates.setdefault(owner, []).append(new.double() - old.double())
    norms = {owner: norm_of(tensors, 2.0) for owner, tensors in weights.items()}
    return {owner: norm_of(updates[owner], 2.0) / norm if norm else math.inf for owner, norm in norms.items()}


@clause("amp.grad_scaler.fused_step.update_ratios")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_ratios_of_updates_to_weights(subject: Library, device: str, kind: str, dtype: torch.dtype) -> None:
    """Parameters and the joint norm are those of a step that keeps no norms, to the bit."""
    step, plain = (NormedStep(subject, device, OPTIMIZERS[kind], dtype=dtype) for _ in range(2))
    before = step.values()
    joint = step.scaler.fused_step(step.optimizer, 0.5, math.inf, **RATIOS)
    plain_joint = plain.scaler.fused_step(plain.optimizer, 0.5, math.inf)
    assert numbers(step.scaler.update_ratios(step.optimizer)) == near(expected_ratios(step, before, NAMES))
    by_module = step.scaler.update_ratios(step.optimizer, per="module")
    assert numbers(by_module) == near(expected_ratios(step, before, OWNERS))
    assert {ratio.device for ratio in by_module.values()} == {joint.device}
    assert torch.equal(joint, plain_joint)
    assert all(map(torch.equal, step.values(), plain.values()))


@clause("amp.grad_scaler.fused_step.update_ratios")
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("state", STATES)
def test_ratios_in_other_states(subject: Library, device: str, kind: str, state: str) -> None:
    """A skipped step and parameters without gradients have 0, and weights of zeros have inf."""
    step, arguments = in_state(subject, device, kind, state)
    before = step.values()
    step.scaler.fused_step(step.optimizer, 0.5, **RATIOS, **arguments)
    ratios = numbers(step.scaler.update_ratios(step.optimizer))
    assert ratios == near(expected_ratios(step, before, NAMES))
    assert any(ratios.values()) == (state != "skipped")


@clause("amp.grad_scaler.fused_step.update_ratios")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_ratios_of_complex_parameters(subject: Library, dtype: torch.dtype) -> None:
    """torch's check for inf and nan takes no complex gradients, so the scaler is disabled."""
    param = nn.Parameter(torch.tensor([3.0 + 4.0j, 12.0j], dtype=dtype))
    optimizer, scaler = SGD([("weight", param)], lr=0.5), subject.amp.GradScaler("cpu", enabled=False)
    param.grad = torch.tensor([6.0j, 8.0], dtype=dtype)
    scaler.fused_step(optimizer, **RATIOS)
    assert numbers(scaler.update_ratios(optimizer)) == near({"weight": 5.0 / 13.0})


@clause("amp.grad_scaler.fused_step.update_ratios")
def test_ratios_raise_unless_last_step_kept_norms(subject: Library, device: str) -> None:
    step = NormedStep(subject, device, OPTIMIZERS["adamw"])
    step.scaler.fused_step(step.optimizer, **RATIOS)
    with pytest.raises(ValueError, match="per is 'layer'; pass 'parameter' or 'module'"):
        step.scaler.update_ratios(step.optimizer, per="layer")
    with pytest.raises(TypeError, match="param_groups"):
        step.scaler.update_ratios(nn.Linear(1, 1))
    step.scaler.fused_step(step.optimizer, keep_norms=True)
    with pytest.raises(RuntimeError, match="keep_update_norms=True"):
        step.scaler.update_ratios(step.optimizer)
