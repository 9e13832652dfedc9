"""Cases of writes to parameters and gradients between two calls of the model, with and without sharding.

Without sharding, one process runs the data of all ranks and averages their losses. A rank runs its own data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import gathered_parameters
from conformance.distributed.fsdp.lab import Lab, filled


class Forked(nn.Module):
    """Model with two inner units, of which one is only used if `forks`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.always = nn.Sequential(nn.Linear(4, 5))
        self.sometimes = nn.Sequential(nn.Linear(4, 5))
        filled(self)

    def forward(self, x: torch.Tensor, forks: bool = False) -> torch.Tensor:
        hidden = self.body(x).tanh()
        return self.always(hidden) + self.sometimes(hidden) if forks else self.always(hidden)


class Headed(nn.Module):
    """Model whose backward reads the weights of the outermost unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 2)
        filled(self)

    def forward(self, x: torch.Tensor, forks: bool = False) -> torch.Tensor:
        del forks
        return self.head(self.inner(x).tanh())


@dataclass(frozen=True)
class WritingTrainer:
    """Model, which may be sharded, and the ranks whose data it gets."""

    model: nn.Module
    ranks: Sequence[int]
    unsynced: Callable[[], contextlib.AbstractContextManager[None]]

    def loss(self, number: int, *, forks: bool = True) -> torch.Tensor:
        inputs = [torch.linspace(0, 1 + number, 15).view(5, 3) - rank * 0.25 for rank in self.ranks]
        losses = [self.model(x, forks).square().mean() / len(inputs) for x in inputs]
        return torch.stack(losses).sum()

    def backward(self, number: int, *, forks: bool = True) -> None:
        self.loss(number, forks=forks).backward()

    def step(self, *, of: str = "", fused: bool = False) -> None:
        """Step the parameters whose names contain `of` with torch's SGD, and clear all gradients."""
        stepped = [parameter for name, parameter in self.model.named_parameters() if of in name]
        torch.optim.SGD(stepped, 0.25, fused=fused).step()
        self.model.zero_grad()

    def output(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.ones(1, 3), forks=True)


