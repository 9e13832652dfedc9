"""Construction: rejected arguments, warnings, modules on the meta device, and synchronised states."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance import simulator
from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training, buffers_of, mesh_of
from conformance.distributed.fsdp.scenes.module_trees import LEAVES, Batch, call, loss_of
from conformance.distributed.fsdp.scenes.rank_judging import (
    assert_like_unsharded,
    assert_ranks_agree,
    trains_like_unsharded,
)
from conformance.distributed.fsdp.scenes.scene import TREE, Scene
from conformance.distributed.fsdp.scenes.twins import (
    STRATEGIES,
    Twins,
    TwinsOf,
    both_kinds,
    each,
    each_strategy,
    leaf_by_leaf,
    raises,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import TRAINED
from conformance.ranks import RankPool

HYBRID = Setup("HYBRID_SHARD", ranks="meshes", shards=2)
SYNCHRONISED = {"sync_module_states": True}


def construct(scene: Scene, *, case: str) -> dict[str, Any]:
    """Wrap with arguments of `ARGUMENTS`. Return the strategy, the identity of the module and this rank's shapes."""
    unit = scene.wrap(**{"module": scene.plain, **ARGUMENTS[case](scene)})
    return {
        "strategy": unit.sharding_strategy.name,
        "wraps what it was given": unit.module is scene.plain,
        "parameters": {
            name: [tuple(parameter.shape), parameter.requires_grad]
            for name, parameter in unit.named_parameters()
        },
    }


def _with_a_scalar(scene: Scene) -> nn.Module:
    scene.plain.scalar = nn.Parameter(torch.tensor(1.0))
    return scene.plain


def _with_a_wrapped_head(scene: Scene) -> nn.Module:
    scene.plain.head = scene.wrap(scene.plain.head)
    return scene.plain


_UNITS_OF_REPLICAS: dict[str, Any] = {"strategy": "HYBRID_SHARD", "units": LEAVES}
THE_ROOT_IGNORED = "the root ignored"
# Arguments of the constructor. The module is by default the plain model of the scene.
ARGUMENTS: dict[str, Callable[[Scene], dict[str, Any]]] = {
    "group and mesh": lambda scene: {"process_group": dist.group.WORLD, "device_mesh": scene.mesh()},
    "modules and states ignored": lambda scene: {
        "ignored_modules": [scene.plain.head],
        "ignored_states": [scene.plain.head],
    },
    "ignored states of two kinds": lambda scene: {
        "ignored_states": [scene.plain.head, scene.plain.head.weight]
    },
    "ignored modules that are none": lambda scene: {"ignored_modules": [scene.plain.head.weight]},
    "ignored modules of which one is none": lambda scene: {
        "ignored_modules": [scene.plain.head, scene.plain.head.weight]
    },
    "ignored states that are none": lambda _: {"ignored_states": [1, 2]},
    "ignored modules that do not iterate": lambda scene: {"ignored_modules": scene.plain.head},
    THE_ROOT_IGNORED: lambda scene: {"ignored_modules": [scene.plain]},
    "a unit ignored": lambda scene: {"ignored_modules": [scene.wrap(scene.plain.head)]},
    "hybrid without groups": lambda _: {"strategy": "HYBRID_SHARD"},
    "hybrid with one group": lambda _: {"process_group": dist.group.WORLD, **_UNITS_OF_REPLICAS},
    "hybrid with a mesh of one dimension": lambda scene: {"device_mesh": scene.mesh(), **_UNITS_OF_REPLICAS},
    "a mesh of two dimensions that is not hybrid": lambda scene: {"device_mesh": mesh_of(scene.rank, 1)},
    "a scalar parameter": lambda scene: {"module": _with_a_scalar(scene)},
    "a lazy module": lambda _: {"module": nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))},
    "no sharding": lambda _: {"strategy": "NO_SHARD"},
    "a container": lambda _: {"module": nn.ModuleList([nn.Linear(2, 2)])},
    "wrapped inside already": lambda scene: {"module": _with_a_wrapped_head(scene), "units": LEAVES},
    "no parameters": lambda _: {"module": nn.Tanh()},
    "no module": lambda _: {"module": "a word"},
    "an init function that is none": lambda _: {"param_init_fn": "no function"},
    "a policy that is none": lambda _: {"auto_wrap_policy": "no policy"},
    "a device by name": lambda _: {"device_id": "cpu"},
    "empty arguments": lambda _: {"ignored_modules": [], "ignored_states": None},
}


@clause("distributed.fsdp.fully_sharded_data_parallel.arguments")
@pytest.mark.parametrize("case", [case for case in ARGUMENTS if case != THE_ROOT_IGNORED])
def test_constructor_takes_arguments_like_torch(twins: Twins, case: str) -> None:
    twins.agree(construct, may_raise=True, case=case)


