"""One call in the place of unscale_, clip_grad_norm_, step and update; judged by torch's four calls."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.distributed.fsdp.judging import share_of_examples
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.fused_steps import (
    FATES,
    FUSED,
    KINDS,
    ROW,
    SOME,
    Story,
    Take,
    assert_same_states,
    assert_same_stories,
    by_four,
    by_four_with,
    by_one,
    judge,
    norms_in,
    state_of,
    story,
)
from conformance.strategies.scaling import Rig


def assert_judged_by_four(
    deviation: DeviationJudge,
    reference: Library,
    device: str,
    take: Take,
    kind: str,
    fates: list[float | None],
    *wanted: float,
) -> None:
    """torch's calls clip by the norms that were returned, and these are judged by torch's."""
    judge(
        deviation,
        lambda library: list(story(library, device, take, kind, fates, *wanted)),
        lambda seen: assert_same_stories(
            list(story(reference, device, by_four_with(norms_in(seen)), kind, fates, *wanted)),
            seen,
            *wanted[1:],
        ),
    )


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@ROW
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
@share_of_examples(0.4)
@given(fates=FATES)
def test_iterations(
    deviation: DeviationJudge,
    reference: Library,
    device: str,
    kind: str,
    max_norm: float,
    fates: list[float | None],
) -> None:
    assert_judged_by_four(deviation, reference, device, by_one, kind, fates, max_norm)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@ROW
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("norm_type", [1.0, 3.0, 0.5, math.inf, 0.0])
def test_norms_of_every_order(
    deviation: DeviationJudge, reference: Library, device: str, kind: str, norm_type: float
) -> None:
    fates = [None, math.nan, None]
    assert_judged_by_four(deviation, reference, device, by_one, kind, fates, 0.5, norm_type)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@ROW
@pytest.mark.parametrize("kind", ["adamw", pytest.param("rmsprop", marks=pytest.mark.profile("full"))])
def test_inside_torch_compile(deviation: DeviationJudge, reference: Library, device: str, kind: str) -> None:
    torch._dynamo.reset()
    try:
        compiled = torch.compile(by_one, backend="eager")
        assert_judged_by_four(deviation, reference, device, compiled, kind, [None, None, math.inf, None], 0.5)
    finally:
        torch._dynamo.reset()


def by_a_compiled_step(rig: Rig, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    if "step" not in vars(rig.optimizer):
        rig.optimizer.step = torch.compile(rig.optimizer.step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Dynamo itself warns of while it compiles
        return by_one(rig, max_norm, norm_type)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@ROW
@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd", marks=pytest.mark.profile("full"))])
def test_of_an_optimizer_whose_step_is_compiled(
    deviation: DeviationJudge, reference: Library, device: str, kind: str
) -> None:
    torch._dynamo.reset()
    try:
        fates = [None, None, math.inf, None]
        assert_judged_by_four(deviation, reference, device, by_a_compiled_step, kind, fates, 0.5)
    finally:
        torch._dynamo.reset()


@clause("amp.grad_scaler.fused_step.leaves_gradients")
@ROW
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("last", [None, math.inf])
def test_gradients_stay_as_they_are(
    deviation: DeviationJudge, device: str, kind: str, last: float | None
) -> None:
    def probe(library: Library) -> Any:
        rig = Rig(library, device, SOME, KINDS[kind], init_scale=8.0)
        rig.zero_grad()
        rig.backward(last)
        having = [p for p in rig.parameters if p.grad is not None]
        before = [(p.grad, p.grad.clone()) for p in having]
        by_one(rig, 0.5)
        return [p.grad is grad and torch.equal(grad.nan_to_num(), kept.nan_to_num())
                for p, (grad, kept) in zip(having, before, strict=True)]  # fmt: skip

    def compare(seen: list[bool]) -> None:
        assert len(seen) == 5
        assert all(seen)

    judge(deviation, probe, compare)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@ROW
@pytest.mark.parametrize("kind", ["adamw", "nesterov", "rmsprop"])
@pytest.mark.parametrize("last", [None, math.inf])
def test_after_unscaling(
    deviation: DeviationJudge, reference: Library, device: str, kind: str, last: float | None
) -> None:
    """Gradients that the user has unscaled, and changed, are taken as they are; what was found then decides."""

    def told(library: Library, fused: bool) -> list[Outcome]:
        rig = Rig(library, device, SOME, KINDS[kind], init_scale=8.0)
        seen = []
        for fate in (None, last):
            rig.zero_grad()
            rig.backward(fate)
            rig.scaler.unscale_(rig.optimizer)
            for parameter in rig.parameters:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.5, 0.5)
            if fused:
                rig.scaler.fused_step(rig.optimizer)
            else:
                rig.scaler.step(rig.optimizer)
                rig.scaler.update()
            seen.append(state_of(rig))
        return seen

    wanted = told(reference, False)
    judge(deviation, lambda library: told(library, True), lambda seen: assert_same_states(wanted, seen))


@clause("amp.grad_scaler.fused_step.several_optimizers")
@ROW
@given(
    fates=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5),
    kinds=st.tuples(*[st.sampled_from(["adam", "sgd", "adagrad", "rmsprop"])] * 2),
)
def test_several_optimizers(
    deviation: DeviationJudge, reference: Library, device: str, fates: Any, kinds: tuple[str, str]
) -> None:
    """The scale moves once an iteration, by what any found, whichever of them takes the fused step."""

    def told(library: Library, fused: bool) -> list[Outcome]:
        rigs = [
            Rig(library, device, SOME[-2:], KINDS[kind], init_scale=8.0, growth_interval=2) for kind in kinds
        ]
        rigs[1].scaler = rigs[0].scaler
        seen = []
        for first_bad, second_bad, second_plain in fates:
            for rig, bad, plain in zip(rigs, (first_bad, second_bad), (False, second_plain), strict=True):
                rig.zero_grad()
                rig.backward(math.inf if bad else None)
                if fused and not plain:
                    rig.scaler.fused_step(rig.optimizer, update=False)
                else:
                    rig.scaler.step(rig.optimizer)
            rigs[0].scaler.update()
            seen += [state_of(rig) for rig in rigs]
        return seen

    wanted = told(reference, False)
    judge(deviation, lambda library: told(library, True), lambda seen: assert_same_states(wanted, seen))


@clause("amp.grad_scaler.fused_step.in_order")
@ROW
def test_out_of_order(deviation: DeviationJudge, device: str) -> None:
    """Twice without update, before any scale, and without any gradient: refused as step refuses."""

    def probe(library: Library) -> Any:
        rig = Rig(library, device, SOME, KINDS["adamw"])
        early = observe(rig.scaler.fused_step, rig.optimizer).raised
        rig.used().zero_grad()
        others = [
            observe(ask, other).raised
            for ask in (rig.scaler.fused_step, rig.scaler.nonfinite_parameters)
            for other in (torch.nn.Linear(1, 1), SGD)
        ]
        without = observe(rig.scaler.fused_step, rig.optimizer).raised
        rig.backward()
        rig.scaler.fused_step(rig.optimizer, update=False)
        twice = observe(rig.scaler.fused_step, rig.optimizer).raised
        weights = [parameter.detach().clone() for parameter in rig.parameters]
        ruinous = [
            observe(rig.scaler.fused_step, rig.optimizer, **arguments).raised
            for arguments in (
                {"max_norm": math.nan},
                {"norm_type": math.nan},
                {"low_precision_params": [torch.ones(1)]},
            )
        ]
        rig.scaler.update()
        ruinous.append(
            observe(rig.scaler.fused_step, rig.optimizer, low_precision_params=[torch.ones(1)]).raised
        )
        kept = all(map(torch.equal, weights, rig.parameters))
        return [raised and raised.text for raised in (early, *others, without, twice, *ruinous)], kept

    def compare(seen: Any) -> None:
        texts, kept = seen
        wanted = [
            "Attempted fused_step but _scale is None",
            *["wanted an optimizer, which has param_groups, got Linear", "got the class SGD"] * 2,
            "No inf checks were recorded for this optimizer",
            "step() has already been called since the last update()",
            "max_norm is nan",
            "norm_type is nan",
            "step() has already been called since the last update()",
            "low_precision_params are 1 tensors",
        ]
        found = [text and expected in text for text, expected in zip(texts, wanted, strict=True)]
        assert found == [True] * 11
        assert kept

    judge(deviation, probe, compare)


@clause("amp.grad_scaler.fused_step.seen_as_a_step")
@ROW
@pytest.mark.parametrize("comes_to_it", [True, False])
@pytest.mark.parametrize("on", ["the optimizer", "its class"])
def test_a_step_that_was_replaced(
    deviation: DeviationJudge, reference: Library, device: str, on: str, comes_to_it: bool
) -> None:
    """What stands in its place is called once a step, with gradients unscaled and clipped, as `step` calls it."""

    def told(library: Library, take: Take) -> list[Any]:
        rig = Rig(library, device, SOME, lambda groups: AdamW(groups, lr=0.125, foreach=True))
        plain, seen = AdamW.step, []

        def replaced(self: Optimizer) -> None:
            params = [param for param in rig.parameters if param.grad is not None]
            seen.append([param.grad.clone() for param in params if param.grad is not None])
            if comes_to_it:
                for param in params:
                    param.data = param.data.clone()
                plain(self)

        place = AdamW if on == "its class" else rig.optimizer
        with mock.patch.object(
            place, "step", replaced if place is AdamW else lambda: replaced(rig.optimizer)
        ):
            for last in (None, None, math.inf, None):
                rig.zero_grad()
                rig.backward(last)
                take(rig, 0.5)
                seen.append([param.detach().clone() for param in rig.parameters])
        return seen

    wanted = observe(told, reference, by_four)
    judge(
        deviation,
        lambda library: observe(told, library, by_one),
        lambda seen: assert_same_states([wanted], [seen]),
    )


@clause("amp.grad_scaler.fused_step.in_order")
@ROW
def test_step_counts_that_are_no_tensors(deviation: DeviationJudge, reference: Library, device: str) -> None:
    """As states of old have them: refused as torch's own step refuses them."""

    def told(library: Library, take: Take) -> list[Any]:
        rig = Rig(library, device, SOME, KINDS["adamw"])
        rig.backward()
        rig.optimizer.step()
        for state in rig.optimizer.state.values():
            state["step"] = state["step"].item()
        rig.zero_grad()
        rig.backward()
        return [observe(take, rig, math.inf).raised, [parameter.tolist() for parameter in rig.parameters]]

    wanted = told(reference, by_four)

    def compare(seen: list[Any]) -> None:
        assert seen == wanted
        assert wanted[0] is not None

    judge(deviation, lambda library: told(library, by_one), compare)


