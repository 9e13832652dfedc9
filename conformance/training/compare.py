"""Checks of two runs of one config, and the bound if not every bit must agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from conformance.training.config import TrainingConfig
from conformance.training.trainer import TrainingRun

# A correct library may be this many times further from torch than torch is from itself. Over two dtypes and three
# seeds, clipping that rounds its norm in another way was at most 2.4 times as far. Clipping that does nothing was at
# least 21 times as far in the losses and 33 times in the norms.
TIMES_FURTHER = 8
# A uniform guess costs 8 bits a byte, the frequencies of the bytes alone about 5.
_LEARNED_BITS = 6.0


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    says: str


@dataclass(frozen=True)
class Bound:
    """The largest relative distances of a torch run from those whose first weights are one rounding away."""

    losses: float
    grad_norms: float
    # The first step at which torch differs from itself, or else the number of steps.
    agree_until: int

    @classmethod
    def between(cls, run: TrainingRun, *neighbours: TrainingRun) -> Bound:
        """Compare `run` with its neighbours, up to where scales or skips differ, or numbers are out of proportion.

        At some weights the smallest change is large in the gradients: in bfloat16 a norm of torch's was up to six times
        as large if training began with weights one rounding away. From that step on no library can be held to it. Which
        way the weights are rounded decides whether a training meets such weights, so both neighbours count.
        """
        bounds = [cls._of_two(run, neighbour) for neighbour in neighbours]
        return cls(
            max(bound.losses for bound in bounds),
            max(bound.grad_norms for bound in bounds),
            min(bound.agree_until for bound in bounds),
        )

    @classmethod
    def _of_two(cls, run: TrainingRun, other: TrainingRun) -> Bound:
        agree = _first_difference(_path(run), _path(other))
        until = len(run.losses) if agree is None else agree
        losses = _distances(run.losses, other.losses)[:until]
        grad_norms = _distances(run.grad_norms, other.grad_norms)[:until]
        until = min(_until_out_of_proportion(losses), _until_out_of_proportion(grad_norms))
        return cls(max(losses[:until], default=0.0), max(grad_norms[:until], default=0.0), until)

    def allowed(self, curve: str) -> float:
        return TIMES_FURTHER * max(getattr(self, curve), torch.finfo(torch.float32).eps)


def compare(
    config: TrainingConfig, reference: TrainingRun, subject: TrainingRun, bound: Bound | None
) -> list[Check]:
    """Return all checks of two runs. `bound` is None if every bit must agree."""
    until = bound.agree_until if bound else config.steps
    checks = [
        _same_path(reference, subject, until),
        _same_start(reference, subject),
        *([_identical(reference, subject)] if bound is None else _within(bound, reference, subject, until)),
        _overflows(config, reference),
    ]
    if config.inject_inf_at is not None:
        checks += [
            _recovers(config, config.inject_inf_at, side, run) for side, run in _both(reference, subject)
        ]
    return checks + [_learns(side, run) for side, run in _both(reference, subject)]


def _until_out_of_proportion(distances: list[float]) -> int:
    """Return the step whose distance is out of proportion to all others, else the number of steps."""
    usual, worst = sorted([torch.finfo(torch.float32).eps] * 2 + distances)[-2:]
    return distances.index(worst) if worst > TIMES_FURTHER * usual else len(distances)


def _same_path(reference: TrainingRun, subject: TrainingRun, until: int) -> Check:
    expected, actual = _path(reference)[:until], _path(subject)[:until]
    at = _first_difference(expected, actual)
    if at is None:
        skipped = [step for step in reference.skipped if step < until]
        return Check("scale", True, f"the scale's path and the {len(skipped)} skipped steps are the same")
    (scale, skips), (our_scale, our_skips) = expected[at], actual[at]
    return Check(
        "scale",
        False,
        f"step {at} leaves the scale at {our_scale:g} ({'skipped' if our_skips else 'taken'}); "
        f"torch leaves it at {scale:g} ({'skipped' if skips else 'taken'})",
    )


def _same_start(reference: TrainingRun, subject: TrainingRun) -> Check:
    """Check that the losses are equal until the first step is taken, because the weights are equal."""
    first_taken = next((i for i in range(len(reference.losses)) if i not in reference.skipped), 0)
    at = _first_difference(reference.losses[: first_taken + 1], subject.losses[: first_taken + 1])
    if at is None:
        return Check("start", True, "until the first step is taken the losses have the same bits")
    return Check(
        "start",
        False,
        f"loss {at} is {subject.losses[at]!r}, torch's {reference.losses[at]!r}, before torch had taken a step",
    )


def _identical(reference: TrainingRun, subject: TrainingRun) -> Check:
    for curve in ("losses", "grad_norms"):
        at = _first_difference(getattr(reference, curve), getattr(subject, curve))
        if at is not None:
            expected, actual = getattr(reference, curve)[at], getattr(subject, curve)[at]
            return Check(
                "bits", False, f"{curve} differ from step {at} on: got {actual!r}, torch {expected!r}"
            )
    if reference.held_out != subject.held_out or reference.weights != subject.weights:
        return Check("bits", False, "the curves agree, the weights or the held-out losses do not")
    return Check(
        "bits", True, f"losses, norms and weights have the same bits over {len(subject.losses)} steps"
    )


def _within(bound: Bound, reference: TrainingRun, subject: TrainingRun, until: int) -> list[Check]:
    checks = []
    for curve in ("losses", "grad_norms"):
        distances = _distances(getattr(reference, curve), getattr(subject, curve))[:until]
        worst = max(distances, default=0.0)
        allowed = bound.allowed(curve)
        says = (
            f"{curve} are at most {worst:.1e} from torch's (step {distances.index(worst) if distances else 0}); "
            f"allowed is {allowed:.1e}, {TIMES_FURTHER} times what torch differs by from weights one rounding away"
        )
        checks.append(Check(f"bound on {curve}", worst <= allowed, says))
    return checks


def _overflows(config: TrainingConfig, reference: TrainingRun) -> Check:
    real = [step for step in reference.skipped if step != config.inject_inf_at]
    if real:
        return Check("overflow", True, f"{len(real)} of the skipped steps overflowed by themselves")
    return Check("overflow", False, f"nothing overflowed in torch's run; start above {config.init_scale:g}")


def _recovers(config: TrainingConfig, step: int, side: str, run: TrainingRun) -> Check:
    name = f"recovery of the {side}"
    if step not in run.skipped:
        return Check(name, False, f"step {step} was taken, although its gradient held an inf")
    before = run.scales[step - 1] if step else config.init_scale
    if run.scales[step] != before * config.backoff_factor:
        expected = before * config.backoff_factor
        return Check(
            name, False, f"the inf at step {step} left the scale at {run.scales[step]:g}, not {expected:g}"
        )
    taken = next((later for later in range(step + 1, len(run.losses)) if later not in run.skipped), None)
    if taken is None:
        return Check(name, False, f"no step was taken after the inf at step {step}")
    if not all(map(math.isfinite, run.losses[step:])):
        return Check(name, False, f"the losses after the inf at step {step} are not finite")
    return Check(name, True, f"the {side} skipped the inf at step {step} and went on at step {taken}")


def _learns(side: str, run: TrainingRun) -> Check:
    done, bits = max(run.held_out.items())
    says = f"the {side}'s held-out loss is {bits:.2f} bits a byte after {done} steps"
    if bits < _LEARNED_BITS:
        return Check(f"learning of the {side}", True, says)
    cure = "; more steps may do it" if math.isfinite(bits) else ""
    return Check(f"learning of the {side}", False, f"{says}, expected below {_LEARNED_BITS:g}{cure}")


def _both(reference: TrainingRun, subject: TrainingRun) -> list[tuple[str, TrainingRun]]:
    return [("reference", reference), ("subject", subject)]


def _path(run: TrainingRun) -> list[tuple[float, bool]]:
    return [(scale, step in run.skipped) for step, scale in enumerate(run.scales)]


def _first_difference(expected: list[Any], actual: list[Any]) -> int | None:
    """Return the first index at which two lists differ, or None if they are equal. A nan equals a nan."""
    pairs = zip(expected, actual, strict=True)
    return next(
        (
            at
            for at, (expected_value, actual_value) in enumerate(pairs)
            if not _same(expected_value, actual_value)
        ),
        None,
    )


def _same(expected: Any, actual: Any) -> bool:
    both_nan = (
        isinstance(expected, float)
        and isinstance(actual, float)
        and math.isnan(expected)
        and math.isnan(actual)
    )
    return both_nan or expected == actual


def _distances(expected: list[float], actual: list[float]) -> list[float]:
    """Return the relative distance of each step: 0 if neither value is finite, inf if only one is."""
    return [_distance(w, g) for w, g in zip(expected, actual, strict=True)]


def _distance(expected: float, actual: float) -> float:
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return math.inf if math.isfinite(expected) or math.isfinite(actual) else 0.0
    return abs(actual - expected) / abs(expected) if expected else abs(actual)
