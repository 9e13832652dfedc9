"""`microbatch`: gradients that are not finite cost one microbatch of the accumulation, and not the step."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import observe
from conformance.strategies.scaling import Aware, TakesScaler

NAMES = ["first", "second", "third"]
SCALE = 64.0
SKIP = "skip"
LEARNING_RATE = 0.125
# A microbatch is good (None), has one element that is not finite, or is skipped.
outcomes_of = st.lists(st.sampled_from([None, None, math.inf, math.nan, SKIP]), min_size=1, max_size=5)

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=LEARNING_RATE),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=LEARNING_RATE, fused=True),
    "aware": Aware,
    "takes scaler": TakesScaler,
}


class MicrobatchRun:
    """Three parameters of which every second microbatch uses only two, an optimizer and a scaler."""

    def __init__(self, library: Library, device: str, optimizer: str = "sgd", **options: Any) -> None:
        self.params = [torch.nn.Parameter(torch.ones(2 + i, 3, device=device)) for i in range(3)]
        self.optimizer: Any = OPTIMIZERS[optimizer]([*zip(NAMES, self.params, strict=True)])
        self.scaler: Any = library.amp.GradScaler(device, **{"init_scale": SCALE} | options)
        self.scaler.scale(torch.ones((), device=device))

    def gradients(self, index: int) -> list[float | None]:
        """Return the value of every element of each parameter's gradient in a microbatch."""
        return [1.0 + index, 2.0, None if index % 2 else 4.0]

    def backward(self, index: int, last: float | None = None) -> None:
        """Run the backward of a microbatch. `last` replaces the last element of the second gradient."""
        losses = [
            (param * factor).sum()
            for param, factor in zip(self.params, self.gradients(index), strict=True)
            if factor is not None
        ]
        if last is not None:
            losses.append(self.params[1].flatten()[-1] * last)
        self.scaler.scale(torch.stack(losses).sum()).backward()

    def run(self, outcomes: Sequence[Any]) -> None:
        """Run one microbatch for each outcome."""
        for index, outcome in enumerate(outcomes):
            with self.scaler.microbatch(self.optimizer) as microbatch:
                if outcome == SKIP:
                    microbatch.skip()
                self.backward(index, outcome if isinstance(outcome, float) else None)

    def step(self, how: str = "step") -> None:
        if how == "unscale_":
            self.scaler.unscale_(self.optimizer)
        if how == "fused_step":
            self.scaler.fused_step(self.optimizer, update=False)
        else:
            self.scaler.step(self.optimizer)

    def expected(self, outcomes: Sequence[Any]) -> list[float]:
        """Return the value of each parameter after one step with the gradients of the good microbatches.

        They count as often as it takes to make up for the others.
        """
        good = [self.gradients(index) for index, outcome in enumerate(outcomes) if outcome is None]
        sums = [sum(factors[i] or 0.0 for factors in good) for i in range(3)]
        factor = len(outcomes) / len(good) if good else 0.0
        return [1.0 - LEARNING_RATE * factor * total for total in sums]

    def check_values(self, expected: Sequence[float]) -> None:
        for param, value in zip(self.params, expected, strict=True):
            torch.testing.assert_close(param.detach(), torch.full_like(param, value), rtol=1e-6, atol=1e-6)


@clause("amp.grad_scaler.microbatch.left_out")
@pytest.mark.parametrize("how", ["step", "unscale_", "fused_step"])
@pytest.mark.parametrize("optimizer", ["sgd", "fused sgd", "aware"])
@given(outcomes=outcomes_of)
def test_bad_microbatches_are_left_out_of_average(
    subject: Library, device: str, optimizer: str, how: str, outcomes: list[Any]
) -> None:
    """The step is not taken if no microbatch is left."""
    run = MicrobatchRun(subject, device, optimizer)
    for _ in range(2):  # the second step begins a new sum
        run.optimizer.zero_grad()
        with torch.no_grad():
            for param in run.params:
                param.fill_(1.0)
        run.run(outcomes)
        run.step(how)
        run.check_values(run.expected(outcomes))
        assert run.scaler.step_was_taken(run.optimizer) is (None in outcomes)
        run.scaler.update()


