"""Both APIs with tensor parallelism, on four real ranks, compared with torch and with one unsharded process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from conformance.distributed.fsdp.scenes.fsdp_training import accumulating, clean
from conformance.distributed.fsdp.scenes.rank_judging import assert_all_close
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import (
    FULL_PROFILE,
    PlainTwins,
    TwinsOf,
    each,
    raise_an_error,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import TRAINED

DEEP = pytest.mark.profile("deep")
WITH_FLAT, WITH_ORIGINALS = {"use_orig_params": False}, {"use_orig_params": True}
_NAMES = ("replicas", "data", "model")
_PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}
_WIDTH, _HIDDEN, _ROWS = 6, 8, 2


@dataclass(frozen=True)
class Parallel:
    """Mesh and arguments of a model with tensor parallelism.

    Args:
        sizes: sizes of the mesh: replicas (if there are three), ranks that share the data, ranks that share a weight.
        arguments: arguments of FullyShardedDataParallel or of fully_shard.
        last_block: a `unit` of its own, left to the `root`, or `ignored`.
    """

    sizes: tuple[int, ...]
    arguments: Mapping[str, Any]
    last_block: str = "unit"
    is_fully_shard: bool = False

    def mesh(self, scene: Scene) -> DeviceMesh:
        return scene.rank.mesh(*self.sizes, names=_NAMES[-len(self.sizes) :])


@pytest.fixture
def mesh_twins(plain_twins_of: TwinsOf, parallel: Parallel) -> PlainTwins:
    """Rank comparison in the world size of the mesh."""
    return plain_twins_of(math.prod(parallel.sizes))


class ParallelBlock(nn.Module):
    """Block with two weights that tensor parallelism shards, and a norm that each rank has in full."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _HIDDEN)
        self.down = nn.Linear(_HIDDEN, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


def plain_model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(ParallelBlock(), ParallelBlock(), nn.Linear(_WIDTH, 3)).double()


class ParallelTraining:
    """Model of a rank, and an optimizer that has not stepped yet."""

    def __init__(self, scene: Scene, parallel: Parallel, seed: int = 0, dtype: Any = torch.float64) -> None:
        self.scene, self.parallel, model = scene, parallel, plain_model(seed).to(dtype)
        mesh = parallel.mesh(scene)
        for block in model[:2] if scene.shards else ():
            parallelize_module(block, mesh["model"], {name: style() for name, style in _PLAN.items()})
        for index in range(2 if parallel.last_block == "unit" else 1):
            model[index] = self._sharded(model[index], mesh)
        ignored = {"ignored_states": [*model[1].parameters()]} if parallel.last_block == "ignored" else {}
        self.model = self._sharded(model, mesh, **ignored)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def _sharded(self, module: nn.Module, mesh: Any, **ignored: Any) -> Any:
        names = _NAMES[-len(self.parallel.sizes) : -1]
        data = mesh and mesh[names if len(names) > 1 else names[0]]
        if self.parallel.is_fully_shard:
            return self.scene.shard(module, mesh=data, **self.parallel.arguments)
        return self.scene.wrap(module, device_mesh=data, **self.parallel.arguments, **ignored)

    def backward(self, step: int) -> Tensor:
        """Run a backward. Ranks that share a weight have the same data."""

        def loss(rank: int) -> Tensor:
            generator = torch.Generator().manual_seed(100 * step + rank // self.parallel.sizes[-1])
            x = torch.randn(_ROWS, _WIDTH, generator=generator, dtype=torch.float64)
            return self.model(x.to(next(self.model.parameters()).dtype)).square().sum()

        mean = self.scene.mean(loss)
        mean.backward()
        return mean.detach()

    def step(self, step: int) -> Tensor:
        loss = self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def parameters(self) -> dict[str, Any]:
        if self.parallel.is_fully_shard:
            return {name: laid_out(p) for name, p in self.model.named_parameters()}
        with self.scene.fsdp.summon_full_params(self.model, writeback=False):
            return {clean(name): laid_out(p) for name, p in self.model.named_parameters()}

    def whole(self) -> dict[str, Tensor]:
        return {name: layout["values"] for name, layout in self.parameters().items()}

    def shards(self) -> dict[str, Tensor]:
        return {
            name: (p._local_tensor if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.model.named_parameters()
        }

    def with_states_of(self, kind: str) -> Any:
        return self.scene.fsdp.state_dict_type(self.model, StateDictType[f"{kind}_STATE_DICT"])

    def state_dict(self, kind: str) -> dict[str, Any]:
        with self.with_states_of(kind):
            return self.model.state_dict()

    def load(self, kind: str, state: dict[str, Any]) -> None:
        with self.with_states_of(kind):
            self.model.load_state_dict(state)

    def optimizer_state(self, kind: str) -> dict[str, Any]:
        with self.with_states_of(kind):
            return self.scene.fsdp.optim_state_dict(self.model, self.optimizer)

    def load_optimizer(self, kind: str, state: dict[str, Any]) -> None:
        with self.with_states_of(kind):
            loaded = self.scene.fsdp.optim_state_dict_to_load(self.model, self.optimizer, state)
            self.optimizer.load_state_dict(loaded)


def laid_out(tensor: Any) -> dict[str, Any]:
    """Return a tensor's layout over the ranks and its full values."""
    if not isinstance(tensor, DTensor):
        return {"values": tensor.detach().clone(), "requires_grad": tensor.requires_grad}
    return {
        "values": tensor.detach().full_tensor().clone(),
        "requires_grad": tensor.requires_grad,
        "placements": str(tensor.placements),
        "mesh": tensor.device_mesh.mesh.tolist(),
        "local": tensor.to_local().detach().clone(),
    }


_FLAT, _ORIGINALS = Parallel((2, 2), WITH_FLAT), Parallel((2, 2), WITH_ORIGINALS)
_FULLY = Parallel((2, 2), {}, is_fully_shard=True)
_KINDS = pytest.mark.parametrize(
    ("parallel", "kind"),
    [
        pytest.param(_FLAT, "SHARDED", id="flat, sharded"),
        pytest.param(_ORIGINALS, "FULL", id="originals, full"),
        pytest.param(_FLAT, "FULL", id="flat, full", marks=FULL_PROFILE),
        pytest.param(_ORIGINALS, "SHARDED", id="originals, sharded", marks=FULL_PROFILE),
    ],
)
_BOTH = pytest.mark.parametrize(
    "parallel", [pytest.param(_FLAT, marks=FULL_PROFILE), _ORIGINALS], ids=["flat", "originals"]
)
of_fsdp = clause("distributed.fsdp.fsdp_tensor_parallel.trains")
of_fully_shard = clause("distributed.fsdp.fully_shard.tensor_parallel")


def train(scene: Scene, parallel: Parallel, steps: int = 3) -> dict[str, Any]:
    """Train for some steps. Return shards before and after, losses, layouts and full parameters."""
    training = ParallelTraining(scene, parallel)
    reported: dict[str, Any] = {"shards": training.shards()}
    reported["losses"] = [training.step(step) for step in range(steps)]
    after = {"after": training.shards(), "parameters": training.parameters()}
    return reported | after | {"whole": training.whole()}


def case(parallel: Parallel, *profile: pytest.MarkDecorator) -> Any:
    """Return a case of the training test, which asks about the clause of its API."""
    of_api = of_fully_shard if parallel.is_fully_shard else of_fsdp
    return pytest.param(parallel, marks=(of_api, *profile), id=str(parallel))


@pytest.mark.parametrize(
    "parallel",
    [
        case(_FLAT),
        case(_ORIGINALS),
        case(Parallel((2, 2), WITH_FLAT, last_block="root"), FULL_PROFILE),
        case(Parallel((2, 2), WITH_ORIGINALS | {"strategy": "SHARD_GRAD_OP"}), FULL_PROFILE),
        case(Parallel((2, 2), WITH_FLAT | {"strategy": "NO_SHARD"}), FULL_PROFILE),
        case(Parallel((4, 1), WITH_ORIGINALS), FULL_PROFILE),
        case(Parallel((1, 4), WITH_FLAT), FULL_PROFILE),
        case(Parallel((1, 2), WITH_FLAT), FULL_PROFILE),
        case(Parallel((2, 1), WITH_FLAT, last_block="root"), FULL_PROFILE),
        case(Parallel((2, 2, 2), WITH_FLAT | {"strategy": "HYBRID_SHARD"}), DEEP),
        case(Parallel((2, 2, 2), WITH_ORIGINALS | {"strategy": "HYBRID_SHARD"}), DEEP),
        case(_FULLY),
        case(
            Parallel((2, 2), {"reshard_after_forward": False}, last_block="root", is_fully_shard=True),
            FULL_PROFILE,
        ),
        case(Parallel((4, 1), {}, is_fully_shard=True), FULL_PROFILE),
        case(Parallel((1, 4), {}, is_fully_shard=True), FULL_PROFILE),
        case(Parallel((2, 2, 2), {}, is_fully_shard=True), DEEP),
    ],
)
def test_tensor_parallel_training_matches_torch_and_unsharded(
    mesh_twins: PlainTwins, parallel: Parallel
) -> None:
    outcomes = mesh_twins.agree(train, parallel=parallel)
    assert mesh_twins.like_unsharded(train, of="whole", parallel=parallel)(outcomes), outcomes


@clause("distributed.fsdp.fully_sharded_data_parallel.tensor_parallel")
@pytest.mark.parametrize("arguments", [WITH_FLAT, WITH_ORIGINALS], ids=["flat", "originals"])
def test_ignored_dtensors_stay_local(plain_twins_of: TwinsOf, arguments: dict[str, Any]) -> None:
    plain_twins_of(2).agree(train, parallel=Parallel((2, 1), arguments, last_block="ignored"))


def clip_sharded(scene: Scene, parallel: Parallel) -> dict[str, Any]:
    """Return the gradients of the first step, and the clipped gradients of the parameters on the whole mesh."""
    training = ParallelTraining(scene, parallel)
    training.backward(0)
    clipped = [p for p in training.model.parameters() if len(p.placements) == len(parallel.sizes)]
    gradients = {name: laid_out(p.grad) for name, p in training.model.named_parameters()}
    norm = scene.library.find("nn.utils.clip_grad_norm_")(clipped, 0.5)
    return {"gradients": gradients, "norm": laid_out(norm), "clipped": [laid_out(p.grad) for p in clipped]}


def load_sharded(scene: Scene, parallel: Parallel) -> dict[str, Any]:
    """Save a model and its optimizer with DCP's own functions, and load them into another model."""
    trained, other = (ParallelTraining(scene, parallel, seed) for seed in (0, 1))
    for training in (trained, other):
        training.step(0)
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    saved = {name: laid_out(value) for name, value in model.items()}
    other.step(1)
    return {"saved": saved, "parameters": other.parameters()}


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@pytest.mark.parametrize("program", [clip_sharded, load_sharded])
def test_dtensors_of_fully_shard_are_clipped_and_loaded(plain_twins_of: TwinsOf, program: Any) -> None:
    plain_twins_of(4).agree(program, parallel=_FULLY)


def shard_over_unrelated_mesh(scene: Scene) -> None:
    """Shard a model over a mesh that is unrelated to the mesh of its DTensor parameters."""
    model = plain_model()
    parallelize_module(model[0], _FULLY.mesh(scene)["model"], {"up": ColwiseParallel()})
    scene.shard(model, mesh=scene.rank.mesh(scene.rank.world_size, names=("elsewhere",)))


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@FULL_PROFILE
def test_fully_shard_refuses_unrelated_meshes(plain_twins_of: TwinsOf) -> None:
    outcomes = plain_twins_of(4).agree(shard_over_unrelated_mesh, may_raise=True)
    assert all("mesh" in str(outcome.raised) for outcome in outcomes), outcomes


def accumulate(scene: Scene, parallel: Parallel) -> dict[str, Any]:
    """Step after two backwards, of which the first does not synchronise. Return the gradients and the parameters."""
    training = ParallelTraining(scene, parallel)
    for step, order in enumerate(("no_sync", "")):
        with accumulating(training.model, order):
            training.backward(step)
    gradients = {
        name: laid_out(p.grad) for name, p in training.model.named_parameters() if p.grad is not None
    }
    training.optimizer.step()
    return {"gradients": gradients, "parameters": training.parameters(), "whole": training.whole()}


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(_FLAT, marks=clause("distributed.fsdp.fsdp_tensor_parallel.accumulates")),
        pytest.param(_FULLY, marks=(of_fully_shard, FULL_PROFILE)),
    ],
    ids=["flat", "fully_shard"],
)
def test_gradients_accumulate_over_backwards(mesh_twins: PlainTwins, parallel: Parallel) -> None:
    outcomes = mesh_twins.agree(accumulate, parallel=parallel)
    assert mesh_twins.like_unsharded(accumulate, of="whole", parallel=parallel)(outcomes), outcomes


def write_summoned(scene: Scene, parallel: Parallel) -> dict[str, Any]:
    """Read and write unsharded parameters, and their gradients with `use_orig_params`. Then train."""
    training = ParallelTraining(scene, parallel)
    originals = bool(parallel.arguments.get("use_orig_params"))
    training.backward(0)
    with scene.fsdp.summon_full_params(training.model, with_grads=originals):
        named = {clean(name): p for name, p in training.model.named_parameters()}
        gradients = {name: laid_out(p.grad) for name, p in named.items() if originals}
        with torch.no_grad():
            for number, parameter in enumerate(named.values()):
                parameter.mul_(1.0 + number)
                if originals:
                    assert parameter.grad is not None
                    parameter.grad.mul_(2.0)
    reported = {"gradients": gradients, "parameters": training.parameters(), "loss": training.backward(1)}
    training.optimizer.step()
    return reported | {"after": training.parameters()}


@clause("distributed.fsdp.fsdp_tensor_parallel.summoned")
@_BOTH
def test_writes_to_summoned_parameters_are_kept(mesh_twins: PlainTwins, parallel: Parallel) -> None:
    mesh_twins.agree(write_summoned, parallel=parallel)


def save(scene: Scene, parallel: Parallel, kind: str) -> dict[str, Any]:
    """Save a model and its optimizer after a step. Return the layout and values of each saved tensor."""
    training = ParallelTraining(scene, parallel)
    training.step(0)
    model = {name: laid_out(value) for name, value in training.state_dict(kind).items()}
    states = training.optimizer_state(kind)["state"]
    optimizer = {
        name: {key: laid_out(value) for key, value in states[name].items()} for name in sorted(states)
    }
    return {"model": model, "optimizer": optimizer}


@clause("distributed.fsdp.fsdp_tensor_parallel.saves")
@_KINDS
def test_state_dict_matches_torch(mesh_twins: PlainTwins, parallel: Parallel, kind: str) -> None:
    mesh_twins.agree(save, parallel=parallel, kind=kind)


def reload(scene: Scene, parallel: Parallel, kind: str) -> dict[str, Any]:
    """Load the state dict of a trained model into a model with other values."""
    trained, other = (ParallelTraining(scene, parallel, seed) for seed in (0, 1))
    trained.step(0)
    other.load(kind, trained.state_dict(kind))
    return {"parameters": other.parameters(), "whole": other.whole(), "loss": other.step(1)}


@clause("distributed.fsdp.fsdp_tensor_parallel.loads")
@_KINDS
def test_state_dict_reloads_and_trains(mesh_twins: PlainTwins, parallel: Parallel, kind: str) -> None:
    outcomes = mesh_twins.agree(reload, parallel=parallel, kind=kind)
    assert mesh_twins.like_unsharded(train, of="whole", parallel=parallel, steps=1)(outcomes), outcomes


def load_without_key(scene: Scene, rank_at_fault: int) -> str:
    """Load a state dict that lacks a key on one rank. Return the error, or "loaded"."""
    training = ParallelTraining(scene, _FLAT)
    before = training.shards()
    state = training.state_dict("FULL")
    if scene.rank.rank == rank_at_fault:
        del state["0.up.weight"]
    try:
        training.load("FULL", state)
    except RuntimeError as error:
        unchanged = all(torch.equal(before[name], now) for name, now in training.shards().items())
        return f"{type(error).__name__}, unchanged: {unchanged}"
    return "loaded"


@clause("distributed.fsdp.fsdp_tensor_parallel.loads_together")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
def test_load_failure_on_one_rank_keeps_all_shards(plain_twins_of: TwinsOf) -> None:
    """torch's other ranks load the state dict without an error."""
    we_do = each(lambda value: value == "RuntimeError, unchanged: True")
    plain_twins_of(4).deviate(load_without_key, rank_at_fault=1, we_do=we_do)


def reshard(scene: Scene, path: str, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Save a model on one mesh and load it on another one."""
    kind = "SHARDED"
    trained = ParallelTraining(scene, _FLAT)
    trained.step(0)
    dcp.save({"model": trained.state_dict(kind)}, checkpoint_id=path)
    other = ParallelTraining(scene, Parallel(sizes, WITH_FLAT), seed=1)
    state = {"model": other.state_dict(kind)}
    dcp.load(state, checkpoint_id=path)
    other.load(kind, state["model"])
    return other.whole()


@clause("distributed.fsdp.fsdp_tensor_parallel.reshards")
@FULL_PROFILE
@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
def test_checkpoint_loads_on_another_mesh(
    plain_twins_of: TwinsOf, sizes: tuple[int, int], tmp_path: Path
) -> None:
    twins = plain_twins_of(4)
    expected = train(Scene.unsharded(0, twins.world_size), _FLAT, steps=1)["whole"]
    for library in (twins.reference, twins.subject):
        path = str(tmp_path / library.spec.replace("/", "_"))
        for value in values_of(twins.of(library, reshard, path=path, sizes=sizes)):
            assert_all_close("parameters", expected, value, TRAINED)


def resume(scene: Scene, parallel: Parallel, kind: str) -> dict[str, Any]:
    """Load the states of a trained model and its optimizer into another model. Then step it."""
    trained, other = (ParallelTraining(scene, parallel, seed) for seed in (0, 1))
    trained.step(0)
    other.step(0)
    other.load(kind, trained.state_dict(kind))
    other.load_optimizer(kind, trained.optimizer_state(kind))
    other.step(1)
    return {"whole": other.whole()}


@clause("distributed.fsdp.fsdp_tensor_parallel.resumes")
@pytest.mark.deviation("fsdp.optimizer_state_of_dtensors")
@_KINDS
def test_resumed_training_matches_unsharded(mesh_twins: PlainTwins, parallel: Parallel, kind: str) -> None:
    """torch trains to other values with original parameters, and raises ValueError with flat parameters."""
    we_do = mesh_twins.like_unsharded(train, of="whole", parallel=parallel, steps=2)
    mesh_twins.deviate(resume, parallel=parallel, kind=kind, we_do=we_do)


def resume_by_older_methods(scene: Scene, parallel: Parallel) -> dict[str, Any]:
    """Load optimizer states by the deprecated methods for rows. Then step."""
    trained, other = (ParallelTraining(scene, parallel, seed) for seed in (0, 1))
    trained.step(0)
    other.step(0)
    other.load("SHARDED", trained.state_dict("SHARDED"))
    saved = scene.fsdp.sharded_optim_state_dict(trained.model, trained.optimizer)
    rows = scene.fsdp.flatten_sharded_optim_state_dict(saved, other.model, other.optimizer)
    other.optimizer.load_state_dict(rows)
    other.step(1)
    return {"whole": other.whole()}


@clause("distributed.fsdp.fsdp_tensor_parallel.resumes")
@pytest.mark.deviation("fsdp.optimizer_state_of_dtensors")
@_BOTH
def test_resumed_training_by_older_methods_matches_unsharded(
    mesh_twins: PlainTwins, parallel: Parallel
) -> None:
    """torch raises an error on some ranks, while other ranks wait for them."""
    we_do = mesh_twins.like_unsharded(train, of="whole", parallel=parallel, steps=2)
    mesh_twins.deviate(resume_by_older_methods, parallel=parallel, we_do=we_do, may_fault=True)


def clip(scene: Scene, parallel: Parallel, norm_type: float) -> dict[str, Tensor]:
    """Return the norm of the gradients, and the parameters after a step with clipped gradients."""
    training = ParallelTraining(scene, parallel, dtype=torch.float32)
    training.backward(0)
    norm = training.model.clip_grad_norm_(0.5, norm_type)
    training.optimizer.step()
    return {"norm": norm, **training.whole()}


@clause("distributed.fsdp.fsdp_tensor_parallel.clips")
@pytest.mark.deviation("fsdp.norm_of_dtensors")
@pytest.mark.parametrize("norm_type", [2.0, pytest.param(torch.inf, marks=FULL_PROFILE)])
@_BOTH
def test_norm_counts_each_element_once(mesh_twins: PlainTwins, parallel: Parallel, norm_type: float) -> None:
    """torch's ranks have different norms, because each ignores the shards of other tensor-parallel ranks."""
    may_agree = norm_type == torch.inf
    mesh_twins.deviate_to_unsharded(clip, parallel=parallel, norm_type=norm_type, may_agree=may_agree)


@clause("distributed.fsdp.fsdp_tensor_parallel.originals")
@pytest.mark.deviation("fsdp.original_dtensors")
@pytest.mark.parametrize(
    "parallel",
    [Parallel((1, 2), WITH_ORIGINALS), pytest.param(Parallel((1, 4), WITH_ORIGINALS), marks=FULL_PROFILE)],
    ids=str,
)
def test_unsharded_original_dtensors_train_like_unsharded(mesh_twins: PlainTwins, parallel: Parallel) -> None:
    mesh_twins.deviate_to_unsharded(train, of="whole", parallel=parallel, torch_does=raise_an_error)


@clause("distributed.fsdp.fsdp_tensor_parallel.originals")
@pytest.mark.deviation("fsdp.original_dtensors")
@FULL_PROFILE
def test_gradients_of_original_dtensors_accumulate(plain_twins_of: TwinsOf) -> None:
    """torch raises RuntimeError about an invalid storage."""
    arguments = {"of": "whole", "parallel": _ORIGINALS, "torch_does": raise_an_error}
    plain_twins_of(4).deviate_to_unsharded(accumulate, **arguments)
