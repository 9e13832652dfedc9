"""Cases in which one rank runs other collectives than its peers, is configured differently, or is killed."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from conformance.distributed.fsdp.fsdp_cases import FSDP
from conformance.distributed.fsdp.fully_shard_cases import FULLY_SHARD
from conformance.judge.library import Library, load_library
from conformance.judge.sandbox import seeding
from conformance.ranks import Rank

ASTRAY = 1  # rank that deviates from the others
TIMEOUT_S = 20.0  # timeout of the group in which ranks are killed
# Hidden elements of a block of realistic size, because ranks may exchange large messages over another transport.
LARGE = 20_000
_WIDTH = 4
_TELLING_S = 15.0  # time for the other ranks to raise too
_PAUSE_S = 1.5


class Bottleneck(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(_WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, _WIDTH))


class Blocks(nn.Module):
    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bottleneck(width) for width in hidden)
        self.head = nn.Linear(_WIDTH, 2)
        self.order: Sequence[int] = range(len(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


@dataclass(frozen=True)
class Program:
    """Steps that all ranks run, and the way in which one rank deviates.

    Each entry of `orders` is a step: the blocks that it runs, in order. If `by` is `order`, the deviating rank runs
    `astray` in step `parts_at` instead. If `by` is a key of `DIFFERENCES`, it changes its model from that step on. If
    `by` is a key of `SHARDED_WITH`, it shards with other arguments, and `parts_at` is 0. With `alike`, all ranks make
    the change or use the arguments.
    """

    orders: tuple[tuple[int, ...], ...] = ((0, 1, 2),) * 4
    hidden: tuple[int, ...] = (8, 8, 8)
    # Values: train, eval or mixed. A mixed step evaluates and runs a backward in no_sync before it trains.
    mode: str = "train"
    astray: tuple[int, ...] = (0, 2, 1)
    parts_at: int | None = None
    face: str = "FSDP1"  # API: FSDP1 or fully_shard
    by: str = "order"
    alike: bool = False


def _unused(blocks: Any, is_astray: bool) -> None:
    if is_astray:
        _leave_out_bias(blocks.blocks[1][0])


def _others_unused(blocks: Any, is_astray: bool) -> None:
    _leave_out_bias(blocks.blocks[1][0 if is_astray else 2])


def _leave_out_bias(layer: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight)

    layer.forward = forward


def _frozen(blocks: Any, is_astray: bool) -> None:
    blocks.blocks[1][0].bias.requires_grad = not is_astray


def _unsynchronised(blocks: Any, is_astray: bool) -> None:
    blocks.blocks[1].set_requires_gradient_sync(not is_astray)


def _kept(blocks: Any, is_astray: bool) -> None:
    for block in blocks.blocks:
        block.set_reshard_after_forward(not is_astray)


def _divided(blocks: Any, is_astray: bool) -> None:
    blocks.blocks[1].set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    if is_astray:
        blocks.blocks[1].set_gradient_divide_factor(3.0)


def _divided_alike(blocks: Any, is_astray: bool) -> None:
    blocks.blocks[1].set_force_sum_reduction_for_comms(True)
    blocks.blocks[1].set_gradient_divide_factor(3 if is_astray else 3.0)


def _by_columns(parameter: nn.Parameter) -> Shard | None:
    is_even = parameter.dim() > 1 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if is_even else None


# Arguments that one rank passes to fully_shard for the second block, or to FSDP1 for the model.
SHARDED_WITH: dict[str, Callable[[Library], dict[str, Any]]] = {
    "computed": lambda library: {
        "mp_policy": library.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    },
    "computed alike": lambda library: {
        "mp_policy": library.distributed.fsdp.MixedPrecisionPolicy(
            torch.float32, torch.float32, output_dtype=torch.float32, cast_forward_inputs=False
        )
    },
    "mixed": lambda library: {
        "mixed_precision": library.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)
    },
    "mixed alike": lambda library: {
        "mixed_precision": library.distributed.fsdp.MixedPrecision(torch.float32, torch.float32)
    },
    "placed": lambda library: {"shard_placement_fn": _by_columns},
}
# Changes that one rank makes to its model, besides another order of the blocks.
DIFFERENCES = {
    "unused": _unused,
    "others unused": _others_unused,
    "frozen": _frozen,
    "unsynchronised": _unsynchronised,
    "kept": _kept,
    "divided": _divided,
    "divided alike": _divided_alike,
}


def run(rank: Rank, *, library: str, program: Program) -> list[torch.Tensor]:
    """Train. Return the outputs and the final parameters. A rank that raises waits until the others raise too."""
    torch.manual_seed(0)
    loaded, blocks = load_library(library), Blocks(program.hidden)
    is_astray = program.parts_at == 0 and (rank.rank == ASTRAY or program.alike)
    options = SHARDED_WITH[program.by](loaded) if is_astray and program.by in SHARDED_WITH else None
    model = _sharded(loaded, blocks, program.face, options=options)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    tensors: list[torch.Tensor] = []
    step = 0
    try:
        for step, common in enumerate(program.orders):
            is_astray = rank.rank == ASTRAY and step == program.parts_at
            blocks.order = program.astray if is_astray and program.by == "order" else common
            if step == program.parts_at and program.by in DIFFERENCES:
                DIFFERENCES[program.by](blocks, is_astray or program.alike)
            tensors += _step(model, program.mode, seeding.generator(10 * step + rank.rank))
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        _wait_until_raised(rank.world_size)
        raise RuntimeError(f"in step {step}: {error}") from error
    return tensors + [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def use_group_afterwards(rank: Rank, *, library: str, program: Program, by: str) -> tuple[str, list[float]]:
    """Return the error of this rank, and sums over the group that it still uses."""
    message = ""
    try:
        if by == "wrapping":
            synchronise(rank, library=library)
        elif by == "state":
            ask_alone(rank, library=library, face=program.face, pause_s=0.0, timeout_s=TIMEOUT_S)
        else:
            run(rank, library=library, program=program)
    except RuntimeError as error:
        message = str(error)
    dist.barrier()
    sums = torch.arange(3.0) * (rank.rank + 1)
    for _ in range(3):
        dist.all_reduce(sums)
    return message, sums.tolist()


def save_afterwards(
    rank: Rank, *, library: str, program: Program
) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the error of this rank, the state dict that it saves then, and the parameters that it should have."""
    torch.manual_seed(0)
    loaded, blocks = load_library(library), Blocks(program.hidden)
    plain = copy.deepcopy(blocks)
    model = _sharded(loaded, blocks, program.face)
    optimizers = [torch.optim.SGD(trained.parameters(), 0.01, momentum=0.5) for trained in (model, plain)]
    message = ""
    try:
        for step, common in enumerate(program.orders):
            is_astray = rank.rank == ASTRAY and step == program.parts_at
            blocks.order = program.astray if is_astray else common
            _step(model, "train", seeding.generator(10 * step + rank.rank))
            for number in range(rank.world_size):
                _step(plain, "train", seeding.generator(10 * step + number))
            for parameter in plain.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(rank.world_size)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        message = str(error)
    states: dict[str, Any] = {}
    if program.face == "FSDP1":
        saved = model.state_dict()
        states = loaded.find(FSDP).optim_state_dict(model, optimizers[0])["state"]
    else:
        saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    saved |= {f"momentum of {name}": state["momentum_buffer"] for name, state in states.items()}
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    expected |= {
        f"momentum of {name}": optimizers[1].state[parameter]["momentum_buffer"]
        for name, parameter in plain.named_parameters()
        if states
    }
    return message, saved, expected


