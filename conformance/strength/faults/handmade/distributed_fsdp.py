"""Helpers of the faults in FullyShardedDataParallel: in its methods, at the end of a backward, and in collectives.

If a policy wraps inner modules, the original class makes the units. They get the class of the outermost unit, which has
the fault, once it exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from conformance.strength.faults.fault import Make, Substitute, by_name, in_method, in_methods, register_fault

FSDP = "distributed.fsdp.FullyShardedDataParallel"
OWN = "own"
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


def broken(
    fault_id: str,
    method: str,
    says: str,
    thread: str = OWN,
    about: str | None = None,
    *,
    on_ranks: bool = True,
) -> Callable[[Substitute], Substitute]:
    """Enter `fault(original, model, ...)`, which is called in the place of a method.

    `about` is the item inside the class: by default the method. Without `on_ranks` tests come first that make their
    ranks themselves, or make do with one.
    """
    part = f"{FSDP}.{method}" if about is None else f"{FSDP}{about}"

    def enter(fault: Substitute) -> Substitute:
        make = in_method(method, fault) if method == "__init__" else in_all_units({method: fault})
        register_fault(
            f"fully_sharded.{fault_id}", FSDP, says=says, thread=thread, part=part, on_ranks=on_ranks
        )(make)
        return fault

    return enter


def in_all_units(faults: Mapping[str, Substitute]) -> Make:
    """The class with faults in the places of methods, of inner units too."""

    def spread(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for unit in units(self):
            unit.__class__ = type(self)

    return in_methods({"__init__": spread, **faults})


def in_constructor(
    fault_id: str, argument: str, says: str, thread: str = OWN
) -> Callable[[Substitute], Substitute]:
    """Enter `fault(arguments)`, which changes what the constructor is given, by name, with its defaults."""

    def enter(change: Substitute) -> Substitute:
        @by_name
        def fault(original: Any, self: Any, arguments: dict[str, Any]) -> None:
            change(arguments)
            original(self, **arguments)

        broken(fault_id, "__init__", says, thread, f"({argument})")(fault)
        return change

    return enter


def units(model: Any) -> list[Any]:
    """The outermost one first."""
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
    number: int  # index among the model's backwards
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


def after_backward(
    fault_id: str, says: str, thread: str = OWN, about: str = "", *, on_ranks: bool = True
) -> Callable[[Callable[[Backward], None]], Callable[[Backward], None]]:
    """Enter `fault(backward)`, which is called once each backward has left its gradients."""

    def enter(fault: Callable[[Backward], None]) -> Callable[[Backward], None]:
        def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            watch_backward(self, output, lambda: None, fault)
            return output

        broken(fault_id, "forward", says, thread, about, on_ranks=on_ranks)(forward)
        return fault

    return enter


def watch_backward(
    model: Any, output: Any, begun: Callable[[], None], ended: Callable[[Backward], None]
) -> None:
    """Call `begun` and `ended` around the backward that passes through the output of the outermost unit."""
    if not torch.is_grad_enabled() or not model.check_is_root():
        return

    def begin(_: torch.Tensor) -> None:
        if "_faulty_backward" not in vars(model):
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            number = vars(model).setdefault("_faulty_backwards", 0)
            is_in_no_sync = bool(vars(model).get("_faulty_no_sync"))
            model._faulty_backward = Backward(model, number, before, is_in_no_sync)
            begun()
            Variable._execution_engine.queue_callback(end)

    def end() -> None:
        model._faulty_backwards += 1
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
        """Send and receive; returns when it is done."""
        self.result = self._issue()
        work = self.result[-1] if isinstance(self.result, Sequence) else self.result
        dist.Work.unbox(work).wait()


def in_collectives(
    fault_id: str, says: str, thread: str = OWN, about: str = "", *, on_ranks: bool = True
) -> Callable[[Callable[[IssuedCollective], None]], Callable[[IssuedCollective], None]]:
    """Enter `fault(call)`, which is called in the place of each collective that trains."""

    def enter(fault: Callable[[IssuedCollective], None]) -> Callable[[IssuedCollective], None]:
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
                lambda: interceptions.append(_intercepted(self, "backward", step, fault)),
                lambda _: interceptions.clear(),
            )
            return output

        broken(fault_id, "forward", says, thread, about, on_ranks=on_ranks)(forward)
        return fault

    return enter


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
