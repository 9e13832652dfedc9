"""Correct sharded trainings on the simulated device: what one rank runs, as a case of a pool, under one schedule."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance import simulator
from conformance.distributed.fsdp.scenes.scene import FOUR_UNITS, Program, run
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

WIDTH = 16
LAYERS = 5  # more than buffers that are kept while they are reduced
# Rows of each step's batches. In the first no memory but that of a layer's gradients is as long as it; in the second
# activations are, so that the memory of the one is used for the other.
ROWS = (4, 24)
LIBRARIES = {"torch": "torch.distributed.fsdp", "impl": "impl.distributed.fsdp"}


def backward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss.detach()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class ShardedProgram:
    """Sharding of a model, and the work of a step."""

    shard: Callable[[ModuleType, nn.Sequential, Rank], nn.Module]
    backward: Callable[[nn.Module, torch.Tensor], torch.Tensor] = backward
    accumulate: Callable[[nn.Module, bool], contextlib.AbstractContextManager[Any]] | None = None
    step: Callable[[nn.Module, torch.optim.Optimizer], None] = step
    between: Callable[[ModuleType, nn.Module], None] = lambda library, model: None


def flat(
    mesh_of: Callable[[Rank], DeviceMesh | None] = lambda rank: None, **options: Any
) -> Callable[[ModuleType, nn.Sequential, Rank], nn.Module]:
    """Return a function that wraps a model with FSDP. An option that is a function gets the library."""

    def shard(library: ModuleType, model: nn.Sequential, rank: Rank) -> nn.Module:
        chosen = {"use_orig_params": True, "device_mesh": mesh_of(rank), **options}
        return library.FullyShardedDataParallel(
            model,
            device_id=rank.device,
            auto_wrap_policy=library.wrap.ModuleWrapPolicy({nn.Sequential}),
            **of_library(library, chosen),
        )

    return shard


def all_shards(rank: Rank) -> DeviceMesh:
    return init_device_mesh(rank.device.type, (rank.world_size,))


def two_replicas(rank: Rank) -> DeviceMesh:
    replicas = min(2, rank.world_size)
    return rank.mesh(replicas, rank.world_size // replicas, names=("replicas", "shards"))


def replicas_only(rank: Rank) -> DeviceMesh:
    """Return a mesh on which no parameter is sharded, so that memory of the computation is reduced."""
    return rank.mesh(rank.world_size, 1, names=("replicas", "shards"))


def per_parameter(
    mesh_of: Callable[[Rank], DeviceMesh] = all_shards, **options: Any
) -> Callable[[ModuleType, nn.Sequential, Rank], nn.Module]:
    """Return a function that applies fully_shard to a model and its layers."""

    def shard(library: ModuleType, model: nn.Sequential, rank: Rank) -> nn.Module:
        chosen = {"mesh": mesh_of(rank), **of_library(library, options)}
        for layer in model:
            library.fully_shard(layer, **chosen)
        return library.fully_shard(model, **chosen)

    return shard


def of_library(library: ModuleType, options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value(library) if callable(value) else value for name, value in options.items()}


def replicated(library: ModuleType, model: nn.Sequential, rank: Rank) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model.to(rank.device), bucket_cap_mb=0.001)


def gathered_before_training(library: ModuleType, model: nn.Sequential, rank: Rank) -> nn.Module:
    """Gather on request, before a forward shows which module is outermost.

    Most ranks have no shard of the last layer.
    """
    model.append(nn.Linear(WIDTH, 1))
    options = {"offload_policy": library.CPUOffloadPolicy(), "reshard_after_forward": False}
    mesh = all_shards(rank)
    for layer in model:
        library.fully_shard(layer, mesh=mesh, **options).unshard(async_op=True)
    return library.fully_shard(model, mesh=mesh, **options)


def write_behind_evaluation(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Write to the shards on the host as soon as a forward has been issued."""
    shards = nn.ParameterList(model.parameters())
    with torch.no_grad():
        loss = model(batch).square().mean()
    halve(shards)
    return loss + backward(model, batch)


def load_what_is_gathered(library: ModuleType, model: nn.Module) -> None:
    for layer in model:
        layer.unshard(async_op=True)
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def prefetching(library: ModuleType, model: nn.Sequential, rank: Rank) -> nn.Module:
    sharded = per_parameter()(library, model, rank)
    for layer, following in itertools.pairwise(model):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    return sharded


