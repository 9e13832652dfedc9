"""ShardedGradScaler method by method: its constructor, scale, unscale_ and update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.scaler_programs import (
    INIT_SCALE_8,
    SCALER,
    ScalerCall,
    ScalerProgram,
    assert_calls_match_torch,
    played,
    scales,
)
from conformance.distributed.fsdp.scenes.twins import Twins
from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import observe
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import Harness, entries
from conformance.strategies.sharded_scaling import iteration, iterations, one_bad, parts

LOW = [torch.float16, torch.bfloat16]

ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "init_scale": st.sampled_from([1.0, 24.0, 3.0, 0.5]),
    "growth_factor": st.sampled_from([2.0, 1.5, 10.0]),
    "backoff_factor": st.sampled_from([0.5, 0.25, 0.75]),  # see test_backoff_factor_is_not_rounded_to_float32
    "growth_interval": st.integers(1, 3),
}


@clause("distributed.fsdp.sharded_grad_scaler.constructor.arguments")
@given(options=st.fixed_dictionaries({}, optional=ARGUMENTS))
def test_constructor_arguments_match_torch(twins: Twins, options: dict[str, Any]) -> None:
    calls = iterations(None, None, one_bad(0, twins.world_size), None)
    plan = ScalerProgram(parts(twins.world_size), calls, options=options)
    assert_calls_match_torch(twins, plan)


@clause("distributed.fsdp.sharded_grad_scaler.constructor.arguments")
def test_defaults_and_arguments_by_position(subject: Library, device: str) -> None:
    scaler = subject.find(SCALER)(device)
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.is_enabled()) == (65536.0, 2000, True)
    assert (scaler.get_backoff_factor(), scaler.get_growth_factor()) == (0.5, 2.0)
    scaler = subject.find(SCALER)(device, 4.0, 0.25, 3.0, 7, True, None)
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.is_enabled()) == (4.0, 7, True)
    assert (scaler.get_backoff_factor(), scaler.get_growth_factor()) == (0.25, 3.0)
    assert subject.find(SCALER)(device, 4.0, 0.25, 3.0, 7, False).is_enabled() is False


@clause("distributed.fsdp.sharded_grad_scaler.constructor.bad_arguments")
@pytest.mark.parametrize(
    "arguments",
    [
        {"growth_factor": 1.0},
        {"growth_factor": 0.5},
        {"backoff_factor": 1.0},
        {"backoff_factor": "0.5"},
        {"growth_factor": None},
        {"scale": 2.0},
        {"growth_factor": 1.0, "backoff_factor": 1.0, "enabled": False},
    ],
    ids=str,
)
def test_invalid_arguments_raise_like_torch(compare: Compare, device: str, arguments: dict[str, Any]) -> None:
    def made(library: Library) -> dict[str, Any]:
        return entries(library.find(SCALER)(device, **arguments))

    compare(lambda library: observe(made, library))


@clause("distributed.fsdp.sharded_grad_scaler.constructor.device")
@pytest.mark.parametrize("where", ["cpu", "cuda", "xpu", None])
@pytest.mark.parametrize("cuda_is_there", [True, False])
def test_scaler_without_cuda_warns_like_torch(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, where: str | None, cuda_is_there: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_is_there)

    def made(library: Library) -> tuple[bool, dict[str, Any]]:
        scaler = library.find(SCALER)() if where is None else library.find(SCALER)(where)
        return scaler.is_enabled(), entries(scaler)

    compare(lambda library: observe(made, library))


@clause("distributed.fsdp.sharded_grad_scaler.enabled.off")
@pytest.mark.parametrize("optimizer", ["recording", "aware"])
def test_disabled_scaler_changes_and_communicates_nothing(twins: Twins, optimizer: str) -> None:
    grad_outcomes = (math.inf,) * twins.world_size
    calls = (
        ScalerCall("scale", argument=torch.ones(2)),
        *iteration(grad_outcomes, unscale=True),
        ScalerCall("update", argument=3.0),
    )
    plan = ScalerProgram(parts(twins.world_size), calls, (optimizer,), options={"enabled": False})
    assert_calls_match_torch(twins, plan)
    assert [len(trace) for trace in twins.pool.traces] == [0] * twins.world_size


@clause("distributed.fsdp.sharded_grad_scaler.is_a_grad_scaler")
def test_sharded_scaler_is_grad_scaler(subject: Library, reference: Library, device: str) -> None:
    """ShardedGradScaler, GradScaler and torch's ShardedGradScaler load each other's state dicts."""
    sharded, plain = subject.find(SCALER), subject.amp.GradScaler
    assert issubclass(sharded, plain)
    first = reference.find(SCALER)(device, 4.0, 0.25, 3.0, 7)
    state = first.state_dict()
    for kind in (sharded, plain, sharded, reference.find(SCALER)):
        scaler = kind(device)
        scaler.load_state_dict(state)
        scaler.scale(torch.ones((), device=device))
        state = scaler.state_dict()
        assert state == first.state_dict()


@clause("distributed.fsdp.sharded_grad_scaler.constructor.min_scale")
def test_min_scale_of_user_is_kept(twins: Twins) -> None:
    calls = iteration((math.inf,) * twins.world_size) * 3
    plan = ScalerProgram(parts(twins.world_size), calls, options=INIT_SCALE_8 | {"min_scale": 2.0})
    assert scales(played(twins, plan)) == [2.0] * twins.world_size


@clause("distributed.fsdp.sharded_grad_scaler.scale.multiplies")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_scale_multiplies_losses(compare: Compare, device: str, dtype: torch.dtype) -> None:
    def scaled(library: Library) -> Any:
        scaler = library.find(SCALER)(device, init_scale=24.0)
        weight = torch.arange(6.0, device=device).to(dtype).reshape(2, 3).requires_grad_()
        whole = scaler.scale(weight)
        whole.abs().sum().backward()
        nested = scaler.scale([weight[0], (weight[1], [weight.sum()]), map(torch.sum, weight)])
        return whole, nested[:2], list(nested[2]), weight.grad

    compare(lambda library: observe(scaled, library))


@clause("distributed.fsdp.sharded_grad_scaler.scale.multiplies")
@pytest.mark.parametrize("outputs", [None, 3.0, [1.0], [torch.ones(2), None]], ids=str)
def test_scale_rejects_inputs_that_are_not_tensors(compare: Compare, device: str, outputs: Any) -> None:
    def scaled(library: Library) -> Any:
        return library.find(SCALER)(device).scale(outputs)

    [outcome] = compare(lambda library: observe(scaled, library))
    assert outcome.raised is not None
    assert outcome.raised.kind is ValueError


@clause("distributed.fsdp.sharded_grad_scaler.scale.low_precision_losses")
@pytest.mark.deviation("grad_scaler.low_precision_losses")
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_low_precision_losses_are_scaled_in_float32(
    deviation: DeviationJudge, device: str, dtype: torch.dtype, shape: tuple[int, ...], nested: bool
) -> None:
    """The loss's gradient is the scale, in the dtype of the loss."""

    def probe(library: Library) -> Any:
        scaler = library.find(SCALER)(device, init_scale=32768.0)
        loss = torch.full(shape, 3.0, dtype=dtype, device=device, requires_grad=True)
        scaled = scaler.scale([loss])[0] if nested else scaler.scale(loss)
        scaled.sum().backward()
        assert bool((loss.grad == 32768.0).all()), f"the gradient is {loss.grad}"
        return scaled.dtype, bool((scaled.float() == 98304.0).all())

    deviation.judge(
        probe,
        torch_does=lambda result: result == (dtype, dtype is torch.bfloat16),
        we_do=lambda result: result == (torch.float32, True),
    )