@clause("amp.grad_scaler.microbatch.left_out")
@pytest.mark.parametrize("outcomes", [(None,), (math.inf, None, None), (SKIP, math.nan, None), (None, SKIP)])
def test_fused_step_returns_norm_of_average(subject: Library, device: str, outcomes: tuple[Any, ...]) -> None:
    run = MicrobatchRun(subject, device)
    run.run(outcomes)
    norm = run.scaler.fused_step(run.optimizer, max_norm=1.0)
    steps = [(1.0 - value) / LEARNING_RATE for value in run.expected(outcomes)]
    expected = math.sqrt(sum(param.numel() * step**2 for param, step in zip(run.params, steps, strict=True)))
    assert float(norm) == pytest.approx(expected, rel=1e-5)
    run.check_values([1.0 - LEARNING_RATE * step / expected for step in steps])


@clause("amp.grad_scaler.microbatch.left_out")
def test_all_finite_microbatches_change_no_bit(subject: Library, device: str) -> None:
    """The accumulated gradients equal those without microbatch(), bit by bit, also those accumulated before."""
    generator = torch.Generator().manual_seed(5)
    factors = [torch.randn(2, 3, generator=generator).to(device) for _ in range(4)]

    def grads_of(first: int) -> torch.Tensor:
        run = MicrobatchRun(subject, device)
        for index, factor in enumerate(factors):
            loss = run.scaler.scale((run.params[0] * factor).sum())
            if index < first:
                loss.backward()
                continue
            with run.scaler.microbatch(run.optimizer):
                loss.backward()
        if first < len(factors):
            # Raises unless a microbatch was judged.
            assert run.scaler.skipped_microbatches(run.optimizer) == []
        run.scaler.unscale_(run.optimizer)
        grad = run.params[0].grad
        assert grad is not None
        return grad

    assert torch.equal(grads_of(len(factors)), grads_of(0))
    assert torch.equal(grads_of(len(factors)), grads_of(1))


