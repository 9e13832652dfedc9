"""One small wrapped model on every rank, and what can be asked of it; what a rank saw comes back as an `Outcome`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import FSDP, Setup, groups_put_back, wrapped
from conformance.distributed.fsdp.module_trees import Group, Leaf, ModuleTree, call, loss_of
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

# Wrapped leaf by leaf: units within a chain that is none, buffers, and a unit with fewer elements than three ranks.
_LOOKED_UP = Leaf("lookup", 3)
TREE = ModuleTree(
    Group((Leaf("affine", 4), Group((_LOOKED_UP, Leaf("batched")), form="tuple"), Leaf("scaled"))),
    dtype=torch.float32,
    seed=3,
)
# The same without statistics over a batch, which need more than low precision has.
SIMPLE = replace(TREE, body=Group((Leaf("affine", 4), Group((_LOOKED_UP,), form="tuple"), Leaf("scaled"))))


@dataclass
class Lab:
    """A rank's model and what it is trained with."""

    rank: Rank
    library: Library
    setup: Setup
    model: Any
    tree: ModuleTree = TREE

    @functools.cached_property
    def fsdp(self) -> Any:
        return self.library.find(FSDP)

    @property
    def units(self) -> list[Any]:
        return self.fsdp.fsdp_modules(self.model)

    def forward(self, number: int = 0) -> Any:
        return call(self.model, self.tree, self.tree.batch(number, self.rank.rank))

    def backward(self, number: int = 0) -> torch.Tensor:
        loss = loss_of(self.forward(number))
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


Probe = Callable[..., Any]


def probe(
    rank: Rank,
    *,
    library: str,
    setup: Setup,
    asks: Probe,
    arguments: Mapping[str, Any] | None = None,
    tree: ModuleTree = TREE,
) -> Outcome:
    """What `asks(lab, **arguments)` does to a freshly wrapped model; `asks` is a function of a module, by name."""
    found, plain = load_library(library), tree.build()

    def run() -> Any:
        lab = Lab(rank, found, setup, wrapped(rank, found, plain, setup), tree)
        return asks(lab, **(arguments or {}))

    with groups_put_back():
        return observe(run)


def tried(call: Callable[[], Any]) -> Any:
    """What a call returns, or the type and text of what it raises: for calls after which the probe goes on."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
