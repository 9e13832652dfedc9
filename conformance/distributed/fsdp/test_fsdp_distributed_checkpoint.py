"""torch.distributed.checkpoint (DCP) end to end: a wrapped model and its optimizer are written and read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.optim import _NamedOptimizer

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, clean
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup
from conformance.distributed.fsdp.scenes.optimizer_states import (
    FULL,
    Optimized,
    StateDictMethod,
    by_name,
    copied,
    described,
    step,
)
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree, holds
from conformance.distributed.fsdp.scenes.scene import SIMPLE, TREE, Scene
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    FULL_PROFILE,
    ORIGINALS,
    Twins,
    TwinsOf,
    flat_or_originals,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.judge.tolerances import EXACT

ROWS = StateDictMethod("SHARDED", offloads=False)
ON_MESH = Setup(wrap="leaves", ranks="mesh")
every_form = pytest.mark.parametrize(
    ("setup", "way"),
    [(FLAT, FULL), (ORIGINALS, ROWS), (ON_MESH, ROWS)],
    ids=["whole", "ShardedTensor", "DTensor"],
)
WORLDS = (1, 2, 3, 4)


class _Trained:
    """Model whose initial values depend on `seed`, with an optimizer that has stepped."""

    def __init__(self, scene: Scene, way: StateDictMethod, seed: int = 0) -> None:
        self.scene, self.way = _scene_of(scene, seed), way
        self.model = self.scene.model
        self.optimizer = Optimized(steps=1 + seed).stepped(self.model)

    def state(self) -> dict[str, Any]:
        with self.way.set_on(self.scene):
            model = self.model.state_dict()
        return {"model": model, "optimizer": self.way.save(self.scene, self.optimizer)}

    def load(self, state: Mapping[str, Any]) -> None:
        with self.way.set_on(self.scene):
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(self.way.load(self.scene, self.optimizer, state["optimizer"]))

    def unsharded(self) -> dict[str, Any]:
        """Return the full parameters, the buffers and the full optimizer states by name."""
        states = FULL.save(self.scene, self.optimizer)["state"]
        return copied(
            {
                "parameters": self.scene.whole_parameters(),
                "buffers": {clean(name): buffer for name, buffer in self.model.named_buffers()},
                "states": described(states),
            }
        )


def _scene_of(scene: Scene, seed: int) -> Scene:
    return Scene(scene.rank, scene.library, scene.setup, scene.tree, scene.wrapped(scene.tree.build(seed)))


def our_planner(**options: Any) -> Any:
    """Return Tandem's `LoadPlanner`."""
    # Importing this module must not import a subject, because ranks of all subjects start with it.
    from impl.distributed.fsdp.checkpoint import LoadPlanner  # noqa: PLC0415

    return LoadPlanner(**options)


def read(scene: Scene, *, path: str, way: StateDictMethod, planner: Any = DefaultLoadPlanner) -> Any:
    """Load a checkpoint into a model with other values. Return its full state."""
    trained = _Trained(scene, way, seed=1)
    state = trained.state()
    dcp.load(state, checkpoint_id=path, planner=planner())
    trained.load(state)
    return trained.unsharded()


def assert_reads(
    twins: Twins, setup: Setup, expected: Any, path: Path, way: StateDictMethod, **arguments: Any
) -> None:
    for value in twins.values(read, setup, path=str(path), way=way, **arguments):
        assert_same_outcome(Outcome(expected), Outcome(value))


def unsharded() -> dict[str, Any]:
    """Return the result of `written` for a model that is not wrapped."""
    model, optimized = TREE.build(), Optimized(steps=1)
    states = by_name(model, optimized.stepped(model))["state"]
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return copied({"parameters": parameters, "buffers": buffers, "states": described(states)})


def written(scene: Scene, *, path: str, way: StateDictMethod) -> Any:
    """Save a checkpoint of a trained model. Return its full state."""
    trained = _Trained(scene, way)
    dcp.save(trained.state(), checkpoint_id=path)
    return trained.unsharded()


_READ = clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
_OTHER_WORLDS = clause("distributed.fsdp.fsdp_state_dict.other_worlds")


