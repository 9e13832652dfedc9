"""Cases of sharding models in which tensor parallelism has made some parameters DTensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from conformance.distributed.fsdp.fsdp_cases import FSDP, clean
from conformance.distributed.fsdp.fully_shard_cases import FULLY_SHARD
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

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


def probe(rank: Rank, *, library: str, asks: Any, parallel: Parallel, **arguments: Any) -> Outcome:
    """Return the outcome of `asks(rank, library, parallel, **arguments)`. `asks` must be defined in this module."""
    loaded = load_library(library)
    return observe(lambda: asks(rank, loaded, parallel, **arguments))


def train(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    site = ParallelSite(rank, library, parallel)
    reported: dict[str, Any] = {"shards": site.shards(), "losses": []}
    reported["losses"] = [site.step(step) for step in range(parallel.steps)]
    return reported | {"after": site.shards(), "parameters": site.parameters()}


def train_sharded(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Train with fully_shard. Also return the gradients before the first step, and clipped gradients."""
    site = ParallelSite(rank, library, parallel)
    site.backward(0)
    clipped = [p for p in site.model.parameters() if len(p.placements) == len(parallel.sizes)]
    gradients = {name: laid_out(p.grad) for name, p in site.model.named_parameters()}
    norm = library.find("nn.utils.clip_grad_norm_")(clipped, 0.5)
    after = [laid_out(p.grad) for p in clipped]
    site.optimizer.zero_grad()
    return {"gradients": gradients, "norm": laid_out(norm), "clipped": after} | train(rank, library, parallel)


def accumulate_sharded(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    site = ParallelSite(rank, library, parallel)
    site.model.set_requires_gradient_sync(False)
    site.backward(0)
    site.model.set_requires_gradient_sync(True)
    site.step(1)
    return {"parameters": site.parameters()}


def load_sharded(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Save a model and its optimizer with DCP's own functions, and load them into another model."""
    trained, other = (ParallelSite(rank, library, parallel, seed) for seed in (0, 1))
    for site in (trained, other):
        site.step(0)
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    saved = {name: laid_out(value) for name, value in model.items()}
    other.step(1)
    return {"saved": saved, "parameters": other.parameters()}


def on_another_mesh(rank: Rank, library: Library, parallel: Parallel) -> None:
    """Shard a model over a mesh that is unrelated to the mesh of its DTensor parameters."""
    model = plain_model()
    parallelize_module(model[0], mesh_of(rank, parallel.sizes)["model"], {"up": ColwiseParallel()})
    other = rank.mesh(rank.world_size, names=("elsewhere",))
    library.find(FULLY_SHARD)(model, mesh=other)


def accumulate(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Step after two backwards, of which the first does not synchronise. Return the gradients and the parameters."""
    site = ParallelSite(rank, library, parallel)
    with site.model.no_sync():
        site.backward(0)
    site.backward(1)
    gradients = {name: p.grad for name, p in site.model.named_parameters()}
    site.optimizer.step()
    return {"gradients": gradients, "parameters": site.parameters()}


def write_summoned(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Read and write unsharded parameters, and their gradients with `use_orig_params`. Then train."""
    site = ParallelSite(rank, library, parallel)
    originals = bool(parallel.arguments.get("use_orig_params"))
    site.backward(0)
    with site.fsdp.summon_full_params(site.model, with_grads=originals):
        named = {clean(name): p for name, p in site.model.named_parameters()}
        gradients = {name: laid_out(p.grad) for name, p in named.items() if originals}
        with torch.no_grad():
            for number, parameter in enumerate(named.values()):
                parameter.mul_(1.0 + number)
                if originals:
                    assert parameter.grad is not None
                    parameter.grad.mul_(2.0)
    reported = {"gradients": gradients, "parameters": site.parameters(), "loss": site.backward(1)}
    site.optimizer.step()
    return reported | {"after": site.parameters()}


def save(rank: Rank, library: Library, parallel: Parallel, *, kind: str) -> dict[str, Any]:
    site = ParallelSite(rank, library, parallel)
    site.step(0)
    model = {name: laid_out(value) for name, value in site.state_dict(kind).items()}
    states = site.optimizer_state(kind)["state"]
    optimizer = {
        name: {key: laid_out(value) for key, value in states[name].items()} for name in sorted(states)
    }
    return {"model": model, "optimizer": optimizer}


def reload(rank: Rank, library: Library, parallel: Parallel, *, kind: str) -> dict[str, Any]:
    """Load the state dict of a trained model into a model with other values."""
    trained, other = (ParallelSite(rank, library, parallel, seed) for seed in (0, 1))
    trained.step(0)
    other.load(kind, trained.state_dict(kind))
    return {"parameters": other.parameters(), "loss": other.step(1)}


def resume(rank: Rank, library: Library, parallel: Parallel, *, kind: str) -> dict[str, Any]:
    """Load the states of a trained model and its optimizer into another model. Then step both."""
    trained, other = (ParallelSite(rank, library, parallel, seed) for seed in (0, 1))
    trained.step(0)
    other.step(0)
    other.load(kind, trained.state_dict(kind))
    other.load_optimizer(kind, trained.optimizer_state(kind))
    for site in (trained, other):
        site.step(1)
    return {"trained": trained.parameters(), "resumed": other.parameters()}


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


def clip(rank: Rank, library: Library, parallel: Parallel, *, norm_type: float) -> dict[str, Any]:
    site = ParallelSite(rank, library, parallel)
    site.backward(0)
    norm = site.model.clip_grad_norm_(0.5, norm_type)
    site.optimizer.step()
    site.optimizer.zero_grad()
    return {"norm": norm, "parameters": site.parameters()}


def fit(rank: Rank, library: Library, parallel: Parallel, *, rank_at_fault: int) -> str:
    """Load a state dict that lacks a key on one rank. Return the error, or "loaded"."""
    site = ParallelSite(rank, library, parallel)
    before = site.shards()
    state = site.state_dict("FULL")
    if rank.rank == rank_at_fault:
        del state["0.up.weight"]
    try:
        site.load("FULL", state)
    except RuntimeError as error:
        unchanged = all(torch.equal(before[name], now) for name, now in site.shards().items())
        return f"{type(error).__name__}, unchanged: {unchanged}"
    return "loaded"


# -- unsharded, in one process


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