def ignoring_from_an_iterator(scene: Scene) -> list[str]:
    """Return the names of this rank's parameters if the ignored modules can be iterated only once."""
    ignored = (module for module in [scene.plain.head])
    return [name for name, _ in scene.wrap(scene.plain, ignored_modules=ignored).named_parameters()]


@clause("distributed.fsdp.fsdp_torch_limit_removed.ignored_modules_used_up")
@pytest.mark.deviation("fsdp.ignored_modules_used_up")
def test_ignored_modules_may_be_iterator(cpu_twins: Twins) -> None:
    def is_ignored(names: list[str]) -> bool:
        return any(name.endswith("head.weight") for name in names)

    cpu_twins.deviate(
        ignoring_from_an_iterator,
        torch_does=each(lambda names: not is_ignored(names)),
        we_do=each(is_ignored),
    )


def differing(scene: Scene, *, argument: str) -> Any:
    """Give an inner unit and the root different values of an argument that must be the same for both."""
    scene.plain.head = scene.wrap(scene.plain.head, **{argument: True})
    return scene.wrap(scene.plain, **{argument: False}).check_is_root()


@clause("distributed.fsdp.fully_sharded_data_parallel.arguments")
@pytest.mark.parametrize("argument", ["limit_all_gathers", "use_orig_params"])
def test_units_with_different_global_settings_are_refused(twins: Twins, argument: str) -> None:
    outcomes = twins.agree(differing, may_raise=True, argument=argument)
    assert raises(ValueError, "Expects one homogeneous value")(outcomes), outcomes


@clause("distributed.fsdp.fully_sharded_data_parallel.arguments")
def test_ignoring_the_root_warns(twins: Twins) -> None:
    """Compare only the beginning of the warning, because torch's names the wrong module at its end."""

    def shortened(outcome: Outcome) -> Outcome:
        return replace(
            outcome, warned=tuple((kind, text.partition(": ")[0]) for kind, text in outcome.warned)
        )

    expected, actual = twins.of_both(construct, case=THE_ROOT_IGNORED)
    assert_ranks_agree([*map(shortened, expected)], [*map(shortened, actual)])


def logged(scene: Scene) -> list[str]:
    """Return the log messages of level WARNING and above that wrapping and one step write.

    The case needs a process that has not used the library.
    """
    records: list[logging.LogRecord] = []
    with mock.patch.object(logging.Logger, "handle", lambda _, record: records.append(record)):
        scene.model = scene.wrap(scene.plain, use_orig_params=True)
        scene.backward()
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


@clause("distributed.fsdp.fully_sharded_data_parallel.arguments")
def test_logs_contain_no_unrequested_warnings(subject: Library, reference: Library) -> None:
    """Run in a separate pool, because a process gives such warnings only once."""
    with RankPool(2) as pool:
        expected, actual = Twins(reference, subject, pool).of_both(logged)
    for of_reference, of_subject in zip(values_of(expected), values_of(actual), strict=True):
        assert set(of_subject) <= set(of_reference)


class _WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def materialised(scene: Scene, *, by: str, strategy: str) -> dict[str, Any]:
    """Wrap a module on the meta device and run a step.

    `by` is the method of initialisation. `function` passes a `param_init_fn`, and `no reset` adds a module that has no
    reset_parameters.
    """
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 2)))
    if by == "no reset":
        plain.append(_WithoutReset())
    torch.manual_seed(0)
    arguments = {"param_init_fn": _fill} if by == "function" else {}
    model = scene.wrap(plain, units=[nn.Linear], strategy=strategy, **arguments)
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    return {"loss": loss.detach(), "whole": scene.whole_parameters(model)}


def _fill(module: nn.Module) -> None:
    """Initialise only the module's own parameters, as a user's `param_init_fn` does."""
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) * 0.1)


@clause("distributed.fsdp.fully_sharded_data_parallel.meta_device")
@pytest.mark.parametrize("by", ["reset", "function", "no reset"])
@each_strategy
def test_modules_on_the_meta_device_are_built_by_wrapping(twins: Twins, strategy: str, by: str) -> None:
    twins.agree(materialised, may_raise=by == "no reset", tolerance=TRAINED, strategy=strategy, by=by)


def synchronised(scene: Scene) -> dict[str, Any]:
    """Wrap a module whose values differ between ranks. Return the parameters and buffers after wrapping."""
    plain = scene.tree.build(scene.rank.rank)
    with torch.no_grad():
        for buffer in plain.buffers():
            buffer.add_(scene.rank.rank + 1)
    model = scene.wrapped(plain)
    return {"whole": scene.whole_parameters(model), "buffers": buffers_of(model)}


@clause("distributed.fsdp.fully_sharded_data_parallel.sync_module_states")
@pytest.mark.reference_limit("fsdp.sync_module_states")
def test_torch_cannot_synchronise_on_a_cpu(torch_cannot: Callable[..., None]) -> None:
    torch_cannot(synchronised, Setup(arguments=SYNCHRONISED))


