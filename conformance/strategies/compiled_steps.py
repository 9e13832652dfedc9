"""Compiled steps of an optimizer, traced by one library's `OptimizerVariable`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.variables.builder
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters, get_static_address_type
from torch.optim import optimizer

from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.judge.tolerances import Tolerance
from conformance.strategies.optimizers import Make, draw_gradient, four_parameters

Script = Callable[["CompiledHarness"], Any]

# On CUDA and XPU, torch before 2.15 sets `capturable` in the user's groups, and Tandem leaves it as it is. The tests of
# the clause `optimizer.groups_stay` and of the deviation `optimizer_variable.groups_stay` judge it.
SET_BY_TORCH = ("capturable",)
# A changing number is a symbol of the graph, which multiplies like a float64 tensor.
ROUNDED = Tolerance(16, "four updates of terms near 1, with numbers that are symbols of a graph", terms=1.0)


def soon(cases: Iterable[str], *names: str) -> list[Any]:
    """Return the cases as parameters. All but `names` run in the full profile, because each compiles for a second."""
    return [
        pytest.param(case, marks=() if case in names else pytest.mark.profile("full"), id=case)
        for case in cases
    ]


@contextlib.contextmanager
def tracing_of(library: Library) -> Generator[None]:
    """Context manager that traces optimizers with the library's class and resets Dynamo before and after.

    Hooks that other tests have left on the steps of all optimizers are off, because Dynamo traces them too.
    """
    tracker = library.dynamo.OptimizerVariable
    torch._dynamo.reset()
    counters.clear()
    try:
        with (
            mock.patch.object(torch._dynamo.variables.builder, "OptimizerVariable", tracker),
            mock.patch.dict(optimizer._global_optimizer_pre_hooks, clear=True),
            mock.patch.dict(optimizer._global_optimizer_post_hooks, clear=True),
        ):
            yield
    finally:
        torch._dynamo.reset()


class GraphCounter:
    """Backend that counts its calls and, for each call, the inputs of the graph."""

    def __init__(self, backend: str) -> None:
        self._compile = lookup_backend(backend)
        self.inputs: list[int] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.inputs.append(len([node for node in module.graph.nodes if node.op == "placeholder"]))
        return self._compile(module, inputs)


class CompiledHarness:
    """An optimizer of a few parameters and its compiled step."""

    def __init__(
        self,
        make: Make,
        device: str = "cpu",
        backend: str = "eager",
        parameters: Iterable[torch.nn.Parameter] | None = None,
    ) -> None:
        self.parameters = four_parameters(device) if parameters is None else list(parameters)
        self.optimizer = make(self.parameters)
        self.graphs = GraphCounter(backend)
        self.without_gradient: set[int] = set()
        self.compiled_after: list[int] = []  # number of compiled graphs after each step
        self.recompile()

    def recompile(self) -> None:
        self.step = torch.compile(self.optimizer.step, backend=self.graphs)

    def set_gradients(self) -> None:
        number = 1000 * len(self.compiled_after)
        for index, parameter in enumerate(self.parameters):
            has_one = index not in self.without_gradient
            parameter.grad = draw_gradient(parameter, number + index) if has_one else None

    def train(self, steps: int = 1) -> CompiledHarness:
        for _ in range(steps):
            self.set_gradients()
            self.take_step()
        return self

    def take_step(self, *args: Any) -> Any:
        result = self.step(*args)
        self.compiled_after.append(len(self.graphs.inputs))
        return result

    def plain_train(self, steps: int = 1) -> CompiledHarness:
        """Train with the optimizer's own step, without compilation."""
        for _ in range(steps):
            self.set_gradients()
            self.optimizer.step()
            self.compiled_after.append(len(self.graphs.inputs))
        return self

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def values(self) -> dict[str, Any]:
        """Return parameters, gradients, state and groups as the user sees them, without `SET_BY_TORCH`."""
        state = self.optimizer.state
        gradients = [parameter.grad for parameter in self.parameters]
        return {
            "parameters": self.weights(),
            "gradients": [None if gradient is None else gradient.clone() for gradient in gradients],
            "state": [
                dict(state[param]) if param in state else None
                for group in self.optimizer.param_groups
                for param in group["params"]
            ],
            "groups": [
                {
                    name: value
                    for name, value in group.items()
                    if name != "params" and name not in SET_BY_TORCH
                }
                for group in self.optimizer.param_groups
            ],
        }

    def seen(self) -> dict[str, Any]:
        return self.values() | {
            "compiled after each step": self.compiled_after,
            "inputs of each graph": self.graphs.inputs,
            "graph breaks": sum(counters["graph_break"].values()),
        }

    def marks(self) -> dict[str, Any]:
        """Return how Dynamo marks each tensor as having a static address."""

        def mark(value: Any) -> str:
            return str(get_static_address_type(value)) if isinstance(value, torch.Tensor) else "no tensor"

        entries = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        return {
            "parameters": [mark(parameter) for parameter in self.parameters],
            "gradients": [mark(parameter.grad) for parameter in self.parameters],
            "state": [{name: mark(value) for name, value in entry.items()} for entry in entries],
        }


