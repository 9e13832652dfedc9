"""Sharded training of impl after an exception, which has no effect on later results."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from conformance.distributed.fsdp.test_scale import world_of
from conformance.judge.judgement import unavailable
from conformance.ranks import Rank, RankPool
from impl.distributed.fsdp import FullyShardedDataParallel, fully_shard
from impl.distributed.fsdp._comm.desync.foreign_collective import foreign_collective
from impl.distributed.fsdp._engine.phase import Phase
from impl.distributed.fsdp._engine.unit_params import gather_group
from impl.distributed.fsdp._fsdp1 import summon
from impl.distributed.fsdp.tests.small_model import loss_of_batch, model_of

CPU = torch.device("cpu")


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("raised in backward")


def seeded_model() -> Any:
    torch.manual_seed(0)
    return model_of()


def gradients_of_a_step(model: nn.Module) -> list[Tensor]:
    loss_of_batch(model).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def raise_in_backward(model: Any) -> None:
    hook = model.body.parts[0].register_forward_hook(lambda module, args, output: Raising.apply(output))
    loss = loss_of_batch(model)
    hook.remove()
    with pytest.raises(ValueError, match="raised in backward"):
        loss.backward()


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_forward_after_failed_summon_matches_fresh_model(
    monkeypatch: pytest.MonkeyPatch, use_orig_params: bool
) -> None:
    """The gather of the unit's second flat parameter fails, when the first one is already registered."""

    def two_dtypes() -> Any:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
        module[0].register_forward_hook(lambda module, args, output: output.double())
        return FullyShardedDataParallel(module, device_id=CPU, use_orig_params=use_orig_params)

    def fail_for_double(handle: Any, dtype: torch.dtype, name: str) -> None:
        if dtype is torch.float64:
            raise torch.OutOfMemoryError("no memory for the second flat parameter")
        gather_group(handle, dtype, name)

    x = torch.ones(2, 3)
    with world_of(1):
        expected = two_dtypes()(x)
        model = two_dtypes()
        names = [name for name, _ in model.named_parameters()]
        with monkeypatch.context() as patch:
            patch.setattr(summon, "gather_group", fail_for_double)
            with (
                pytest.raises(torch.OutOfMemoryError),
                FullyShardedDataParallel.summon_full_params(model),
            ):
                pass
        assert torch.equal(model(x), expected)
        assert [name for name, _ in model.named_parameters()] == names
        with FullyShardedDataParallel.summon_full_params(model):
            assert [parameter.numel() for parameter in model.parameters()] == [12, 4, 8, 2]


def test_step_after_failed_backward_matches_fresh_model() -> None:
    with world_of(1):  # a real group, because a fake one moves no data
        expected = gradients_of_a_step(seeded_model())
    with world_of(1):
        model = seeded_model()
        raise_in_backward(model)
        for parameter in model.parameters():
            parameter.grad = None
        actual = gradients_of_a_step(model)
    assert len(actual) == len(expected) > 0
    torch.testing.assert_close(actual, expected)


def test_forward_inside_rank0_only_summoning_raises() -> None:
    """Other ranks would have to issue collectives that they do not know of. torch waits for them."""
    with world_of(4):
        model = seeded_model()
        with (
            type(model).summon_full_params(model, writeback=False, rank0_only=True),
            pytest.raises(RuntimeError, match="rank0_only=True"),
        ):
            loss_of_batch(model)
        loss_of_batch(model)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_failed_backward_inside_summoning_changes_no_weight(use_orig_params: bool) -> None:
    """The forward computes with a low-precision copy, which must not be written back."""

    def unsharded_of(model: Any) -> list[Tensor]:
        with type(model).summon_full_params(model, writeback=False):
            return [parameter.detach().clone() for parameter in model.parameters()]

    with world_of(1):
        torch.manual_seed(0)
        model = model_of(
            arguments={"use_orig_params": use_orig_params}, mixed_precision={"param_dtype": torch.bfloat16}
        )
        before = unsharded_of(model)
        with type(model).summon_full_params(model):
            raise_in_backward(model)
        torch.testing.assert_close(unsharded_of(model), before, rtol=0, atol=0)
        loss_of_batch(model).backward()


