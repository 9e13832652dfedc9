"""The environment of test programs on ranks: a rank, a library, and a small model that the library wraps.

A program is a function `program(lab, **arguments)` in a `*_cases` module. The parent process gets an `Outcome` from
each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import FSDP, Setup, wrapped
from conformance.distributed.fsdp.module_trees import Leaf, ModuleGroup, ModuleTree, call, loss_of
from conformance.judge.library import Library, LookupFailed, NotProvided, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

# Wrapped leaf by leaf, the model has units in a chain that is not a unit, buffers, and a unit with fewer elements than
# three ranks.
_LOOKED_UP = Leaf("lookup", 3)
TREE = ModuleTree(
    ModuleGroup(
        (Leaf("affine", 4), ModuleGroup((_LOOKED_UP, Leaf("batched")), form="tuple"), Leaf("scaled"))
    ),
    dtype=torch.float32,
    seed=3,
)
# The same without batch statistics, which need more precision than low-precision dtypes have.
SIMPLE = replace(
    TREE, body=ModuleGroup((Leaf("affine", 4), ModuleGroup((_LOOKED_UP,), form="tuple"), Leaf("scaled")))
)


ONE_UNIT = Setup()


class Lab:
    """A rank with a library and a model of `tree`: `plain` is the model as built, `model` is wrapped by `setup`."""

    def __init__(
        self,
        rank: Rank,
        library: Library,
        setup: Setup = ONE_UNIT,
        tree: ModuleTree = TREE,
        model: Any = None,
    ) -> None:
        self.rank, self.library, self.setup, self.tree = rank, library, setup, tree
        if model is not None:
            self.model = model

    @functools.cached_property
    def plain(self) -> Any:
        return self.tree.build()

    @functools.cached_property
    def model(self) -> Any:
        return self.wrapped(self.plain)

    def wrapped(self, model: nn.Module, setup: Setup | None = None) -> Any:
        return wrapped(self.rank, self.library, model, setup or self.setup)

    def wrap(self, module: Any, *, strategy: str = "", units: Collection[type] = (), **arguments: Any) -> Any:
        """Wrap `module` by calling the constructor. Submodules of the classes in `units` become units."""
        arguments.setdefault("device_id", self.rank.device)
        if strategy:
            arguments["sharding_strategy"] = self.api.ShardingStrategy[strategy]
        if units:
            arguments["auto_wrap_policy"] = self.api.wrap.ModuleWrapPolicy(set(units))
        return self.fsdp(module, **arguments)

    @property
    def api(self) -> Any:
        return self.library.distributed.fsdp

    @property
    def fsdp(self) -> Any:
        return self.library.find(FSDP)

    @property
    def units(self) -> list[Any]:
        return self.fsdp.fsdp_modules(self.model)

    def forward(self, number: int = 0) -> Any:
        batch = self.tree.batch(number, self.rank.rank)
        # The root moves no tensors of user objects to the device.
        if self.tree.takes == "dataclass":
            batch = batch.on(self.rank.device)
        return call(self.model, self.tree, batch)

    def backward(self, number: int = 0) -> torch.Tensor:
        loss = loss_of(self.forward(number))
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


Program = Callable[..., Any]


def run(
    rank: Rank,
    *,
    library: str,
    program: Program,
    setup: Setup,
    tree: ModuleTree,
    arguments: Mapping[str, Any],
) -> Outcome:
    """Run a program on this rank. Return its outcome."""
    lab = Lab(rank, load_library(library), setup, tree)
    return observe(lambda: program(lab, **arguments))


def tried(call: Callable[[], Any]) -> Any:
    """Return the result of `call`, or the type and text of the error that it raised.

    Use it for calls after which the program continues.
    """
    try:
        return call()
    except (NotProvided, LookupFailed):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def filled(module: nn.Module) -> Any:
    """Fill the parameters with numbers from -1 to 1, with different values for each parameter."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            values = torch.linspace(-1, 1, parameter.numel() + number, dtype=torch.float64)[number:]
            parameter.copy_(values.view(parameter.shape))
    return module
