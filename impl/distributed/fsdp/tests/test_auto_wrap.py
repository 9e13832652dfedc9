"""Auto-wrapping by `impl`, compared with torch's by a stand-in wrapper, and the owners of shared parameters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._wrap_utils as theirs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp.api import MixedPrecision

from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.strategies.wrapping import (
    ONE_BY_ONE,
    SEEING_THE_TREE,
    Block,
    Built,
    Node,
    Policy,
    StandInWrapper,
    Tree,
    noting,
    shape,
    trees,
)
from impl.distributed.fsdp._params.param_assignment import ParamAssignment
from impl.distributed.fsdp.wrap import auto_wrap

OURS, TORCHS = load_library("impl"), load_library("torch")
MIXED = MixedPrecision(torch.bfloat16)


def kwargs_of(mixed_precision: MixedPrecision | None = None, use_orig_params: bool = True) -> dict[str, Any]:
    return {"mixed_precision": mixed_precision, "use_orig_params": use_orig_params, "forward_prefetch": False}


def wrapped_by_us(built: Built, policy: Any, kwargs: dict[str, Any]) -> Outcome:
    wrapper_cls, notes = noting(built.names)

    def run() -> Any:
        auto_wrap(
            built.root,
            policy,
            ignored_modules=built.ignored,
            ignored_params=built.ignored_params,
            wrapper_cls=wrapper_cls,
            wrapper_kwargs=kwargs,
        )
        return notes, shape(built.root)

    return observe(run)


def wrapped_by_torch(built: Built, policy: Any, kwargs: dict[str, Any]) -> Outcome:
    wrapper_cls, notes = noting(built.names)

    def run() -> Any:
        theirs._auto_wrap(built.root, policy, built.ignored, built.ignored_params, kwargs, wrapper_cls)
        for _, given_kwargs in notes:
            given_kwargs.pop("auto_wrap_policy", None)  # torch passes None, `impl` passes nothing
        return notes, shape(built.root)

    return observe(run)


@pytest.mark.parametrize("answers", [(), (False,), (True, False), (False, True, True), (0, "yes")], ids=str)
def test_any_of_several_policies(answers: tuple[Any, ...]) -> None:
    """Policies after the first match are not called."""

    def outcome(library: Library) -> Outcome:
        calls: list[tuple[int, dict[str, Any]]] = []

        def numbered(number: int, **question: Any) -> Any:
            calls.append((number, {**question, "module": type(question["module"]).__name__}))
            return answers[number]

        policies = (functools.partial(numbered, number) for number in range(len(answers)))
        policy = library.distributed.fsdp.wrap._or_policy
        return observe(lambda: (policy(nn.ReLU(), False, 7, policies=policies), calls))

    assert_same_outcome(outcome(TORCHS), outcome(OURS))


@given(
    tree=trees(shares=False),
    policy=st.one_of(ONE_BY_ONE, SEEING_THE_TREE),
    owner=st.sampled_from([OURS, TORCHS]),
    mixed_precision=st.sampled_from(
        [None, MIXED, MixedPrecision(_module_classes_to_ignore=(nn.LayerNorm, Block))]
    ),
    use_orig_params=st.booleans(),
)
def test_wraps_what_torch_wraps(
    tree: Tree, policy: Policy, owner: Library, mixed_precision: MixedPrecision | None, use_orig_params: bool
) -> None:
    """Torch's policies are taken too."""
    kwargs = kwargs_of(mixed_precision, use_orig_params)
    assert_same_outcome(
        wrapped_by_torch(tree.build(), policy.of(TORCHS), dict(kwargs)),
        wrapped_by_us(tree.build(), policy.of(owner), kwargs),
    )
    assert kwargs == kwargs_of(mixed_precision, use_orig_params)