@clause("amp.grad_scaler.fused_step.seen_as_a_step")
@ROW
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("last", [None, math.inf])
def test_hooks_schedulers_and_answers(
    deviation: DeviationJudge, device: str, kind: str, last: float | None
) -> None:
    """A step that is taken is one for hooks and schedulers, one that is skipped is none; both can be asked about."""

    def probe(library: Library) -> Any:
        rig = Rig(library, device, SOME, KINDS[kind])
        called: list[str] = []
        rig.optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        rig.optimizer.register_step_post_hook(lambda *_: called.append("after"))
        scheduler = StepLR(rig.optimizer, 1)
        rig.zero_grad()
        rig.backward(last)
        rig.scaler.fused_step(rig.optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        names = rig.scaler.nonfinite_parameters(rig.optimizer)
        return called, len(caught), rig.scaler.step_was_taken(rig.optimizer), len(names)

    # Where the device decides, a fused optimizer is called for a step that it skips, as by torch's scaler.
    skipped = (
        ([], 1, False, 1) if device == "cpu" or kind == "rmsprop" else (["before", "after"], 0, False, 1)
    )

    def compare(seen: Any) -> None:
        assert seen == ((["before", "after"], 0, True, 0) if last is None else skipped)

    judge(deviation, probe, compare)


@clause("amp.grad_scaler.fused_step.switched_off")
@ROW
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_switched_off(
    deviation: DeviationJudge, reference: Library, device: str, kind: str, max_norm: float
) -> None:
    """Clipping and the step, whatever the gradients hold."""

    def told(library: Library, take: Take) -> Story:
        rig = Rig(library, device, SOME, KINDS[kind], enabled=False)
        seen: Story = []
        for times in (1.0, 2.0):
            rig.zero_grad()
            rig.backward(times=times)
            seen.append((observe(take, rig, max_norm), state_of(rig)))
        return seen

    judge(
        deviation,
        lambda library: told(library, by_one),
        lambda seen: assert_same_stories(told(reference, by_four_with(norms_in(seen))), seen),
    )


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@ROW
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_momentum_that_begins_with_a_skipped_step(
    deviation: DeviationJudge, reference: Library, device: str, dampening: float
) -> None:
    """Judged by torch's unfused momentum, whose products are exact: the fused one then holds what lay in its memory."""

    def told(library: Library, take: Take) -> Story:
        rig = Rig(
            library, device, SOME, lambda groups: SGD(groups, lr=0.125, momentum=0.5, dampening=dampening)
        )
        seen = []
        for last in (math.inf, None, None):
            rig.zero_grad()
            rig.backward(last)
            norm = observe(take, rig, math.inf)
            seen.append((norm, observe(lambda: [parameter.detach().clone() for parameter in rig.parameters])))
        return seen

    wanted = told(reference, by_four)
    judge(deviation, lambda library: told(library, by_one), lambda seen: assert_same_stories(wanted, seen))


class NoHostRead(TorchDispatchMode):
    """In here what would wait for a device raises, and nothing is taken for the host's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


@clause("amp.grad_scaler.fused_step.waits_for_nothing")
@ROW
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_nothing_waits_for_the_device_that_decides(
    deviation: DeviationJudge, reference: Library, device: str, kind: str, max_norm: float
) -> None:
    """The flag decides where it lies, to the same bits; what is documented to wait, in its first step, may."""

    def unread(rig: Rig, *wanted: float) -> torch.Tensor:
        may_wait = kind in ("dampened", "rmsprop") and not rig.optimizer.state
        with contextlib.nullcontext() if may_wait else NoHostRead():
            return by_one(rig, *wanted)

    with pytest.raises(AssertionError, match="on the host"), NoHostRead():
        torch.ones(()).item()
    fates = [None, math.inf, None, math.nan, None]
    assert_judged_by_four(deviation, reference, device, unread, kind, fates, max_norm)


@clause("amp.grad_scaler.fused_step.waits_for_nothing")
@ROW
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_nothing_waits_for_the_device(deviation: DeviationJudge, max_norm: float) -> None:
    """Tensors on the meta device have no values: reading or copying one to the host raises."""

    def probe(library: Library) -> Any:
        rig = Rig(library, "meta", SOME, AdamW, init_scale=8.0)
        norms = []
        for _ in range(2):
            rig.zero_grad()
            rig.backward()
            norms.append(by_one(rig, max_norm))
        return [norm.device.type for norm in norms]

    def compare(seen: Any) -> None:
        assert seen == ["meta", "meta"]

    judge(deviation, probe, compare)


def _drop_one(params: list[torch.Tensor]) -> None:
    params[0].grad = None


def _replace_one(params: list[torch.Tensor]) -> None:
    params[0].grad = torch.full_like(params[0], 3.0)


def _clamp_all(params: list[torch.Tensor]) -> None:
    for param in params:
        if param.grad is not None:
            param.grad.clamp_(-0.5, 0.5)


@clause("amp.grad_scaler.fused_step.seen_as_a_step")
@ROW
@pytest.mark.parametrize("everywhere", [False, True], ids=["its own", "of all optimizers"])
@pytest.mark.parametrize("does", [_drop_one, _replace_one, _clamp_all])
def test_hooks_before_the_step_have_the_last_word(
    deviation: DeviationJudge,
    reference: Library,
    device: str,
    does: Callable[[list[torch.Tensor]], None],
    everywhere: bool,
) -> None:
    """They see unscaled gradients, and it is stepped by what they leave; in the third step, after two without."""

    def told(library: Library, take: Take) -> list[Any]:
        rig = Rig(library, device, SOME, KINDS["adamw"], init_scale=8.0)
        seen: list[Any] = []
        for iteration in range(4):
            rig.zero_grad()
            rig.backward()
            register = (
                register_optimizer_step_pre_hook if everywhere else rig.optimizer.register_step_pre_hook
            )
            hook = register(lambda *_: does(rig.parameters)) if iteration == 2 else contextlib.nullcontext()
            with hook:
                take(rig, math.inf)
            seen.append(state_of(rig))
        return seen

    wanted = told(reference, by_four)
    judge(deviation, lambda library: told(library, by_one), lambda seen: assert_same_states(wanted, seen))
