"""Proofs that torch_npu's gradient scalers, as the package's `__init__` runs them, differ from torch's."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import sharded_grad_scaler as torchs
from torch.optim import SGD, Adam

from conformance.subjects.proof import Proofs, Sides, beside, mesh_of_one, parameter, reported, warnings_of
from conformance.subjects.torch_npu import GradScaler, ShardedGradScaler

PROOFS = Proofs()
both = beside(GradScaler, torch.amp.GradScaler)


def both_sharded(call: Callable[[Callable[..., Any]], Any]) -> Sides:
    mesh_of_one()
    return beside(ShardedGradScaler, torchs.ShardedGradScaler)(call)


def begun(kind: Callable[..., Any], **numbers: Any) -> Any:
    """Return a scaler that has scaled a tensor."""
    scaler = kind("cpu", **{"init_scale": 8.0} | numbers)
    scaler.scale(torch.ones(()))
    return scaler


def optimizer(*gradients: float) -> SGD:
    return SGD([parameter(torch.tensor(gradient)) for gradient in gradients], lr=0.5)


@PROOFS.keep
def fused_optimizers() -> Sides:
    """torch's fused optimizers get an argument grad_scaler, which they no longer accept since torch 2.0."""
    fused = Adam([parameter(torch.ones(2))], fused=True)
    return both(lambda kind: begun(kind).step(fused))


@PROOFS.keep
def an_optimizer_that_takes_the_scaler() -> Sides:
    """An optimizer whose step takes the scaler gets it without torch's deprecation warning."""

    class Takes(SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            grad_scaler.unscale_(self)

    return both(lambda kind: bool(warnings_of(lambda: begun(kind).step(Takes([parameter(torch.ones(2))])))))


@PROOFS.keep
def states_of_torch() -> Sides:
    """A state dict that torch saved cannot be loaded, because torch's scalers lack the entry 'dynamic'."""
    state = begun(torch.amp.GradScaler).state_dict()
    return both(lambda kind: kind("cpu").load_state_dict(state))


@PROOFS.keep
def six_entries() -> Sides:
    """The state has a sixth entry."""
    return both(lambda kind: sorted(begun(kind).state_dict()))


@PROOFS.keep
def what_torch_pickled() -> Sides:
    """A scaler restored from torch's pickled attributes lacks an attribute."""

    def given(kind: Callable[..., Any]) -> Any:
        loaded = object.__new__(type(kind("cpu")))
        loaded.__setstate__(torch.amp.GradScaler("cpu").__getstate__())
        return loaded.state_dict()["scale"]

    return both(given)


@PROOFS.keep
def one_of_two_optimizers() -> Sides:
    """An infinite gradient of one optimizer also skips the step of the other, whose gradients are finite."""

    def stepped(kind: Callable[..., Any]) -> float:
        scaler, bad, good = begun(kind), optimizer(math.inf), optimizer(8.0)
        scaler.step(bad)
        scaler.step(good)
        return good.param_groups[0]["params"][0].item()

    return both(stepped)


@PROOFS.keep
def a_check_result_written_by_hand() -> Sides:
    """A found_inf written into the state of an optimizer decides its step. The update reads a separate flag."""

    def updated(kind: Callable[..., Any]) -> float:
        scaler, sgd = begun(kind), optimizer(8.0)
        scaler.unscale_(sgd)
        for found_inf in scaler._per_optimizer_states[id(sgd)]["found_inf_per_device"].values():
            found_inf.fill_(1.0)
        scaler.step(sgd)
        scaler.update()
        return scaler.get_scale()

    return both(updated)


@PROOFS.keep
def nothing_to_check() -> Sides:
    """A step without gradients, and the update after it, silently succeed."""
    return both(lambda kind: begun(kind).step(SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)))


@PROOFS.keep
def a_growth_factor_of_one() -> Sides:
    """Invalid numbers raise another type of exception."""
    return both(lambda kind: kind("cpu", growth_factor=1.0))


@PROOFS.keep
def no_tensor() -> Sides:
    """A value that is not a tensor raises another type of exception."""
    return both(lambda kind: kind("cpu").scale(3))


@PROOFS.keep
def gradients_in_float16() -> Sides:
    """Gradients in float16 raise another type of exception."""
    half = SGD([parameter(torch.ones(2, dtype=torch.float16))], lr=0.5)
    return both(lambda kind: begun(kind).unscale_(half))


