"""`fused_step` of several optimizers: one norm and one decision for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Muon, RMSprop

from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.sandbox import seeding

SCALE = 8.0
# The first two have fused updates.
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda params: AdamW(params, lr=0.125),
    "momentum": lambda params: SGD(params, lr=0.125, momentum=0.5),
    "rmsprop": lambda params: RMSprop(params, lr=0.125),
    "muon": lambda params: Muon(params, lr=0.125),
    "adagrad": lambda params: Adagrad(params, lr=0.125),
}
KINDS = ["adamw+momentum", "muon+adamw", "momentum+rmsprop", "rmsprop+muon", "adagrad+muon+adamw"]


class Optimizers:
    """Optimizers of three parameters each, and the scaler of their gradients."""

    def __init__(self, library: Library, device: str, kinds: str, **settings: Any) -> None:
        self.device = device
        generator = seeding.generator(5)
        self.params: list[list[nn.Parameter]] = [
            [
                nn.Parameter(torch.randn(shape, generator=generator).to(device))
                for shape in ((3, 4), (40, 5), (2, 1))
            ]
            for _ in kinds.split("+")
        ]
        self.optimizers: list[Any] = [
            OPTIMIZERS[kind]([(f"{kind}.{number}", param) for number, param in enumerate(params)])
            for kind, params in zip(kinds.split("+"), self.params, strict=True)
        ]
        self.scaler: Any = library.amp.GradScaler(device, init_scale=SCALE, growth_interval=1000, **settings)
        self.scaler.scale(torch.ones((), device=device))

    @property
    def all_params(self) -> list[nn.Parameter]:
        return [param for params in self.params for param in params]

    def backward(self, step: int, bad: int | None = None) -> list[Tensor]:
        """Assign scaled gradients, one of which has an inf if a `bad` optimizer is given. Return the true ones."""
        generator = seeding.generator(100 + step)
        grads = [torch.randn(param.shape, generator=generator) for param in self.all_params]
        factor = SCALE if self.scaler.is_enabled() else 1.0
        for param, grad in zip(self.all_params, grads, strict=True):
            param.grad = (grad * factor).to(self.device)
        if bad is not None:
            self.params[bad][1].grad[0, 0] = math.inf
        return grads

    def by_four_calls(self, max_norm: float, norm_type: float) -> Tensor:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(self.all_params, max_norm, norm_type)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return norm

    def values(self) -> list[Tensor]:
        return [param.detach().cpu().clone() for param in self.all_params]

    def gradients(self) -> list[Tensor]:
        return [param.grad.cpu().clone() for param in self.all_params if param.grad is not None]

    def were_taken(self) -> list[bool]:
        return [self.scaler.step_was_taken(optimizer) for optimizer in self.optimizers]


def near(values: Sequence[Tensor]) -> Any:
    return [pytest.approx(value, rel=1e-4, abs=1e-5) for value in values]


@clause("amp.grad_scaler.fused_step.joint")
@pytest.mark.parametrize(
    ("state", "max_norm", "norm_type"),
    [
        ("scaled", 0.5, 2.0),
        ("scaled", math.inf, 2.0),
        ("scaled", 0.5, math.inf),
        ("scaled", 2.0, 0.0),
        ("first unscaled", 0.5, 2.0),
        ("last unscaled", 0.5, 1.0),
        ("disabled", 0.5, 2.0),
    ],
)
@pytest.mark.parametrize("kinds", KINDS)
def test_gradients_of_all_optimizers_are_clipped_by_one_norm(
    subject: Library,
    reference: Library,
    device: str,
    kinds: str,
    state: str,
    max_norm: float,
    norm_type: float,
) -> None:
    joint, four = (
        Optimizers(library, device, kinds, enabled=state != "disabled") for library in (subject, reference)
    )
    for step in range(3):
        joint.backward(step)
        four.backward(step)
        if state.endswith("unscaled"):
            joint.scaler.unscale_(joint.optimizers[0 if state.startswith("first") else -1])
        norm = joint.scaler.fused_step(joint.optimizers, max_norm, norm_type)
        assert norm.item() == pytest.approx(four.by_four_calls(max_norm, norm_type).item(), rel=1e-5)
        assert joint.values() == near(four.values()), f"step {step}"
    if state != "disabled":
        assert joint.were_taken() == [True] * len(joint.optimizers)


@clause("amp.grad_scaler.fused_step.joint")
@pytest.mark.parametrize("is_unscaled", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
def test_inf_of_one_optimizer_skips_all(subject: Library, device: str, kinds: str, is_unscaled: bool) -> None:
    """The scale falls once. Torch's calls would step the others, with gradients that the norm made nan."""
    joint = Optimizers(subject, device, kinds)
    for bad in range(len(joint.optimizers)):
        joint.backward(bad)
        joint.scaler.fused_step(joint.optimizers, 1.0)
        assert all(joint.were_taken())
        before, scale = joint.values(), joint.scaler.get_scale()
        joint.backward(10 + bad, bad)
        if is_unscaled:
            joint.scaler.unscale_(joint.optimizers[0])
        assert not joint.scaler.fused_step(joint.optimizers, 1.0).isfinite()
        assert not any(joint.were_taken())
        assert all(map(torch.equal, joint.values(), before))
        assert joint.scaler.get_scale() == scale / 2
        named = [joint.scaler.nonfinite_parameters(optimizer) for optimizer in joint.optimizers]
        assert [bool(entries) for entries in named] == [index == bad for index in range(len(named))]
        joint.scaler.update(SCALE)