@clause("distributed.fsdp.sharded_grad_scaler.scale.any_device")
@pytest.mark.deviation("grad_scaler.gradients_on_the_host")
def test_host_loss_is_scaled(deviation: DeviationJudge, device: str) -> None:
    if device == "cpu":
        unavailable("one device type only")

    def probe(library: Library) -> list[float]:
        scaler = library.find(SCALER)(device, init_scale=4.0)
        scaler.scale(torch.ones((), device=device))
        return scaler.scale(torch.ones(2)).tolist()

    deviation.judge(
        probe,
        torch_does=lambda scaled: scaled != [4.0, 4.0],
        we_do=lambda scaled: scaled == [4.0, 4.0],
        may_agree=True,  # unless the copy ends after the host reads
    )


@clause("distributed.fsdp.sharded_grad_scaler.unscale_.divides")
@pytest.mark.parametrize("scale", [3.0, 1024.0])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64], ids=str)
def test_unscale_divides_gradients_of_one_optimizer(twins: Twins, dtype: torch.dtype, scale: float) -> None:
    """Gradients are divided even if a peer finds nan. Gradients of another optimizer are unchanged."""
    world_size = twins.world_size
    calls: tuple[ScalerCall, ...] = ()
    for grad_outcomes in (None, one_bad(world_size - 1, world_size, math.nan)):
        calls += (
            ScalerCall("backward", 0, grad_outcomes),
            ScalerCall("backward", 1),
            ScalerCall("unscale_", 0),
        )
        calls += (ScalerCall("zero_grad", 1), ScalerCall("update"), ScalerCall("zero_grad"))
    plan = ScalerProgram(
        parts(world_size, optimizers=2, dtype=dtype), calls, ("sgd", "sgd"), options={"init_scale": scale}
    )
    assert_calls_match_torch(twins, plan)