def gather_by_hand(rank: Rank, *, library: str) -> list[torch.Tensor]:
    """Unshard the root explicitly before the first forward, on one rank only. The root has mixed precision."""
    torch.manual_seed(0)
    loaded = load_library(library)
    policy = loaded.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = loaded.find(FULLY_SHARD)(Blocks((8,)), mp_policy=policy)
    if rank.rank == ASTRAY:
        model.unshard()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    tensors: list[torch.Tensor] = []
    for step in range(2):
        tensors += _step(model, "train", seeding.generator(10 * step + rank.rank))
        optimizer.step()
        optimizer.zero_grad()
    return tensors + [p.to_local().detach().clone() for p in model.parameters()]


def write_alone(rank: Rank, *, library: str, use_orig_params: bool) -> None:
    """Write to the unsharded root unit on one rank only, between a forward and its backward."""
    torch.manual_seed(0)
    model = _wrapped(load_library(library), Blocks((8,)), use_orig_params=use_orig_params)
    loss = model(torch.ones(3, _WIDTH)).sum()
    if rank.rank == ASTRAY:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "blocks" not in name:
                    parameter.mul_(0.5)
    try:
        loss.backward()
    except Exception as error:
        raise RuntimeError(" ".join([str(error), *getattr(error, "__notes__", ())])) from error


def synchronise(rank: Rank, *, library: str) -> None:
    """Wrap two blocks with `sync_module_states`, in the opposite order on one rank."""
    blocks = [Bottleneck(8), Bottleneck(16)]
    try:
        for block in reversed(blocks) if rank.rank == ASTRAY else blocks:
            load_library(library).find(FSDP)(block, device_id=torch.device("cpu"), sync_module_states=True)
    except Exception:
        _wait_until_raised(rank.world_size)
        raise