@pytest.mark.parametrize(
    ("setup", "way", "worlds"),
    [
        pytest.param(FLAT, FULL, (2, 3), id="flat, full", marks=_READ),
        pytest.param(ORIGINALS, FULL, (2, 3), id="originals, full", marks=_READ),
        pytest.param(FLAT, ROWS, (3, 2), id="flat, rows", marks=_READ),
        pytest.param(ORIGINALS, ROWS, (3, 2), id="originals, rows", marks=_READ),
        pytest.param(FLAT, ROWS, (1, 2), id="flat, of one rank", marks=_OTHER_WORLDS),
        pytest.param(ON_MESH, ROWS, (2, 4), id="mesh", marks=_OTHER_WORLDS),
    ],
)
def test_checkpoint_is_read_by_another_number_of_ranks(
    twins_of: TwinsOf, tmp_path: Path, setup: Setup, way: StateDictMethod, worlds: tuple[int, int]
) -> None:
    before, after = map(twins_of, worlds)
    wrote, *_ = before.values(written, setup, path=str(tmp_path), way=way)
    assert_reads(after, setup, wrote, tmp_path, way)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@flat_or_originals
def test_checkpoint_is_read_by_ranks_without_rows(twins_of: TwinsOf, tmp_path: Path, setup: Setup) -> None:
    """Read with Tandem's `LoadPlanner`.

    DCP's default planner reports existing keys as missing on such ranks, with either library's class.
    """
    wrote, *_ = twins_of(2).values(written, setup, path=str(tmp_path), way=ROWS)
    assert_reads(twins_of(4), setup, wrote, tmp_path, ROWS, planner=our_planner)


def read_by_torchs_helper(scene: Scene, *, path: str) -> Any:
    """Load the optimizer's rows with DCP's own helper, which reads one-element tensors in full on every rank."""
    trained = _Trained(scene, StateDictMethod("SHARDED"), seed=1)
    state = trained.state()
    dcp.load({"model": state["model"]}, checkpoint_id=path, planner=our_planner())
    loaded = load_sharded_optimizer_state_dict(
        state["model"], optimizer_key="optimizer", storage_reader=dcp.FileSystemReader(path)
    )
    trained.load({"model": state["model"], "optimizer": loaded["optimizer"]})
    return trained.unsharded()


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@flat_or_originals
def test_checkpoint_is_read_by_helper_of_torch(
    cpu_twins: Twins, twins_of: TwinsOf, tmp_path: Path, setup: Setup
) -> None:
    arguments = {
        "tree": replace(SIMPLE, body=ModuleGroup((Leaf("affine", 1), Leaf("normed")))),
        "path": str(tmp_path),
    }
    wrote, *_ = twins_of(3).values(written, setup, way=ROWS, **arguments)
    for value in cpu_twins.values(read_by_torchs_helper, setup, **arguments):
        assert_same_outcome(Outcome(wrote), Outcome(value))


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@every_form
@pytest.mark.world_sizes(also=WORLDS)
@FULL_PROFILE
def test_checkpoint_of_any_world_size_is_read(
    cpu_twins: Twins, twins_of: TwinsOf, tmp_path: Path, setup: Setup, way: StateDictMethod
) -> None:
    expected = observe(unsharded).value
    for before in WORLDS:
        path = tmp_path / str(before)
        for wrote in twins_of(before).values(written, setup, path=str(path), way=way):
            assert_same_outcome(Outcome(expected), Outcome(wrote))
        assert_reads(cpu_twins, setup, expected, path, way, planner=our_planner)


def written_meanwhile(scene: Scene, *, path: str, way: StateDictMethod) -> Any:
    """Save with `async_save` while training goes on. Return the values from the time when the save began."""
    trained = _Trained(scene, way)
    expected = trained.unsharded()
    # The default stager asks each tensor for its data pointer, and a ShardedTensor has none.
    stager = BlockingAsyncStager() if way.name == "SHARDED" and scene.setup.ranks != "mesh" else None
    group = dist.new_group(backend="gloo")
    begun: Any = dcp.async_save(trained.state(), checkpoint_id=path, process_group=group, async_stager=stager)
    step(trained.model, trained.optimizer)
    getattr(begun, "upload_completion", begun).result()
    return expected


@clause("distributed.fsdp.fsdp_distributed_checkpoint.asynchronous")
@every_form
def test_training_continues_during_async_save(
    cpu_twins: Twins, tmp_path: Path, setup: Setup, way: StateDictMethod
) -> None:
    wrote, *_ = cpu_twins.values(written_meanwhile, setup, path=str(tmp_path), way=way)
    assert_reads(cpu_twins, setup, wrote, tmp_path, way, planner=our_planner)


