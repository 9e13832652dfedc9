"""The units that the constructor makes for a policy, and their arguments. The process group has no peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp.api import MixedPrecision

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks.fake_group import fake_group
from conformance.strategies.wrapping import ONE_BY_ONE, SEEING_THE_TREE, Block, Policy, Tree, trees

_WRAPPED = "_fsdp_wrapped_module"
LINEAR_UNITS = [Policy("ModuleWrapPolicy", ("linear",)), Policy("lambda_auto_wrap_policy", ("linear",))]


@pytest.fixture(autouse=True)
def _group_without_peers() -> Iterator[None]:
    with fake_group(2):
        yield


def sharded(library: Library, root: nn.Module, policy: Any, **kwargs: Any) -> nn.Module:
    wrapper = library.distributed.fsdp.FullyShardedDataParallel
    return wrapper(root, auto_wrap_policy=policy, device_id=torch.device("cpu"), **kwargs)


def units(library: Library, model: nn.Module) -> list[tuple[str, Any]]:
    """Return each module by its name without wrappers: the arguments of a unit, or the type of another module."""
    wrapper = library.distributed.fsdp.FullyShardedDataParallel
    entries: list[tuple[str, Any]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        plain = ".".join(part for part in name.split(".") if part != _WRAPPED)
        is_unit = isinstance(module, wrapper)
        reported = (module.mixed_precision, module.forward_prefetch) if is_unit else type(module).__name__
        entries.append((plain, reported))
    return entries


@clause("distributed.fsdp.wrap.auto_wrap.units")
@given(
    tree=trees(shares=False),
    policy=st.one_of(ONE_BY_ONE, SEEING_THE_TREE),
    mixed_precision=st.sampled_from(
        [
            None,
            MixedPrecision(torch.bfloat16),
            MixedPrecision(torch.bfloat16, _module_classes_to_ignore=[nn.LayerNorm, Block]),
        ]
    ),
    use_orig_params=st.booleans(),
)
def test_policy_makes_units_of_torch(
    compare: Compare,
    tree: Tree,
    policy: Policy,
    mixed_precision: MixedPrecision | None,
    use_orig_params: bool,
) -> None:
    def outcome(library: Library) -> Outcome:
        built = tree.build()
        given_kwargs = {
            "ignored_modules": built.ignored,
            "mixed_precision": mixed_precision,
            "use_orig_params": use_orig_params,
        }
        return observe(
            lambda: units(library, sharded(library, built.root, policy.of(library), **given_kwargs))
        )

    compare(outcome)


@clause("distributed.fsdp.wrap.auto_wrap.units")
@pytest.mark.parametrize("policy", LINEAR_UNITS, ids=["a class", "a function"])
def test_module_wrapped_before_is_refused(compare: Compare, policy: Policy) -> None:
    def outcome(library: Library) -> Outcome:
        inner = sharded(library, nn.Linear(3, 3), None)
        root = nn.Sequential(nn.Linear(3, 3), nn.Sequential(inner))
        refused = observe(sharded, library, root, policy.of(library))
        return Outcome(units(library, root), raised=refused.raised, warned=refused.warned)

    compare(outcome)


@clause("distributed.fsdp.wrap.auto_wrap.shared")
@pytest.mark.deviation("fsdp.shared_is_one")
@pytest.mark.parametrize("policy", LINEAR_UNITS, ids=["a class", "a function"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("parents", ["one", "two"])
def test_shared_module_is_one_unit(
    deviation: DeviationJudge, policy: Policy, use_orig_params: bool, parents: str
) -> None:
    def probe(library: Library) -> tuple[bool, bool]:
        """Return whether both places hold one object, and whether the second place holds a wrapper."""
        shared = nn.Linear(3, 3)
        root = (
            nn.Sequential(shared, shared)
            if parents == "one"
            else nn.Sequential(Block([shared]), Block([shared]))
        )
        sharded(library, root, policy.of(library), use_orig_params=use_orig_params)
        first, second = root if parents == "one" else (block.part0 for block in root)
        return first is second, isinstance(second, library.distributed.fsdp.FullyShardedDataParallel)

    deviation.judge(
        probe,
        torch_does=lambda result: result in ((False, False), (False, True)),
        we_do=lambda result: result == (True, True),
    )


@clause("distributed.fsdp.wrap.auto_wrap.shared")
@pytest.mark.deviation("fsdp.shared_is_one")
@pytest.mark.parametrize("policy", LINEAR_UNITS, ids=["a class", "a function"])
def test_parameter_shared_by_two_units_is_stored_once(deviation: DeviationJudge, policy: Policy) -> None:
    def probe(library: Library) -> int:
        """Return the number of elements in this rank's half."""
        first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        second.weight = first.weight
        model = sharded(library, nn.Sequential(first, second), policy.of(library), use_orig_params=False)
        return sum(parameter.numel() for parameter in model.parameters())

    deviation.judge(probe, torch_does=lambda numel: numel == 16, we_do=lambda numel: numel == 8)


@clause("distributed.fsdp.wrap.auto_wrap.frozen")
@pytest.mark.deviation("fsdp.frozen_in_part")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_partly_frozen_module_is_wrapped_by_policy(deviation: DeviationJudge, use_orig_params: bool) -> None:
    def probe(library: Library) -> tuple[str, list[str], bool]:
        """Return the error, the warnings, and whether the module was wrapped."""
        layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        layers[0].requires_grad_(False)
        root = nn.Sequential(nn.Sequential(Block([layers])), nn.Linear(3, 3))
        policy = Policy("ModuleWrapPolicy", ("block",)).of(library)
        outcome = observe(lambda: sharded(library, root, policy, use_orig_params=use_orig_params) and None)
        warned = [text for _, text in outcome.warned if "requires_grad" in text]
        return str(outcome.raised), warned, not isinstance(root[0][0], Block)

    def is_named(text: str) -> bool:
        return "0.0.part0.0.weight" in text

    deviation.judge(
        probe,
        torch_does=lambda result: (
            any(map(is_named, result[1]))
            if use_orig_params
            else result[0].startswith("ValueError") and is_named(result[0])
        ),
        we_do=lambda result: result == ("None", [], True),
    )
