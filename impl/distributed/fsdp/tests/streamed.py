"""Programs that use the streams of impl.distributed.fsdp on one rank of a fake group, and faults in them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training, train, wrapped
from conformance.distributed.fsdp.scenes.fully_shard_training import ShardedTraining, Sharding, sharded
from conformance.distributed.fsdp.scenes.fully_shard_training import train as train_sharded
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree, call, loss_of
from conformance.distributed.fsdp.test_scale import world_of
from conformance.judge.library import Library
from conformance.ranks import Rank
from impl.distributed.fsdp._engine import root
from impl.distributed.fsdp._engine.memory import Memory
from impl.distributed.fsdp._engine.streams import StreamRole
from impl.distributed.fsdp.tests.happens_before import Entry
from impl.distributed.fsdp.tests.recording_streams import RecordingStreams, is_of_impl

RANK = Rank(2, 4, torch.device("cpu"))
PLAIN = ModuleTree(ModuleGroup((Leaf("affine", 4), Leaf("tied"), Leaf("lookup", 3))), dtype=torch.float32)
RECOMPUTED = ModuleTree(
    ModuleGroup((Leaf("affine", 4), Leaf("batched"), Leaf("affine", 5)), checkpointing="plain"),
    dtype=torch.float32,
)
FROZEN = ModuleTree(
    ModuleGroup((Leaf("affine", 4, frozen="first"), Leaf("normed", frozen="all"), Leaf("idle"))),
    dtype=torch.float32,
)
TWICE = ModuleTree(ModuleGroup((Leaf("affine", 3),), calls=2), dtype=torch.float32)
STEPS = (
    Step(),
    Step(forwards=2, order="together", before="eval"),
    Step(forwards=2, order="no_sync", set_to_none=False),
    Step(forwards=2),
)

Program = Callable[[], None]


def log_of(program: Program, streams: RecordingStreams) -> list[Entry]:
    with world_of(RANK.world_size), pytest.MonkeyPatch.context() as patch:
        patch.setattr(root, "streams_for", lambda device: streams)
        with streams:
            program()
    return streams.log


# -- programs


@dataclass(frozen=True)
class Trains:
    setup: Setup
    tree: ModuleTree = PLAIN
    steps: Sequence[Step] = STEPS

    def __call__(self) -> None:
        outcome = train(RANK, library="impl", training=Training(self.tree, self.setup, self.steps))
        assert outcome.raised is None, outcome.raised

    def __str__(self) -> str:
        setup = self.setup
        on = [name for name, value in setup.arguments.items() if value]
        rest = [word for word in (setup.backward_prefetch, setup.mixed_precision and "mixed") if word]
        return "-".join([setup.strategy, *rest, *on])


@dataclass(frozen=True)
class Offloads:
    """Training whose optimizer steps memory of the host."""

    strategy: str

    def __call__(self) -> None:
        model = model_of(strategy=self.strategy, offload_params=True)
        steps(model, lambda number: loss_of(call(model, PLAIN, PLAIN.batch(number, 0))))

    def __str__(self) -> str:
        return f"{self.strategy}-offloads"


def model_of(tree: ModuleTree = PLAIN, **setup: Any) -> Any:
    return wrapped(RANK, Library("impl"), tree.build(), Setup(wrap="leaves", **setup))


def steps(model: nn.Module, forward: Callable[[int], Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        forward(number).backward()
        optimizer.step()
        optimizer.zero_grad()


def forward_of_inner_unit() -> None:
    model = model_of()
    batch = PLAIN.batch(0, 0)
    steps(model, lambda _: model.body.parts[0](batch.x, ids=batch.ids).sum())


def forward_of_contained_module() -> None:
    model = model_of()
    steps(model, lambda _: model.head(torch.ones(2, model.head.in_features)).sum())


def change_before_backward() -> None:
    model = model_of(arguments={"use_orig_params": True})
    lookup = model.body.parts[2]

    def forward(number: int) -> Tensor:
        loss = loss_of(call(model, PLAIN, PLAIN.batch(number, 0)))
        with torch.no_grad():
            for parameter in lookup.parameters():  # no gradient is computed from it, so autograd accepts this
                parameter.mul_(0.5)
        return loss

    steps(model, forward)


def parameter_put_in_place() -> None:
    model = model_of(arguments={"use_orig_params": True})

    def forward(number: int) -> Tensor:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return loss_of(call(model, PLAIN, PLAIN.batch(number, 0)))

    steps(model, forward)


def low_precision_hook() -> None:
    model = model_of()
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    steps(model, lambda number: loss_of(call(model, PLAIN, PLAIN.batch(number, 0))))


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, count: int) -> Tensor:
        for part in self.parts[:count]:
            x = part(x)
        return x


def skipping_model(strategy: str) -> Any:
    """Return a model that calls only some of its units, so that others are prefetched but not used."""
    fsdp = Library("impl").distributed.fsdp
    make = functools.partial(
        fsdp.FullyShardedDataParallel,
        sharding_strategy=fsdp.ShardingStrategy[strategy],
        forward_prefetch=True,
        use_orig_params=True,
        device_id=RANK.device,
    )
    torch.manual_seed(0)
    plain = Skips()
    plain.parts = nn.ModuleList(make(part) for part in plain.parts)
    return make(plain)


def forecast_that_fails() -> None:
    model = skipping_model("SHARD_GRAD_OP")
    for count in (3, 1, 3):
        model(torch.ones(2, 4), count).sum().backward()
        change(model)


def forecast_that_fails_in_evaluation() -> None:
    model = skipping_model("FULL_SHARD")
    for count in (3, 1, 3):
        with torch.no_grad():
            model(torch.ones(2, 4), count)
        change(model)


@torch.no_grad()
def change(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def summons() -> None:
    fsdp = Library("impl").distributed.fsdp.FullyShardedDataParallel
    model = model_of(arguments={"use_orig_params": True})
    for options in (
        {},
        {"with_grads": True},
        {"writeback": False, "rank0_only": True},
        {"writeback": False, "offload_to_cpu": True},
    ):
        steps(model, lambda number: loss_of(call(model, PLAIN, PLAIN.batch(number, 0))))
        loss_of(call(model, PLAIN, PLAIN.batch(0, 0))).backward()
        with fsdp.summon_full_params(model, **options):
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
        model.clip_grad_norm_(1.0)


@dataclass(frozen=True)
class FullyShards:
    sharding: Sharding = field(default_factory=Sharding)
    tree: ModuleTree = PLAIN
    schedule: Sequence[Step] = STEPS

    def __call__(self) -> None:
        training = ShardedTraining(self.tree, self.sharding, self.schedule)
        outcome = train_sharded(RANK, library="impl", training=training)
        assert outcome.raised is None, outcome.raised

    def __str__(self) -> str:
        settings = [f"{name}={value}" for name, value in vars(self.sharding).items() if value]
        return "-".join(["fully_shard", *settings])


@dataclass
class OneStep:
    """A forward and a backward; `backward_begins` is the length of the log between them."""

    face: str
    strategy: str
    backward_begins: int = 0

    def __call__(self) -> None:
        is_hybrid = self.strategy == "HYBRID_SHARD"
        if self.face == "FSDP1":
            ranks: dict[str, Any] = {"ranks": "meshes", "shards": 2} if is_hybrid else {}
            model = model_of(strategy=self.strategy, backward_prefetch="BACKWARD_PRE", **ranks)
        else:
            ranks = {"ranks": "replicas", "shards": 2} if is_hybrid else {}
            model = sharded(RANK, Library("impl"), PLAIN.build(), Sharding(**ranks))
        loss = loss_of(call(model, PLAIN, PLAIN.batch(0, 0)))
        unit = model._unit if self.face == "FSDP1" else model._get_fsdp_state().unit
        streams: Any = unit.root.streams
        self.backward_begins = len(streams.log)
        loss.backward()


def optimizer_beside() -> None:
    """Step on a separate stream. Only an event orders it before the next forward."""
    model = sharded(RANK, Library("impl"), PLAIN.build(), Sharding())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        loss_of(call(model, PLAIN, PLAIN.batch(number, 0))).backward()
        streams: Any = model._get_fsdp_state().unit.root.streams
        with streams.beside("optimizer"):
            optimizer.step()
            model.set_post_optim_event(streams.event())
        optimizer.zero_grad()


def unshards_by_hand() -> None:
    model = sharded(RANK, Library("impl"), PLAIN.build(), Sharding())

    def forward(number: int) -> Tensor:
        for unit in model.modules():
            if hasattr(unit, "unshard"):
                unit.unshard(async_op=True)
        return loss_of(call(model, PLAIN, PLAIN.batch(number, 0)))

    steps(model, forward)


def finalizes_by_hand() -> None:
    """Run two backwards, then one asynchronous finalization, and change the parameters after its `wait`."""
    model = sharded(RANK, Library("impl"), PLAIN.build(), Sharding())
    model.set_manual_backward_finalization(True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        for part in range(2):
            loss_of(call(model, PLAIN, PLAIN.batch(2 * number + part, 0))).backward()
        model.finalize_backward(async_op=True).wait()
        optimizer.step()
        optimizer.zero_grad()


OTHERS: tuple[Program, ...] = (
    forward_of_inner_unit,
    forward_of_contained_module,
    change_before_backward,
    parameter_put_in_place,
    low_precision_hook,
    forecast_that_fails,
    forecast_that_fails_in_evaluation,
    summons,
    optimizer_beside,
    unshards_by_hand,
    finalizes_by_hand,
)


# -- faults


@dataclass
class Faulty(RecordingStreams):
    """Streams of which one kind of wait does nothing, or one kind of event is its stream's very first.

    `drops` is a wait: who is held up, and the function of impl that asks for it. `early` is a record, likewise.
    """

    drops: tuple[str, str] = ("", "")
    early: tuple[str, str] = ("", "")
    requested: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self._first: dict[str, int] = {}

    def record(self, role: StreamRole) -> int:
        event = super().record(role)
        first = self._first.setdefault(role.value, event)
        return first if (role.value, _requesting_function()) == self.early else event

    def wait(self, role: StreamRole, event: int | None) -> None:
        if self._is_kept(role.value):
            super().wait(role, event)

    def wait_in(self, stream: str, event: int | None) -> None:
        if self._is_kept(StreamRole.COMPUTE.value):
            super().wait_in(stream, event)

    def block(self, event: int | None) -> None:
        if self._is_kept("host"):
            super().block(event)

    def _is_kept(self, who: str) -> bool:
        site = (who, _requesting_function())
        self.requested.add(site)
        return site != self.drops


def _requesting_function() -> str:
    names = (frame.f_code.co_name for frame in _frames() if is_of_impl(frame))
    return next(name for name in names if name != "make_gather_wait_for_compute")


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextlib.contextmanager
def faulty(method: str, change: Callable[..., None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, method, change)
        yield
