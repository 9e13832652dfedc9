"""User-defined optimizers, with an `_init_group` method and without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Collecting(torch.optim.Optimizer):
    """Like torch's optimizers: `_init_group` fills lists. It creates no state here, but may in subclasses."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def _init_group(self, group: dict[str, Any], parameters: list[Any], gradients: list[Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameters.append(parameter)
                gradients.append(parameter.grad)

    def update(self, group: dict[str, Any]) -> None:
        parameters: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        self._init_group(group, parameters, gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient * -group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.update(group)


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


class Returning(Collecting):
    """Gets the tensors as a result instead of passing lists, and changes the returned list."""

    def _init_group(self, group: dict[str, Any]) -> list[torch.Tensor]:
        return [parameter for parameter in group["params"] if parameter.grad is not None]

    def update(self, group: dict[str, Any]) -> None:
        parameters = self._init_group(group)
        parameters.reverse()
        for parameter in parameters:
            parameter.add_(parameter.grad * -group["lr"])


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


class KeepingElsewhere(Collecting):
    """The momenta are kept outside the optimizer's state."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.momenta: dict[int, torch.Tensor] = {}

    def _init_group(
        self, group: dict[str, Any], parameters: list[Any], gradients: list[Any], momenta: list[Any]
    ) -> None:
        super()._init_group(group, parameters, gradients)
        momenta += [
            self.momenta.setdefault(id(parameter), torch.zeros_like(parameter)) for parameter in parameters
        ]

    def update(self, group: dict[str, Any]) -> None:
        parameters: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        momenta: list[torch.Tensor] = []
        self._init_group(group, parameters, gradients, momenta)
        for parameter, gradient, momentum in zip(parameters, gradients, momenta, strict=True):
            parameter.add_(momentum.mul_(0.9).add_(gradient) * -group["lr"])


class Plain(torch.optim.Optimizer):
    """An optimizer without `_init_group`: the step does everything."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.add_(state["momentum"] * -group["lr"])


class OddlyNamed(Plain):
    """The attributes are named after parts of the name `_init_group`."""

    group = init = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * self.group * self.init)


class KeepingCount(Plain):
    """Counts steps in an attribute that changes the result."""

    taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * (group["lr"] / self.taken))


class CountingOnDevices(Collecting):
    """Like torch's optimizers with `capturable`: if it is set, step counts are on the devices of their parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["capturable"] = False

    def _init_group(self, group: dict[str, Any], parameters: list[Any], gradients: list[Any]) -> None:
        super()._init_group(group, parameters, gradients)
        for parameter in parameters:
            if not self.state[parameter]:
                count = parameter.detach().new_zeros(()) if group["capturable"] else torch.zeros(())
                self.state[parameter]["step"] = count


class PassingOver(Collecting):
    """`_init_group` checks which parameters have a state, and creates none."""

    def _init_group(self, group: dict[str, Any], parameters: list[Any], gradients: list[Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter not in self.state:
                parameters.append(parameter)
                gradients.append(parameter.grad)


class WritingGroups(Plain):
    """Counts steps in its groups, which have torch's option `capturable` and do not set it."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group |= {"capturable": False, "taken": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["taken"] += 1
        super().step(closure)


class AskingGroups(Plain):
    """Updates differently if a group is `capturable`, and has groups without the option."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            factor = 2.0 if group.get("capturable", False) else 1.0
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["lr"] * factor)
