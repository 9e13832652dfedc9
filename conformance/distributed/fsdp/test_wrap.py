"""Wrap policies, called for one module and for complete trees, with a stand-in for the wrapper class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.strategies.wrapping import (
    CLASSES,
    ONE_BY_ONE,
    SEEING_THE_TREE,
    Block,
    Built,
    Node,
    Policy,
    Tree,
    WiderBlock,
    compare_wrap,
    noting,
    shape,
    trees,
)

_MODULES = {
    "linear": nn.Linear(3, 3),
    "list": nn.ModuleList([nn.Linear(2, 2)]),
    "dict": nn.ModuleDict({"a": nn.Linear(2, 2)}),
    "attention": nn.MultiheadAttention(2, 1),
    "block": Block([nn.Linear(2, 2)]),
    "wider": WiderBlock([]),
    "sequential": nn.Sequential(),
}


def compare_policy(compare: Compare, policy: Policy, *numels: int) -> dict[str, Any]:
    """Call the policy for each module and size, with both values of `recurse`. Return the subject's answers."""

    def answers(library: Library) -> dict[str, Any]:
        function = policy.of(library)
        return {
            f"{name}, recurse={recurse}, {numel}": function(
                module=module, recurse=recurse, nonwrapped_numel=numel
            )
            for name, module in _MODULES.items()
            for recurse in (True, False)
            for numel in numels
        }

    [outcome] = compare(lambda library: observe(answers, library))
    assert outcome.raised is None
    return outcome.value


