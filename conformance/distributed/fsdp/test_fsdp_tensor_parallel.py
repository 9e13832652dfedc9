"""Sharding combined with tensor parallelism, on four real ranks, compared with torch and with one unsharded process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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

from conformance.distributed.fsdp.scenes.fsdp_training import FSDP, clean
from conformance.distributed.fsdp.scenes.fully_shard_training import FULLY_SHARD
from conformance.distributed.fsdp.scenes.rank_judging import (
    assert_all_close,
    assert_ranks_agree,
    run_on_ranks,
)
from conformance.distributed.fsdp.scenes.twins import (
    FULL,
    RankOutcomes,
    Twins,
    TwinsOf,
    each,
    holds,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.judge.tolerances import TRAINED
from conformance.ranks import Rank

DEEP = pytest.mark.profile("deep")

FLAT, ORIGINALS = {"use_orig_params": False}, {"use_orig_params": True}


@dataclass(frozen=True)
class Parallel:
    """Mesh and arguments of a model with tensor parallelism.

    Args:
        sizes: sizes of the mesh: replicas (if there are three), ranks that share the data, ranks that share a weight.
        arguments: arguments of FullyShardedDataParallel or of fully_shard.
        leaves_last: whether the last block is left to the outermost unit.
    """

    sizes: tuple[int, ...]
    arguments: Mapping[str, Any]
    leaves_last: bool = False
    steps: int = 3
    is_fully_shard: bool = False

    @property
    def batches(self) -> int:
        """Number of ranks that have their own data."""
        return functools.reduce(int.__mul__, self.sizes[:-1])


_FLAT, _ORIGINALS = Parallel((2, 2), FLAT), Parallel((2, 2), ORIGINALS)
_KINDS = pytest.mark.parametrize(
    ("parallel", "kind"),
    [
        pytest.param(_FLAT, "SHARDED", id="flat, sharded"),
        pytest.param(_ORIGINALS, "FULL", id="originals, full"),
        pytest.param(_FLAT, "FULL", id="flat, full", marks=FULL),
        pytest.param(_ORIGINALS, "SHARDED", id="originals, sharded", marks=FULL),
    ],
)
_BOTH = pytest.mark.parametrize(
    "parallel", [pytest.param(_FLAT, marks=FULL), _ORIGINALS], ids=["flat", "originals"]
)
_LATTICE = [
    pytest.param(Parallel(sizes, FLAT | arguments, leaves_last), marks=FULL)
    for sizes, arguments, leaves_last in [
        ((2, 2), {}, True),
        ((2, 2), ORIGINALS | {"sharding_strategy": "SHARD_GRAD_OP"}, False),
        ((2, 2), {"sharding_strategy": "NO_SHARD"}, False),
        ((4, 1), ORIGINALS, False),
        ((1, 4), {}, False),
        ((1, 2), {}, False),
        ((2, 1), {}, True),
    ]
]
_REPLICAS = [
    pytest.param(Parallel((2, 2, 2), arguments | {"sharding_strategy": "HYBRID_SHARD"}), marks=DEEP)
    for arguments in (FLAT, ORIGINALS)
]
_MESHES = [_FLAT, _ORIGINALS, *_LATTICE, *_REPLICAS]


def twins_for(twins_of: TwinsOf, parallel: Parallel) -> Twins:
    return twins_of(parallel.batches * parallel.sizes[-1])


def probe(rank: Rank, *, library: str, asks: Any, parallel: Parallel, **arguments: Any) -> Outcome:
    """Return the outcome of `asks(rank, library, parallel, **arguments)`. `asks` must be defined in this module."""
    loaded = load_library(library)
    return observe(lambda: asks(rank, loaded, parallel, **arguments))


def seen_by(twins: Twins, library: Library, asks: Any, parallel: Parallel, **arguments: Any) -> RankOutcomes:
    return run_on_ranks(twins.pool, library, probe, asks=asks, parallel=parallel, **arguments)


def assert_agree(
    twins_of: TwinsOf, asks: Any, parallel: Parallel, *, all_raise: bool = False, **arguments: Any
) -> RankOutcomes:
    """Compare the ranks of both libraries. Return the subject's outcomes."""
    twins = twins_for(twins_of, parallel)
    expected, actual = (
        seen_by(twins, library, asks, parallel, **arguments) for library in (twins.reference, twins.subject)
    )
    assert all((outcome.raised is not None) is all_raise for outcome in expected), expected
    assert_ranks_agree(expected, actual)
    return actual