def outcome(
    library: Library, script: Script, make: Make, *, must_compile: bool = True, **settings: Any
) -> Outcome:
    """Run the script with this library's tracing. Return its outcome.

    Args:
        must_compile: the outcome is an AssertionError if nothing was compiled. Dynamo silently runs what it skips.
        settings: arguments of `CompiledHarness`.
    """

    def run() -> Any:
        harness = CompiledHarness(make, **settings)
        result = script(harness)
        assert harness.graphs.inputs or not must_compile, "nothing was compiled"
        return result

    with tracing_of(library):
        outcome = observe(run)
    # Drop warnings that imports of backends and torch's C++ give once per process, because only the first run gets
    # them.
    reported = [(kind, text) for kind, text in outcome.warned if kind != "DeprecationWarning"]
    often = tuple(warning for warning in reported if "Triggered internally" not in warning[1])
    return dataclasses.replace(outcome, warned=often)


def compare_compiled(compare: Compare, script: Script, make: Make, **settings: Any) -> Any:
    """Compare the script on both libraries, which must not raise. Return the subject's result."""
    [result] = compare(lambda library: outcome(library, script, make, **settings))
    assert result.raised is None, result.raised
    return result.value


def after(script: Callable[[CompiledHarness], Any]) -> Script:
    """Return a script that runs `script` and then reports everything observable of its harness."""

    def run(harness: CompiledHarness) -> Any:
        script(harness)
        return harness.seen()

    return run


def run_uncompiled(script: Script, make: Make, device: str) -> Outcome:
    """Run the script with the optimizer's own step instead of the compiled one."""

    def run() -> Any:
        harness = CompiledHarness(make, device)
        harness.step = harness.optimizer.step
        return script(harness)

    return observe(run)


def is_right(
    script: Script, make: Make, device: str, library: Library, tolerance: Tolerance = ROUNDED
) -> Any:
    """Return whether compiled and plain results agree, or the name of the error that compilation raised."""
    expected, actual = run_uncompiled(script, make, device), outcome(library, script, make, device=device)
    if actual.raised is not None:
        return actual.raised.kind.__name__
    try:
        assert_same_outcome(expected, actual, tolerance)
    except AssertionError:
        return False
    return True


def judge_values(
    deviation: DeviationJudge,
    script: Script,
    make: Make,
    device: str,
    torch_does: Sequence[Any] = (False,),
    *,
    may_agree: bool = False,
    tolerance: Tolerance = ROUNDED,
) -> None:
    """Judge a deviation: the subject's values are right, and `is_right` gives one of `torch_does` for torch.

    Args:
        may_agree: torch's values may be right, and then every subject's must be.
    """
    deviation.judge(
        lambda library: is_right(script, make, device, library, tolerance),
        torch_does=lambda value: value in torch_does,
        we_do=lambda value: value is True,
        may_agree=may_agree,
    )
