"""Helpers of the faults in FullyShardedDataParallel: in its methods, at the end of a backward, and in collectives.

If a policy wraps inner modules, the original class makes the units. They get the class of the outermost unit, which has
the fault, once it exists.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from conformance.strength.faults.fault import (
    OWN,
    Decorator,
    Make,
    Substitute,
    by_name,
    fault_in,
    in_method,
    in_methods,
)

FSDP = "distributed.fsdp.FullyShardedDataParallel"
_BEFORE_BACKENDS = "AutogradCPU"  # no collective has a kernel there, and all pass it
# The kind of each collective operator, and the names of its outputs and inputs.
_KINDS = {
    "_allgather_base_": ("gather", "output_tensor", "input_tensor"),
    "allgather_": ("gather", "output_tensors", "input_tensors"),
    "_reduce_scatter_base_": ("scatter", "output_tensor", "input_tensor"),
    "reduce_scatter_": ("scatter", "output_tensors", "input_tensors"),
    "alltoall_base_": ("scatter", "output", "input"),
    "alltoall_": ("scatter", "output_tensors", "input_tensors"),
    "allreduce_": ("reduce", "tensors", "tensors"),
}


def broken(method: str, thread: str = OWN, about: str | None = None, *, on_ranks: bool = True) -> Decorator:
    """Return a decorator of `fault(original, model, ...)`, which replaces a method.

    `about` is the item inside the class, by default the method. Without `on_ranks`, tests that start their ranks
    themselves or need only one come first.
    """
    part = f"{FSDP}.{method}" if about is None else f"{FSDP}{about}"

    def make(fault: Substitute) -> Make:
        return in_method(method, fault) if method == "__init__" else in_all_units({method: fault})

    return fault_in("fully_sharded", FSDP, make, thread, part=part, on_ranks=on_ranks)


def in_all_units(faults: Mapping[str, Substitute]) -> Make:
    """Return a maker that replaces methods by faults, also in inner units."""

    def spread(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for unit in units(self):
            unit.__class__ = type(self)

    return in_methods({"__init__": spread, **faults})


def in_constructor(argument: str, thread: str = OWN) -> Decorator:
    """Return a decorator of `fault(arguments)`, which changes the constructor's named arguments."""

    def register(change: Substitute) -> Substitute:
        @by_name
        @functools.wraps(change)
        def fault(original: Any, self: Any, arguments: dict[str, Any]) -> None:
            change(arguments)
            original(self, **arguments)

        return broken("__init__", thread, f"({argument})")(fault)

    return register


def units(model: Any) -> list[Any]:
    """Return all units, the outermost first."""
    return type(model).fsdp_modules(model)


def ranks(model: Any) -> int:
    return model.process_group.size()


def gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from tensors_in(list(vars(value).values()))


# At the end of a backward


@dataclass
class Backward:
    """A backward that has ended."""

    model: Any  # the outermost unit
    before: list[torch.Tensor | None]  # earlier `.grad` of each parameter
    is_in_no_sync: bool

    @property
    def rank(self) -> int:
        return self.model.process_group.rank()

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The gradient of each parameter that has one, with its earlier gradient."""
        both = zip(self.model.parameters(), self.before, strict=True)
        return [(parameter.grad, before) for parameter, before in both if parameter.grad is not None]


def after_backward(thread: str = OWN, about: str = "") -> Decorator:
    """Return a decorator of `fault(backward)`, which is called after each backward."""
    return lambda fault: broken("forward", thread, about)(calling_after_backward(fault))


def calling_after_backward(fault: Callable[[Backward], None]) -> Substitute:
    """Return a replacement of `forward` that calls `fault(backward)` after each backward."""

    @functools.wraps(fault)
    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        watch_backward(self, output, fault)
        return output

    return forward


def watch_backward(
    model: Any, output: Any, ended: Callable[[Backward], None], begun: Callable[[], object] = lambda: None
) -> None:
    """Call `begun` and `ended` around the backward that passes through the output of the outermost unit."""
    if not torch.is_grad_enabled() or not model.check_is_root():
        return

    def begin(_: torch.Tensor) -> None:
        if "_faulty_backward" not in vars(model):
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            is_in_no_sync = bool(vars(model).get("_faulty_no_sync"))
            model._faulty_backward = Backward(model, before, is_in_no_sync)
            begun()
            Variable._execution_engine.queue_callback(end)

    def end() -> None:
        with torch.no_grad():
            ended(vars(model).pop("_faulty_backward"))

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(begin)


# In what ranks send each other


@dataclass
class IssuedCollective:
    """A collective that a model issues in its forward or backward. The fault must issue it once."""

    model: Any
    kind: str  # gather, scatter or reduce
    during: str  # forward or backward
    step: int  # index of the model's forward
    index: int  # index among collectives of the kind in this phase
    inputs: list[torch.Tensor]
    received: list[torch.Tensor]
    _issue: Callable[[], Any]
    result: Any = field(default=None)

    @property
    def rank(self) -> int:
        return self.model.process_group.rank()

    @property
    def ranks(self) -> int:
        return ranks(self.model)

    def issue(self) -> None:
        """Issue the collective and wait for its end."""
        self.result = self._issue()
        work = self.result[-1] if isinstance(self.result, Sequence) else self.result
        dist.Work.unbox(work).wait()


def in_collectives(thread: str = OWN, about: str = "", *, on_ranks: bool = True) -> Decorator:
    """Return a decorator of `fault(call)`, which replaces each collective of the forward and the backward."""

    def register(fault: Callable[[IssuedCollective], None]) -> Substitute:
        @functools.wraps(fault)
        def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.check_is_root():
                return original(self, *args, **kwargs)
            step = vars(self).setdefault("_faulty_steps", 0)
            self._faulty_steps += 1
            interceptions: list[object] = [_intercepted(self, "forward", step, fault)]
            try:
                output = original(self, *args, **kwargs)
            finally:
                interceptions.clear()
            watch_backward(
                self,
                output,
                lambda _: interceptions.clear(),
                begun=lambda: interceptions.append(_intercepted(self, "backward", step, fault)),
            )
            return output

        return broken("forward", thread, about, on_ranks=on_ranks)(forward)

    return register


def _intercepted(model: Any, during: str, step: int, fault: Callable[[IssuedCollective], None]) -> object:
    """Pass every collective to the fault as long as the returned object exists."""
    kernels = torch.library.Library("c10d", "IMPL")
    counts = dict.fromkeys(("gather", "scatter", "reduce"), 0)

    def register(name: str) -> None:
        operator = getattr(torch.ops.c10d, name).default
        kind, received, inputs = _KINDS[name]
        names = [argument.name for argument in operator._schema.arguments]

        def issue(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args)

        def kernel(*args: Any) -> Any:
            by_name = dict(zip(names, args, strict=False))
            call = IssuedCollective(
                model,
                kind,
                during,
                step,
                counts[kind],
                [*tensors_in(by_name[inputs])],
                [*tensors_in(by_name[received])],
                lambda: issue(*args),
            )
            counts[kind] += 1
            with torch.no_grad():
                fault(call)
            return call.result

        kernels.impl(name, kernel, _BEFORE_BACKENDS)

    for name in _KINDS:
        register(name)
    return kernels
