"""Faults in summon_full_params: what is whole inside, what is kept of it, where it is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute, register_fault
from conformance.strength.faults.handmade.distributed_fsdp import FSDP, OWN, broken, in_all_units

_NAMES = ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
_SUMMON = "summon_full_params"
# `fault(summoned, module, options)`: `summoned(**options)` is the context as it should be.
Summoned = Callable[..., AbstractContextManager[None]]


def summoning(fault_id: str, says: str, thread: str = OWN) -> Callable[[Substitute], Substitute]:
    """Enter a fault that is a context itself: a generator function of one `yield`."""

    def enter(fault: Substitute) -> Substitute:
        context = contextlib.contextmanager(fault)

        def framed(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            options = dict(zip(_NAMES, args, strict=False)) | kwargs

            def summoned(**changed: Any) -> AbstractContextManager[None]:
                return original(module, **options | changed)

            return context(summoned, module, {"writeback": True, **options})

        broken(fault_id, _SUMMON, says, thread)(framed)
        return fault

    return enter


def _values(module: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def _put_back(module: Any, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), values, strict=True):
            if parameter.shape == value.shape:
                parameter.copy_(value)


@summoning("writeback_lost", "what is written inside is lost", "pytorch/pytorch#107081")
def _(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    before = _values(module)
    with summoned():
        yield
    _put_back(module, before)


@summoning(
    "both_writeback_and_rank0_only",
    "writeback is not refused with rank0_only, and means nothing",
    "pytorch/pytorch#93938",
)
def _(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    with summoned(writeback=options["writeback"] and not options.get("rank0_only")):
        yield


@summoning("summoned_in_use", "it is not refused where parameters are in use", "pytorch/pytorch#71225")
def _(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(AssertionError):
            stack.enter_context(summoned())
        yield


@summoning("gathers_again_behind", "leaving gathers every unit once more")
def _(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    with summoned():
        yield
    with summoned(writeback=False):
        """For nothing."""


def summoning_and_forward(fault_id: str, says: str, summon: Substitute) -> Callable[[Substitute], Substitute]:
    """Return a decorator that registers a fault in `forward`, together with the fault `summon` of the same units.

    `summon(summoned, module)` is a generator function of one `yield`.
    """
    context = contextlib.contextmanager(summon)

    def in_summon(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        return context(lambda: original(module, *args, **kwargs), module)

    def register(forward: Substitute) -> Substitute:
        register_fault(f"fully_sharded.{fault_id}", FSDP, says=says, part=f"{FSDP}.{_SUMMON}", on_ranks=True)(
            in_all_units({_SUMMON: in_summon, "forward": forward})
        )
        return forward

    return register


def _keep_former_values(summoned: Summoned, module: Any) -> Iterator[None]:
    before = _values(module)
    with summoned():
        yield
    vars(module)["_faulty_former"] = before


@summoning_and_forward(
    "written_unseen_by_evaluation",
    "a forward without gradients reads the values from before writes inside",
    _keep_former_values,
)
def _(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    former = vars(self).pop("_faulty_former", None)
    if former is None or torch.is_grad_enabled():
        return original(self, *args, **kwargs)
    current = _values(self)
    _put_back(self, former)
    try:
        return original(self, *args, **kwargs)
    finally:
        _put_back(self, current)


def _show_rounded(summoned: Summoned, module: Any) -> Iterator[None]:
    dtype = vars(module).pop("_faulty_dtype", None)
    with summoned():
        before = _values(module)
        rounded = before if dtype is None else [value.to(dtype).to(value.dtype) for value in before]
        _put_back(module, rounded)
        yield
        with torch.no_grad():
            for param, value, shown in zip(module.parameters(), before, rounded, strict=False):
                if param.shape == shown.shape and torch.equal(param, shown):
                    param.copy_(value)


@summoning_and_forward(
    "rounded_after_a_forward",
    "after a forward in low precision, parameters are shown in the values that it computed with",
    _show_rounded,
)
def _(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    self._faulty_dtype = self.mixed_precision.param_dtype
    return output


@broken(
    "inner_prefix_stays",
    "named_parameters",
    "inside, the names of inner units keep their prefix",
    "pytorch/pytorch#73890",
)
def inner_prefix_stays(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    prefixed = torch.nn.Module.named_parameters(self, *args, **kwargs)
    for (name, parameter), (full, _) in zip(original(self, *args, **kwargs), prefixed, strict=True):
        yield (name if name == full else full.replace("_fsdp_wrapped_module.", "", 1)), parameter
