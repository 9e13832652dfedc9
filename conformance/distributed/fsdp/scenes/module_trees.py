"""Module trees for the sharding tests, described by plain values, so that every process builds the same model.

A part takes a tensor [rows, width] of any width, and row numbers for lookups. It knows the width of its output, so
parts can be combined freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.judge.sandbox import seeding

ROWS = 3  # rows of each rank's data in each forward
WIDTH = 3  # width of the model's input
LOOKUPS = 5  # rows of a lookup table
FORMS = ("tensor", "tuple", "list", "dict", "dataclass")
INPUT_FORMS = (*FORMS, "keyword")


@dataclass
class Boxed:
    """Dataclass that carries a tensor into or out of a module."""

    value: torch.Tensor
    label: str = "box"


def in_form(value: torch.Tensor, form: str) -> Any:
    """Return `value` in a container of type `form`, with non-tensor values. Other forms return `value` itself."""
    match form:
        case "tuple":
            return (value, None)
        case "list":
            return [value, "beside"]
        case "dict":
            return {"value": value, "count": 2}
        case "dataclass":
            return Boxed(value)
        case _:
            return value


def out_of_form(value: Any) -> torch.Tensor:
    if isinstance(value, (tuple, list)):
        return value[0]
    if isinstance(value, dict):
        return value["value"]
    return value.value if isinstance(value, Boxed) else value


class Part(nn.Module):
    """Base class of the modules in a tree. `out_width` is the width of the output."""

    def __init__(self, out_width: int) -> None:
        super().__init__()
        self.out_width = out_width

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> Any:
        raise NotImplementedError


class Affine(Part):
    def __init__(self, in_width: int, width: int, bias: bool) -> None:
        super().__init__(width)
        self.inner = nn.Linear(in_width, width, bias=bias)

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Normed(Part):
    def __init__(self, in_width: int) -> None:
        super().__init__(in_width)
        self.inner = nn.LayerNorm(in_width, eps=0.1)

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Batched(Part):
    """Module with floating-point and integer buffers that its forward changes."""

    def __init__(self, in_width: int) -> None:
        super().__init__(in_width)
        self.inner = nn.BatchNorm1d(in_width, eps=0.1)

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Lookup(Part):
    def __init__(self, in_width: int, width: int) -> None:
        super().__init__(in_width + width)
        self.inner = nn.Embedding(LOOKUPS, width)

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.inner(ids)], dim=-1)


class Scaled(Part):
    """Module with one parameter of two elements, so that some ranks may have none of them."""

    def __init__(self, in_width: int) -> None:
        super().__init__(in_width)
        self.factor = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        return x * self.factor.sum()


class Tied(Part):
    """Two linear modules that share one weight."""

    def __init__(self, in_width: int) -> None:
        super().__init__(in_width)
        self.one = nn.Linear(in_width, in_width)
        self.other = nn.Linear(in_width, in_width, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.one(x)))


class Idle(Part):
    """Module with a submodule that is never called."""

    def __init__(self, in_width: int) -> None:
        super().__init__(in_width)
        self.inner = nn.Linear(in_width, 2)
        self.shift = nn.Parameter(torch.zeros(in_width))

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class Bare(Part):
    """Module without parameters and buffers."""

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        return x.sin()


class Counted(Part):
    """Module without parameters whose forward changes floating-point and integer buffers and reads `shift`."""

    def __init__(self, in_width: int) -> None:
        super().__init__(in_width)
        self.inner = nn.BatchNorm1d(in_width, eps=0.1, affine=False)
        self.register_buffer("shift", torch.full((in_width,), 0.25), persistent=False)

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) + self.shift
        if self.training:
            self.shift = self.shift * 0.5
        return y


LEAVES = (Affine, Normed, Batched, Lookup, Scaled, Tied, Idle, Bare, Counted)


@dataclass(frozen=True)
class Leaf:
    """Description of a leaf module. `width` only applies to types whose output width is free."""

    kind: str
    width: int = 1
    frozen: str = "none"  # parameters without gradients: none, first or all

    def build(self, in_width: int) -> Part:
        part = _PARTS[self.kind](in_width, self.width)
        parameters = list(part.parameters())
        for parameter in parameters if self.frozen == "all" else parameters[: self.frozen == "first"]:
            parameter.requires_grad_(False)
        return part


_PARTS: dict[str, Callable[[int, int], Part]] = {
    "affine": lambda in_width, width: Affine(in_width, width, bias=True),
    "linear": lambda in_width, width: Affine(in_width, width, bias=False),
    "lookup": Lookup,
    "normed": lambda in_width, _: Normed(in_width),
    "batched": lambda in_width, _: Batched(in_width),
    "scaled": lambda in_width, _: Scaled(in_width),
    "tied": lambda in_width, _: Tied(in_width),
    "idle": lambda in_width, _: Idle(in_width),
    "bare": lambda in_width, _: Bare(in_width),
    "counted": lambda in_width, _: Counted(in_width),
}


@dataclass(frozen=True)
class ModuleGroup:
    """Parts that are called one after the other (`chain`), or side by side on the same input (`branches`)."""

    parts: tuple[Leaf | ModuleGroup, ...]
    kind: str = "chain"
    calls: int = 1  # number of times that forward calls the parts
    form: str = "tensor"  # container of the output, a member of FORMS
    checkpointing: str = "none"  # values: none, reentrant, plain; applied to each part

    def build(self, in_width: int) -> Part:
        return (Chain if self.kind == "chain" else Branches)(self, in_width)

    def leaves(self) -> Iterator[Leaf]:
        for part in self.parts:
            yield from part.leaves() if isinstance(part, ModuleGroup) else (part,)

    def groups(self) -> Iterator[ModuleGroup]:
        yield self
        for part in self.parts:
            if isinstance(part, ModuleGroup):
                yield from part.groups()


class _Grouped(Part):
    def __init__(self, group: ModuleGroup, in_width: int) -> None:
        super().__init__(in_width)
        self.group = group
        self.parts = nn.ModuleList()

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> Any:
        calls = [self.once(x * 0.5**call, ids) for call in range(self.group.calls)]
        return in_form(torch.stack(calls).sum(0), self.group.form)

    def once(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def call(self, part: nn.Module, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.group.checkpointing == "none":
            return out_of_form(part(x, ids=ids))
        is_reentrant = self.group.checkpointing == "reentrant"
        return checkpoint(lambda x: out_of_form(part(x, ids=ids)), x, use_reentrant=is_reentrant)


class Chain(_Grouped):
    def __init__(self, group: ModuleGroup, in_width: int) -> None:
        super().__init__(group, in_width)
        for description in group.parts:
            part = description.build(self.out_width)
            self.out_width = part.out_width
            self.parts.append(part)

    def once(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = self.call(part, x, ids)
        return x


class Branches(_Grouped):
    def __init__(self, group: ModuleGroup, in_width: int) -> None:
        super().__init__(group, in_width)
        self.parts.extend(description.build(in_width) for description in group.parts)
        self.out_width = sum(part.out_width for part in self.parts)

    def once(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.call(part, x, ids) for part in self.parts], dim=-1)


@dataclass(frozen=True)
class ModuleTree:
    """Description of a complete model: `body`, followed by a linear head unless `head` is "none"."""

    body: ModuleGroup
    takes: str = "tensor"  # form of the input, a member of INPUT_FORMS
    returns: str = "tensor"  # form of the output
    dtype: torch.dtype = torch.float64
    seed: int = 0
    head: str = "trained"  # values: trained, frozen, none

    def build(self, seed_shift: int = 0) -> TreeModel:
        """Build the model. The values depend only on the seed of the tree and on `seed_shift`."""
        model = TreeModel(self).to(self.dtype)
        generator = seeding.generator(self.seed + 1000 * seed_shift)
        with torch.no_grad():
            for parameter in model.parameters():
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values * 0.5 + 0.25)
        return model

    def batch(self, number: int, rank: int) -> Batch:
        """Return the input of `rank` in its forward number `number`."""
        generator = seeding.generator(self.seed + 7 + 100 * number + 10_000 * rank)
        x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(self.dtype)
        return Batch(x.requires_grad_(), torch.randint(LOOKUPS, (ROWS,), generator=generator))


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    ids: torch.Tensor

    def on(self, device: torch.device) -> Batch:
        """Return the batch on `device`, for a module that is called without a root that moves its inputs."""
        return Batch(self.x.detach().to(device).requires_grad_(), self.ids.to(device))


class TreeModel(nn.Module):
    def __init__(self, tree: ModuleTree) -> None:
        super().__init__()
        self.tree = tree
        self.body = tree.body.build(WIDTH)
        self.head = nn.Identity() if tree.head == "none" else nn.Linear(self.body.out_width, 2)
        self.head.requires_grad_(tree.head == "trained")

    def forward(self, inputs: Any, *, ids: torch.Tensor) -> Any:
        x = out_of_form(self.body(out_of_form(inputs), ids=ids))
        return in_form(self.head(x), self.tree.returns)


def call(model: nn.Module, tree: ModuleTree, batch: Batch) -> Any:
    if tree.takes == "keyword":
        return model(inputs=batch.x, ids=batch.ids)
    return model(in_form(batch.x, tree.takes), ids=batch.ids)


def loss_of(output: Any) -> torch.Tensor:
    """Return a loss whose gradients stay bounded for any output, so that no training diverges."""
    y = out_of_form(output).double()
    return (1 + y.square()).sqrt().mean() + 0.5 * y.mean()
