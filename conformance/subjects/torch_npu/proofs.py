"""Where torch_npu's gradient scalers differ from torch's: its classes as the module beside this one runs them."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import sharded_grad_scaler as torchs
from torch.optim import SGD, Adam

from conformance.subjects.proof import Proofs, Sides, beside, mesh_of_one, parameter, said, warnings_of
from conformance.subjects.torch_npu import GradScaler, ShardedGradScaler

PROOFS = Proofs()
_PLAIN = "amp.grad_scaler."
_SHARDED = "distributed.fsdp.sharded_grad_scaler."
both = beside(GradScaler, torch.amp.GradScaler)


def both_sharded(call: Callable[[Callable[..., Any]], Any]) -> Sides:
    mesh_of_one()
    return beside(ShardedGradScaler, torchs.ShardedGradScaler)(call)


def begun(kind: Callable[..., Any], **numbers: Any) -> Any:
    """A scaler that has scaled something."""
    scaler = kind("cpu", **{"init_scale": 8.0} | numbers)
    scaler.scale(torch.ones(()))
    return scaler


def optimizer(*gradients: float) -> SGD:
    return SGD([parameter(torch.tensor(gradient)) for gradient in gradients], lr=0.5)


@PROOFS.of(
    f"{_PLAIN}step.aware_optimizers",
    f"{_PLAIN}step.steps_or_skips",
    f"{_PLAIN}step.refuses_closures",
    f"{_PLAIN}step.hands_arguments_on",
    f"{_PLAIN}step.order_of_calls",
    f"{_PLAIN}step.optimizer_raises",
    f"{_PLAIN}unscale_.sparse",
    f"{_PLAIN}pickle.between_iterations",
    f"{_PLAIN}hooks.overriding_takes_effect",
    f"{_SHARDED}sequences.any",
    f"{_SHARDED}step.amp_aware_after_unscaling",
    f"{_SHARDED}step.older_protocol",
    f"{_SHARDED}step.one_decision_amp_aware",
    f"{_SHARDED}step.several_ranks_found_inf",
    f"{_SHARDED}step.without_gradients",
)
def fused_optimizers() -> Sides:
    """torch's fused optimizers are handed an argument, grad_scaler, that they have not taken since torch 2.0."""
    fused = Adam([parameter(torch.ones(2))], fused=True)
    return both(lambda kind: begun(kind).step(fused))


@PROOFS.of(
    f"{_PLAIN}load_state_dict.restores_all",
    f"{_PLAIN}load_state_dict.between_libraries",
    f"{_PLAIN}load_state_dict.foreign",
    f"{_PLAIN}load_state_dict.then_unscale",
    f"{_PLAIN}sequences.any",
    f"{_SHARDED}is_a_grad_scaler",
)
def states_of_torch() -> Sides:
    """A state dict that torch saved cannot be loaded: it lacks an entry that torch's scalers do not have."""
    state = begun(torch.amp.GradScaler).state_dict()
    return both(lambda kind: kind("cpu").load_state_dict(state))


@PROOFS.of(f"{_PLAIN}state_dict.five_entries")
def six_entries() -> Sides:
    """The state has a sixth entry."""
    return both(lambda kind: sorted(begun(kind).state_dict()))


@PROOFS.of(f"{_PLAIN}pickle.torchs_own", f"{_PLAIN}pickle.setstate")
def what_torch_pickled() -> Sides:
    """Given what torch pickles of a scaler, it lacks an attribute."""

    def given(kind: Callable[..., Any]) -> Any:
        made = object.__new__(type(kind("cpu")))
        made.__setstate__(torch.amp.GradScaler("cpu").__getstate__())
        return made.state_dict()["scale"]

    return both(given)


@PROOFS.of(f"{_PLAIN}step.several_optimizers", f"{_PLAIN}hooks.per_optimizer_states")
def one_of_two_optimizers() -> Sides:
    """An infinite gradient of one optimizer keeps the other, whose gradients are finite, from its step."""

    def stepped(kind: Callable[..., Any]) -> float:
        scaler, bad, good = begun(kind), optimizer(math.inf), optimizer(8.0)
        scaler.step(bad)
        scaler.step(good)
        return good.param_groups[0]["params"][0].item()

    return both(stepped)


@PROOFS.of(
    f"{_PLAIN}unscale_.divides",
    f"{_PLAIN}unscale_.parameters",
    f"{_PLAIN}update.needs_checks",
    f"{_SHARDED}errors.told_to_peers",
)
def nothing_to_check() -> Sides:
    """A step without any gradient is taken in silence, and so is the update behind it."""
    return both(lambda kind: begun(kind).step(SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)))


@PROOFS.of(f"{_PLAIN}constructor.bad_arguments", f"{_SHARDED}constructor.bad_arguments")
def a_growth_factor_of_one() -> Sides:
    """Numbers that cannot be are refused by another type of exception."""
    return both(lambda kind: kind("cpu", growth_factor=1.0))


@PROOFS.of(f"{_PLAIN}scale.bad_outputs", f"{_SHARDED}scale.multiplies")
def no_tensor() -> Sides:
    """What is no tensor is refused by another type of exception."""
    return both(lambda kind: kind("cpu").scale(3))


