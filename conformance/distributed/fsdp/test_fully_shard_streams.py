"""Sharded models on an accelerator: work on streams of the user, and work of the user on the models' streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from conformance import simulator
from conformance.distributed.fsdp.scenes.fully_shard_calls import ReportingReduceScatter
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.streamed_training import UNIT_NUMEL, WIDTH, StreamedTraining
from conformance.distributed.fsdp.scenes.twins import PlainTwins
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable

_STEPS = 3
_LARGE_NUMEL = 160_000  # elements of a buffer whose memory is not split


def forwards_on_two_streams(scene: Scene, api: str = "fully_shard") -> list[torch.Tensor]:
    """Return the losses of a training with one backward of two forwards."""
    training, losses = StreamedTraining(scene, api), list[torch.Tensor]()
    for _ in range(_STEPS):
        for stream in training.streams[:2]:
            with training.on(stream):
                losses.append(training.loss())
        (losses[-2] + losses[-1]).backward()
        training.step()
    return losses


def forwards_of_fsdp_on_two_streams(scene: Scene) -> list[torch.Tensor]:
    return forwards_on_two_streams(scene, "FullyShardedDataParallel")


def backward_of_two_of_three_forwards(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a training with forwards on three streams, of which the first has a backward of its own."""
    training, losses = StreamedTraining(scene), list[torch.Tensor]()
    for _ in range(_STEPS):
        for factor, stream in enumerate(training.streams, 1):
            with training.on(stream):
                losses.append(training.loss(factor))
        (losses[-2] + losses[-1]).backward()
        losses[-3].backward()
        training.step()
    return losses


def microbatches_on_two_streams(scene: Scene, api: str = "fully_shard") -> list[torch.Tensor]:
    """Return the losses of a training whose first microbatch of two is on a side stream, without synchronisation."""
    training, losses = StreamedTraining(scene, api), list[torch.Tensor]()
    for _ in range(_STEPS):
        with training.on(training.streams[0]), training.unsynchronised():
            training.loss(2.0).backward()
        losses.append(training.loss())
        losses[-1].backward()
        training.fill_freed_memory_of(training.streams[0])
        training.step()
    return losses


def microbatches_of_fsdp_on_two_streams(scene: Scene) -> list[torch.Tensor]:
    return microbatches_on_two_streams(scene, "FullyShardedDataParallel")


def layer_on_inner_stream(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a training in which a module computes one of its layers on another stream."""
    training, losses = StreamedTraining(scene, forks=True), list[torch.Tensor]()
    for _ in range(_STEPS):
        losses.append(training.loss())
        losses[-1].backward()
        training.fill_freed_memory_of(training.streams[0])
        training.step()
    return losses


def head_beside_microbatches(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a head on a side stream, while microbatches that do not use it run.

    Units stay unsharded after a forward, so the backwards of the microbatches reshard the head too.
    """
    training, losses = StreamedTraining(scene, reshard_after_forward=False), list[torch.Tensor]()
    body, _, head = training.model
    training.loss().backward()
    training.step()
    for _ in range(_STEPS):
        with training.on(training.streams[0], joins=False):
            output = training.x
            for _ in range(4):
                output = head(output)
            losses.append(output.square().mean())
        for _ in range(2):
            body(training.x).square().mean().backward()
        if training.streams[0] is not None:
            torch.accelerator.current_stream().wait_stream(training.streams[0])
        losses[-1].backward()
        training.step()
    return losses


def forward_on_side_stream(scene: Scene) -> dict[str, torch.Tensor]:
    """Train with each forward on a stream that allocates memory after the backward."""
    training = StreamedTraining(scene)
    for _ in range(_STEPS):
        with training.on(training.streams[0]):
            loss = training.loss()
        loss.backward()
        training.fill_freed_memory_of(training.streams[0])
        training.step()
    return training.parameters()


def step_on_side_stream(scene: Scene, unshards: bool = True) -> dict[str, torch.Tensor]:
    """Train with the steps on another stream, whose event the next forward waits for.

    Gradients are reduced in another dtype than that of `.grad`. If `unshards`, the next gather begins before the
    forward.
    """
    policy = scene.api.MixedPrecisionPolicy(reduce_dtype=torch.float64) if scene.shards else None
    training = StreamedTraining(scene, mp_policy=policy)
    for _ in range(_STEPS):
        training.loss().backward()
        side = training.streams[0]
        with training.on(side, joins=False):
            training.optimizer.step()
        training.optimizer.zero_grad()
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
        self._buffer = torch.empty(UNIT_NUMEL, device=device)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        is_input = torch.Size(size).numel() == UNIT_NUMEL
        return self._buffer if is_input else super().allocate(size, dtype=dtype, device=device)


def persistent_reduce_scatter(scene: Scene) -> dict[str, torch.Tensor]:
    training = StreamedTraining(scene)
    comm = _PersistentReduceScatter(training.device)
    for unit in training.model:
        unit.set_custom_reduce_scatter(comm)
    for _ in range(_STEPS):
        training.loss().backward()
        training.step()
    return training.parameters()


def _step_in_hooks(model: nn.Module) -> None:
    """Step each parameter as soon as it has its gradient."""
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], 0.5)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)


