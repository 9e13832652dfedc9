"""User-defined optimizers: features that torch.optim does not use and that torch compiles wrongly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.surface import is_torch_in
from conformance.strategies.compiled_steps import (
    CompiledHarness,
    after,
    compare_compiled,
    is_right,
    judge_values,
    outcome,
    soon,
)
from conformance.strategies.optimizers import Make, against_eager, maker
from conformance.strategies.user_optimizers import Collecting, KeepingElsewhere, Plain


class ToldWhatIsComputed(Collecting):
    """Passes a tensor that the step computes to `_init_group`."""

    def _init_group(
        self, group: dict[str, Any], parameters: list[Any], gradients: list[Any], most: torch.Tensor
    ) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameters.append(parameter)
                gradients.append(parameter.grad / most)

    def update(self, group: dict[str, Any]) -> None:
        parameters: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        self._init_group(group, parameters, gradients, group["params"][0].grad.abs().max())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient * -group["lr"])


STEPS = 4
KINDS = (Collecting, ToldWhatIsComputed, KeepingElsewhere, Plain)


def trained(harness: CompiledHarness) -> list[torch.Tensor]:
    return harness.train(STEPS).weights()


@clause("dynamo.optimizer.init_group.users")
@pytest.mark.parametrize("make", KINDS)
def test_user_optimizers_match_compiled_torch(compare: Compare, device: str, make: Make) -> None:
    compare_compiled(compare, after(lambda harness: harness.train(STEPS)), make, device=device)


@clause("dynamo.optimizer.init_group.users")
@pytest.mark.parametrize("make", KINDS)
def test_user_optimizers_match_eager_steps(subject: Library, device: str, make: Make) -> None:
    def script(harness: CompiledHarness) -> list[torch.Tensor]:
        harness.train(2)
        harness.optimizer.param_groups[0]["lr"] = 0.3
        harness.without_gradient = {2}
        return trained(harness)

    assert is_right(script, make, device, subject) is True


@clause("dynamo.optimizer.init_group.users")
@pytest.mark.profile("full")
def test_optimizer_made_in_compiled_function_matches_torch(compare: Compare, device: str) -> None:
    def script(harness: CompiledHarness) -> Any:
        def run() -> None:
            torch.optim.SGD(harness.parameters, lr=0.1, momentum=0.9).step()

        harness.step = torch.compile(run, backend=harness.graphs)
        return harness.train(2).weights()

    compare_compiled(compare, script, Plain, device=device)


class ByKeyword(Collecting):
    """Passes the lists by keyword."""

    def update(self, group: dict[str, Any]) -> None:
        parameters: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        self._init_group(group, parameters=parameters, gradients=gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient * -group["lr"])


class IntoItsOwn(Collecting):
    """Passes a list that is an attribute, in which the caller finds the updated parameters and which it clears."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.updated: list[torch.Tensor] = []

    def update(self, group: dict[str, Any]) -> None:
        gradients: list[torch.Tensor] = []
        self._init_group(group, self.updated, gradients)
        for parameter, gradient in zip(self.updated, gradients, strict=True):
            parameter.add_(gradient * -group["lr"])


@clause("dynamo.optimizer.init_group.arguments")
@pytest.mark.deviation("optimizer_variable.arguments_of_init_group")
def test_init_group_fills_list_of_optimizer(deviation: DeviationJudge, device: str) -> None:
    def script(harness: CompiledHarness) -> Any:
        updated = []
        for lacking in (set(), {1}):
            harness.without_gradient = lacking
            harness.train()
            updated.append([parameter.detach().clone() for parameter in harness.optimizer.updated])
            harness.optimizer.updated.clear()
        return updated, harness.weights()

    judge_values(deviation, script, IntoItsOwn, device, torch_does=("AssertionError",))