@clause("distributed.fsdp.sharded_grad_scaler.unscale_.sparse")
@pytest.mark.parametrize("value", [2.0, 40000.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_inf_in_sparse_gradients_skips_step(twins: Twins, dtype: torch.dtype, value: float) -> None:
    """The last rank has sparse gradients.

    In float16, the sum of two values 40000 in one row is inf, though neither value is.
    """
    values = torch.tensor([1.0, value, value]).to(dtype)
    last = twins.world_size - 1
    calls = (
        ScalerCall("backward"),
        ScalerCall("sparse", argument=values, on=(last,)),
        ScalerCall("unscale_"),
        ScalerCall("step"),
        ScalerCall("update"),
    )
    plan = ScalerProgram(parts(last + 1), calls, options=INIT_SCALE_8)
    outcomes = assert_calls_match_torch(twins, plan)
    assert (sparse := outcomes[last][1]).raised is None, f"there is no such gradient: {sparse.raised}"
    skips = value == math.inf or (value > 2.0 and dtype is torch.float16)
    assert scales(outcomes) == [4.0 if skips else 8.0] * (last + 1)


@clause("distributed.fsdp.sharded_grad_scaler.update.moves_the_scale")
@pytest.mark.parametrize(
    "new_scale",
    [
        4.0,
        torch.tensor(2.0),
        torch.tensor([2.0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor(2.0, requires_grad=True),
        torch.tensor(2.0, device="meta"),
    ],
    ids=str,
)
def test_new_scale_replaces_backoff(twins: Twins, new_scale: Any) -> None:
    """The new scale replaces the backoff after an inf."""
    world_size = twins.world_size
    calls = (*iteration(one_bad(0, world_size))[:-1], ScalerCall("update", argument=new_scale), *iteration())
    plan = ScalerProgram(parts(world_size), calls, options=INIT_SCALE_8)
    assert_calls_match_torch(twins, plan)


@clause("distributed.fsdp.sharded_grad_scaler.update.moves_the_scale")
@pytest.mark.parametrize("interval", [1, 3])
def test_inf_on_any_rank_restarts_growth(twins: Twins, interval: int) -> None:
    """An inf on any rank restarts the count of clean steps. State dicts contain the count."""
    world_size = twins.world_size
    calls: tuple[ScalerCall, ...] = ()
    for bad_rank in (None, None, 0, None, None, world_size - 1, None, None, None, None):
        calls += iteration(None if bad_rank is None else one_bad(bad_rank, world_size))
        if bad_rank == 0:
            calls += (ScalerCall("resume"),)
    plan = ScalerProgram(
        parts(world_size), calls, options=INIT_SCALE_8 | {"growth_interval": interval, "growth_factor": 3.0}
    )
    assert_calls_match_torch(twins, plan)


@clause("distributed.fsdp.sharded_grad_scaler.update.as_grad_scalers")
@pytest.mark.deviation("sharded_grad_scaler.scale_moves_as_grad_scalers")
def test_scale_stays_finite(twins: Twins, device: str) -> None:
    small = (Gradient((3,), scale=1e-3),)
    plan = ScalerProgram(
        ((small,),) * twins.world_size, iteration(), options={"init_scale": 3e38, "growth_interval": 1}
    )
    held = torch.tensor(3e38).item()
    twins.judge(
        lambda library: scales(played(twins, plan, library)),
        torch_does=lambda reported: reported == [math.inf] * twins.world_size,
        we_do=lambda reported: reported == [held] * twins.world_size,
        may_agree=device != "cpu",
    )


@clause("distributed.fsdp.sharded_grad_scaler.update.as_grad_scalers")
@pytest.mark.deviation("sharded_grad_scaler.scale_moves_as_grad_scalers")
@pytest.mark.parametrize("factor", [0.3, 0.9])
def test_backoff_factor_is_not_rounded_to_float32(twins: Twins, device: str, factor: float) -> None:
    """Tandem rounds only the product to float32. torch rounds the factor and then the product."""
    grad_outcomes = (math.inf,) * twins.world_size
    options = {"init_scale": 65521.0, "backoff_factor": factor}
    plan = ScalerProgram(parts(twins.world_size), iteration(grad_outcomes) * 3, options=options)

    def of_a_grad_scaler(library: Library) -> float:
        harness = Harness(library, device, **options)
        for _ in range(3):
            list(harness.iteration(math.inf))
        return harness.scaler.get_scale()

    def probe(library: Library) -> tuple[set[float], set[float]]:
        return {*scales(played(twins, plan, library))}, {of_a_grad_scaler(library)}

    twins.judge(probe, we_do=lambda result: result[0] == result[1], may_agree=device != "cpu")