def exchanged_in_place(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Write other values through `.data`, evaluate, and write the former values through `.data`."""
    parameters = list(trainer.model.parameters())
    former = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.mul_(0.5)
    outputs = [trainer.output()]
    for parameter, values in zip(parameters, former, strict=True):
        parameter.data.copy_(values)
    return [*outputs, trainer.output()]


def exchanged_after_forward(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Exchange the values in place for an evaluation, after a forward without a backward. Then run a backward."""
    trainer.loss(0)
    outputs = exchanged_in_place(trainer)
    trainer.backward(1)
    trainer.step()
    return [*outputs, trainer.output()]


def exchanged_by_memory(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Assign other memory to `.data`, evaluate, and assign the former memory."""
    parameters = list(trainer.model.parameters())
    outputs = [trainer.output()]
    former = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data * 0.5
    outputs.append(trainer.output())
    for parameter, values in zip(parameters, former, strict=True):
        parameter.data = values
    return [*outputs, trainer.output()]


def given_more_elements(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Assign memory with one more element to `.data` of the parameters of which this rank has elements."""
    for parameter in trainer.model.parameters():
        if parameter.numel() > 0:
            parameter.data = torch.ones(parameter.numel() + 1)
    return [trainer.output()]


def given_one_dimension(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Assign one-dimensional memory with as many elements to `.data`."""
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.reshape(-1) * 0.5
    return [trainer.output()]


def from_a_vector(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Set all parameters with torch.nn.utils' vector functions between two evaluations."""
    outputs = [trainer.output()]
    vector = nn.utils.parameters_to_vector(trainer.model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.5, trainer.model.parameters())
    return [*outputs, trainer.output()]


def memory_while_unsharded(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Assign other memory to `.data` while gradients accumulate and parameters are still unsharded."""
    with trainer.unsynced():
        trainer.backward(0)
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data * 0.5
    trainer.backward(1)
    trainer.step()
    return [trainer.output()]


def stepped_and_cleared(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Step with an optimizer that changes no version counter and clears its gradients.

    The model stays unsharded meanwhile for another backward.
    """
    trainer.backward(0)
    _unused = trainer.loss(1)
    optimizer = torch.optim.SGD(trainer.model.parameters(), 0.25, fused=True)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    optimizer.step()
    return [trainer.output()]


def stepped_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Step with an optimizer between a forward and its backward."""
    return _written_between(trainer, trainer.step)


def stepped_between_by_a_fused_one(trainer: WritingTrainer) -> list[torch.Tensor]:
    return _written_between(trainer, lambda: trainer.step(fused=True))


def changed_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Change the parameters in place between a forward and its backward."""

    def change() -> None:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.5)

    return _written_between(trainer, change)


def memory_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Assign other memory to `.data` between a forward and its backward."""

    def change() -> None:
        for parameter in trainer.model.parameters():
            parameter.data = parameter.data * 0.5

    return _written_between(trainer, change)


def _written_between(trainer: WritingTrainer, write: Callable[[], None]) -> list[torch.Tensor]:
    trainer.backward(0)
    loss = trainer.loss(1)
    write()
    loss.backward()
    return []


def stepped_beside(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Step, between a forward and its backward, parameters that the backward does not read."""
    trainer.backward(0)
    loss = trainer.loss(1)
    trainer.step(of="inner")
    loss.backward()
    trainer.step()
    return [trainer.output()]


def inferred_first(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Run the first forward in inference mode, and then train."""
    with torch.inference_mode():
        outputs = [trainer.output().clone()]
    trainer.backward(0)
    trainer.step()
    return [*outputs, trainer.output()]


def zeroed(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Zero averaged gradients together with gradients that are not averaged yet, and run another backward."""
    trainer.backward(0)
    with trainer.unsynced():
        trainer.backward(1)
    trainer.model.zero_grad(set_to_none=False)
    trainer.backward(2)
    trainer.step()
    return [trainer.output()]


def replaced_gradients(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Replace the memory of gradients, once averaged and once not, and accumulate onto it."""
    for context in (contextlib.nullcontext, trainer.unsynced):
        with context():
            trainer.backward(0)
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data * 0.5
        trainer.backward(1)
        trainer.step()
    return [trainer.output()]


def not_reached(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Run a backward that averages without a unit that took part in an earlier backward in no_sync."""
    with trainer.unsynced():
        trainer.backward(0)
    trainer.backward(1, forks=False)
    trainer.step()
    return [trainer.output()]


def moved(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Move the model to its current device while gradients wait to be averaged."""
    trainer.backward(0)
    with trainer.unsynced():
        trainer.backward(1)
    trainer.model.to(next(trainer.model.parameters()).device)
    trainer.backward(2)
    trainer.step()
    return [trainer.output()]


def cast_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Cast the model to another dtype between a forward and its backward."""
    loss = trainer.loss(0)
    trainer.model.double()
    loss.backward()
    return []


def flat_cast_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Cast the flat parameters by their private name, as accelerate does, between a forward and its backward."""
    loss = trainer.loss(0)
    model: Any = trainer.model
    for unit in type(model).fsdp_modules(model):
        if unit._flat_param is not None:
            unit._flat_param.data = unit._flat_param.data.double()
    loss.backward()
    return []


def called_with_others(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Call the model with other parameters by torch.func.functional_call, and then with its own."""
    others = {name: parameter.detach() * 0.5 for name, parameter in trainer.model.named_parameters()}
    with torch.no_grad():
        output = torch.func.functional_call(trainer.model, others, (torch.ones(1, 3), True))
    return [output, trainer.output()]


def given_a_parameter(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Replace a parameter by another one."""
    inner: Any = trainer.model
    inner.body.bias = nn.Parameter(torch.full((4,), 3.0))
    return [trainer.output()]


Does = Callable[[WritingTrainer], list[torch.Tensor]]
Makes = Callable[[], nn.Module]


def written(
    lab: Lab, *, does: Does, strategy: str, use_orig_params: bool, makes: Makes = Forked
) -> dict[str, Any]:
    """Run `does` on a sharded model. Return the outputs and the full parameters at the end."""
    model = lab.wrap(makes(), strategy=strategy, units=[nn.Sequential], use_orig_params=use_orig_params)
    outputs = does(WritingTrainer(model, [lab.rank.rank], model.no_sync))
    return {"outputs": outputs, "whole": gathered_parameters(lab.library, model)}


def written_without_sharding(does: Does, ranks: int, makes: Makes = Forked) -> dict[str, Any]:
    model = makes()
    outputs = does(WritingTrainer(model, range(ranks), contextlib.nullcontext))
    return {
        "outputs": outputs,
        "whole": {name: parameter.detach() for name, parameter in model.named_parameters()},
    }