class IntoItsGroup(Collecting):
    """Passes a list of numbers that is stored in the group."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["places"] = []

    def _init_group(self, group: dict[str, Any], parameters: list[Any], places: list[int]) -> None:
        for place, parameter in enumerate(group["params"], 1):
            if parameter.grad is not None:
                parameters.append(parameter)
                places.append(place)

    def update(self, group: dict[str, Any]) -> None:
        parameters: list[torch.Tensor] = []
        self._init_group(group, parameters, group["places"])
        for parameter, place in zip(parameters, group["places"], strict=True):
            parameter.add_(parameter.grad * (-group["lr"] * place))


@clause("dynamo.optimizer.init_group.arguments")
@pytest.mark.deviation("optimizer_variable.arguments_of_init_group")
def test_init_group_fills_list_of_group(deviation: DeviationJudge, device: str) -> None:
    def script(harness: CompiledHarness) -> Any:
        places = harness.train().optimizer.param_groups[0]["places"]
        return list(places), harness.weights()

    judge_values(
        deviation, script, IntoItsGroup, device, torch_does=("IndexError", "InternalTorchDynamoError")
    )


class IntoFilled(Collecting):
    """Passes a list that is not empty."""

    def _init_group(self, group: dict[str, Any], factors: list[float]) -> None:
        factors.extend(0.5 for parameter in group["params"] if parameter.grad is not None)

    def update(self, group: dict[str, Any]) -> None:
        factors = [1.0]
        self._init_group(group, factors)
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad * -group["lr"] * len(factors))


class Returning(Collecting):
    """Gets the tensors as a result instead of passing lists, and changes the returned list."""

    def _init_group(self, group: dict[str, Any]) -> list[torch.Tensor]:
        return [parameter for parameter in group["params"] if parameter.grad is not None]

    def update(self, group: dict[str, Any]) -> None:
        parameters = self._init_group(group)
        parameters.reverse()
        for parameter in parameters:
            parameter.add_(parameter.grad * -group["lr"])


@clause("dynamo.optimizer.init_group.arguments")
@pytest.mark.deviation("optimizer_variable.arguments_of_init_group")
@pytest.mark.parametrize(
    ("make", "error"), [(ByKeyword, False), (IntoFilled, False), (Returning, "AssertionError")]
)
def test_unusual_arguments_of_init_group_match_eager_steps(
    deviation: DeviationJudge, device: str, make: Make, error: Any
) -> None:
    judge_values(deviation, trained, make, device, torch_does=(error,))


class RatesHandedOver(Collecting):
    """`_init_group` collects numbers of the group."""

    def _init_group(self, group: dict[str, Any], parameters: list[Any], rates: list[float]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameters.append(parameter)
                rates.append(group["lr"])

    def update(self, group: dict[str, Any]) -> None:
        parameters: list[torch.Tensor] = []
        rates: list[float] = []
        self._init_group(group, parameters, rates)
        for parameter, rate in zip(parameters, rates, strict=True):
            parameter.add_(parameter.grad * -rate)


@clause("dynamo.optimizer.guards.schedules")
@pytest.mark.deviation("optimizer_variable.state_of_each_parameter")
def test_rate_collected_by_init_group_is_guarded(deviation: DeviationJudge, device: str) -> None:
    def script(harness: CompiledHarness) -> list[torch.Tensor]:
        for rate in (0.2, 0.3, 0.4):
            harness.train().optimizer.param_groups[0]["lr"] = rate
        return trained(harness)

    judge_values(deviation, script, RatesHandedOver, device)


@clause("dynamo.optimizer.guards.schedules")
def test_tensor_rate_collected_by_init_group_matches_eager_steps(subject: Library, device: str) -> None:
    def script(harness: CompiledHarness) -> list[torch.Tensor]:
        harness.train(2).optimizer.param_groups[0]["lr"].fill_(0.2)
        return trained(harness)

    def with_tensor(parameters: Iterable[torch.Tensor]) -> RatesHandedOver:
        return RatesHandedOver(parameters, lr=torch.tensor(0.1))

    assert is_right(script, with_tensor, device, subject) is True


class ScaledByState(Collecting):
    """`_init_group` collects a number or None from each parameter's state."""

    def _init_group(self, group: dict[str, Any], parameters: list[Any], scales: list[Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameters.append(parameter)
                scales.append(self.state[parameter].setdefault("scale", None))

    def update(self, group: dict[str, Any]) -> None:
        parameters: list[torch.Tensor] = []
        scales: list[Any] = []
        self._init_group(group, parameters, scales)
        for parameter, scale in zip(parameters, scales, strict=True):
            parameter.add_(parameter.grad * -(0.1 if scale is None else scale))


@clause("dynamo.optimizer.guards.state")
@pytest.mark.deviation("optimizer_variable.state_of_each_parameter")
@pytest.mark.parametrize("index", [0, pytest.param(2, marks=pytest.mark.profile("full")), 3])
def test_state_that_init_group_collects(deviation: DeviationJudge, device: str, index: int) -> None:
    def script(harness: CompiledHarness) -> list[torch.Tensor]:
        for parameter in harness.parameters:
            harness.optimizer.state[parameter]["scale"] = 1.0
        for value in (2.0, 3.0, None):
            harness.train().optimizer.state[harness.parameters[index]]["scale"] = value
        return trained(harness)

    judge_values(deviation, script, ScaledByState, device)


class NestedMomenta(KeepingElsewhere):
    """Each parameter's momentum is in a container in its state."""

    nest: Any

    def _init_group(
        self, group: dict[str, Any], parameters: list[Any], gradients: list[Any], momenta: list[Any]
    ) -> None:
        Collecting._init_group(self, group, parameters, gradients)
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["nested"] = self.nest(torch.zeros_like(parameter))
            momenta += tree_leaves(self.state[parameter])


NESTS = {
    "list": lambda tensor: [tensor],
    "tuple": lambda tensor: (tensor,),
    "dict": lambda tensor: {"momentum": tensor},
    "nested": lambda tensor: {0: [(tensor,)]},
}


@clause("dynamo.optimizer.guards.state")
@pytest.mark.deviation("optimizer_variable.state_of_each_parameter")
@pytest.mark.parametrize("nest", soon(NESTS, "tuple", "dict"))
def test_containers_in_state_are_guarded(deviation: DeviationJudge, device: str, nest: str) -> None:
    def make(parameters: Iterable[torch.Tensor]) -> NestedMomenta:
        optimizer = NestedMomenta(parameters)
        optimizer.nest = NESTS[nest]
        return optimizer

    def script(harness: CompiledHarness) -> list[torch.Tensor]:
        state = harness.train(2).optimizer.state
        for parameter in harness.parameters[2:]:
            state[parameter]["nested"] = NESTS[nest](torch.full_like(parameter, 3.0))
        return trained(harness)

    judge_values(deviation, script, make, device)


class SkipsParametersWithState(Collecting):
    """`_init_group` checks which parameters have a state, and creates none."""

    def _init_group(self, group: dict[str, Any], parameters: list[Any], gradients: list[Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter not in self.state:
                parameters.append(parameter)
                gradients.append(parameter.grad)


@clause("dynamo.optimizer.guards.state")
def test_state_from_user_is_noticed_without_init_group_state(subject: Library, device: str) -> None:
    """`_init_group` creates no state, and skips a parameter that the user gives a state."""

    def script(harness: CompiledHarness) -> list[torch.Tensor]:
        state = harness.train(2).optimizer.state
        state[harness.parameters[1]]["is_frozen"] = True
        return trained(harness)

    assert is_right(script, SkipsParametersWithState, device, subject) is True
    values = outcome(subject, after(script), SkipsParametersWithState, device=device).value
    assert values["compiled after each step"] == [1, 1, 2, 2, 2, 2]


class CountingSteps(Collecting):
    """The step counts are Python numbers, under torch's name "step"."""

    def _init_group(self, group: dict[str, Any], parameters: list[Any], gradients: list[Any]) -> None:
        super()._init_group(group, parameters, gradients)
        for parameter in parameters:
            self.state[parameter].setdefault("step", 0)

    def update(self, group: dict[str, Any]) -> None:
        parameters: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        self._init_group(group, parameters, gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self.state[parameter]["step"] += 1
            parameter.add_(gradient * (-group["lr"] / self.state[parameter]["step"]))


@clause("dynamo.optimizer.init_group.users")
@pytest.mark.deviation("optimizer_variable.step_counts_of_python")
def test_python_step_counts_match_eager_steps(deviation: DeviationJudge, device: str) -> None:
    judge_values(deviation, trained, CountingSteps, device, torch_does=("InternalTorchDynamoError",))


@clause("dynamo.optimizer.init_group.errors")
def test_errors_of_init_group(subject: Library, reference: Library, device: str) -> None:
    """The error is Adam's for sparse gradients, whose type Dynamo may wrap."""

    def script(harness: CompiledHarness) -> None:
        harness.set_gradients()
        for parameter in harness.parameters:
            parameter.grad = parameter.grad.to_sparse()
        harness.take_step()

    for library in (reference, subject):
        assert "sparse" in str(outcome(library, script, maker("Adam"), device=device).raised)


@clause("dynamo.optimizer.init_group.pending_changes")
@pytest.mark.deviation("optimizer_variable.closures_of_foreach_steps")
@pytest.mark.parametrize("way", ["defaults", "foreach"])
@pytest.mark.parametrize("name", soon(["Adam", "AdamW", "NAdam", "Adamax", "SGD"], "Adam", "SGD"))
def test_gradients_of_closures(deviation: DeviationJudge, device: str, name: str, way: str) -> None:
    """Closures set gradients, and the step returns their result. Most steps are single-tensor code by default."""
    is_right_in_torch = way == "defaults" or name == "SGD" or (name != "Adamax" and is_torch_in(">=2.15"))

    def script(harness: CompiledHarness) -> Any:
        def closure() -> torch.Tensor:
            for parameter in harness.parameters:
                parameter.grad = torch.ones_like(parameter)
            return torch.tensor(7.0)

        results = [float(harness.take_step(closure)) for _ in range(3)]
        return results, harness.weights(), [parameter.grad for parameter in harness.parameters]

    judge_values(
        deviation,
        script,
        maker(name, way),
        device,
        torch_does=("TorchRuntimeError", "TypeError"),
        may_agree=is_right_in_torch,
        tolerance=against_eager(name),
    )