def stepped_in_backward(library: ModuleType, model: nn.Sequential, rank: Rank) -> nn.Module:
    sharded = per_parameter()(library, model, rank)
    for parameter in sharded.parameters():
        optimizer = torch.optim.AdamW([parameter], 1e-2)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: step(sharded, optimizer))
    return sharded


def without_syncing(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
    if hasattr(model, "no_sync"):
        return contextlib.nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def without_all_reduce(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
    model.set_requires_all_reduce(last)
    return contextlib.nullcontext()


def not_the_last(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
    model.set_is_last_backward(last)
    return contextlib.nullcontext()


def summon(library: ModuleType, model: nn.Module) -> None:
    with library.FullyShardedDataParallel.summon_full_params(model):
        halve(model)
    offload = dist.get_world_size() > 1  # torch refuses to where nothing is sharded
    with library.FullyShardedDataParallel.summon_full_params(model, writeback=False, offload_to_cpu=offload):
        pass


def summon_and_write(library: ModuleType, model: nn.Module) -> None:
    """Allow the host to write to the shards as soon as the unsharded parameters are no longer in use."""
    with library.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        pass
    halve(model)


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def gather_for_nothing(library: ModuleType, model: nn.Module) -> None:
    """Gather without use. The gather still reads the shards, which are written to next."""
    for layer in model:
        layer.unshard(async_op=True)
        layer.reshard()
    halve(model)


def gather_ahead(library: ModuleType, model: nn.Module) -> None:
    handles = [layer.unshard(async_op=True) for layer in model]
    handles[0].wait()


def gather_offloaded_by_hand(library: ModuleType, model: nn.Module) -> None:
    """Gather with and without use. The host writes to the shards next."""
    shards = nn.ParameterList(model.parameters())
    for layer in model:
        layer.unshard()
    twice = [parameter * 2 for parameter in model.parameters()]
    halve(shards)
    for layer in model:
        layer.reshard()
        layer.unshard(async_op=True)
        layer.reshard()
    halve(shards)
    for shard, doubled in zip(shards, twice, strict=True):
        shard._local_tensor += float(doubled.abs().mean())


def evaluate_and_write(library: ModuleType, model: nn.Module) -> None:
    with torch.no_grad():
        output = model(torch.ones(4, WIDTH, device="sim"))
    halve(model)
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter.data)
        local += float(output.mean())


def give_other_tensors(library: ModuleType, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def write_before_backward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Write to the biases, which no gradient depends on. The backward gathers them, and torch's gathers do not wait."""
    loss = model(batch).square().mean()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.mul_(0.5)
    loss.backward()
    return loss.detach()


def step_on_a_stream_of_its_own(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step on another stream. Only the all-gathers wait for the step, by its event."""
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        optimizer.step()
    model.set_post_optim_event(side.record_event())
    if dist.get_world_size() == 1:  # torch gathers nothing, so nothing there waits for the event
        torch.accelerator.current_stream().wait_stream(side)
    for parameter in model.parameters():
        parameter.grad.to_local().record_stream(side)
    optimizer.zero_grad()


def save(library: ModuleType, model: nn.Module) -> None:
    model.state_dict()


def offloading(library: ModuleType) -> Any:
    return library.CPUOffload(offload_params=True)


FLAT_WAYS = {
    "FSDP": ShardedProgram(flat()),
    "FSDP, flat parameters": ShardedProgram(flat(use_orig_params=False)),
    "FSDP, gathered early and without limit": ShardedProgram(
        flat(
            limit_all_gathers=False,
            forward_prefetch=True,
            backward_prefetch=lambda library: library.BackwardPrefetch.BACKWARD_POST,
        )
    ),
    "FSDP, kept for backward": ShardedProgram(
        flat(sharding_strategy=lambda library: library.ShardingStrategy.SHARD_GRAD_OP)
    ),
    "FSDP, bfloat16": ShardedProgram(
        flat(
            mixed_precision=lambda library: library.MixedPrecision(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        )
    ),
    "FSDP, offloaded": ShardedProgram(flat(cpu_offload=offloading)),
    "FSDP, offloaded, bfloat16": ShardedProgram(
        flat(
            cpu_offload=offloading,
            mixed_precision=lambda library: library.MixedPrecision(param_dtype=torch.bfloat16),
        )
    ),
    "FSDP, offloaded, accumulated": ShardedProgram(flat(cpu_offload=offloading), accumulate=without_syncing),
    "FSDP, offloaded, evaluated": ShardedProgram(flat(cpu_offload=offloading), between=evaluate_and_write),
    "FSDP, offloaded, summoned": ShardedProgram(flat(cpu_offload=offloading), between=summon_and_write),
    "FSDP, accumulated": ShardedProgram(flat(), accumulate=without_syncing),
    "FSDP, summoned": ShardedProgram(flat(), between=summon),
    "FSDP, saved": ShardedProgram(flat(), between=save),
    "FSDP, given other tensors": ShardedProgram(flat(), between=give_other_tensors),
    "FSDP, written to before the backward": ShardedProgram(flat(), backward=write_before_backward),
}
OFFLOADED = per_parameter(offload_policy=lambda library: library.CPUOffloadPolicy())
REPLICATED, HYBRID = per_parameter(replicas_only), per_parameter(two_replicas)
PER_PARAMETER_WAYS = {
    "fully_shard": ShardedProgram(per_parameter()),
    "fully_shard, kept for backward": ShardedProgram(per_parameter(reshard_after_forward=False)),
    "fully_shard, bfloat16": ShardedProgram(
        per_parameter(
            mp_policy=lambda library: library.MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        )
    ),
    "fully_shard, offloaded": ShardedProgram(OFFLOADED),
    "fully_shard, offloaded, bfloat16": ShardedProgram(
        per_parameter(
            offload_policy=lambda library: library.CPUOffloadPolicy(),
            mp_policy=lambda library: library.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        )
    ),
    "fully_shard, offloaded, accumulated": ShardedProgram(OFFLOADED, accumulate=not_the_last),
    "fully_shard, offloaded, gathered by hand": ShardedProgram(OFFLOADED, between=gather_offloaded_by_hand),
    "fully_shard, offloaded, evaluated": ShardedProgram(OFFLOADED, between=evaluate_and_write),
    "fully_shard, offloaded, gathered before training": ShardedProgram(
        gathered_before_training, backward=write_behind_evaluation
    ),
    "fully_shard, offloaded, loaded while gathered": ShardedProgram(OFFLOADED, between=load_what_is_gathered),
    "fully_shard, prefetched": ShardedProgram(prefetching),
    "fully_shard, accumulated": ShardedProgram(per_parameter(), accumulate=without_syncing),
    "fully_shard, a backward that is not the last": ShardedProgram(per_parameter(), accumulate=not_the_last),
    "fully_shard, replicas that add up": ShardedProgram(REPLICATED, accumulate=without_all_reduce),
    "fully_shard, replicas, a backward that is not the last": ShardedProgram(
        REPLICATED, accumulate=not_the_last
    ),
    "fully_shard, gathered ahead": ShardedProgram(per_parameter(), between=gather_ahead),
    "fully_shard, an optimizer on a stream of its own": ShardedProgram(
        per_parameter(), step=step_on_a_stream_of_its_own
    ),
    "fully_shard, stepped in the backward": ShardedProgram(stepped_in_backward),
    "fully_shard, gathered for nothing": ShardedProgram(per_parameter(), between=gather_for_nothing),
}
HYBRID_WAYS = {
    "FSDP, hybrid": ShardedProgram(
        flat(two_replicas, sharding_strategy=lambda library: library.ShardingStrategy.HYBRID_SHARD)
    ),
    "fully_shard, hybrid": ShardedProgram(HYBRID),
    "fully_shard, hybrid, a backward that is not the last": ShardedProgram(HYBRID, accumulate=not_the_last),
    "fully_shard, hybrid, replicas that add up": ShardedProgram(HYBRID, accumulate=without_all_reduce),
}
WAYS = {
    **FLAT_WAYS,
    **PER_PARAMETER_WAYS,
    **HYBRID_WAYS,
    "DDP": ShardedProgram(replicated, accumulate=without_syncing),
}

# torch's host writes to shards that are being copied from.
WRITTEN_TO_WHILE_COPIED = (
    "FSDP, offloaded, evaluated",
    "FSDP, offloaded, summoned",
    "fully_shard, offloaded, gathered by hand",
    "fully_shard, offloaded, evaluated",
    "fully_shard, offloaded, gathered before training",
    "fully_shard, offloaded, loaded while gathered",
)
OF_ONE_LIBRARY = {
    "DDP": "torch",
    "FSDP, written to before the backward": "impl",
    # Where nothing is sharded, torch gives memory out again that a copy to the host still reads.
    "FSDP, offloaded, accumulated": "impl",
    **dict.fromkeys(WRITTEN_TO_WHILE_COPIED, "impl"),
}


@dataclass(frozen=True)
class ScheduledTraining:
    bits: str
    order: str
    unreplayable: tuple[str, ...]


def course(rank: Rank, library: str, way: str, seed: int) -> ScheduledTraining:
    """Return a training's results under one schedule."""
    loaded = importlib.import_module(LIBRARIES[library])
    # Freeze the objects of earlier trainings, because a collection by Python depends on what ran before. Objects that
    # stay, such as those that torch's FSDP1 leaks at one rank, need not be traversed again.
    gc.collect()
    gc.freeze()
    gc.disable()
    simulator.set_schedule(seed, rank.rank)
    bits = _train(loaded, WAYS[way], rank)
    simulator.synchronize()
    return ScheduledTraining(bits, simulator.course(), tuple(simulator.take_unreplayable()))


def run_program(rank: Rank, library: str, program: Program) -> None:
    """Run a test's program without its result, which a process without the simulated device cannot receive."""
    outcome = run(rank, library=library, program=program, setup=None, tree=FOUR_UNITS, arguments={})
    assert outcome.raised is None, outcome.raised


def without_wait(rank: Rank, training: Callable[..., Any], file: str, line: int, **arguments: Any) -> None:
    """Run a training without the wait for an event, or of the host, that `line` of `file` in impl's FSDP issues."""
    from impl.distributed.fsdp._engine import streams  # noqa: PLC0415 - after the device is registered

    with contextlib.ExitStack() as stack:
        for name in ("wait", "wait_stream", "wait_in", "block"):
            waits = getattr(streams.DeviceStreams, name)

            def unless_dropped(*arguments: Any, waits: Callable[..., None] = waits) -> None:
                frame = sys._getframe(1)
                while frame is not None:
                    if frame.f_lineno == line and Path(frame.f_code.co_filename).name == file:
                        return
                    frame = frame.f_back
                waits(*arguments)

            stack.enter_context(mock.patch.object(streams.DeviceStreams, name, unless_dropped))
        training(rank, library="impl", **arguments)


def race(rank: Rank, library: str) -> Outcome:
    """Read a tensor on the current stream that another stream writes."""
    del library
    values = torch.zeros(4, device=rank.device)
    with torch.Stream(rank.device):
        values.add_(1)
    return observe((values * 2).cpu)


def pinned_where_cast(rank: Rank) -> list[bool]:
    """Return whether shards on the host are pinned after their module was cast and the parameters were gathered."""
    loaded = importlib.import_module(LIBRARIES["impl"])
    simulator.set_schedule(0, rank.rank)
    model = OFFLOADED(loaded, nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH))), rank)
    pinned = []
    for dtype in (torch.float32, torch.float64):
        model[0][0].to(dtype)
        with torch.no_grad():
            model(torch.ones(1, WIDTH, dtype=dtype, device=rank.device))
        pinned += [parameter._local_tensor.is_pinned() for parameter in model.parameters()]
    return pinned


def pinned_by_training(rank: Rank, library: str, strategy: str, keeps_params: bool) -> list[Any]:
    """Return which offloaded parameters and gradients of FSDP1 are pinned before each of two steps."""
    loaded = importlib.import_module(LIBRARIES[library])
    simulator.set_schedule(0, rank.rank)
    shard = flat(
        cpu_offload=offloading,
        sharding_strategy=lambda library: library.ShardingStrategy[strategy],
        use_orig_params=keeps_params,
    )
    model = shard(loaded, nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH))), rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pinned: list[Any] = []
    for _ in range(2):
        backward(model, torch.ones(1, WIDTH, device=rank.device))
        for parameter in model.parameters():
            if parameter.numel():
                pinned.append((parameter.is_pinned(), parameter.grad.is_pinned()))
        step(model, optimizer)
    return pinned


def _train(library: ModuleType, way: ShardedProgram, rank: Rank) -> str:
    torch.manual_seed(rank.rank if way.shard is replicated else 0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    model = way.shard(library, nn.Sequential(*layers), rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank.rank)
    losses = []
    for rows in ROWS:
        for last in (False, False, True) if way.accumulate else (True,):
            batch = torch.randn(rows, WIDTH, generator=generator).to(rank.device, non_blocking=True)
            with way.accumulate(model, last) if way.accumulate else contextlib.nullcontext():
                losses.append(way.backward(model, batch))
        way.step(model, optimizer)
        way.between(library, model)
    torch.accelerator.synchronize()
    parameters = (getattr(p, "_local_tensor", p) for p in model.parameters())
    results = (tensor.detach().cpu().contiguous().flatten() for tensor in (*losses, *parameters))
    return hashlib.sha256(
        b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in results)
    ).hexdigest()