@PROOFS.keep
def no_parameters() -> Sides:
    """A value that is not a parameter ends in an AttributeError of torch_npu's code."""

    class Odd:
        param_groups = ({"params": [None]},)

    return both(lambda kind: begun(kind).unscale_(Odd()))


@PROOFS.keep
def cuda_that_is_not_there() -> Sides:
    """A scaler for a missing device is neither disabled nor warns, because torch_npu knows one device."""
    return both(lambda kind: warnings_of(lambda: kind("cuda")))


@PROOFS.keep
def another_device() -> Sides:
    """The scaler does not scale tensors of another device."""
    return both(lambda kind: kind("cpu").scale(torch.ones(2, device="meta")).device)


@PROOFS.keep
def an_interval_that_is_no_number_of_steps() -> Sides:
    """A fractional growth interval is accepted and never reached."""

    def updated(kind: Callable[..., Any]) -> float:
        scaler = begun(kind, growth_interval=1.5)
        scaler.step(optimizer(8.0))
        scaler.update()
        return scaler.get_scale()

    return both(updated)


@PROOFS.keep
def rounding_of_the_scale() -> Sides:
    """The factor is rounded to float32 before it multiplies the scale, which changes the product."""

    def grown(kind: Callable[..., Any]) -> float:
        scaler = begun(kind, init_scale=9.0, backoff_factor=0.1)
        scaler.step(optimizer(math.inf))
        scaler.update()
        return scaler.get_scale()

    return both(grown)


@PROOFS.keep
def a_factor_that_is_no_number() -> Sides:
    """A factor that is not a number is accepted, also by the update."""

    def updated(kind: Callable[..., Any]) -> None:
        scaler = begun(kind)
        scaler.step(optimizer(8.0))
        scaler.set_growth_factor("2")
        scaler.update()

    return both(updated)


@PROOFS.keep
def the_scale_is_replaced() -> Sides:
    """Growth replaces the scale tensor, so that an optimizer or a captured graph keeps the old one."""

    def is_kept(kind: Callable[..., Any]) -> bool:
        scaler = begun(kind, growth_interval=1)
        scale = scaler._scale
        scaler.step(optimizer(8.0))
        scaler.update()
        return scaler._scale is scale

    return both(is_kept)


@PROOFS.keep
def a_new_scale_of_ones_own() -> Sides:
    """A new scale is stored without a copy and changes with the caller's tensor."""

    def changed(kind: Callable[..., Any]) -> float:
        scaler, new_scale = begun(kind), torch.tensor(4.0)
        scaler.update(new_scale)
        new_scale.fill_(100.0)
        return scaler.get_scale()

    return both(changed)


@PROOFS.keep
def a_new_scale_that_cannot_be() -> Sides:
    """An invalid scale raises another type of exception."""
    return both(lambda kind: begun(kind).update(torch.ones(2)))


@PROOFS.keep
def a_tracker_before_the_scale() -> Sides:
    """A second manual initialization of the scale raises another type of exception."""
    return both(lambda kind: begun(kind)._lazy_init_scale_growth_tracker(torch.device("cpu")))


@PROOFS.keep
def the_device_that_others_read() -> Sides:
    """The scaler has no `_device`, which torch's methods and accelerate read."""
    return both(lambda kind: kind("cpu")._device)


@PROOFS.keep
def a_refused_step() -> Sides:
    """A step without gradients counts as taken, so the next one, with gradients, raises."""

    def stepped(kind: Callable[..., Any]) -> list[str]:
        scaler, empty = begun(kind), SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
        first = reported(lambda: scaler.step(empty))
        empty.param_groups[0]["params"][0].grad = torch.ones(2)
        return [first, reported(lambda: scaler.step(empty))]

    return both(stepped)


@PROOFS.keep
def gradients_after_an_infinite_one() -> Sides:
    """Gradients listed after an infinite one stay scaled on the CPU."""

    def unscaled(kind: Callable[..., Any]) -> float:
        scaler, both_kinds = begun(kind), optimizer(math.inf, 16.0)
        scaler.unscale_(both_kinds)
        return both_kinds.param_groups[0]["params"][1].grad.item()

    return both_sharded(unscaled)


@PROOFS.keep
def the_default_device() -> Sides:
    """The default device is the NPU."""
    return tuple(
        reported(lambda kind=kind: inspect.signature(kind.__init__).parameters["device"].default)
        for kind in (ShardedGradScaler, torchs.ShardedGradScaler)
    )


if __name__ == "__main__":
    sys.exit(PROOFS.show())