@clause("distributed.fsdp.wrap.always_wrap_policy.says_yes")
@pytest.mark.parametrize("args", [(), (None,), (nn.ReLU(), False, 0)], ids=len)
@pytest.mark.parametrize("kwargs", [{}, {"recurse": False}, {"anything": 1}], ids=str)
def test_always_wrap_policy_says_yes(compare: Compare, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    compare_wrap(compare, lambda wrap: wrap.always_wrap_policy(*args, **kwargs))


@clause("distributed.fsdp.wrap.lambda_auto_wrap_policy.asks_the_function")
@pytest.mark.parametrize("answer", [True, False, None, 0, "yes"], ids=repr)
@pytest.mark.parametrize("recurse", [True, False, 1, 0, None], ids=repr)
def test_lambda_policy_calls_function_only_without_recurse(
    compare: Compare, recurse: Any, answer: Any
) -> None:
    def call_policy(wrap: Any) -> Any:
        names: list[str] = []

        def answered(module: nn.Module) -> Any:
            names.append(type(module).__name__)
            return answer

        policy = wrap.lambda_auto_wrap_policy
        return [policy(module, recurse, 3, answered) for module in _MODULES.values()], names

    answers, called_for = compare_wrap(compare, call_policy).value
    assert answers == [True if recurse else answer] * len(_MODULES)
    assert called_for == ([] if recurse else [type(module).__name__ for module in _MODULES.values()])


@clause("distributed.fsdp.wrap.transformer_auto_wrap_policy.by_class")
@pytest.mark.parametrize("classes", [(), ("block",), ("wider",), ("linear", "list")], ids=str)
def test_transformer_policy_wraps_listed_classes(compare: Compare, classes: tuple[str, ...]) -> None:
    answers = compare_policy(compare, Policy("transformer_auto_wrap_policy", classes), 0, 10**9)
    listed = tuple(CLASSES[name] for name in classes)
    for name, module in _MODULES.items():
        assert answers[f"{name}, recurse=True, 0"] is True
        assert answers[f"{name}, recurse=False, 0"] is isinstance(module, listed)


@clause("distributed.fsdp.wrap.transformer_auto_wrap_policy.by_class")
@pytest.mark.parametrize("container", [list, tuple, frozenset])
def test_transformer_policy_accepts_any_collection(compare: Compare, container: Callable[[Any], Any]) -> None:
    def call_policy(wrap: Any) -> Any:
        policy = wrap.transformer_auto_wrap_policy
        return [policy(module, False, 0, container({Block})) for module in _MODULES.values()]

    compare_wrap(compare, call_policy)


@clause("distributed.fsdp.wrap.size_based_auto_wrap_policy.threshold")
@pytest.mark.parametrize("numel", [0, 1, 5, 10**8])
def test_size_policy_wraps_from_threshold(compare: Compare, numel: int) -> None:
    policy = Policy("size_based_auto_wrap_policy", numel=numel)
    compare_policy(compare, policy, numel - 1, numel, numel + 1)


@clause("distributed.fsdp.wrap.size_based_auto_wrap_policy.threshold")
def test_size_policy_has_default_of_torch(compare: Compare) -> None:
    def call_policy(wrap: Any) -> Any:
        return [wrap.size_based_auto_wrap_policy(nn.ReLU(), False, 10**8 + more) for more in (-1, 0, 1)]

    compare_wrap(compare, call_policy)


_OF_LEAVES = clause("distributed.fsdp.wrap.size_based_auto_wrap_policy.leaves")
_OF_EXCLUDED = clause("distributed.fsdp.wrap.size_based_auto_wrap_policy.never_wrapped")


@_OF_LEAVES
@pytest.mark.parametrize("leaves", [None, (), ("linear",), ("attention", "block"), ("list",)], ids=str)
def test_size_policy_does_not_enter_leaf_classes(compare: Compare, leaves: tuple[str, ...] | None) -> None:
    compare_policy(compare, Policy("size_based_auto_wrap_policy", numel=5, leaves=leaves), 4, 5)


@_OF_EXCLUDED
@pytest.mark.parametrize("excluded", [None, (), ("linear",), ("list", "block"), ("attention",)], ids=str)
def test_size_policy_never_wraps_excluded_classes(compare: Compare, excluded: tuple[str, ...] | None) -> None:
    compare_policy(compare, Policy("size_based_auto_wrap_policy", numel=5, excluded=excluded), 4, 5)


@pytest.mark.parametrize(
    "attribute",
    [
        pytest.param("FORCE_LEAF_MODULES", marks=_OF_LEAVES),
        pytest.param("EXCLUDE_WRAP_MODULES", marks=_OF_EXCLUDED),
    ],
)
def test_size_defaults_can_be_added_to(compare: Compare, attribute: str) -> None:
    def call_policy(wrap: Any) -> Any:
        policy = wrap.size_based_auto_wrap_policy
        defaults = getattr(policy, attribute)
        before = set(defaults)
        defaults.add(Block)
        try:
            function = functools.partial(policy, nonwrapped_numel=10**9)
            answers = [function(module, recurse) for module in _MODULES.values() for recurse in (True, False)]
        finally:
            defaults.intersection_update(before)
        return sorted(module_class.__name__ for module_class in before), answers

    compare_wrap(compare, call_policy)


@clause("distributed.fsdp.wrap.policies.chosen_one_by_one")
@given(tree=trees(shares=True), policies=st.lists(ONE_BY_ONE, min_size=1, max_size=2))
def test_policy_functions_choose_modules_of_torch(
    subject: Library, reference: Library, tree: Tree, policies: list[Policy]
) -> None:
    """Use the policies of each library in torch's walk over the tree."""
    walk = reference.distributed.fsdp.wrap._recursive_wrap

    def outcome(library: Library) -> Outcome:
        built = tree.build()
        wrapper_cls, notes = noting(built.names)

        def policy(**arguments: Any) -> bool:
            return any(candidate.of(library)(**arguments) for candidate in policies)

        def run() -> Any:
            numel = walk(
                module=built.root,
                auto_wrap_policy=policy,
                wrapper_cls=wrapper_cls,
                ignored_modules=built.ignored,
                ignored_params=built.ignored_params,
                only_wrap_children=True,
            )[1]
            return notes, shape(built.root), numel

        return observe(run)

    assert_same_outcome(outcome(reference), outcome(subject))


def _run(policy: Any, built: Built, kwargs: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the modules that a policy for the complete tree chooses, by name."""
    chosen = policy._run_policy(built.root, built.ignored, kwargs)
    return [(built.names[module], arguments) for module, arguments in chosen.items()]


_ROOT_KWARGS = {"forward_prefetch": False, "mixed_precision": "some", "use_orig_params": True}


@clause("distributed.fsdp.wrap.policies.chosen_from_the_tree")
@given(tree=trees(shares=True), policy=SEEING_THE_TREE)
def test_policy_classes_choose_modules_of_torch(compare: Compare, tree: Tree, policy: Policy) -> None:
    def choices(library: Library) -> Any:
        kwargs = dict(_ROOT_KWARGS)
        return _run(policy.of(library), tree.build(), kwargs), kwargs

    compare(lambda library: observe(choices, library))


@clause("distributed.fsdp.wrap.policies.chosen_from_the_tree")
@pytest.mark.parametrize(
    "policy",
    [
        Policy("ModuleWrapPolicy", ("linear",)),
        Policy("CustomPolicy", answers=(("linear", True),)),
        Policy("CustomPolicy", answers=(("linear", {"use_orig_params": False}),)),
    ],
    ids=["ModuleWrapPolicy", "CustomPolicy", "CustomPolicy, a dict"],
)
def test_units_get_separate_arguments(compare: Compare, policy: Policy) -> None:
    def choices(library: Library) -> Any:
        built, kwargs = Tree(Node("sequential", (Node("linear"), Node("linear")))).build(), dict(_ROOT_KWARGS)
        built_policy = policy.of(library)
        first = _run(built_policy, built, kwargs)
        first[0][1]["mixed_precision"] = "changed"
        return first, kwargs, _run(built_policy, built, kwargs)

    compare(lambda library: observe(choices, library))


def first_places(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return, for each name, the first name of the same object."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(member), name) for name, member in named}


@clause("distributed.fsdp.wrap.policies.chosen_from_the_tree")
@pytest.mark.parametrize(
    "policy",
    [Policy("ModuleWrapPolicy", ("linear",)), Policy("CustomPolicy", answers=(("linear", True),))],
    ids=["ModuleWrapPolicy", "CustomPolicy"],
)
def test_policies_leave_tree_unchanged(compare: Compare, policy: Policy) -> None:
    """A shared module and a shared parameter stay shared."""

    shared, linear = Node("shared"), Node("linear")
    tree = Tree(Node("block", (shared, Node("list", (shared, linear)), linear)), is_tied=True)

    def places(library: Library) -> Any:
        built = tree.build()
        _run(policy.of(library), built, {})
        return (
            first_places(built.root.named_modules(remove_duplicate=False)),
            first_places(built.root.named_parameters(remove_duplicate=False)),
        )

    compare(lambda library: observe(places, library))


_BAD: dict[str, Callable[[Any], Any]] = {
    "no classes": lambda wrap: wrap.ModuleWrapPolicy(),
    "classes None": lambda wrap: wrap.ModuleWrapPolicy(None),
    "one class": lambda wrap: wrap.ModuleWrapPolicy(nn.Linear),
    "names of classes": lambda wrap: wrap.ModuleWrapPolicy(["Linear"]),
    "names of classes, run": lambda wrap: wrap.ModuleWrapPolicy(["Linear"])._run_policy(nn.ReLU(), set(), {}),
    "names of classes, looked inside": lambda wrap: wrap.ModuleWrapPolicy(["Linear"])(nn.ReLU(), True),
    "names of classes, called": lambda wrap: wrap.ModuleWrapPolicy(["Linear"])(nn.ReLU(), False),
    "unhashable": lambda wrap: wrap.ModuleWrapPolicy([[nn.Linear]]),
    "called without a module": lambda wrap: wrap.ModuleWrapPolicy([nn.Linear])(recurse=True),
    "no function": lambda wrap: wrap.CustomPolicy(),
    "function None": lambda wrap: wrap.CustomPolicy(None),
    "function None, run": lambda wrap: wrap.CustomPolicy(None)._run_policy(nn.ReLU(), set(), {}),
    "custom policy called": lambda wrap: wrap.CustomPolicy(lambda _: True)(nn.ReLU(), False, 0),
    "no lambda_fn": lambda wrap: wrap.lambda_auto_wrap_policy(nn.ReLU(), False, 0),
    "lambda_fn None": lambda wrap: wrap.lambda_auto_wrap_policy(nn.ReLU(), False, 0, None),
    "lambda_fn None, looked inside": lambda wrap: wrap.lambda_auto_wrap_policy(nn.ReLU(), True, 0, None),
    "transformer without classes": lambda wrap: wrap.transformer_auto_wrap_policy(nn.ReLU(), True, 0),
    "transformer classes None": lambda wrap: wrap.transformer_auto_wrap_policy(nn.ReLU(), False, 0, None),
    "one transformer class": lambda wrap: wrap.transformer_auto_wrap_policy(nn.ReLU(), False, 0, nn.ReLU),
    "size without numel": lambda wrap: wrap.size_based_auto_wrap_policy(nn.ReLU(), True),
    "numel a string": lambda wrap: wrap.size_based_auto_wrap_policy(nn.ReLU(), True, "1"),
    "one leaf class, large": lambda wrap: wrap.size_based_auto_wrap_policy(nn.ReLU(), True, 2, 1, nn.ReLU),
    "one leaf class, small": lambda wrap: wrap.size_based_auto_wrap_policy(nn.ReLU(), True, 0, 1, nn.ReLU),
    "one leaf class, to wrap": lambda wrap: wrap.size_based_auto_wrap_policy(nn.ReLU(), False, 2, 1, nn.ReLU),
}


@clause("distributed.fsdp.wrap.policies.bad_arguments")
@pytest.mark.parametrize("call", list(_BAD))
def test_invalid_arguments_raise_like_torch(compare: Compare, call: str) -> None:
    def call_policy(wrap: Any) -> bool | None:
        answer = _BAD[call](wrap)
        return answer if isinstance(answer, bool) else None

    compare_wrap(compare, call_policy)


@clause("distributed.fsdp.wrap.ModuleWrapPolicy.by_class")
def test_module_wrap_policy_copies_its_classes(compare: Compare) -> None:
    def call_policy(wrap: Any) -> Any:
        classes = {Block}
        policy = wrap.ModuleWrapPolicy(classes)
        classes.add(nn.Linear)
        return [policy(module, False) for module in _MODULES.values()]

    compare_wrap(compare, call_policy)


@clause("distributed.fsdp.wrap.ModuleWrapPolicy.by_class")
@pytest.mark.parametrize("classes", [(), ("block",), ("wider", "attention"), ("batch", "linear")], ids=str)
def test_module_wrap_policy_selects_instances_in_tree(compare: Compare, classes: tuple[str, ...]) -> None:
    """The class `Block` also selects the `WiderBlock` in the tree, because `WiderBlock` is a subclass of `Block`."""
    tree = Tree(
        Node("block", (Node("wider", (Node("linear"),)), *map(Node, ("linear", "batch", "attention"))))
    )
    [outcome] = compare(
        lambda library: observe(
            lambda: _run(Policy("ModuleWrapPolicy", classes).of(library), tree.build(), {})
        )
    )
    assert outcome.raised is None
    assert bool(outcome.value) == bool(classes)


@clause("distributed.fsdp.wrap.ModuleWrapPolicy.as_a_function")
@pytest.mark.parametrize("classes", [(), ("block",), ("wider", "attention")], ids=str)
@pytest.mark.parametrize("recurse", [True, False, 1, None], ids=repr)
def test_module_wrap_policy_works_as_function(
    compare: Compare, classes: tuple[str, ...], recurse: Any
) -> None:
    def call_policy(wrap: Any) -> Any:
        policy = wrap.ModuleWrapPolicy({CLASSES[name] for name in classes})
        return [
            answer
            for module in _MODULES.values()
            for answer in (
                policy(module, recurse),
                policy(module, recurse, 7),
                policy(module, recurse, nonwrapped_numel=7),
            )
        ]

    compare_wrap(compare, call_policy)


@clause("distributed.fsdp.wrap.ModuleWrapPolicy.shown")
@pytest.mark.parametrize("classes", [set[Any](), {nn.Linear}, {Block, nn.Linear}], ids=len)
def test_module_wrap_policy_repr_lists_classes(compare: Compare, classes: set[type]) -> None:
    def split_repr(wrap: Any) -> tuple[str, str]:
        shown = repr(wrap.ModuleWrapPolicy(classes))
        return shown.partition(" object at ")[0].rpartition(".")[2], shown.partition(">(")[2]

    compare_wrap(compare, split_repr)


@clause("distributed.fsdp.wrap.CustomPolicy.answers")
@given(tree=trees(shares=True), answers=st.lists(st.sampled_from([True, False, {}, {"new": 1}]), min_size=1))
def test_each_module_is_asked_once(compare: Compare, tree: Tree, answers: list[Any]) -> None:
    def question(wrap: Any) -> Any:
        built, names = tree.build(), list[str]()

        def answered(module: nn.Module) -> Any:
            names.append(built.names[module])
            return answers[len(names) % len(answers)]

        return _run(wrap.CustomPolicy(answered), built, dict(_ROOT_KWARGS)), names

    compare_wrap(compare, question)


@clause("distributed.fsdp.wrap.CustomPolicy.other_answers")
@pytest.mark.parametrize("answer", [None, 1, 0, "yes", [("new", 1)], (), 1.5], ids=repr)
def test_custom_policy_rejects_other_answers(compare: Compare, answer: Any) -> None:
    outcome = compare_wrap(
        compare, lambda wrap: wrap.CustomPolicy(lambda module: answer)._run_policy(nn.ReLU(), set(), {})
    )
    assert outcome.raised is not None
    assert outcome.raised.kind is ValueError
