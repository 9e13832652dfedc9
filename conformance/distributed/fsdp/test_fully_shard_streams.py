"""fully_shard on an accelerator: work on streams of the user, and work of the user on streams of fully_shard."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn

from conformance import simulator
from conformance.distributed.fsdp.scenes.fully_shard_calls import ReportingReduceScatter
from conformance.distributed.fsdp.scenes.fully_shard_training import full_parameters
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import PlainTwins
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable

_WIDTH, _STEPS = 16, 3
_UNIT_NUMEL = _WIDTH * (_WIDTH + 1)  # elements of a layer, and of its gathered or reduced buffer


class _Training:
    """Model of three layers and streams of the user, which the unsharded reference on the CPU does not have."""

    def __init__(self, scene: Scene, api: str = "fully_shard", **policy: Any) -> None:
        self.device = scene.rank.device
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(3)]
        model = nn.Sequential(*layers).to(self.device)
        if api == "fully_shard":
            self.model = scene.shard_children(model, **policy)
        else:
            self.model = scene.wrap(model, strategy="FULL_SHARD", units=[nn.Linear], use_orig_params=True)
        self.x = torch.linspace(-1, 1, _UNIT_NUMEL, device=self.device).view(-1, _WIDTH)
        self.streams = [torch.Stream(self.device) if scene.shards else None for _ in range(2)]

    def loss(self) -> torch.Tensor:
        return self.model(self.x).square().mean()

    @contextlib.contextmanager
    def on(self, stream: torch.Stream | None, *, joins: bool = True) -> Generator[None]:
        """Context manager for work on a stream, which waits for the current one, and the reverse if it `joins`."""
        if stream is None:
            yield
            return
        main = torch.accelerator.current_stream()
        stream.wait_stream(main)
        with stream:
            yield
        if joins:
            main.wait_stream(stream)

    def fill_freed_memory(self) -> list[torch.Tensor]:
        """Return tensors that get memory which was given back to the current stream."""
        return [torch.full((_UNIT_NUMEL,), 7.0, device=self.device) for _ in range(12)]

    def parameters(self) -> dict[str, torch.Tensor]:
        return full_parameters(self.model)


def forwards_on_two_streams(scene: Scene, api: str = "fully_shard") -> list[torch.Tensor]:
    """Return the losses of a training with one backward of two forwards."""
    training, losses = _Training(scene, api), list[torch.Tensor]()
    optimizer = torch.optim.SGD(training.model.parameters(), 0.5)
    for _ in range(_STEPS):
        for stream in training.streams:
            with training.on(stream):
                losses.append(training.loss())
        (losses[-2] + losses[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def forwards_of_fsdp_on_two_streams(scene: Scene) -> list[torch.Tensor]:
    return forwards_on_two_streams(scene, "FullyShardedDataParallel")


def forward_on_side_stream(scene: Scene) -> dict[str, torch.Tensor]:
    """Train with each forward on a stream that allocates memory after the backward."""
    training = _Training(scene)
    optimizer = torch.optim.SGD(training.model.parameters(), 0.5)
    for _ in range(_STEPS):
        with training.on(training.streams[0]):
            loss = training.loss()
        loss.backward()
        if training.streams[0] is not None:
            with training.streams[0]:
                training.fill_freed_memory()
        optimizer.step()
        optimizer.zero_grad()
    return training.parameters()


def step_on_side_stream(scene: Scene, unshards: bool) -> dict[str, torch.Tensor]:
    """Train with the steps on another stream, whose event the next forward waits for.

    Gradients are reduced in another dtype than that of `.grad`. If `unshards`, the next gather begins before the
    forward.
    """
    policy = scene.api.MixedPrecisionPolicy(reduce_dtype=torch.float64) if scene.shards else None
    training = _Training(scene, mp_policy=policy)
    optimizer = torch.optim.SGD(training.model.parameters(), 0.5)
    for _ in range(_STEPS):
        training.loss().backward()
        side = training.streams[0]
        with training.on(side, joins=False):
            optimizer.step()
        optimizer.zero_grad()
        if side is not None:
            training.model.set_post_optim_event(side.record_event())
            if unshards:
                training.model[0].unshard(async_op=True)
        training.fill_freed_memory()
    if side is not None:
        torch.accelerator.current_stream().wait_stream(side)
    for module in (*training.model, training.model):
        module.reshard()
    return training.parameters()


class _PersistentReduceScatter(ReportingReduceScatter):
    """Reduce-scatter whose input is the same memory for every layer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(lambda _: None)
        self._buffer = torch.empty(_UNIT_NUMEL, device=device)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        is_input = torch.Size(size).numel() == _UNIT_NUMEL
        return self._buffer if is_input else super().allocate(size, dtype=dtype, device=device)


def persistent_reduce_scatter(scene: Scene) -> dict[str, torch.Tensor]:
    training = _Training(scene)
    if scene.shards:
        comm = _PersistentReduceScatter(training.device)
        for unit in training.model:
            unit.set_custom_reduce_scatter(comm)
    optimizer = torch.optim.SGD(training.model.parameters(), 0.5)
    for _ in range(_STEPS):
        training.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    return training.parameters()


def steps_in_hooks_before_last_backward(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a training whose hooks step each parameter as soon as it has its gradient."""
    training = _Training(scene)
    if scene.shards:
        training.model.set_is_last_backward(False)
    for param in training.model.parameters():
        optimizer = torch.optim.SGD([param], 0.5)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    losses = []
    for _ in range(_STEPS):
        losses.append(training.loss())
        losses[-1].backward()
    return losses


def penalty_of_shards(scene: Scene) -> dict[str, torch.Tensor]:
    """Train with two microbatches a step, of which the last adds a penalty of the parameters to the loss."""
    training = _Training(scene)
    optimizer = torch.optim.SGD(training.model.parameters(), 0.5)
    for _ in range(_STEPS):
        for is_last in (False, True):
            if scene.shards:
                training.model.set_is_last_backward(is_last)
            loss = training.loss()
            if is_last:
                shards = [
                    param.to_local() if scene.shards else param for param in training.model.parameters()
                ]
                loss = loss + sum(shard.square().sum() for shard in shards)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return training.parameters()


PROGRAMS = [
    forwards_on_two_streams,
    forwards_of_fsdp_on_two_streams,
    forward_on_side_stream,
    persistent_reduce_scatter,
    steps_in_hooks_before_last_backward,
    penalty_of_shards,
]


@clause("distributed.fsdp.fully_shard.user_streams")
@pytest.mark.deviation("fully_shard.user_streams")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_streams_of_user_keep_results(plain_twins: PlainTwins, device: str, program: Any) -> None:
    if device == "cpu":
        unavailable("an accelerator")
    plain_twins.deviate_to_unsharded(program, may_agree=True)


@clause("distributed.fsdp.fully_shard.ordered")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_waits_order_accesses_to_memory(plain_twins: PlainTwins, device: str, program: Any) -> None:
    """Run the program. `run_on_ranks` asserts this of every program on the simulated device."""
    if device != simulator.NAME:
        unavailable("the simulated device")
    plain_twins.values(program)


@clause("distributed.fsdp.fully_shard.user_streams")
@pytest.mark.deviation("fully_shard.user_streams")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("unshards", [False, True])
def test_step_on_stream_of_user_keeps_results(plain_twins: PlainTwins, device: str, unshards: bool) -> None:
    if device == "cpu":
        unavailable("an accelerator")
    plain_twins.deviate_to_unsharded(step_on_side_stream, unshards=unshards, may_agree=True)