@clause("amp.grad_scaler.microbatch.left_out")
@pytest.mark.parametrize("bad", [0, 1])
def test_sparse_microbatch_is_left_out(subject: Library, device: str, bad: int) -> None:
    try:
        torch.sparse_coo_tensor([[1]], [1.0], (2,), device=device, check_invariants=True)
    except NotImplementedError:
        unavailable(f"{device} has no sparse tensors")
    layer = torch.nn.Embedding(4, 2, sparse=True, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    scaler: Any = subject.amp.GradScaler(device, init_scale=SCALE)
    before = layer.weight.detach().clone()
    for index in range(3):
        with scaler.microbatch(optimizer):
            rows = layer(torch.tensor([index, 1], device=device))
            scaler.scale(rows.sum() * (math.inf if index == bad else 1.0)).backward()
    scaler.step(optimizer)
    counts = torch.zeros(4, 1, device=device)
    for index in {0, 1, 2} - {bad}:
        counts[index] += 1.5
        counts[1] += 1.5
    torch.testing.assert_close(layer.weight.detach(), before - LEARNING_RATE * counts)


@clause("amp.grad_scaler.microbatch.scale")
@pytest.mark.parametrize("how", ["step", "fused_step"])
@given(outcomes=outcomes_of)
def test_scale_falls_after_nonfinite_microbatch(
    subject: Library, device: str, how: str, outcomes: list[Any]
) -> None:
    """Skipped microbatches do not lower it."""
    run = MicrobatchRun(subject, device, growth_interval=100)
    run.run(outcomes)
    run.step(how)
    run.scaler.update()
    fell = any(isinstance(outcome, float) for outcome in outcomes)
    assert run.scaler.get_scale() == (SCALE / 2 if fell else SCALE)


@clause("amp.grad_scaler.microbatch.scale")
def test_step_without_any_loss_keeps_scale(subject: Library, device: str) -> None:
    """The scaler has scaled no loss yet, so that it creates the scale itself."""
    run = MicrobatchRun(subject, device)
    run.scaler = subject.amp.GradScaler(device, init_scale=SCALE)
    with run.scaler.microbatch(run.optimizer) as microbatch:
        microbatch.skip()
    run.step()
    run.scaler.update()
    assert (run.scaler.step_was_taken(run.optimizer), run.scaler.get_scale()) == (False, SCALE)


@clause("amp.grad_scaler.microbatch.scale")
def test_scale_falls_if_sum_of_finite_microbatches_overflows(subject: Library, device: str) -> None:
    run = MicrobatchRun(subject, device, init_scale=1.0)
    for _ in range(2):
        with run.scaler.microbatch(run.optimizer):
            run.scaler.scale(run.params[0].sum() * 3e38).backward()
    run.step()
    run.scaler.update()
    assert (run.scaler.step_was_taken(run.optimizer), run.scaler.get_scale()) == (False, 0.5)


@clause("amp.grad_scaler.microbatch.names")
@given(outcomes=outcomes_of)
def test_skipped_microbatches_are_named(subject: Library, device: str, outcomes: list[Any]) -> None:
    """The list outlives the update, until the next step's first microbatch."""
    run = MicrobatchRun(subject, device)
    run.run(outcomes)
    expected = [
        (index, 0, () if outcome == SKIP else ("second",))
        for index, outcome in enumerate(outcomes)
        if outcome is not None
    ]
    assert run.scaler.skipped_microbatches(run.optimizer) == expected
    run.step()
    run.scaler.update()
    assert [tuple(entry) for entry in run.scaler.skipped_microbatches(run.optimizer)] == expected
    assert ["second" in str(entry) for entry in run.scaler.skipped_microbatches(run.optimizer)] == [
        bool(names) for _, _, names in expected
    ]
    run.run([None])
    assert run.scaler.skipped_microbatches(run.optimizer) == []


@clause("amp.grad_scaler.microbatch.errors")
@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("how", ["step", "fused_step"])
def test_exception_leaves_sum_as_before(subject: Library, device: str, how: str, earlier: int) -> None:
    run = MicrobatchRun(subject, device)
    run.run([None] * earlier)

    def fail() -> None:
        with run.scaler.microbatch(run.optimizer):
            run.backward(1, math.inf)
            raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        fail()
    if not earlier:
        run.backward(0)
    run.step(how)
    run.check_values(run.expected([None]))
    run.scaler.update()
    assert run.scaler.get_scale() == SCALE


@clause("amp.grad_scaler.microbatch.errors")
def test_exception_in_first_microbatch_leaves_scaler_as_before(subject: Library, device: str) -> None:
    """The scaler can still be copied, which is allowed between `update` and the next call for an optimizer."""
    run = MicrobatchRun(subject, device)
    run.run([None, math.inf])
    run.step()
    run.scaler.update()
    skipped = run.scaler.skipped_microbatches(run.optimizer)

    def fail() -> None:
        with run.scaler.microbatch(run.optimizer):
            run.backward(0)
            raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        fail()
    assert copy.deepcopy(run.scaler).get_scale() == run.scaler.get_scale()
    assert run.scaler.skipped_microbatches(run.optimizer) == skipped != []


@clause("amp.grad_scaler.microbatch.left_out")
def test_cleared_gradients_begin_new_average(subject: Library, device: str) -> None:
    run = MicrobatchRun(subject, device)
    run.run([None, math.inf])
    run.optimizer.zero_grad()
    run.run([None, SKIP, None])
    run.step()
    run.check_values(run.expected([None, SKIP, None]))
    assert [entry.position for entry in run.scaler.skipped_microbatches(run.optimizer)] == [1]


@clause("amp.grad_scaler.microbatch.scale")
@pytest.mark.parametrize("outcome", [None, SKIP])
def test_overflow_of_other_optimizer_lowers_scale(subject: Library, device: str, outcome: Any) -> None:
    run = MicrobatchRun(subject, device, growth_interval=100)
    param = torch.nn.Parameter(torch.ones(2, device=device))
    other = torch.optim.SGD([param], lr=LEARNING_RATE)
    run.run([outcome])
    run.scaler.scale(param.sum() * math.inf).backward()
    run.step()
    run.scaler.step(other)
    run.scaler.update()
    assert run.scaler.get_scale() == SCALE / 2


@clause("amp.grad_scaler.microbatch.errors")
@pytest.mark.parametrize("call", ["unscale_", "step", "fused_step", "microbatch", "update"])
def test_calls_inside_microbatch_raise(subject: Library, device: str, call: str) -> None:
    run = MicrobatchRun(subject, device)
    run.run([None])
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1, device=device))], lr=1.0)
    other.param_groups[0]["params"][0].grad = torch.ones(1, device=device)
    run.scaler.unscale_(other)
    calls = {
        "update": run.scaler.update,
        "microbatch": lambda: run.scaler.microbatch(run.optimizer).__enter__(),
    }
    with run.scaler.microbatch(run.optimizer):
        run.backward(1)
        with pytest.raises(RuntimeError, match=r"inside of microbatch\(\)"):
            calls.get(call, lambda: getattr(run.scaler, call)(run.optimizer))()
    run.step()
    run.check_values(run.expected([None, None]))


