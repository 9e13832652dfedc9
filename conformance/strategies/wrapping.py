"""Module trees and policies for wrapping, and a wrapper that records its arguments.

All are described by plain values, so that each library gets its own tree and policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe


class Block(nn.Module):
    """A user-defined module: submodules under any name, and a parameter."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        for index, part in enumerate(parts):
            self.add_module(f"part{index}", part)


class WiderBlock(Block):
    """A subclass, whose instances are instances of `Block` too."""


_LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3),
    "thin": lambda: nn.Linear(3, 1, bias=False),
    "norm": lambda: nn.LayerNorm(3),
    "batch": lambda: nn.BatchNorm1d(3),
    "relu": nn.ReLU,
    "attention": lambda: nn.MultiheadAttention(2, 1),
}
_GROUPS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "sequential": lambda parts: nn.Sequential(*parts),
    "list": nn.ModuleList,
    "dict": lambda parts: nn.ModuleDict({f"key{index}": part for index, part in enumerate(parts)}),
    "block": Block,
    "wider": WiderBlock,
}
CLASSES: dict[str, type[nn.Module]] = {
    "linear": nn.Linear,
    "norm": nn.LayerNorm,
    "batch": nn.BatchNorm1d,
    "attention": nn.MultiheadAttention,
    "sequential": nn.Sequential,
    "list": nn.ModuleList,
    "dict": nn.ModuleDict,
    "block": Block,
    "wider": WiderBlock,
}


@dataclass(frozen=True)
class Node:
    """A module: a leaf, a group of `parts`, or `shared`, which is the same module wherever it is used."""

    kind: str
    parts: tuple[Node, ...] = ()

    def build(self, shared: nn.Module) -> nn.Module:
        if self.kind == "shared":
            return shared
        if self.kind in _GROUPS:
            return _GROUPS[self.kind]([part.build(shared) for part in self.parts])
        return _LEAVES[self.kind]()


@dataclass(frozen=True)
class Tree:
    """A tree of modules. `ignored` and `frozen` select modules and parameters by number, modulo their count."""

    root: Node
    shared: Node = Node("linear")
    ignored: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    is_tied: bool = False  # linear layers of one shape share one weight

    def build(self) -> Built:
        root = self.root.build(self.shared.build(nn.ReLU()))
        if self.is_tied:
            _tie(root)
        modules, parameters = list(root.modules())[1:], list(root.parameters())
        for index in self.frozen:
            parameters[index % len(parameters)].requires_grad_(False)
        picked = {modules[index % len(modules)] for index in self.ignored}
        ignored = {inner for module in picked for inner in module.modules()}
        names = {module: name for name, module in root.named_modules()}
        return Built(root, ignored, {p for module in ignored for p in module.parameters()}, names)


def _tie(root: nn.Module) -> None:
    first: dict[Any, nn.Parameter] = {}
    for module in root.modules():
        if type(module) is nn.Linear:
            module.weight = first.setdefault(module.weight.shape, module.weight)


@dataclass(frozen=True)
class Built:
    root: nn.Module
    ignored: set[nn.Module]
    ignored_params: set[nn.Parameter]
    names: dict[nn.Module, str]  # names before wrapping


def _nodes(leaves: st.SearchStrategy[str], least: int = 0) -> st.SearchStrategy[Node]:
    groups = st.sampled_from(list(_GROUPS))
    return st.recursive(
        st.builds(Node, leaves),
        lambda inner: st.builds(Node, groups, st.lists(inner, min_size=least, max_size=3).map(tuple)),
        max_leaves=8,
    )


def trees(*, shares: bool) -> st.SearchStrategy[Tree]:
    """Draw trees of at least two modules and a parameter.

    Without `shares`, each module and parameter is in the tree once.
    """
    leaves = st.sampled_from([*_LEAVES, "shared"] if shares else list(_LEAVES))
    roots = st.lists(_nodes(leaves), min_size=1, max_size=4).map(lambda parts: Node("block", tuple(parts)))
    numbers = st.lists(st.integers(0, 20), max_size=2).map(tuple)
    return st.builds(
        Tree,
        roots,
        shared=_nodes(st.sampled_from(list(_LEAVES)), least=1) if shares else st.just(Node("linear")),
        ignored=numbers,
        is_tied=st.booleans() if shares else st.just(False),
    )