def read_in_part(scene: Scene, *, path: str, planner: Any) -> Any:
    """Load a checkpoint of the body only. Return the target's values before and after, and the saved model's values."""
    source, target = _Trained(scene, ROWS), _Trained(scene, ROWS, seed=1)
    body = {name: value for name, value in source.state()["model"].items() if name.startswith("body.")}
    dcp.save({"model": body}, checkpoint_id=path)
    before, state = target.unsharded(), target.state()
    dcp.load({"model": state["model"]}, checkpoint_id=path, planner=planner(allow_partial_load=True))
    target.load(state)
    return {"before": before, "after": target.unsharded(), "saved": source.unsharded()}


@clause("distributed.fsdp.fsdp_distributed_checkpoint.in_part")
@pytest.mark.parametrize("planner", [DefaultLoadPlanner, our_planner], ids=["torch's", "ours"])
def test_partial_checkpoint_is_read(cpu_twins: Twins, tmp_path: Path, planner: Callable[..., Any]) -> None:
    arguments = {"path": str(tmp_path), "planner": planner}
    for state in cpu_twins.values(read_in_part, ORIGINALS, **arguments):
        for kind, after in state["after"].items():
            expected = dict(state["before"][kind])
            if kind != "states":  # the checkpoint has no optimizer
                expected |= {name: v for name, v in state["saved"][kind].items() if name.startswith("body.")}
            assert_same_outcome(Outcome(expected), Outcome(after))


def named(scene: Scene, *, path: str) -> Any:
    """Save the states of one `_NamedOptimizer` of torch and load them into another. Return the states of both."""
    first, second = _Named(scene, 0), _Named(scene, 1)
    dcp.save(first.saved(), checkpoint_id=path)
    state = second.saved()
    dcp.load(state, checkpoint_id=path)
    second.load(state)
    return [first.own_state(), second.own_state()]


class _Named:
    def __init__(self, scene: Scene, seed: int) -> None:
        self._scene = _scene_of(scene, seed)
        model = self._scene.model
        optimizer: Any = _NamedOptimizer(dict(model.named_parameters()), torch.optim.Adam)  # pyright: ignore[reportArgumentType]
        optimizer.init_state()
        for _ in range(1 + seed):
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 0.5
            optimizer.step()
        self._optimizer = optimizer

    def saved(self) -> dict[str, Any]:
        with FULL.set_on(self._scene):
            return self._scene.fsdp.optim_state_dict(
                self._scene.model, self._optimizer, self._optimizer.state_dict()
            )

    def load(self, state: dict[str, Any]) -> None:
        with FULL.set_on(self._scene):
            loaded = self._scene.fsdp.optim_state_dict_to_load(
                self._scene.model, self._optimizer, state, is_named_optimizer=True
            )
        self._optimizer.load_state_dict(loaded)

    def own_state(self) -> dict[str, Any]:
        """Return the states of the parameters of which this rank has elements."""
        states = self._optimizer.state_dict()["state"]
        owned = [name for name, parameter in self._scene.model.named_parameters() if parameter.numel()]
        return copied({name: states[name] for name in owned})


@clause("distributed.fsdp.fsdp_distributed_checkpoint.named")
@flat_or_originals
def test_states_of_named_optimizer_round_trip(cpu_twins: Twins, tmp_path: Path, setup: Setup) -> None:
    for first, second in cpu_twins.values(named, setup, path=str(tmp_path)):
        assert_same_outcome(Outcome(first), Outcome(second))


def named_by_itself(scene: Scene, *, path: str) -> Any:
    """Pass states of torch's `_NamedOptimizer` to DCP directly. Return this rank's states and the loaded states."""
    first, second = _Named(scene, 0), _Named(scene, 1)
    dcp.save(first.own_state(), checkpoint_id=path)
    state = second.own_state()
    dcp.load(state, checkpoint_id=path)
    return [first.own_state(), state]


@clause("distributed.fsdp.fsdp_distributed_checkpoint.named_by_itself")
@pytest.mark.world_sizes(fewest=2)
def test_named_optimizer_saves_only_own_shards(cpu_twins: Twins, tmp_path: Path) -> None:
    outcomes = [
        cpu_twins.of(library, named_by_itself, FLAT, path=str(tmp_path / side))
        for side, library in (("reference", cpu_twins.reference), ("subject", cpu_twins.subject))
    ]
    assert_ranks_agree(*outcomes, EXACT)
    assert not all(holds(assert_same_outcome, *map(Outcome, states)) for states in values_of(outcomes[1]))