def steps_in_hooks_before_last_backward(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a training that steps in hooks."""
    training = StreamedTraining(scene)
    _step_in_hooks(training.model)
    training.model.set_is_last_backward(False)
    losses = []
    for _ in range(_STEPS):
        losses.append(training.loss())
        losses[-1].backward()
    return losses


def steps_in_hooks_of_failed_backward(scene: Scene, **options: Any) -> torch.Tensor:
    """Return the loss after a backward that steps in hooks and then raises."""
    training = StreamedTraining(scene, **options)
    _step_in_hooks(training.model)
    factor = torch.ones((), device=training.device, requires_grad=True)
    factor.register_hook(_fail)
    tried(training.loss(factor).backward)
    return training.loss()


def steps_in_hooks_of_failed_backward_of_replicas(scene: Scene) -> torch.Tensor:
    return steps_in_hooks_of_failed_backward(scene, mesh=scene.rank.mesh(2, 2, names=("replicas", "shards")))


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("the last hook of the backward")


def gradient_hooks_before_last_backward(scene: Scene) -> dict[str, torch.Tensor]:
    """Train with hooks that read a tensor which the user changes after each of two microbatches."""
    training, scale = StreamedTraining(scene), torch.ones((), device=scene.rank.device)
    for param in training.model.parameters():
        param.register_hook(lambda gradient: gradient * scale)
    for _ in range(_STEPS):
        for is_last in (False, True):
            training.model.set_is_last_backward(is_last)
            training.loss().backward()
            scale.mul_(0.5)
        training.step()
    return training.parameters()


def unshard_between_on_side_stream(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a training in which a side stream gathers units, of shards over half of the ranks."""
    training, losses = StreamedTraining(scene, reshard_after_forward=2), list[torch.Tensor]()
    for _ in range(_STEPS):
        losses.append(training.loss())
        with training.on(training.streams[0], joins=False):
            for unit in training.model:
                unit.unshard()
        memory = training.fill_freed_memory()
        losses[-1].backward()
        training.step()
        del memory
    return losses


def sequence_parallel_forward_on_side_stream(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a training whose gradients are partial sums over half of the ranks."""
    mesh, side = scene.rank.mesh(2, 2, names=("data", "model")), torch.Stream(scene.rank.device)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)).to(scene.rank.device)
    parallelize_module(model, mesh["model"], {"0": SequenceParallel(), "1": SequenceParallel()})
    scene.shard_children(model, mesh=mesh["data"])
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), list[torch.Tensor]()
    x = torch.linspace(-1, 1, 8 * WIDTH, device=scene.rank.device).view(2, 4, WIDTH)
    for _ in range(_STEPS):
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            losses.append(model(x).to_local().square().mean())
        torch.accelerator.current_stream().wait_stream(side)
        losses[-1].backward()
        with side:
            next_batch = [torch.full((WIDTH,), 7.0, device=scene.rank.device) for _ in range(40)]
        torch.accelerator.current_stream().wait_stream(side)
        del next_batch
        optimizer.step()
        optimizer.zero_grad()
    return losses


def penalty_of_shards(scene: Scene) -> dict[str, torch.Tensor]:
    """Train with three microbatches a step. The last two add a penalty of the parameters to the loss.

    It is computed before the forward, so that it is differentiated last, or after it.
    """
    training = StreamedTraining(scene)

    def penalty() -> Any:
        params = training.model.parameters()
        return sum((param.to_local() if scene.shards else param).square().sum() for param in params)

    for _ in range(_STEPS):
        training.model.set_is_last_backward(False)
        training.loss().backward()
        # The first layer is reduced before the penalty is differentiated, because its input needs a gradient.
        (penalty() + training.loss(torch.ones((), device=training.device, requires_grad=True))).backward()
        training.model.set_is_last_backward(True)
        (training.loss() + penalty()).backward()
        training.step()
    return training.parameters()


def finalizations_of_user(scene: Scene) -> dict[str, torch.Tensor]:
    """Train with reductions that the user starts after each backward and waits for before each step."""
    training = StreamedTraining(scene)
    training.model.set_manual_backward_finalization(True)
    for _ in range(_STEPS):
        training.loss().backward()
        training.model.finalize_backward(async_op=True).wait()
        training.step()
    return training.parameters()


def microbatches_before_last_backward(scene: Scene) -> dict[str, torch.Tensor]:
    """Train with microbatches whose gradients a scaler takes while they are reduced."""
    training = StreamedTraining(scene)
    scaler = scene.library.find("amp.GradScaler")(scene.rank.device.type)
    training.model.set_is_last_backward(False)
    for _ in range(_STEPS):
        with scaler.microbatch(training.optimizer):
            scaler.scale(training.loss()).backward()
    scaler.step(training.optimizer)
    return training.parameters()


def penalty_of_fsdp_on_side_stream(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a training in which a side stream first computes gradients of the sharded parameters."""
    training, losses = StreamedTraining(scene, "FullyShardedDataParallel"), list[torch.Tensor]()
    params = [param for param in training.model.parameters() if param.numel()]
    for _ in range(_STEPS):
        with training.on(training.streams[0]):
            torch.stack([param.square().sum() for param in params]).sum().backward()
        losses.append(training.loss())
        losses[-1].backward()
        training.fill_freed_memory_of(training.streams[0])
        training.step()
    return losses


def kept_low_precision_gradients_of_two_streams(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a training that adds up gradients of two streams, in another dtype than the parameters'."""
    precision = scene.api.MixedPrecision(param_dtype=torch.float64, keep_low_precision_grads=True)
    training = StreamedTraining(scene, "FullyShardedDataParallel", mixed_precision=precision)
    losses = []
    for _ in range(_STEPS):
        with training.on(training.streams[0]):
            training.loss(2.0).backward()
        losses.append(training.loss().float())
        losses[-1].backward()
        training.fill_freed_memory_of(training.streams[0], torch.float64)
        training.step()
    return losses


def first_forward_of_fsdp_on_side_stream(scene: Scene) -> torch.Tensor:
    """Return the output of a first forward, which casts the buffers, while the current stream allocates memory."""
    layer = nn.Linear(WIDTH, WIDTH).to(scene.rank.device)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    layer.register_buffer("factor", torch.full((_LARGE_NUMEL,), 2.0, device=scene.rank.device))
    layer.register_forward_hook(lambda layer, _, output: output * layer.factor[:WIDTH])
    model = scene.wrap(layer, mixed_precision=scene.api.MixedPrecision(buffer_dtype=torch.float64))
    x = torch.ones(1, WIDTH, device=scene.rank.device)
    if not scene.shards:
        return model(x).double()
    main, side = torch.accelerator.current_stream(), torch.Stream(scene.rank.device)
    side.wait_stream(main)
    with side:
        output = model(x)
    memory = [torch.full((_LARGE_NUMEL,), 7.0, device=scene.rank.device) for _ in range(4)]
    main.wait_stream(side)
    del memory
    return output


def assigned_data_of_fsdp_on_two_streams(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a training with data that is assigned to the parameters on the stream of each forward."""
    training, losses = StreamedTraining(scene, "FullyShardedDataParallel"), list[torch.Tensor]()
    for stream in (None, training.streams[0], None, training.streams[1]):
        with training.on(stream, joins=False):
            for param in training.model.parameters():
                param.data = param.data * 2
            losses.append(training.loss())
        memory = training.fill_freed_memory()
        if stream is not None:
            torch.accelerator.current_stream().wait_stream(stream)
        del memory
        losses[-1].backward()
        training.fill_freed_memory_of(training.streams[0])
        training.step()
    return losses


def microbatches_of_scaler(scene: Scene) -> torch.Tensor:
    """Return the sum of gradients of microbatches whose forwards are on a side stream. Nothing is sharded."""
    training, param = StreamedTraining(scene), nn.Parameter(torch.ones(WIDTH, device=scene.rank.device))
    optimizer = torch.optim.SGD([param], 0.5)
    scaler = scene.library.find("amp.GradScaler")(scene.rank.device.type)
    for factor in (1.0, 2.0, 4.0):
        with scaler.microbatch(optimizer):
            with training.on(training.streams[0]):
                loss = (factor * param).square().sum()
            scaler.scale(loss).backward()
        training.fill_freed_memory_of(training.streams[0])
    scaler.unscale_(optimizer)
    assert param.grad is not None
    return param.grad.cpu()


PROGRAMS = [
    forwards_on_two_streams,
    forwards_of_fsdp_on_two_streams,
    backward_of_two_of_three_forwards,
    microbatches_on_two_streams,
    microbatches_of_fsdp_on_two_streams,
    layer_on_inner_stream,
    head_beside_microbatches,
    forward_on_side_stream,
    persistent_reduce_scatter,
    steps_in_hooks_before_last_backward,
    steps_in_hooks_of_failed_backward,
    penalty_of_shards,
    penalty_of_fsdp_on_side_stream,
    kept_low_precision_gradients_of_two_streams,
    first_forward_of_fsdp_on_side_stream,
    assigned_data_of_fsdp_on_two_streams,
]
ORDERED = [*PROGRAMS, gradient_hooks_before_last_backward, step_on_side_stream]
ORDERED_WITH_EXTENSIONS = [finalizations_of_user, microbatches_before_last_backward]
ORDERED_ON_FOUR_RANKS = [
    sequence_parallel_forward_on_side_stream,
    steps_in_hooks_of_failed_backward_of_replicas,
    unshard_between_on_side_stream,
]


@clause("distributed.fsdp.fully_shard.user_streams")
@pytest.mark.deviation("fully_shard.user_streams")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_streams_of_user_keep_results(plain_twins: PlainTwins, device: str, program: Any) -> None:
    """torch may read gradients whose memory was reused, or weights from before a step."""
    if device == "cpu":
        unavailable("an accelerator")
    plain_twins.deviate_to_unsharded(program, may_agree=True)


@pytest.fixture
def simulated_twins(plain_twins: PlainTwins, device: str) -> PlainTwins:
    """Return libraries on the simulated device, where `run_on_ranks` asserts that waits order accesses to memory."""
    if device != simulator.NAME:
        unavailable("the simulated device")
    return plain_twins


@clause("distributed.fsdp.fully_shard.ordered")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("program", ORDERED, ids=lambda program: program.__name__)
def test_waits_order_accesses_to_memory(simulated_twins: PlainTwins, program: Any) -> None:
    simulated_twins.values(program)


@clause("distributed.fsdp.fully_shard.ordered")
@pytest.mark.world_sizes(fewest=4)
@pytest.mark.parametrize("program", ORDERED_ON_FOUR_RANKS, ids=lambda program: program.__name__)
def test_waits_order_accesses_to_memory_on_mesh(simulated_twins: PlainTwins, program: Any) -> None:
    simulated_twins.values(program)


@clause("distributed.fsdp.fully_shard.finalization")
@pytest.mark.world_sizes(fewest=2)
def test_waits_order_finalizations_of_user(simulated_twins: PlainTwins) -> None:
    simulated_twins.values(finalizations_of_user)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.sharded")
@pytest.mark.world_sizes(fewest=2)
def test_waits_order_microbatches(simulated_twins: PlainTwins) -> None:
    simulated_twins.values(microbatches_before_last_backward)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.sharded")
def test_waits_order_microbatches_of_unsharded_parameter(simulated_twins: PlainTwins) -> None:
    for gradient in simulated_twins.values(microbatches_of_scaler):
        assert gradient.values.tolist() == [2.0 * (1.0 + 4.0 + 16.0)] * WIDTH


@clause("distributed.fsdp.fully_shard.user_streams")
@pytest.mark.deviation("fully_shard.user_streams")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("unshards", [False, True])
def test_step_on_stream_of_user_keeps_results(plain_twins: PlainTwins, device: str, unshards: bool) -> None:
    """torch may read gradients whose memory was reused, or gather weights from before the step."""
    if device == "cpu":
        unavailable("an accelerator")
    plain_twins.deviate_to_unsharded(step_on_side_stream, unshards=unshards, may_agree=True)