@given(tree=trees(shares=False), policy=ONE_BY_ONE, mixed_precision=st.sampled_from([None, MIXED]))
def test_asks_what_torch_asks(tree: Tree, policy: Policy, mixed_precision: MixedPrecision | None) -> None:
    def questions(wrapped_by: Any) -> list[Any]:
        built, modules = tree.build(), list[Any]()

        def noted(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            modules.append((built.names[module], recurse, nonwrapped_numel))
            return policy.of(TORCHS)(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)

        wrapped_by(built, noted, kwargs_of(mixed_precision))
        return modules

    assert questions(wrapped_by_us) == questions(wrapped_by_torch)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("frozen", [(0,), (2, 3), (0, 1, 2, 3, 4)], ids=str)
def test_frozen_parameters_change_nothing(frozen: tuple[int, ...], use_orig_params: bool) -> None:
    """0 to 2 are parameters of the root, 3 and 4 of the unit inside."""
    inner = Node("block", (Node("thin"),))
    tree = Tree(Node("block", (Node("sequential", (Node("linear"),)), inner)))
    kwargs = kwargs_of(use_orig_params=use_orig_params)
    policy = Policy("ModuleWrapPolicy", ("block",)).of(OURS)
    thawed, with_frozen = (
        wrapped_by_us(variant.build(), policy, kwargs) for variant in (tree, replace(tree, frozen=frozen))
    )
    assert_same_outcome(thawed, with_frozen)


@given(tree=trees(shares=True), policy=st.one_of(ONE_BY_ONE, SEEING_THE_TREE))
def test_shared_module_is_wrapped_once_at_every_place(tree: Tree, policy: Policy) -> None:
    built = tree.build()
    places_before = [name for name, _ in built.root.named_modules(remove_duplicate=False)]
    notes, assignment = wrapped_by_us(built, policy.of(OURS), kwargs_of()).value
    names = [name for name, _ in notes]
    assert len(names) == len(set(names))
    around = {module.module: module for module in built.root.modules() if isinstance(module, StandInWrapper)}
    assert {built.names[module] for module in around} == set(names)
    for parent in built.root.modules():
        standing = set(parent.children()) if not isinstance(parent, StandInWrapper) else set()
        assert not standing & around.keys(), "a chosen module stands there without its wrapper"
    assert [_before(name) for name, kind in assignment if kind != "Wrapper"] == places_before


def test_policy_is_called_once_for_shared_module() -> None:
    questions: list[tuple[nn.Module, bool]] = []

    def noted(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        questions.append((module, recurse))
        return True

    wrapped_by_us(
        Tree(Node("block", (Node("shared"), Node("list", (Node("shared"),)), Node("shared")))).build(),
        noted,
        kwargs_of(),
    )
    assert len(questions) == len(set(questions)) == 5


def _before(name: str) -> str:
    """A name as it was before wrapping."""
    return ".".join(part for part in name.split(".") if part != "module")


def uses(
    module: nn.Module, around: tuple[nn.Module, ...]
) -> Iterator[tuple[nn.Parameter, tuple[nn.Module, ...]]]:
    """Each way to each parameter: the modules on it, outermost first."""
    around = (*around, module)
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter, around
    for child in module._modules.values():
        if child is not None:
            yield from uses(child, around)


@given(tree=trees(shares=True), policy=SEEING_THE_TREE)
def test_shared_parameter_belongs_to_innermost_common_unit(tree: Tree, policy: Policy) -> None:
    """Said by walking every way from the root to every use."""
    built = tree.build()
    chosen = policy.of(OURS)._run_policy(built.root, built.ignored, {})
    units = {*chosen, built.root}
    ways: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    for parameter, way in uses(built.root, ()):
        ways.setdefault(parameter, []).append(way)
    manager = {
        parameter: [unit for unit in paths[0] if unit in units and all(unit in way for way in paths)][-1]
        for parameter, paths in ways.items()
        if parameter not in built.ignored_params
    }
    assignment = ParamAssignment(built.root, chosen, built.ignored_params)
    for unit in units:
        inside = set(unit.modules())
        left = {p for p in unit.parameters() if p in manager and manager[p] not in inside}
        assert assignment.left_to_ancestors(unit) == left


def left_in(root: nn.Module, policy: Any, ignored_params: set[nn.Parameter]) -> dict[str, list[str]]:
    """Return the names of the parameters that each wrapped module had to leave, by module name."""
    names = {parameter: name for name, parameter in root.named_parameters()}
    built = Built(root, set(), ignored_params, {module: name for name, module in root.named_modules()})
    notes, _ = wrapped_by_us(built, policy, kwargs_of()).value
    return {
        name: sorted(names[parameter] for parameter in kwargs["_left_to_ancestor"])
        for name, kwargs in notes
        if "_left_to_ancestor" in kwargs
    }


def tied(*, inside: bool) -> nn.Module:
    """Return two linear layers that share a weight, in one block of the root or in two of its modules."""
    first, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = first.weight
    return (
        nn.Sequential(Block([first, other]))
        if inside
        else nn.Sequential(Block([first]), nn.Sequential(other))
    )


def test_tied_weight_belongs_to_common_unit() -> None:
    policy = OURS.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Linear, Block})
    assert left_in(tied(inside=True), policy, set()) == {
        "0.part0": ["0.part0.weight"],
        "0.part1": ["0.part0.weight"],
    }
    blocks = OURS.distributed.fsdp.wrap.ModuleWrapPolicy({Block})
    assert left_in(tied(inside=True), blocks, set()) == {}