@clause("amp.grad_scaler.microbatch.errors")
@pytest.mark.parametrize("how", ["step", "unscale_"])
def test_microbatch_after_step_raises(subject: Library, device: str, how: str) -> None:
    run = MicrobatchRun(subject, device)
    run.run([None])
    getattr(run.scaler, how)(run.optimizer)
    with pytest.raises(RuntimeError, match="update"), run.scaler.microbatch(run.optimizer):
        pass


@clause("amp.grad_scaler.microbatch.errors")
def test_skip_after_backward_raises(subject: Library, device: str) -> None:
    run = MicrobatchRun(subject, device)
    with run.scaler.microbatch(run.optimizer) as microbatch:
        run.backward(0)
        with pytest.raises(RuntimeError, match="before"):
            microbatch.skip()
    run.step()
    run.check_values(run.expected([None]))


@clause("amp.grad_scaler.microbatch.errors")
def test_gradients_in_memory_of_sum_raise_or_are_added(subject: Library, device: str) -> None:
    """Bucket views of DistributedDataParallel are an example.

    A subject that keeps the first gradient as the sum raises, because the second one overwrites it.
    """
    run = MicrobatchRun(subject, device)
    bucket = torch.zeros(2, 3, device=device)

    def accumulate(value: float) -> None:
        with run.scaler.microbatch(run.optimizer):
            run.params[0].grad = bucket.fill_(value * SCALE)

    accumulate(1.0)
    second = observe(accumulate, 2.0)
    if second.raised is not None:
        assert second.raised.kind is RuntimeError
        assert "gradient_as_bucket_view" in second.raised.text
        return
    run.step()
    run.check_values([1.0 - LEARNING_RATE * 3.0, 1.0, 1.0])


@clause("amp.grad_scaler.microbatch.errors")
def test_low_precision_params_with_microbatches_raise(subject: Library, device: str) -> None:
    run = MicrobatchRun(subject, device)
    run.run([None])
    copies = [param.detach().bfloat16() for param in run.params]
    with pytest.raises(ValueError, match="low_precision_params"):
        run.scaler.fused_step(run.optimizer, low_precision_params=copies)


@clause("amp.grad_scaler.microbatch.errors")
def test_optimizer_that_takes_scaler_raises_after_microbatch(subject: Library, device: str) -> None:
    """The optimizer's `step` takes the scaler (`grad_scaler=`) and calls `unscale_` itself."""
    run = MicrobatchRun(subject, device, "takes scaler")
    run.run([None])
    with pytest.raises(NotImplementedError, match="unscale_"):
        run.scaler.step(run.optimizer)


@clause("amp.grad_scaler.microbatch.errors")
def test_skipped_microbatches_raise_without_microbatch(subject: Library, device: str) -> None:
    run = MicrobatchRun(subject, device)
    with pytest.raises(RuntimeError, match=r"microbatch\(optimizer\)"):
        run.scaler.skipped_microbatches(run.optimizer)


@clause("amp.grad_scaler.microbatch.disabled")
def test_disabled_scaler_checks_no_microbatch(subject: Library, device: str) -> None:
    run = MicrobatchRun(subject, device, enabled=False)
    with run.scaler.microbatch(run.optimizer) as microbatch:
        run.backward(0)
        with pytest.raises(RuntimeError, match="disabled"):
            microbatch.skip()
    run.run([None, None])
    run.scaler.step(run.optimizer)
    run.check_values([1.0 - LEARNING_RATE * total for total in (1.0 + 1.0 + 2.0, 6.0, 8.0)])
    assert run.scaler.skipped_microbatches(run.optimizer) == []