@PROOFS.of(f"{_PLAIN}unscale_.refuses_float16")
def gradients_in_float16() -> Sides:
    """Gradients in float16 are refused by another type of exception."""
    half = SGD([parameter(torch.ones(2, dtype=torch.float16))], lr=0.5)
    return both(lambda kind: begun(kind).unscale_(half))


@PROOFS.of(f"{_PLAIN}unscale_.bad_optimizers")
def no_parameters() -> Sides:
    """What is no parameter ends in an AttributeError of its own code."""

    class Odd:
        param_groups = ({"params": [None]},)

    return both(lambda kind: begun(kind).unscale_(Odd()))


@PROOFS.of(f"{_PLAIN}constructor.device", f"{_SHARDED}constructor.device")
def cuda_that_is_not_there() -> Sides:
    """Asked for a device that is not there it is neither off nor warns: it knows one device."""
    return both(lambda kind: warnings_of(lambda: kind("cuda")))


@PROOFS.of(f"{_PLAIN}scale.several_devices", f"{_PLAIN}sync.none", f"{_SHARDED}scale.any_device")
def another_device() -> Sides:
    """Tensors of another device than its own are not scaled."""
    return both(lambda kind: kind("cpu").scale(torch.ones(2, device="meta")).device)


@PROOFS.of(f"{_PLAIN}constructor.arguments", f"{_PLAIN}setters.take_effect", f"{_PLAIN}setters.bad_values")
def an_interval_that_is_no_number_of_steps() -> Sides:
    """A growth interval between two integers is taken, and never reached."""

    def updated(kind: Callable[..., Any]) -> float:
        scaler = begun(kind, growth_interval=1.5)
        scaler.step(optimizer(8.0))
        scaler.update()
        return scaler.get_scale()

    return both(updated)


@PROOFS.of(f"{_PLAIN}update.grows_after_interval", f"{_PLAIN}update.backs_off")
def rounding_of_the_scale() -> Sides:
    """The factor is rounded to float32 before the scale is multiplied, and the product is another."""

    def grown(kind: Callable[..., Any]) -> float:
        scaler = begun(kind, init_scale=9.0, backoff_factor=0.1)
        scaler.step(optimizer(math.inf))
        scaler.update()
        return scaler.get_scale()

    return both(grown)


@PROOFS.of(f"{_PLAIN}update.new_scale")
def a_new_scale_of_ones_own() -> Sides:
    """A new scale is kept itself rather than copied, and changes with the caller's tensor."""

    def changed(kind: Callable[..., Any]) -> float:
        scaler, given = begun(kind), torch.tensor(4.0)
        scaler.update(given)
        given.fill_(100.0)
        return scaler.get_scale()

    return both(changed)


@PROOFS.of(f"{_PLAIN}update.bad_new_scale")
def a_new_scale_that_cannot_be() -> Sides:
    """What cannot be a scale is refused by another type of exception."""
    return both(lambda kind: begun(kind).update(torch.ones(2)))


@PROOFS.of(
    f"{_PLAIN}hooks.numbers",
    "conformance/test_surface.py::test_name_that_others_read_exists[amp.GradScaler._device]",
)
def the_device_that_others_read() -> Sides:
    """It has no `_device`, which torch's methods and accelerate read."""
    return both(lambda kind: kind("cpu")._device)


@PROOFS.of(f"{_PLAIN}step.again_after_a_refusal")
def a_refused_step() -> Sides:
    """A step without gradients counts as taken, so the next one, with gradients, is refused."""

    def stepped(kind: Callable[..., Any]) -> list[str]:
        scaler, empty = begun(kind), SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
        first = said(lambda: scaler.step(empty))
        empty.param_groups[0]["params"][0].grad = torch.ones(2)
        return [first, said(lambda: scaler.step(empty))]

    return both(stepped)


@PROOFS.of(
    f"{_SHARDED}unscale_.divides",
    f"{_SHARDED}unscale_.sparse",
    f"{_SHARDED}step.one_decision",
    f"{_SHARDED}training.fsdp",
    f"{_SHARDED}constructor.arguments",
    f"{_SHARDED}constructor.process_group",
    f"{_SHARDED}update.moves_the_scale",
)
def gradients_behind_an_infinite_one() -> Sides:
    """On the CPU the gradients behind an infinite one stay scaled."""

    def unscaled(kind: Callable[..., Any]) -> float:
        scaler, both_kinds = begun(kind), optimizer(math.inf, 16.0)
        scaler.unscale_(both_kinds)
        return both_kinds.param_groups[0]["params"][1].grad.item()

    return both_sharded(unscaled)


@PROOFS.of(
    "conformance/test_surface.py::test_signature_is_torchs[distributed.fsdp.sharded_grad_scaler.ShardedGradScaler]"
)
def the_default_device() -> Sides:
    """Without a device it takes its own."""
    return tuple(
        said(lambda kind=kind: inspect.signature(kind.__init__).parameters["device"].default)
        for kind in (ShardedGradScaler, torchs.ShardedGradScaler)
    )


if __name__ == "__main__":
    sys.exit(PROOFS.show())
