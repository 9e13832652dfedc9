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