@dataclass(frozen=True)
class Policy:
    """A policy, given by the name of its class or function and its arguments. Classes are named as in `CLASSES`."""

    name: str
    classes: tuple[str, ...] = ()
    numel: int = 0
    leaves: tuple[str, ...] | None = None
    excluded: tuple[str, ...] | None = None
    answers: tuple[tuple[str, Any], ...] = ()  # a custom policy's answers by class

    def of(self, library: Library) -> Any:
        policy = getattr(library.distributed.fsdp.wrap, self.name)
        match self.name:
            case "ModuleWrapPolicy":
                return policy(_classes(self.classes))
            case "CustomPolicy":
                return policy(functools.partial(_answer, dict(self.answers)))
            case "transformer_auto_wrap_policy":
                return functools.partial(policy, transformer_layer_cls=_classes(self.classes))
            case "lambda_auto_wrap_policy":
                return functools.partial(policy, lambda_fn=functools.partial(_is_one_of, self.classes))
            case "size_based_auto_wrap_policy":
                class_names = {"force_leaf_modules": self.leaves, "exclude_wrap_modules": self.excluded}
                return functools.partial(
                    policy,
                    min_num_params=self.numel,
                    **{name: _classes(names) for name, names in class_names.items() if names is not None},
                )
            case _:
                return policy


def _classes(names: tuple[str, ...]) -> set[type[nn.Module]]:
    return {CLASSES[name] for name in names}


def _is_one_of(names: tuple[str, ...], module: nn.Module) -> bool:
    return isinstance(module, tuple(_classes(names)))


def _answer(answers: dict[str, Any], module: nn.Module) -> Any:
    return next((answer for name, answer in answers.items() if type(module) is CLASSES[name]), False)


_some_classes = st.lists(st.sampled_from(list(CLASSES)), max_size=3, unique=True).map(tuple)
_answers = st.dictionaries(
    st.sampled_from(list(CLASSES)),
    st.sampled_from(
        [True, False, {}, {"forward_prefetch": True}, {"forward_prefetch": 2, "mixed_precision": None}]
    ),
    max_size=4,
)

ONE_BY_ONE = st.one_of(
    st.builds(Policy, st.just("always_wrap_policy")),
    st.builds(Policy, st.just("transformer_auto_wrap_policy"), classes=_some_classes),
    st.builds(Policy, st.just("lambda_auto_wrap_policy"), classes=_some_classes),
    st.builds(
        Policy,
        st.just("size_based_auto_wrap_policy"),
        numel=st.integers(0, 40),
        leaves=st.none() | _some_classes,
        excluded=st.none() | _some_classes,
    ),
)
SEEING_THE_TREE = st.one_of(
    st.builds(Policy, st.just("ModuleWrapPolicy"), classes=_some_classes),
    st.builds(Policy, st.just("CustomPolicy"), answers=_answers.map(lambda answers: tuple(answers.items()))),
)


class StandInWrapper(nn.Module):
    """Stand-in for FullyShardedDataParallel."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def compare_wrap(compare: Compare, probe: Callable[[Any], Any]) -> Outcome:
    """Call the probe with both libraries' `distributed.fsdp.wrap`. Return the subject's outcome."""
    [outcome] = compare(lambda library: observe(probe, library.distributed.fsdp.wrap))
    return outcome


def noting(names: dict[nn.Module, str]) -> tuple[type[StandInWrapper], list[tuple[str, dict[str, Any]]]]:
    """Return a wrapper class, and the list to which it appends each module's name and its arguments."""
    notes: list[tuple[str, dict[str, Any]]] = []

    class Noting(StandInWrapper):
        def __init__(self, module: nn.Module, **kwargs: Any) -> None:
            notes.append((names[module], kwargs))
            super().__init__(module, **kwargs)

    return Noting, notes


def shape(root: nn.Module) -> list[tuple[str, str]]:
    """Return the name and class of the module at each place of a tree."""
    return [
        (name, "Wrapper" if isinstance(module, StandInWrapper) else type(module).__name__)
        for name, module in root.named_modules(remove_duplicate=False)
    ]