def wait_elsewhere(rank: Rank, *, library: str, face: str, by: str, timeout_s: float) -> None:
    """Leave out a step on one rank, which enters a collective of the default group instead. Every rank raises."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    torch.manual_seed(0)
    model = _sharded(load_library(library), Blocks((8, 8)), face, group)
    _step(model, "train", seeding.generator(0))
    meet = dist.barrier if by == "barrier" else functools.partial(dist.all_reduce, torch.ones(1))
    try:
        if rank.rank != ASTRAY:
            _step(model, "train", seeding.generator(1))
    finally:
        meet()
    raise RuntimeError("a step was left out")


def ask_alone(rank: Rank, *, library: str, face: str, pause_s: float, timeout_s: float) -> None:
    """Request a full state on one rank only, while the others begin a step `pause_s` seconds later.

    FSDP1 requests the state of the optimizer, fully_shard the state of the model.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    torch.manual_seed(0)
    loaded = load_library(library)
    model = _sharded(loaded, Blocks((8, 8)), face, group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.5)
    _step(model, "train", seeding.generator(0))
    optimizer.step()
    try:
        if rank.rank != ASTRAY:
            time.sleep(pause_s)
            _step(model, "train", seeding.generator(1))
        elif face == "FSDP1":
            model.optim_state_dict(model, optimizer, group=group)
        else:
            path = "distributed.checkpoint.state_dict.get_model_state_dict"
            get = loaded.find(path) if loaded.provides(path) else get_model_state_dict
            get(model, options=StateDictOptions(full_state_dict=True))
    except Exception:
        _wait_until_raised(rank.world_size)
        raise
    raise RuntimeError("a state was asked for")


def _sharded(
    library: Library,
    blocks: Blocks,
    face: str,
    group: dist.ProcessGroup | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    if face == "FSDP1":
        return _wrapped(library, blocks, group, **options or {})
    mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
    fully_shard = library.find(FULLY_SHARD)
    for number, block in enumerate(blocks.blocks):
        fully_shard(block, mesh=mesh, **(options or {}) if number == 1 else {})
    return fully_shard(blocks, mesh=mesh)


def _wrapped(library: Library, model: Blocks, group: dist.ProcessGroup | None = None, **options: Any) -> Any:
    policy = library.distributed.fsdp.wrap.ModuleWrapPolicy({Bottleneck})
    return library.find(FSDP)(
        model, process_group=group, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options
    )


def _step(model: Any, mode: str, generator: torch.Generator) -> list[torch.Tensor]:
    x = torch.randn(3, _WIDTH, generator=generator)
    tensors: list[torch.Tensor] = []
    if mode in ("eval", "mixed"):
        with torch.no_grad():
            tensors.append(model.eval()(x))
        model.train()
    if mode == "mixed":
        with model.no_sync():
            model(x).sum().backward()
    if mode in ("train", "mixed"):
        outputs = model(x)
        outputs.sum().backward()
        tensors.append(outputs.detach())
    return tensors


def _wait_until_raised(ranks: int) -> None:
    """Wait until `ranks` ranks have raised, because the others would take a rank that exits early for the cause."""
    store = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + _TELLING_S
    with contextlib.suppress(RuntimeError):  # the rank that serves the store may have died
        store.add("raised", 1)
        while store.add("raised", 0) < ranks and time.monotonic() < end:
            time.sleep(0.05)


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(*_: Any) -> None:
    raise ValueError("it fails")


def lose_a_rank(
    rank: Rank, *, library: str, when: str, victim: int, hidden: int, face: str = "FSDP1"
) -> None:
    """Kill one rank, or let it exit after an exception.

    `when` is `before` (wrapping), `middle` (of a step), `collective` (which the others enter late) or `exception`. The
    other ranks raise their error together with the seconds that it took.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier(group)
    is_victim = rank.rank == victim
    if is_victim and when == "before":
        _die()
    torch.manual_seed(0)
    blocks = Blocks((hidden,) * 3)
    model = _sharded(load_library(library), blocks, face, group)
    began = time.monotonic()
    try:
        if when != "before":
            _step(model, "train", seeding.generator(0))
        if is_victim and when == "collective":
            threading.Timer(_PAUSE_S / 3, _die).start()
        elif is_victim:
            blocks.blocks[1].register_forward_pre_hook(_fail if when == "exception" else _die)
        elif when == "collective":
            time.sleep(_PAUSE_S)
        _step(model, "train", seeding.generator(1))
    except Exception as error:
        if is_victim:
            os._exit(1)
        _wait_until_raised(rank.world_size - 1)
        raise RuntimeError(f"{error} [after {time.monotonic() - began:.1f} s]") from error
