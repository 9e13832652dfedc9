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

from conformance.subjects.proof import Proofs, mesh_of_one, parameter, reported, warnings_of
from conformance.subjects.torch_npu import GradScaler, ShardedGradScaler

PROOFS = Proofs(GradScaler, torch.amp.GradScaler)
SHARDED = Proofs(ShardedGradScaler, torchs.ShardedGradScaler)


def begun(kind: Callable[..., Any], **numbers: Any) -> Any:
    """Return a scaler that has scaled a tensor."""
    scaler = kind("cpu", **{"init_scale": 8.0} | numbers)
    scaler.scale(torch.ones(()))
    return scaler


def optimizer(*gradients: float) -> SGD:
    return SGD([parameter(torch.tensor(gradient)) for gradient in gradients], lr=0.5)


@PROOFS.keep
def fused_optimizers(kind: Any) -> object:
    """torch's fused optimizers get an argument grad_scaler, which they no longer accept since torch 2.0."""
    fused = Adam([parameter(torch.ones(2))], fused=True)
    return begun(kind).step(fused)


@PROOFS.keep
def an_optimizer_that_takes_the_scaler(kind: Any) -> object:
    """An optimizer whose step takes the scaler gets it without torch's deprecation warning."""

    class Takes(SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            grad_scaler.unscale_(self)

    return bool(warnings_of(lambda: begun(kind).step(Takes([parameter(torch.ones(2))]))))


@PROOFS.keep
def states_of_torch(kind: Any) -> object:
    """A state dict that torch saved cannot be loaded, because torch's scalers lack the entry 'dynamic'."""
    state = begun(torch.amp.GradScaler).state_dict()
    return kind("cpu").load_state_dict(state)


@PROOFS.keep
def six_entries(kind: Any) -> object:
    """The state has a sixth entry."""
    return sorted(begun(kind).state_dict())


@PROOFS.keep
def pickles_of_torch(kind: Any) -> object:
    """A scaler restored from torch's pickled attributes lacks an attribute."""
    loaded = object.__new__(type(kind("cpu")))
    loaded.__setstate__(torch.amp.GradScaler("cpu").__getstate__())
    return loaded.state_dict()["scale"]


@PROOFS.keep
def one_of_two_optimizers(kind: Any) -> object:
    """An infinite gradient of one optimizer also skips the step of the other, whose gradients are finite."""
    scaler, bad, good = begun(kind), optimizer(math.inf), optimizer(8.0)
    scaler.step(bad)
    scaler.step(good)
    return good.param_groups[0]["params"][0].item()


@PROOFS.keep
def found_inf_written_by_the_user(kind: Any) -> object:
    """A found_inf written into the state of an optimizer decides its step. The update reads a separate flag."""
    scaler, sgd = begun(kind), optimizer(8.0)
    scaler.unscale_(sgd)
    for found_inf in scaler._per_optimizer_states[id(sgd)]["found_inf_per_device"].values():
        found_inf.fill_(1.0)
    scaler.step(sgd)
    scaler.update()
    return scaler.get_scale()


@PROOFS.keep
def nothing_to_check(kind: Any) -> object:
    """A step without gradients, and the update after it, silently succeed."""
    return begun(kind).step(SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5))


@PROOFS.keep
def a_growth_factor_of_one(kind: Any) -> object:
    """Invalid numbers raise another type of exception."""
    return kind("cpu", growth_factor=1.0)


@PROOFS.keep
def values_that_are_not_tensors(kind: Any) -> object:
    """A value that is not a tensor raises another type of exception."""
    return kind("cpu").scale(3)


@PROOFS.keep
def gradients_in_float16(kind: Any) -> object:
    """Gradients in float16 raise another type of exception."""
    half = SGD([parameter(torch.ones(2, dtype=torch.float16))], lr=0.5)
    return begun(kind).unscale_(half)


@PROOFS.keep
def values_that_are_not_parameters(kind: Any) -> object:
    """A value that is not a parameter ends in an AttributeError of torch_npu's code."""

    class Odd:
        param_groups = ({"params": [None]},)

    return begun(kind).unscale_(Odd())


@PROOFS.keep
def missing_cuda(kind: Any) -> object:
    """A scaler for a missing device is neither disabled nor warns, because torch_npu knows one device."""
    return warnings_of(lambda: kind("cuda"))


@PROOFS.keep
def another_device(kind: Any) -> object:
    """The scaler does not scale tensors of another device."""
    return kind("cpu").scale(torch.ones(2, device="meta")).device


@PROOFS.keep
def fractional_growth_interval(kind: Any) -> object:
    """A fractional growth interval is accepted and never reached."""
    scaler = begun(kind, growth_interval=1.5)
    scaler.step(optimizer(8.0))
    scaler.update()
    return scaler.get_scale()


@PROOFS.keep
def rounding_of_the_scale(kind: Any) -> object:
    """The factor is rounded to float32 before it multiplies the scale, which changes the product."""
    scaler = begun(kind, init_scale=9.0, backoff_factor=0.1)
    scaler.step(optimizer(math.inf))
    scaler.update()
    return scaler.get_scale()


@PROOFS.keep
def factor_that_is_not_a_number(kind: Any) -> object:
    """A factor that is not a number is accepted, also by the update."""
    scaler = begun(kind)
    scaler.step(optimizer(8.0))
    scaler.set_growth_factor("2")
    scaler.update()


@PROOFS.keep
def the_scale_is_replaced(kind: Any) -> object:
    """Growth replaces the scale tensor, so that an optimizer or a captured graph keeps the old one."""
    scaler = begun(kind, growth_interval=1)
    scale = scaler._scale
    scaler.step(optimizer(8.0))
    scaler.update()
    return scaler._scale is scale


@PROOFS.keep
def new_scale_of_the_caller(kind: Any) -> object:
    """A new scale is stored without a copy and changes with the caller's tensor."""
    scaler, new_scale = begun(kind), torch.tensor(4.0)
    scaler.update(new_scale)
    new_scale.fill_(100.0)
    return scaler.get_scale()


@PROOFS.keep
def invalid_new_scale(kind: Any) -> object:
    """An invalid scale raises another type of exception."""
    return begun(kind).update(torch.ones(2))


@PROOFS.keep
def a_tracker_before_the_scale(kind: Any) -> object:
    """A second manual initialization of the scale raises another type of exception."""
    return begun(kind)._lazy_init_scale_growth_tracker(torch.device("cpu"))


@PROOFS.keep
def device_attribute(kind: Any) -> object:
    """The scaler has no `_device`, which torch's methods and accelerate read."""
    return kind("cpu")._device


@PROOFS.keep
def a_refused_step(kind: Any) -> object:
    """A step without gradients counts as taken, so the next one, with gradients, raises."""
    scaler, empty = begun(kind), SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    first = reported(lambda: scaler.step(empty))
    empty.param_groups[0]["params"][0].grad = torch.ones(2)
    return [first, reported(lambda: scaler.step(empty))]


@SHARDED.keep
def gradients_after_an_infinite_one(kind: Any) -> object:
    """Gradients listed after an infinite one stay scaled on the CPU."""
    mesh_of_one()
    scaler, both_kinds = begun(kind), optimizer(math.inf, 16.0)
    scaler.unscale_(both_kinds)
    return both_kinds.param_groups[0]["params"][1].grad.item()


@SHARDED.keep
def the_default_device(kind: Any) -> object:
    """The default device is the NPU."""
    return inspect.signature(kind.__init__).parameters["device"].default


if __name__ == "__main__":
    sys.exit(PROOFS.show() + SHARDED.show())
