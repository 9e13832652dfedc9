"""A scaler in use: parameters in two groups, an optimizer, a scaler, and scenarios that two libraries run in lockstep.

A scenario is a generator that takes a library and yields one `Outcome` per call. The scenarios of both libraries
advance and are compared step by step.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, Protocol

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from conformance.judge.judgement import unavailable
from conformance.judge.library import Library, LookupFailed, NotProvided
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.gradients import Gradient
from conformance.strategies.missing_kernels import (
    fused_adagrad,
    refusal_of_bfloat16,
    refuses_bfloat16,
    replaced_for,
)

Scenario = Callable[[Library], Iterator[Outcome]]

# Sizes that no vector width divides, and an empty gradient. Faults are put into the last gradient.
FOUR = (Gradient((5,), seed=1), Gradient((0,), seed=2), Gradient((3, 4), seed=3), Gradient((7,), seed=4))
_ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
MEASURED_DTYPES = [torch.float32, torch.bfloat16, torch.float64]


class Recording(SGD):
    """Optimizer that records the arguments of each call of `step`, and returns `returns`."""

    def __init__(self, params: Any, returns: Any = None) -> None:
        super().__init__(params, lr=0.125)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.returns = returns

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        super().step()
        return self.returns


class Aware(SGD):
    """Optimizer that unscales and skips steps itself, with the attributes that the scaler sets."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, raises: bool = False) -> None:
        super().__init__(params, lr=0.125)
        self.handed: list[tuple[Any, Any]] = []
        self.raises = raises

    def step(self, *args: Any, **kwargs: Any) -> str:
        scale, found_inf = getattr(self, "grad_scale", "absent"), getattr(self, "found_inf", "absent")
        self.handed.append((as_number(scale), as_number(found_inf)))
        if self.raises:
            raise MemoryError("no room for the step")
        if not as_number(found_inf):
            with torch.no_grad():
                for parameter in itertools.chain(*(group["params"] for group in self.param_groups)):
                    if parameter.grad is not None:
                        parameter.sub_(0.125 * parameter.grad / (1.0 if scale is None else scale))
        return "stepped"