def test_tied_weight_belongs_to_root() -> None:
    policy = OURS.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Linear, Block})
    left = {"0.part0": ["0.part0.weight"], "0": ["0.part0.weight"], "1.0": ["0.part0.weight"]}
    assert left_in(tied(inside=False), policy, set()) == left
    root = tied(inside=False)
    assert left_in(root, policy, {root[0].part0.weight}) == {}


def test_module_in_two_units_belongs_to_root_unless_unit() -> None:
    shared = nn.Linear(3, 3)
    root = nn.Sequential(Block([shared]), Block([shared]))
    names = ["0.part0.bias", "0.part0.weight"]
    blocks = OURS.distributed.fsdp.wrap.ModuleWrapPolicy({Block})
    assert left_in(copy.deepcopy(root), blocks, set()) == {"0": names, "1": names}
    assert left_in(root, OURS.distributed.fsdp.wrap.ModuleWrapPolicy({Block, nn.Linear}), set()) == {}


@pytest.mark.parametrize(
    "policy",
    [Policy("always_wrap_policy"), Policy("ModuleWrapPolicy", ("linear",))],
    ids=["a function", "a class"],
)
def test_wrapped_module_raises(policy: Policy) -> None:
    root = nn.Sequential(nn.Linear(2, 2), StandInWrapper(nn.ReLU()))
    with pytest.raises(ValueError, match="already have FSDP applied but found 1 in\nSequential"):
        auto_wrap(
            root,
            policy.of(OURS),
            ignored_modules=set(),
            ignored_params=set(),
            wrapper_cls=StandInWrapper,
            wrapper_kwargs=kwargs_of(),
        )
    assert isinstance(root[0], nn.Linear)


@pytest.mark.parametrize("name", ["lambda_auto_wrap_policy", "CustomPolicy"])
def test_failed_policy_leaves_tree_unchanged(name: str) -> None:
    def refuse(module: nn.Module) -> bool:
        if isinstance(module, Block):
            raise ArithmeticError
        return True

    policy = getattr(OURS.distributed.fsdp.wrap, name)
    policy = policy(refuse) if name == "CustomPolicy" else functools.partial(policy, lambda_fn=refuse)
    built = Tree(Node("block", (Node("batch"), Node("block")))).build()
    before = shape(built.root)
    assert wrapped_by_us(built, policy, kwargs_of(MIXED)).raised.kind is ArithmeticError
    assert shape(built.root) == before
    assert not any(module._forward_pre_hooks for module in built.root.modules())


class RecordingModule(nn.Module):
    """Module that records the dtype it computes in, and returns its input."""

    def forward(self, *args: Any) -> Any:
        dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
        return {
            "given": args,
            "sum": sum((x.sum() for x in args[:1]), torch.zeros(())),
            "dtypes": str(dtypes),
        }


@pytest.mark.parametrize(
    "policy", [Policy("always_wrap_policy"), Policy("ModuleWrapPolicy")], ids=["a function", "a class"]
)
def test_classes_left_out_of_mixed_precision_compute_in_float32(policy: Policy) -> None:
    """A call must not remember the casts of earlier calls."""
    calls = [
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2)),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), "beside"),
        (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float16)),
        (torch.ones(2, dtype=torch.int64),),
    ]
    mixed_precision = MixedPrecision(_module_classes_to_ignore=(RecordingModule,))

    def outcome(library: Library) -> Outcome:
        root = nn.Sequential(RecordingModule())
        built = Built(root, set(), set(), {module: name for name, module in root.named_modules()})
        wrapped_by = wrapped_by_us if library is OURS else wrapped_by_torch
        done = wrapped_by(built, policy.of(library), kwargs_of(mixed_precision))
        assert done.value[0][0][1]["mixed_precision"] is None
        return observe(lambda: (done.warned, [root[0](*call) for call in calls]))

    assert_same_outcome(outcome(TORCHS), outcome(OURS))