@clause("amp.grad_scaler.fused_step.joint")
@pytest.mark.parametrize("kinds", KINDS)
def test_norms_and_ratios_of_each_optimizer(subject: Library, device: str, kinds: str) -> None:
    joint = Optimizers(subject, device, kinds)
    grads, before = joint.backward(0), joint.values()
    norm = joint.scaler.fused_step(joint.optimizers, 0.5, keep_norms=True, keep_update_norms=True)
    expected = [grad.double().norm().item() for grad in grads]
    assert norm.item() == pytest.approx(math.hypot(*expected), rel=1e-5)
    norms, ratios = (
        [value.item() for optimizer in joint.optimizers for value in of(optimizer).values()]
        for of in (joint.scaler.gradient_norms, joint.scaler.update_ratios)
    )
    assert norms == pytest.approx(expected, rel=1e-5)
    changes = [
        ((after.double() - value.double()).norm() / value.double().norm()).item()
        for after, value in zip(joint.values(), before, strict=True)
    ]
    assert ratios == pytest.approx(changes, rel=1e-3)


@clause("amp.grad_scaler.fused_step.joint")
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
def test_list_of_one_optimizer_is_that_optimizer(subject: Library, device: str, kind: str) -> None:
    alone, listed = (Optimizers(subject, device, kind) for _ in range(2))
    for steps, argument in ((alone, alone.optimizers[0]), (listed, tuple(listed.optimizers))):
        steps.backward(0)
        steps.scaler.fused_step(argument, 0.5)
    assert all(map(torch.equal, alone.values(), listed.values()))


@clause("amp.grad_scaler.fused_step.joint")
def test_accumulated_microbatches_are_averaged_for_each_optimizer(subject: Library, device: str) -> None:
    """The second of three microbatches is bad for the last optimizer only."""
    joint = Optimizers(subject, device, "adamw+momentum")
    sums = [torch.zeros(param.shape) for param in joint.all_params]
    for number in range(3):
        with (
            joint.scaler.microbatch(joint.optimizers[0]),
            joint.scaler.microbatch(joint.optimizers[1]),
        ):
            generator = seeding.generator(number)
            for index, param in enumerate(joint.all_params):
                grad = torch.randn(param.shape, generator=generator)
                is_bad = number == 1 and index >= 3
                scaled = (grad * (math.inf if is_bad else SCALE / 3)).to(device)
                param.grad = scaled if param.grad is None else param.grad + scaled
                sums[index] += torch.zeros_like(grad) if is_bad else grad / (2 if index >= 3 else 3)
    norm = joint.scaler.fused_step(joint.optimizers, 1.0)
    assert norm.item() == pytest.approx(math.hypot(*(grad.norm().item() for grad in sums)), rel=1e-5)
    assert all(joint.were_taken())