@clause("distributed.fsdp.fully_sharded_data_parallel.sync_module_states")
@pytest.mark.parametrize("wrap", ["root", "leaves"])
@pytest.mark.parametrize(
    ("setup", "all_ranks"),
    [(Setup(), 1), (Setup(), 2), (Setup("NO_SHARD"), 3), (HYBRID, 4)],
    ids=["1", "2", "3-NO_SHARD", "4-HYBRID_SHARD"],
)
def test_sync_module_states_copies_states_of_first_rank(
    twins_of: TwinsOf, setup: Setup, all_ranks: int, wrap: str
) -> None:
    setup, first = replace(setup, wrap=wrap, arguments=SYNCHRONISED), TREE.build()
    for state in twins_of(all_ranks).values(synchronised, setup):
        for name, parameter in first.named_parameters():
            assert torch.equal(state["whole"][name].values, parameter.detach()), name
        for name, buffer in first.named_buffers():
            assert torch.equal(state["buffers"][name].values, buffer + 1), name


@clause("distributed.fsdp.fully_sharded_data_parallel.cpu_offload")
@pytest.mark.reference_limit("fsdp.cpu_offload")
def test_torch_cannot_offload_parameters_on_a_cpu(torch_cannot: Callable[..., None]) -> None:
    torch_cannot(Scene.backward, Setup(offload_params=True))


def waits_for_offloaded(scene: Scene) -> list[int]:
    """Return how often the host waits for the device in a backward, with one unit and with one unit per leaf."""
    waits: list[int] = []
    for wrap in ("root", "leaves"):
        scene.model = scene.wrapped(scene.tree.build(), replace(scene.setup, wrap=wrap))
        scene.backward()
        batch = scene.batch(1)
        loss = loss_of(call(scene.model, scene.tree, Batch(batch.x.detach(), batch.ids)))
        simulator.take_host_waits()
        loss.backward()
        waits.append(sum(wait.count for wait in simulator.take_host_waits()))
    return waits


@clause("distributed.fsdp.fully_sharded_data_parallel.cpu_offload_overlaps")
@both_kinds
@pytest.mark.world_sizes(fewest=2)
def test_host_waits_once_for_all_units(twins: Twins, device: str, use_orig_params: bool) -> None:
    if device != simulator.NAME:
        unavailable("a device that counts what the host waits for")
    arguments = {"use_orig_params": use_orig_params, "limit_all_gathers": False}
    setup = Setup(arguments=arguments, offload_params=True)
    for outcome in twins.agree(waits_for_offloaded, setup):
        assert outcome.value == [1, 1]


def offloaded_training(strategy: str, use_orig_params: bool) -> Training:
    """Train leaves as units, with parameters on the CPU. One step accumulates in no_sync, and one evaluates first."""
    setup = replace(leaf_by_leaf(strategy, use_orig_params), offload_params=True)
    steps = (Step(), Step(forwards=2, order="no_sync"), Step(before="eval"))
    return Training(replace(TREE, dtype=torch.float64), setup, steps)


@clause("distributed.fsdp.fully_sharded_data_parallel.cpu_offload")
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"),
    # Deviation fsdp.offloaded_whole: NO_SHARD with use_orig_params is in the next test.
    [pair for pair in itertools.product(STRATEGIES, (False, True)) if pair != ("NO_SHARD", True)],
)
def test_trains_with_parameters_offloaded(
    twins: Twins, device: str, strategy: str, use_orig_params: bool
) -> None:
    """Compare with torch and with one process.

    On the CPU, torch cannot offload, so it trains without offload there.
    """
    offloaded = offloaded_training(strategy, use_orig_params)
    actual = twins.trained(twins.subject, offloaded)
    assert_like_unsharded(actual, offloaded)
    # Deviation fsdp.offloaded_whole: torch trains wrongly if nothing is sharded, as on a single rank.
    if device != "cpu" and twins.is_alone and use_orig_params:
        return
    plain = replace(offloaded, setup=replace(offloaded.setup, offload_params=False))
    assert_ranks_agree(twins.trained(twins.reference, plain if device == "cpu" else offloaded), actual)


@clause("distributed.fsdp.fsdp_torch_limit_removed.offloaded_whole")
@pytest.mark.deviation("fsdp.offloaded_whole")
def test_offloaded_parameters_without_sharding_train_like_unsharded(twins: Twins) -> None:
    offloaded = offloaded_training("NO_SHARD", use_orig_params=True)
    twins.judge(
        lambda library: twins.trained(library, offloaded),
        torch_does=lambda outcomes: not trains_like_unsharded(outcomes, offloaded),
        we_do=lambda outcomes: trains_like_unsharded(outcomes, offloaded),
        may_agree=True,  # unless a copy overlaps with the next one
    )