def test_gradients_from_before_a_backward_that_raised_are_kept() -> None:
    with world_of(4):
        model = seeded_model()
        before = gradients_of_a_step(model)
        raise_in_backward(model)
        assert model.training_state.name == "IDLE"
        grads = [p.grad for p in model.parameters()]
    assert len(grads) == len(before) > 0
    assert all(grad is not None for grad in grads)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_unreduced_gradients_are_restored_after_penalty_of_failed_backward(use_orig_params: bool) -> None:
    """The penalty's gradient arrives between the reduction of its unit and the failure, and replaces `.grad`."""

    def accumulated(*, fails: bool) -> list[Tensor | None]:
        with world_of(1):
            torch.manual_seed(0)
            wrap = partial(FullyShardedDataParallel, use_orig_params=use_orig_params, device_id=CPU)
            first, second = (wrap(nn.Linear(2, 2)) for _ in range(2))
            model = wrap(nn.Sequential(first, second))
            x = torch.ones(1, 2, requires_grad=True)
            with model.no_sync():
                model(x).sum().backward()
            if fails:
                y = Raising.apply(x)
                penalty = torch.stack([param.square().sum() for param in second.parameters()]).sum()
                with pytest.raises(ValueError, match="raised in backward"):
                    (model(y).sum() + penalty).backward()
            model(x).sum().backward()
            return [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(accumulated(fails=True), accumulated(fails=False), rtol=0, atol=0)


def test_inner_module_runs_after_failed_backward() -> None:
    with world_of(1):
        model = seeded_model()
        x = torch.ones(2, model.head.in_features)
        expected = model.head(x).detach()
        raise_in_backward(model)
        with torch.no_grad():
            actual = model.head(x)
        assert model._unit.phase is Phase.IDLE, "what is in the middle of a backward gathers nothing"
    torch.testing.assert_close(actual, expected)


def test_summoning_on_other_thread_raises_and_keeps_backward() -> None:
    """The refused call is not taken for a failure of the backward that is running on the main thread."""
    with world_of(1):
        expected = gradients_of_a_step(seeded_model())
    refused: list[BaseException] = []
    with world_of(1):
        model = seeded_model()

        def summon() -> None:
            with pytest.raises(AssertionError) as raised, type(model).summon_full_params(model):
                pass
            refused.append(raised.value)

        def summon_on_thread(_: Tensor) -> None:
            thread = threading.Thread(target=summon)
            thread.start()
            thread.join()

        hook = model.body.parts[0].register_forward_hook(
            lambda _, __, out: out.register_hook(summon_on_thread) and None
        )
        actual = gradients_of_a_step(model)
        hook.remove()
    assert len(refused) == 1
    assert "during forward/backward" in str(refused[0])
    torch.testing.assert_close(actual, expected)
    assert len(actual) > 0


def test_forward_thread_may_list_parameters_during_backward_of_another_thread() -> None:
    """The running backward is not taken for one that has failed."""
    with world_of(1):
        expected = gradients_of_a_step(seeded_model())
    in_backward, listed = threading.Event(), threading.Event()

    def wait_for_list(_: Tensor) -> None:
        in_backward.set()
        listed.wait()

    with world_of(1):
        model = seeded_model()
        hook = model.body.parts[0].register_forward_hook(
            lambda _, __, out: out.register_hook(wait_for_list) and None
        )
        loss = loss_of_batch(model)
        hook.remove()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        in_backward.wait()
        names = [name for name, _ in model.named_parameters()]
        listed.set()
        thread.join()
        actual = [p.grad for p in model.parameters() if p.grad is not None]
    assert names
    torch.testing.assert_close(actual, expected)


def test_no_garbage_is_collected_while_another_threads_frames_are_walked() -> None:
    """A finalizer would let that thread run on, and Python 3.11 fill in a frame that is gone: a segmentation fault."""
    if sys.version_info >= (3, 12):
        unavailable("a Python that collects garbage while it makes an object")
    look, may_end, collected = threading.Event(), threading.Event(), []

    def wait_below(frames: int) -> None:
        if frames:
            wait_below(frames - 1)
        else:
            look.set()
            may_end.wait()

    def note(phase: str, _: dict[str, int]) -> None:
        frame = sys._getframe()
        while (frame := frame.f_back) is not None:
            if frame.f_code is foreign_collective.__wrapped__.__code__:
                collected.append(phase)

    waiting = threading.Thread(target=wait_below, args=(200,))
    waiting.start()
    look.wait()
    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        assert foreign_collective(waiting.ident) is None
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
        may_end.set()
        waiting.join()
    assert not collected
    assert gc.isenabled()


class FailsOnce:
    """Gathers, but where it `fails`."""

    fails = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        fails, self.fails = self.fails, False
        if fails:
            raise OSError("a gather fails")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, **options)


def gather_again(rank: Rank) -> list[float]:
    """Return outputs of a layer of ones that keeps shards after forward, once it was written to and a gather fails."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    mesh = DeviceMesh("cpu", torch.arange(rank.world_size))
    fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    model = fully_shard(nn.Sequential(layer), mesh=mesh)
    gathers = FailsOnce()
    layer.set_custom_all_gather(gathers)
    shards = list(model.parameters())
    with torch.no_grad():
        before = model(torch.ones(1, 4))
        for shard in shards:
            shard.mul_(2)
        gathers.fails = True
        with pytest.raises(OSError, match="a gather fails"):
            model(torch.ones(1, 4))
        return [float(element) for out in (before, model(torch.ones(1, 4))) for element in out.unique()]


@pytest.mark.deadline(120)
def test_failed_gather_is_followed_by_gather_of_shards(ranks: Callable[..., RankPool]) -> None:
    """Shards that were kept for a backward have older values than the parameters."""
    outcomes = ranks(4).run(gather_again)
    assert outcomes == [[4.0, 8.0]] * 4
