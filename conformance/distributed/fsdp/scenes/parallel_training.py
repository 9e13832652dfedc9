"""Trainings of models in which tensor parallelism has made some parameters DTensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
    RankOutcomes,
    Twins,
    TwinsOf,
    values_of,
)
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.judge.tolerances import TRAINED
from conformance.ranks import Rank

DEEP = pytest.mark.profile("deep")


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


def twins_for(twins_of: TwinsOf, parallel: Parallel) -> Twins:
    return twins_of(parallel.batches * parallel.sizes[-1])


def probe(rank: Rank, *, library: str, asks: Any, parallel: Parallel, **arguments: Any) -> Outcome:
    """Return the outcome of `asks(rank, library, parallel, **arguments)`."""
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


def assert_like_unsharded(got: RankOutcomes, expected: dict[str, Any]) -> None:
    for value in values_of(got):
        parameters = {name: state["values"] for name, state in value["parameters"].items()}
        assert_all_close("parameters", expected["parameters"], parameters, TRAINED)


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


class ParallelTraining:
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
    training = ParallelTraining(rank, library, parallel)
    reported: dict[str, Any] = {"shards": training.shards(), "losses": []}
    reported["losses"] = [training.step(step) for step in range(parallel.steps)]
    return reported | {"after": training.shards(), "parameters": training.parameters()}


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