@clause("amp.grad_scaler.fused_step.joint")
def test_results_of_steps_before_failed_one_are_recorded(subject: Library, device: str) -> None:
    """The step that raised can be repeated alone: its gradients are unscaled, and the scaler knows it."""
    joint = Optimizers(subject, device, "adamw+rmsprop")
    first, last = joint.optimizers
    joint.backward(0, bad=0)
    joint.scaler.fused_step(joint.optimizers)
    joint.scaler.update(SCALE)

    def fail(*_: object) -> None:
        raise RuntimeError("the hook failed")

    grads = joint.backward(1)
    handle = last.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the hook failed"):
        joint.scaler.fused_step(joint.optimizers)
    handle.remove()
    assert joint.scaler.step_was_taken(first)
    joint.scaler.step(last)
    assert joint.scaler.step_was_taken(last)
    assert joint.gradients()[3:] == near(grads[3:])


@clause("amp.grad_scaler.fused_step.joint")
def test_norm_of_double_complex_gradients_does_not_overflow(subject: Library) -> None:
    params = [nn.Parameter(torch.ones(2, dtype=torch.complex128)) for _ in range(2)]
    for param in params:
        param.grad = torch.full_like(param, 3e100j)
    optimizers: Any = [RMSprop([param]) for param in params]
    scaler = subject.amp.GradScaler("cpu", enabled=False)
    assert scaler.fused_step(optimizers, 1.0).item() == pytest.approx(6e100)


@clause("amp.grad_scaler.fused_step.joint")
@pytest.mark.parametrize("kinds", KINDS)
def test_step_after_refusal_without_gradients_unscales_all(subject: Library, device: str, kinds: str) -> None:
    joint = Optimizers(subject, device, kinds)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        joint.scaler.fused_step(joint.optimizers)
    grads = joint.backward(0)
    expected = math.hypot(*(grad.norm().item() for grad in grads))
    assert joint.scaler.fused_step(joint.optimizers).item() == pytest.approx(expected, rel=1e-5)


@clause("amp.grad_scaler.fused_step.joint")
@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("none", ValueError, "got no optimizer"),
        ("shared", ValueError, "belong to several of the optimizers"),
        ("copies", ValueError, "low_precision_params are copies of one optimizer's parameters"),
        ("string", TypeError, "expected an optimizer"),
        ("stepped", RuntimeError, "step"),
        ("no gradients", AssertionError, "No inf checks were recorded"),
        ("nan", ValueError, "max_norm is nan"),
        ("overlap", RuntimeError, "refers to a single memory location"),
    ],
)
def test_refused_list_changes_nothing(
    subject: Library, device: str, case: str, error: type[Exception], text: str
) -> None:
    joint = Optimizers(subject, device, "rmsprop+muon" if case == "overlap" else "adamw+momentum")
    first, last = joint.optimizers
    joint.backward(0)
    if case == "overlap":
        joint.params[1][0].grad = torch.ones((), device=device).expand(3, 4)
    if case == "stepped":
        joint.scaler.fused_step(last, update=False)
    if case == "no gradients":
        for param in joint.all_params:
            param.grad = None
    optimizers = {"none": [], "shared": [first, SGD(joint.params[0])], "string": [first, "second"]}
    options: dict[str, Any] = {}
    if case == "copies":
        options["low_precision_params"] = [param.detach().half() for param in joint.all_params]
    before, grads = joint.values(), joint.gradients()
    with pytest.raises(error, match=text):
        joint.scaler.fused_step(
            optimizers.get(case, joint.optimizers), math.nan if case == "nan" else 1.0, **options
        )
    assert all(map(torch.equal, joint.values(), before))
    assert joint.gradients() == near(grads)