def deviate(
    twins_of: TwinsOf, asks: Any, parallel: Parallel, arguments: dict[str, Any], **sides: Any
) -> None:
    """Judge the deviation that the test names. `sides` are arguments of `DeviationJudge.judge`."""
    twins = twins_for(twins_of, parallel)
    twins.judge(lambda library: seen_by(twins, library, asks, parallel, **arguments), **sides)


def assert_like_unsharded(got: RankOutcomes, expected: dict[str, Any]) -> None:
    for value in values_of(got):
        parameters = {name: state["values"] for name, state in value["parameters"].items()}
        assert_all_close("parameters", expected["parameters"], parameters, TRAINED)


def like_unsharded(expected: dict[str, Any]) -> Callable[[RankOutcomes], bool]:
    return lambda got: holds(assert_like_unsharded, got, expected)


_NAMES = ("replicas", "data", "model")


_PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


_WIDTH, _HIDDEN, _ROWS = 6, 8, 2


_MOMENTUM = 0.9


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


def batch_of(step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(_ROWS, _WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().sum()


def mesh_of(rank: Rank, sizes: tuple[int, ...]) -> DeviceMesh:
    return rank.mesh(*sizes, names=_NAMES[-len(sizes) :])


class ParallelSite:
    """Model of a rank, and an optimizer that has not stepped yet."""

    def __init__(self, rank: Rank, library: Library, parallel: Parallel, seed: int = 0) -> None:
        self.parallel = parallel
        self.library = library
        self.fsdp: Any = library.find(FSDP)
        mesh = mesh_of(rank, parallel.sizes)
        names = _NAMES[-len(parallel.sizes) : -1]
        data = mesh[names if len(names) > 1 else names[0]]
        self._batch = rank.rank // parallel.sizes[-1]
        model = plain_model(seed)
        blocks = 1 if parallel.leaves_last else 2
        for index in range(2):
            plan = {name: style() for name, style in _PLAN.items()}
            parallelize_module(model[index], mesh["model"], plan)
        for index in range(blocks):
            model[index] = self._wrapped(model[index], data)
        self.model = self._wrapped(model, data)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=_MOMENTUM)

    def _wrapped(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        if self.parallel.is_fully_shard:
            return self.library.find(FULLY_SHARD)(module, mesh=mesh, **self.parallel.arguments)
        arguments = {"device_id": torch.device("cpu"), **self.parallel.arguments}
        strategies = self.library.distributed.fsdp.ShardingStrategy
        if "sharding_strategy" in arguments:
            arguments["sharding_strategy"] = strategies[arguments["sharding_strategy"]]
        return self.fsdp(module, device_mesh=mesh, **arguments)

    def backward(self, step: int) -> Tensor:
        loss = loss_of(self.model, batch_of(step, self._batch))
        loss.backward()
        return loss.detach()

    def step(self, step: int) -> Tensor:
        loss = self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def parameters(self) -> dict[str, Any]:
        if self.parallel.is_fully_shard:
            return {name: laid_out(p) for name, p in self.model.named_parameters()}
        with self.fsdp.summon_full_params(self.model, writeback=False):
            return {clean(name): laid_out(p) for name, p in self.model.named_parameters()}

    def shards(self) -> dict[str, Tensor]:
        return {
            name: (p._local_tensor if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.model.named_parameters()
        }

    def state_dict(self, kind: str) -> dict[str, Any]:
        with self.fsdp.state_dict_type(self.model, StateDictType[f"{kind}_STATE_DICT"]):
            return self.model.state_dict()

    def load(self, kind: str, state: dict[str, Any]) -> None:
        with self.fsdp.state_dict_type(self.model, StateDictType[f"{kind}_STATE_DICT"]):
            self.model.load_state_dict(state)

    def optimizer_state(self, kind: str) -> dict[str, Any]:
        with self.fsdp.state_dict_type(self.model, StateDictType[f"{kind}_STATE_DICT"]):
            return self.fsdp.optim_state_dict(self.model, self.optimizer)

    def load_optimizer(self, kind: str, state: dict[str, Any]) -> None:
        with self.fsdp.state_dict_type(self.model, StateDictType[f"{kind}_STATE_DICT"]):
            self.optimizer.load_state_dict(
                self.fsdp.optim_state_dict_to_load(self.model, self.optimizer, state)
            )


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


def train(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    scene = ParallelSite(rank, library, parallel)
    reported: dict[str, Any] = {"shards": scene.shards(), "losses": []}
    reported["losses"] = [scene.step(step) for step in range(parallel.steps)]
    return reported | {"after": scene.shards(), "parameters": scene.parameters()}


def train_unsharded(
    parallel: Parallel, norm: tuple[float, float] | None = None, steps: int | None = None, backwards: int = 1
) -> dict[str, Any]:
    """Train on the mean over all batches, with `backwards` backwards per step.

    `norm` is the maximum norm and its order, for clipping.
    """
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=_MOMENTUM)
    total = None
    for step in range(parallel.steps if steps is None else steps):
        for backward in range(step, step + backwards):
            for number in range(parallel.batches):
                (loss_of(model, batch_of(backward, number)) / parallel.batches).backward()
        if norm is not None:
            total = nn.utils.clip_grad_norm_(model.parameters(), *norm)
        optimizer.step()
        optimizer.zero_grad()
    return {"parameters": {name: p.detach() for name, p in model.named_parameters()}, "norm": total}


@clause("distributed.fsdp.fsdp_tensor_parallel.trains")
@pytest.mark.parametrize("parallel", _MESHES, ids=str)
def test_tensor_parallel_training_matches_torch(twins_of: TwinsOf, parallel: Parallel) -> None:
    got = assert_agree(twins_of, train, parallel)
    assert_like_unsharded(got, train_unsharded(parallel))


def accumulate(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Step after two backwards, of which the first does not synchronise. Return the gradients and the parameters."""
    scene = ParallelSite(rank, library, parallel)
    with scene.model.no_sync():
        scene.backward(0)
    scene.backward(1)
    gradients = {name: p.grad for name, p in scene.model.named_parameters()}
    scene.optimizer.step()
    return {"gradients": gradients, "parameters": scene.parameters()}


@clause("distributed.fsdp.fsdp_tensor_parallel.accumulates")
def test_gradients_accumulate_over_backwards(twins_of: TwinsOf) -> None:
    got = assert_agree(twins_of, accumulate, _FLAT)
    assert_like_unsharded(got, train_unsharded(_FLAT, steps=1, backwards=2))


def write_summoned(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Read and write unsharded parameters, and their gradients with `use_orig_params`. Then train."""
    scene = ParallelSite(rank, library, parallel)
    originals = bool(parallel.arguments.get("use_orig_params"))
    scene.backward(0)
    with scene.fsdp.summon_full_params(scene.model, with_grads=originals):
        named = {clean(name): p for name, p in scene.model.named_parameters()}
        gradients = {name: laid_out(p.grad) for name, p in named.items() if originals}
        with torch.no_grad():
            for number, parameter in enumerate(named.values()):
                parameter.mul_(1.0 + number)
                if originals:
                    assert parameter.grad is not None
                    parameter.grad.mul_(2.0)
    reported = {"gradients": gradients, "parameters": scene.parameters(), "loss": scene.backward(1)}
    scene.optimizer.step()
    return reported | {"after": scene.parameters()}


@clause("distributed.fsdp.fsdp_tensor_parallel.summoned")
@_BOTH
def test_writes_to_summoned_parameters_are_kept(twins_of: TwinsOf, parallel: Parallel) -> None:
    assert_agree(twins_of, write_summoned, parallel)


def save(rank: Rank, library: Library, parallel: Parallel, *, kind: str) -> dict[str, Any]:
    scene = ParallelSite(rank, library, parallel)
    scene.step(0)
    model = {name: laid_out(value) for name, value in scene.state_dict(kind).items()}
    states = scene.optimizer_state(kind)["state"]
    optimizer = {
        name: {key: laid_out(value) for key, value in states[name].items()} for name in sorted(states)
    }
    return {"model": model, "optimizer": optimizer}


@clause("distributed.fsdp.fsdp_tensor_parallel.saves")
@_KINDS
def test_state_dict_matches_torch(twins_of: TwinsOf, parallel: Parallel, kind: str) -> None:
    assert_agree(twins_of, save, parallel, kind=kind)


def reload(rank: Rank, library: Library, parallel: Parallel, *, kind: str) -> dict[str, Any]:
    """Load the state dict of a trained model into a model with other values."""
    trained, other = (ParallelSite(rank, library, parallel, seed) for seed in (0, 1))
    trained.step(0)
    other.load(kind, trained.state_dict(kind))
    return {"parameters": other.parameters(), "loss": other.step(1)}


@clause("distributed.fsdp.fsdp_tensor_parallel.loads")
@_KINDS
def test_state_dict_reloads_and_trains(twins_of: TwinsOf, parallel: Parallel, kind: str) -> None:
    got = assert_agree(twins_of, reload, parallel, kind=kind)
    assert_like_unsharded(got, train_unsharded(parallel, steps=1))


def fit(rank: Rank, library: Library, parallel: Parallel, *, rank_at_fault: int) -> str:
    """Load a state dict that lacks a key on one rank. Return the error, or "loaded"."""
    scene = ParallelSite(rank, library, parallel)
    before = scene.shards()
    state = scene.state_dict("FULL")
    if rank.rank == rank_at_fault:
        del state["0.up.weight"]
    try:
        scene.load("FULL", state)
    except RuntimeError as error:
        unchanged = all(torch.equal(before[name], now) for name, now in scene.shards().items())
        return f"{type(error).__name__}, unchanged: {unchanged}"
    return "loaded"


@clause("distributed.fsdp.fsdp_tensor_parallel.loads_together")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
def test_loads_on_all_ranks_or_on_none(twins_of: TwinsOf) -> None:
    we_do = each(lambda value: value == "RuntimeError, unchanged: True")
    deviate(twins_of, fit, _FLAT, {"rank_at_fault": 1}, we_do=we_do)


def reshard(rank: Rank, library: Library, parallel: Parallel, *, path: str, sizes: tuple[int, ...]) -> Any:
    """Save a model on one mesh and load it on another one."""
    kind = "SHARDED"
    trained = ParallelSite(rank, library, parallel)
    trained.step(0)
    dcp.save({"model": trained.state_dict(kind)}, checkpoint_id=path)
    other = ParallelSite(rank, library, Parallel(sizes, parallel.arguments, parallel.leaves_last), seed=1)
    state = {"model": other.state_dict(kind)}
    dcp.load(state, checkpoint_id=path)
    other.load(kind, state["model"])
    return {"parameters": {name: value["values"] for name, value in other.parameters().items()}}


@clause("distributed.fsdp.fsdp_tensor_parallel.reshards")
@FULL
@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
def test_another_mesh_reads_what_was_written(
    twins_of: TwinsOf, sizes: tuple[int, int], tmp_path: Path
) -> None:
    twins = twins_for(twins_of, _FLAT)
    expected = train_unsharded(_FLAT, steps=1)["parameters"]
    for library in (twins.reference, twins.subject):
        path = str(tmp_path / library.spec.replace("/", "_"))
        for value in values_of(seen_by(twins, library, reshard, _FLAT, path=path, sizes=sizes)):
            assert_all_close("parameters", expected, value["parameters"], TRAINED)


def resume(rank: Rank, library: Library, parallel: Parallel, *, kind: str) -> dict[str, Any]:
    """Load the states of a trained model and its optimizer into another model. Then step both."""
    trained, other = (ParallelSite(rank, library, parallel, seed) for seed in (0, 1))
    trained.step(0)
    other.step(0)
    other.load(kind, trained.state_dict(kind))
    other.load_optimizer(kind, trained.optimizer_state(kind))
    for scene in (trained, other):
        scene.step(1)
    return {"trained": trained.parameters(), "resumed": other.parameters()}


@clause("distributed.fsdp.fsdp_tensor_parallel.resumes")
@pytest.mark.deviation("fsdp.optimizer_state_of_dtensors")
@_KINDS
def test_training_is_resumed(twins_of: TwinsOf, parallel: Parallel, kind: str) -> None:
    expected = train_unsharded(parallel, steps=2)

    def goes_on(value: Any) -> bool:
        return holds(assert_like_unsharded, [Outcome({"parameters": value["resumed"]})], expected)

    deviate(twins_of, resume, parallel, {"kind": kind}, we_do=each(goes_on))


def clip(rank: Rank, library: Library, parallel: Parallel, *, norm_type: float) -> dict[str, Any]:
    scene = ParallelSite(rank, library, parallel)
    scene.backward(0)
    norm = scene.model.clip_grad_norm_(0.5, norm_type)
    scene.optimizer.step()
    scene.optimizer.zero_grad()
    return {"norm": norm, "parameters": scene.parameters()}


@clause("distributed.fsdp.fsdp_tensor_parallel.clips")
@pytest.mark.deviation("fsdp.norm_of_dtensors")
@pytest.mark.parametrize("norm_type", [2.0, pytest.param(torch.inf, marks=FULL)])
@_BOTH
def test_norm_counts_each_element_once(twins_of: TwinsOf, parallel: Parallel, norm_type: float) -> None:
    expected = train_unsharded(parallel, norm=(0.5, norm_type), steps=1)

    def is_right(got: RankOutcomes) -> bool:
        if not holds(assert_like_unsharded, got, expected):
            return False
        norms = [outcome.value["norm"].values for outcome in got]
        return all(TRAINED.excess(expected["norm"], norm) is None for norm in norms)

    may_agree = norm_type == torch.inf
    deviate(twins_of, clip, parallel, {"norm_type": norm_type}, we_do=is_right, may_agree=may_agree)


@clause("distributed.fsdp.fsdp_tensor_parallel.originals")
@pytest.mark.deviation("fsdp.original_dtensors")
@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((1, 4), marks=FULL)])
def test_originals_that_are_not_sharded_train(twins_of: TwinsOf, sizes: tuple[int, int]) -> None:
    parallel = Parallel(sizes, ORIGINALS)
    we_do = like_unsharded(train_unsharded(parallel))
    deviate(twins_of, train, parallel, {}, we_do=we_do, torch_does=_raises)


@clause("distributed.fsdp.fsdp_tensor_parallel.originals")
@pytest.mark.deviation("fsdp.original_dtensors")
@FULL
def test_originals_accumulate(twins_of: TwinsOf) -> None:
    we_do = like_unsharded(train_unsharded(_ORIGINALS, steps=1, backwards=2))
    deviate(twins_of, accumulate, _ORIGINALS, {}, we_do=we_do, torch_does=_raises)


_FULLY = [
    Parallel((2, 2), {}, is_fully_shard=True),
    *(
        pytest.param(Parallel(sizes, arguments, leaves_last, is_fully_shard=True), marks=FULL)
        for sizes, arguments, leaves_last in [
            ((2, 2), {"reshard_after_forward": False}, True),
            ((4, 1), {}, False),
            ((1, 4), {}, False),
        ]
    ),
    pytest.param(Parallel((2, 2, 2), {}, is_fully_shard=True), marks=DEEP),
]


def train_sharded(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Train with fully_shard. Also return the gradients before the first step, and clipped gradients."""
    scene = ParallelSite(rank, library, parallel)
    scene.backward(0)
    clipped = [p for p in scene.model.parameters() if len(p.placements) == len(parallel.sizes)]
    gradients = {name: laid_out(p.grad) for name, p in scene.model.named_parameters()}
    norm = library.find("nn.utils.clip_grad_norm_")(clipped, 0.5)
    after = [laid_out(p.grad) for p in clipped]
    scene.optimizer.zero_grad()
    return {"gradients": gradients, "norm": laid_out(norm), "clipped": after} | train(rank, library, parallel)


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@pytest.mark.parametrize("parallel", _FULLY, ids=str)
def test_fully_shard_trains(twins_of: TwinsOf, parallel: Parallel) -> None:
    got = assert_agree(twins_of, train_sharded, parallel)
    assert_like_unsharded(got, train_unsharded(parallel))


def accumulate_sharded(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    scene = ParallelSite(rank, library, parallel)
    scene.model.set_requires_gradient_sync(False)
    scene.backward(0)
    scene.model.set_requires_gradient_sync(True)
    scene.step(1)
    return {"parameters": scene.parameters()}


def load_sharded(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Save a model and its optimizer with DCP's own functions, and load them into another model."""
    trained, other = (ParallelSite(rank, library, parallel, seed) for seed in (0, 1))
    for scene in (trained, other):
        scene.step(0)
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    saved = {name: laid_out(value) for name, value in model.items()}
    other.step(1)
    return {"saved": saved, "parameters": other.parameters()}


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@pytest.mark.parametrize("asks", [pytest.param(accumulate_sharded, marks=FULL), load_sharded])
def test_fully_shard_accumulates_and_loads(twins_of: TwinsOf, asks: Any) -> None:
    assert_agree(twins_of, asks, _FULLY[0])


def on_another_mesh(rank: Rank, library: Library, parallel: Parallel) -> None:
    """Shard a model over a mesh that is unrelated to the mesh of its DTensor parameters."""
    model = plain_model()
    parallelize_module(model[0], mesh_of(rank, parallel.sizes)["model"], {"up": ColwiseParallel()})
    other = rank.mesh(rank.world_size, names=("elsewhere",))
    library.find(FULLY_SHARD)(model, mesh=other)


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@FULL
def test_fully_shard_refuses_meshes_that_do_not_belong_together(twins_of: TwinsOf) -> None:
    assert_agree(twins_of, on_another_mesh, _FULLY[0], all_raise=True)


def _raises(got: RankOutcomes) -> bool:
    return all(outcome.raised is not None for outcome in got)
