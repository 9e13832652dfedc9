"""Programs in which one rank deviates from the others, and what the ranks report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from conformance.distributed.fsdp.scenes.fsdp_training import FSDP
from conformance.distributed.fsdp.scenes.fully_shard_training import FULLY_SHARD
from conformance.judge.library import Library, load_library
from conformance.judge.sandbox import seeding
from conformance.ranks import Rank, RankFault, RanksDiverged

GRACE_S = 20.0
SHORT_GRACE_S = 5.0  # grace for ranks that are known to hang
ORDERS = ((0, 1, 2), (0, 2, 1))


@dataclass
class RankReports:
    """The error text of each rank that raised, and whether the values are those of ranks with the same program."""

    raised: dict[int, str] = field(default_factory=dict)
    diverged: bool = False  # collectives of unequal sizes were issued
    is_right: bool = False


ASTRAY = 1  # rank that deviates from the others
WIDTH = 4
_TELLING_S = 15.0  # time for the other ranks to raise too


class Bottleneck(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH))


class Blocks(nn.Module):
    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bottleneck(width) for width in hidden)
        self.head = nn.Linear(WIDTH, 2)
        self.order: Sequence[int] = range(len(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


@dataclass(frozen=True)
class Program:
    """Steps that all ranks run, and the way in which one rank deviates.

    Each entry of `orders` is a step: the blocks that it runs, in order. `differs_by` says what the deviating rank does
    from step `differs_at` on. If it is `order`, the rank runs `other_order` in that step only. If it is a key of
    `CHANGES`, the rank changes its model. If it is a key of `ARGUMENTS`, the rank shards with other arguments, and the
    step is 0. With `alike`, all ranks make the change or use the arguments.
    """

    orders: tuple[tuple[int, ...], ...] = ((0, 1, 2),) * 4
    hidden: tuple[int, ...] = (8, 8, 8)
    # Values: train, eval or mixed. A mixed step evaluates and runs a backward in no_sync before it trains.
    mode: str = "train"
    other_order: tuple[int, ...] = (0, 2, 1)
    differs_at: int | None = None  # step in which one rank differs
    api: str = "FSDP1"  # API: FSDP1 or fully_shard
    differs_by: str = "order"
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
ARGUMENTS: dict[str, Callable[[Library], dict[str, Any]]] = {
    "mp_policy": lambda library: {
        "mp_policy": library.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    },
    "mp_policy of float32": lambda library: {
        "mp_policy": library.distributed.fsdp.MixedPrecisionPolicy(
            torch.float32, torch.float32, output_dtype=torch.float32, cast_forward_inputs=False
        )
    },
    "mixed_precision": lambda library: {
        "mixed_precision": library.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)
    },
    "mixed_precision of float32": lambda library: {
        "mixed_precision": library.distributed.fsdp.MixedPrecision(torch.float32, torch.float32)
    },
    "shard_placement_fn": lambda library: {"shard_placement_fn": _by_columns},
}
# Changes that one rank makes to its model, besides another order of the blocks.
CHANGES = {
    "unused bias": _unused,
    "other unused bias": _others_unused,
    "frozen bias": _frozen,
    "unsynchronised block": _unsynchronised,
    "blocks kept unsharded": _kept,
    "divide factor": _divided,
    "divide factor as integer": _divided_alike,
}


def run(rank: Rank, *, library: str, program: Program) -> list[torch.Tensor]:
    """Train. Return the outputs and the final parameters. A rank that raises waits until the others raise too."""
    torch.manual_seed(0)
    loaded, blocks = load_library(library), Blocks(program.hidden)
    is_astray = program.differs_at == 0 and (rank.rank == ASTRAY or program.alike)
    options = ARGUMENTS[program.differs_by](loaded) if is_astray and program.differs_by in ARGUMENTS else None
    model = shard_blocks(loaded, blocks, program.api, options=options)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    tensors: list[torch.Tensor] = []
    step = 0
    try:
        for step, common in enumerate(program.orders):
            is_astray = rank.rank == ASTRAY and step == program.differs_at
            blocks.order = program.other_order if is_astray and program.differs_by == "order" else common
            if step == program.differs_at and program.differs_by in CHANGES:
                CHANGES[program.differs_by](blocks, is_astray or program.alike)
            tensors += train_step(model, program.mode, seeding.generator(10 * step + rank.rank))
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        wait_until_raised(rank.world_size)
        raise RuntimeError(f"in step {step}: {error}") from error
    return tensors + [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def shard_blocks(
    library: Library,
    blocks: Blocks,
    api: str,
    group: dist.ProcessGroup | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    if api == "FSDP1":
        return wrap_fsdp(library, blocks, group, **options or {})
    mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
    fully_shard = library.find(FULLY_SHARD)
    for number, block in enumerate(blocks.blocks):
        fully_shard(block, mesh=mesh, **(options or {}) if number == 1 else {})
    return fully_shard(blocks, mesh=mesh)


def wrap_fsdp(library: Library, model: Blocks, group: dist.ProcessGroup | None = None, **options: Any) -> Any:
    policy = library.distributed.fsdp.wrap.ModuleWrapPolicy({Bottleneck})
    return library.find(FSDP)(
        model, process_group=group, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options
    )


def train_step(model: Any, mode: str, generator: torch.Generator) -> list[torch.Tensor]:
    x = torch.randn(3, WIDTH, generator=generator)
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


def wait_until_raised(ranks: int) -> None:
    """Wait until `ranks` ranks have raised, because the others would take a rank that exits early for the cause."""
    store = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + _TELLING_S
    with contextlib.suppress(RuntimeError):  # the rank that serves the store may have died
        store.add("raised", 1)
        while store.add("raised", 0) < ranks and time.monotonic() < end:
            time.sleep(0.05)


def reports_in(fault: RankFault) -> RankReports:
    raised = {failure.rank: failure.text for failure in fault.record.failures}
    return RankReports(raised, isinstance(fault, RanksDiverged))


# Hidden elements of a block of realistic size, because ranks may exchange large messages over another transport.
LARGE = 20_000
