"""One call in the place of unscale_, clip_grad_norm_, step and update; judged by torch's four calls."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

from conformance.clauses import clause
from conformance.deviations import DeviationJudge
from conformance.library import Library
from conformance.outcome import Outcome, assert_same_outcome, observe
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import Rig
from conformance.tolerances import EXACT, Tolerance

LACKING = "no such method"
ROW = pytest.mark.deviation("grad_scaler.fused_step")
# 16500 elements lie beyond what is joined with others, in pieces.
SOME = (
    Gradient((5,), seed=1),
    Gradient((0,), seed=2),
    Gradient((3, 4), seed=3, layout="transposed"),
    Gradient((6,), None),
    Gradient((16_500,), seed=4, scale=0.1),
    Gradient((7,), seed=5),
)
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda groups: Adam(groups, lr=0.125, amsgrad=True, weight_decay=0.25, fused=True),
    "adamw": lambda groups: AdamW(groups, lr=0.125, maximize=True, fused=True),
    "sgd": lambda groups: SGD(groups, lr=0.125, fused=True),
    "nesterov": lambda groups: SGD(groups, lr=0.125, momentum=0.5, nesterov=True, fused=True),
    "dampened": lambda groups: SGD(groups, lr=0.125, momentum=0.5, dampening=0.25, fused=True),
    "adagrad": lambda groups: Adagrad(groups, lr=0.125, lr_decay=0.5, fused=True),
    "rmsprop": lambda groups: RMSprop(groups, lr=0.125),
}
FUSED = [name for name in KINDS if name != "rmsprop"]
# How torch's fused momentum begins after a step that is skipped is what its memory happens to hold.
FATES = st.lists(st.sampled_from([None, None, None, math.inf, math.nan]), min_size=2, max_size=5).map(
    lambda fates: [None, *fates]
)
NORM = Tolerance(roundings=64, reason="norms of 16,500 elements, by rows and by tensors: sums of 512 at most")
CLIPPED = Tolerance(
    roundings=64 * 6,
    terms=1.0,
    reason="the norm's roundings, in each of six updates of parameters that stay below 1",
)


def by_four(rig: Rig, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    rig.scaler.unscale_(rig.optimizer)
    norm = torch.nn.utils.clip_grad_norm_(
        [p for p in rig.parameters if p.numel()], max_norm if max_norm < math.inf else 1e30, norm_type
    )
    rig.scaler.step(rig.optimizer)
    rig.scaler.update()
    return norm


def by_one(rig: Rig, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    return rig.scaler.fused_step(rig.optimizer, max_norm, norm_type)


def state_of(rig: Rig) -> Outcome:
    return observe(
        lambda: {
            "parameters": [parameter.detach().clone() for parameter in rig.parameters],
            "optimizer": {
                number: {name: torch.as_tensor(value).clone() for name, value in state.items()}
                for number, state in rig.optimizer.state_dict()["state"].items()
            },
            "scaler": rig.scaler.state_dict(),
        }
    )


Take = Callable[..., torch.Tensor]


def story(
    library: Library, device: str, take: Take, kind: str, fates: list[float | None], *wanted: float
) -> Iterator[tuple[Outcome, Outcome]]:
    """After each iteration: the norm, and all that lasts."""
    rig = Rig(library, device, SOME, KINDS[kind], init_scale=8.0, growth_interval=2)
    rig.optimizer.param_groups[-1]["lr"] *= 2
    for number, last in enumerate(fates):
        rig.zero_grad()
        rig.backward(last, times=1.0 + number)
        if number == 2:
            rig.parameters[0].grad = None
        yield observe(take, rig, *wanted), state_of(rig)


def judge(deviation: DeviationJudge, wanted: Any, probe: Callable[[Library], Any], compare: Any) -> None:
    def asked(library: Library) -> Any:
        return probe(library) if hasattr(library.amp.GradScaler, "fused_step") else LACKING

    def agrees(seen: Any) -> bool:
        if seen is LACKING:
            return False
        compare(wanted, seen)
        return True

    deviation.judge(asked, torch_does=lambda seen: seen is LACKING, we_do=agrees)


def same_stories(tolerance: Tolerance) -> Callable[[Any, Any], None]:
    def compare(wanted: Any, seen: Any) -> None:
        assert len(wanted) == len(seen)
        for (norm, state), (our_norm, our_state) in zip(wanted, seen, strict=True):
            assert_same_outcome(norm, our_norm, NORM)
            assert_same_outcome(state, our_state, tolerance)

    return compare


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@ROW
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
@given(fates=FATES)
def test_iterations(
    deviation: DeviationJudge,
    reference: Library,
    device: str,
    kind: str,
    max_norm: float,
    fates: list[float | None],
) -> None:
    """Unclipped the same bits, scales being powers of two; clipped within the roundings of the norm."""
    wanted = list(story(reference, device, by_four, kind, fates, max_norm))
    judge(
        deviation,
        wanted,
        lambda library: list(story(library, device, by_one, kind, fates, max_norm)),
        same_stories(EXACT if max_norm == math.inf else CLIPPED),
    )


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@ROW
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("norm_type", [1.0, 3.0, 0.5, math.inf, 0.0])
def test_norms_of_every_order(
    deviation: DeviationJudge, reference: Library, device: str, kind: str, norm_type: float
) -> None:
    fates = [None, math.nan, None]
    wanted = list(story(reference, device, by_four, kind, fates, 0.5, norm_type))
    judge(
        deviation,
        wanted,
        lambda library: list(story(library, device, by_one, kind, fates, 0.5, norm_type)),
        same_stories(CLIPPED),
    )


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

    def compare(_: Any, seen: list[bool]) -> None:
        assert len(seen) == 5
        assert all(seen)

    judge(deviation, None, probe, compare)


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

    def compare(wanted: list[Outcome], seen: list[Outcome]) -> None:
        for one, other in zip(wanted, seen, strict=True):
            assert_same_outcome(one, other)

    judge(deviation, told(reference, False), lambda library: told(library, True), compare)


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

    def compare(wanted: list[Outcome], seen: list[Outcome]) -> None:
        for one, other in zip(wanted, seen, strict=True):
            assert_same_outcome(one, other)

    judge(deviation, told(reference, False), lambda library: told(library, True), compare)


@clause("amp.grad_scaler.fused_step.in_order")
@ROW
def test_out_of_order(deviation: DeviationJudge, device: str) -> None:
    """Twice without update, before any scale, and without any gradient: refused as step refuses."""

    def probe(library: Library) -> Any:
        rig = Rig(library, device, SOME, KINDS["adamw"])
        early = observe(rig.scaler.fused_step, rig.optimizer).raised
        rig.used().zero_grad()
        without = observe(rig.scaler.fused_step, rig.optimizer).raised
        rig.backward()
        rig.scaler.fused_step(rig.optimizer, update=False)
        twice = observe(rig.scaler.fused_step, rig.optimizer).raised
        weights = [parameter.detach().clone() for parameter in rig.parameters]
        ruinous = [
            observe(rig.scaler.fused_step, rig.optimizer, **arguments).raised
            for arguments in ({"max_norm": math.nan}, {"norm_type": math.nan}, {"copies": [torch.ones(1)]})
        ]
        rig.scaler.update()
        ruinous.append(observe(rig.scaler.fused_step, rig.optimizer, copies=[torch.ones(1)]).raised)
        kept = all(map(torch.equal, weights, rig.parameters))
        return [raised and raised.text for raised in (early, without, twice, *ruinous)], kept

    def compare(_: Any, seen: Any) -> None:
        texts, kept = seen
        wanted = [
            "Attempted fused_step but _scale is None",
            "No inf checks were recorded for this optimizer",
            "step() has already been called since the last update()",
            "max_norm is nan",
            "norm_type is nan",
            "step() has already been called since the last update()",
            "copies are 1 tensors",
        ]
        assert [text and expected in text for text, expected in zip(texts, wanted, strict=True)] == [True] * 7
        assert kept

    judge(deviation, None, probe, compare)


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

    def compare(_: Any, seen: Any) -> None:
        assert seen == ((["before", "after"], 0, True, 0) if last is None else ([], 1, False, 1))

    judge(deviation, None, probe, compare)


@clause("amp.grad_scaler.fused_step.copies")
@ROW
@pytest.mark.parametrize("kind", ["adam", "nesterov", "adagrad", "rmsprop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_copies_in_lower_precision(
    deviation: DeviationJudge,
    reference: Library,
    device: str,
    kind: str,
    dtype: torch.dtype,
    max_norm: float,
) -> None:
    """What loops around the step do: widen the gradients of the copies, step, and round the parameters to them."""

    def told(library: Library, fused: bool) -> list[tuple[Outcome, Outcome]]:
        copies = [
            torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
            for shape in ((5,), (130, 130), (0,))
        ]
        masters = [copy.detach().float() for copy in copies]
        optimizer = KINDS[kind](masters)
        scaler = library.amp.GradScaler(device, init_scale=8.0)
        scaler.scale(torch.zeros((), device=device))
        seen = []
        for number in range(3):
            for copy in copies:
                draw = torch.Generator().manual_seed(number)
                copy.grad = torch.randn(copy.shape, generator=draw).to(device, dtype)
            if number == 1:
                copies[0].grad[-1] = math.inf
            if fused:
                norm = scaler.fused_step(optimizer, max_norm, copies=copies)
            else:
                for master, copy in zip(masters, copies, strict=True):
                    master.grad = copy.grad.float()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(masters, min(max_norm, 1e30))
                scaler.step(optimizer)
                scaler.update()
                for master, copy in zip(masters, copies, strict=True):
                    copy.data.copy_(master)
            state = [tensor.detach().clone() for tensor in (*masters, *copies)]
            seen.append((observe(list, [norm]), observe(list, state)))
        assert not fused or all(master.grad is None for master in masters)
        return seen

    tolerance = EXACT if max_norm == math.inf else CLIPPED
    judge(deviation, told(reference, False), lambda library: told(library, True), same_stories(tolerance))


@clause("amp.grad_scaler.fused_step.low_precision")
@ROW
@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd", "adagrad"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_parameters_of_every_dtype(
    deviation: DeviationJudge, reference: Library, device: str, kind: str, dtype: torch.dtype
) -> None:
    """As a fused optimizer that unscales for itself: halves are not rounded between scale and update."""
    gradients = (Gradient((5,), dtype, seed=1), Gradient((16_500,), dtype, seed=2, scale=0.1))

    def told(library: Library, fused: bool) -> list[Outcome]:
        rig = Rig(library, device, gradients, KINDS[kind], init_scale=8.0)
        seen = []
        for last in (None, math.nan, None):
            rig.zero_grad()
            rig.backward(last)
            if fused:
                rig.scaler.fused_step(rig.optimizer)
            else:
                rig.scaler.step(rig.optimizer)
                rig.scaler.update()
            seen.append(state_of(rig))
        return seen

    def compare(wanted: list[Outcome], seen: list[Outcome]) -> None:
        for one, other in zip(wanted, seen, strict=True):
            assert_same_outcome(one, other)

    judge(deviation, told(reference, False), lambda library: told(library, True), compare)


@clause("amp.grad_scaler.fused_step.switched_off")
@ROW
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_switched_off(
    deviation: DeviationJudge, reference: Library, device: str, kind: str, max_norm: float
) -> None:
    """Clipping and the step, whatever the gradients hold."""

    def told(library: Library, fused: bool) -> list[tuple[Outcome, Outcome]]:
        rig = Rig(library, device, SOME, KINDS[kind], enabled=False)
        seen = []
        for times in (1.0, 2.0):
            rig.zero_grad()
            rig.backward(times=times)
            norm = (by_one if fused else by_four)(rig, max_norm)
            seen.append((observe(lambda norm=norm: norm), state_of(rig)))
        return seen

    tolerance = EXACT if max_norm == math.inf else CLIPPED
    judge(deviation, told(reference, False), lambda library: told(library, True), same_stories(tolerance))


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@ROW
@pytest.mark.parametrize("dampening", [0.0, 0.25])
def test_momentum_that_begins_with_a_skipped_step(
    deviation: DeviationJudge, reference: Library, device: str, dampening: float
) -> None:
    """Judged by torch's unfused momentum: the fused one then holds what lay in its memory."""

    def told(library: Library, take: Take) -> list[tuple[Outcome, Outcome]]:
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

    judge(
        deviation,
        told(reference, by_four),
        lambda library: told(library, by_one),
        same_stories(CLIPPED),
    )