class TakesScaler(SGD):
    """Optimizer with the older protocol, whose `step` takes the scaler."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.125)
        self.scalers: list[Any] = []

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> str:
        self.scalers.append(grad_scaler)
        grad_scaler.unscale_(self)
        super().step()
        return "stepped"


def as_number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: SGD(groups, lr=0.125),
    "momentum": lambda groups: SGD(groups, lr=0.125, momentum=0.5),
    "adam": lambda groups: Adam(groups, lr=0.125),
    # Without momentum, because torch's fused SGD reads an uninitialised momentum buffer after a skipped first step.
    "fused sgd": lambda groups: SGD(groups, lr=0.125, fused=True),
    "fused adam": lambda groups: Adam(groups, lr=0.125, fused=True),
    "fused adamw": lambda groups: AdamW(groups, lr=0.125, fused=True),
    "fused adagrad": lambda groups: fused_adagrad(groups, lr=0.125),
    "aware": Aware,
    "recording": Recording,
}
PLAIN = ("sgd", "momentum", "adam", "recording")
AMP_AWARE = ("fused sgd", "fused adam", "fused adamw", "fused adagrad", "aware")


class Harness:
    """A library's scaler with its parameters and optimizer. Two harnesses share no memory."""

    def __init__(
        self,
        library: Library,
        device: str,
        gradients: tuple[Gradient, ...] = FOUR,
        optimizer: str | Callable[[Any], Optimizer] = "sgd",
        scaler: Any = None,  # default: a GradScaler with `options`
        **options: Any,
    ) -> None:
        self.library, self.device = library, device
        self.scaler = library.amp.GradScaler(device, **options) if scaler is None else scaler
        self.parameters = [gradient.parameter(device) for gradient in gradients]
        middle = len(self.parameters) // 2
        groups = [{"params": self.parameters[:middle]}, {"params": self.parameters[middle:]}]
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        self.optimizer: Any = make([group for group in groups if group["params"]])
        self._gradients = gradients

    def used(self) -> Harness:
        """Create the scale on the device, as the first loss does."""
        self.scaler.scale(torch.zeros((), device=self.device))
        return self

    def backward(self, last: float | None = None, times: float = 1.0) -> None:
        """Run backward of a scaled loss. `last` replaces the last element of the last gradient.

        If no parameter gets a gradient, only create the scale.
        """
        expected = [gradient for gradient in self._gradients if gradient.dtype is not None]
        if not expected:
            self.used()
            return
        if last is not None:
            expected[-1] = dataclasses.replace(expected[-1], last=last)
        having = [p for p, g in zip(self.parameters, self._gradients, strict=True) if g.dtype is not None]
        losses = [
            (p * (g.values() * times).to(device=self.device, dtype=p.dtype)).sum().float()
            for p, g in zip(having, expected, strict=True)
        ]
        self.scaler.scale(torch.stack(losses).sum()).backward()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def did(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
        """Run a call. Return its outcome with the parameters, gradients, optimizer and scaler after the call.

        A library that refuses bfloat16 as torch does gets a replacement of torch's operator. If it refuses
        nevertheless, the test is unavailable.
        """
        with replaced_for(self.library, self.device):
            outcome = observe(call, *args, watch=self.parameters, **kwargs)
        if refuses_bfloat16(self.library, self.device) and outcome.raised == refusal_of_bfloat16(self.device):
            unavailable(f"{self.library.spec} refuses bfloat16 gradients on {self.device}, as torch does")
        return dataclasses.replace(outcome, watched={"parameters": outcome.watched, **self.seen()})

    def seen(self) -> dict[str, Any]:
        return {
            "scaler": self._entries(),
            "attached to the optimizer": {
                name: as_number(getattr(self.optimizer, name, "absent"))
                for name in ("grad_scale", "found_inf")
            },
            "handed": list(getattr(self.optimizer, "handed", ())),
            "calls": list(getattr(self.optimizer, "calls", ())),
        }

    def _entries(self) -> dict[str, Any] | None:
        """Return the scaler's numbers, or None if `state_dict` raises, which other clauses cover."""
        try:
            return entries(self.scaler)
        except (NotProvided, LookupFailed):
            raise
        except Exception:
            return None

    def iteration(self, last: float | None = None, *, unscale: bool = False) -> Iterator[Outcome]:
        """Yield the outcomes of one iteration: backward, unscale_ if `unscale`, step and update."""
        self.zero_grad()
        yield self.did(self.backward, last)
        yield from self.calls(*["unscale_"] * unscale, "step", "update")

    def calls(self, *names: str) -> Iterator[Outcome]:
        """Yield the outcomes of the scaler's methods of these names, called in order."""
        for name in names:
            yield self.did(getattr(self.scaler, name), *(() if name == "update" else (self.optimizer,)))


class Judges(Protocol):
    """A `DeviationJudge`, or a comparison on ranks."""

    def judge(self, probe: Callable[[Library], Any], **sides: Any) -> None: ...


def judge_added_method(
    deviation: Judges,
    method: str,
    probe: Callable[[Library], Any],
    we_do: Callable[[Any], bool],
    scaler: str = "amp.GradScaler",
) -> None:
    """Judge a deviation: torch's scaler has no such method. `we_do` returns whether the subject's result is right."""
    lacking = "no such method"
    deviation.judge(
        lambda library: probe(library) if hasattr(library.find(scaler), method) else lacking,
        torch_does=lambda outcome: outcome is lacking,
        we_do=lambda outcome: outcome is not lacking and we_do(outcome),
    )


def entries(scaler: Any) -> dict[str, Any]:
    """Return the entries of torch's state dict. The clause `state_dict.five_entries` covers further entries."""
    return {name: value for name, value in scaler.state_dict().items() if name in _ENTRIES}


def pickled(scaler: Any, as_class: type | None = None) -> Any:
    """Pickle and unpickle a scaler, into `as_class` if given. Every object but the class itself is really pickled."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            # A class with an injected fault is not importable by its name.
            return "the scaler's class" if obj is type(scaler) else None

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> type:
            return as_class or type(scaler)

    written = BytesIO()
    Pickler(written).dump(scaler)
    return Unpickler(BytesIO(written.getvalue())).load()
