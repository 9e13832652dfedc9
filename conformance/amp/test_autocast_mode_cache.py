"""Cached casts of an autocast region: how often it casts, and when cached casts are out of date."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.strategies import kept_casts
from conformance.strategies.kept_casts import CastCounter, CastScene, Script
from conformance.strategies.regions import Planned


def casts_in(
    library: Library, device: str, cache_enabled: bool | None, leaf: bool, uses: int, regions: int
) -> int:
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    used = weight if leaf else weight * 2
    x = torch.ones(4, 4, device=device, dtype=torch.bfloat16)
    with CastCounter() as counter:
        for _ in range(regions):
            with library.amp.autocast(device, dtype=torch.bfloat16, cache_enabled=cache_enabled):
                for _ in range(uses):
                    _ = x @ used
                with library.amp.autocast(device, dtype=torch.bfloat16, cache_enabled=cache_enabled):
                    _ = x @ used
                _ = x @ used
    return counter.casts


@clause("amp.autocast_mode.autocast.cache")
@pytest.mark.parametrize("cache_enabled", [None, True, False])
@pytest.mark.parametrize("leaf", [True, False])
def test_casts_are_kept(
    subject: Library, reference: Library, device: str, cache_enabled: bool | None, leaf: bool
) -> None:
    actual = casts_in(subject, device, cache_enabled, leaf, uses=3, regions=2)
    assert actual == casts_in(reference, device, cache_enabled, leaf, uses=3, regions=2)
    assert actual == (2 if leaf and cache_enabled is not False else 10)


def played(library: Library, device: str, script: Script) -> Outcome:
    def play() -> list[Any]:
        scene = CastScene(library, device)
        script(scene)
        return scene.seen

    return observe(play)


@clause("amp.autocast_mode.autocast.cache_of_which_tensors")
@pytest.mark.parametrize("script", kept_casts.SCRIPTS, ids=lambda script: script.__name__)
def test_cached_casts_match_torch(subject: Library, reference: Library, device: str, script: Script) -> None:
    outcomes = [played(library, device, script) for library in (reference, subject)]
    assert_same_outcome(*outcomes)
    assert outcomes[0].raised is None, "the script itself fails on torch"


@clause("amp.autocast_mode.autocast.cache_of_which_dtype")
@pytest.mark.deviation("autocast.casts_of_another_dtype")
@pytest.mark.parametrize("script", kept_casts.IN_ANOTHER_DTYPE, ids=lambda script: script.__name__)
def test_nested_region_of_another_dtype_casts_weights_again(
    deviation: DeviationJudge, device: str, script: Script
) -> None:
    """The weight is cast for each region whose dtype differs from that of the previous region."""
    low, other = torch.bfloat16, torch.float16
    expected = [(1, low, 2.0, True), (1, other, 2.0, True), (1, low, 2.0, True)]

    def probe(library: Library) -> Outcome:
        return played(library, device, script)

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome.raised is not None and "same dtype" in outcome.raised.text,
        we_do=lambda outcome: outcome.value == expected,
    )


def product_after_update(
    library: Library, device: str, update: Callable[[torch.nn.Parameter], None]
) -> float:
    """Return the product of a second region with a weight of 1 that `update` changes to 3 between two regions."""
    weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
    x = torch.ones(2, 2, device=device)
    with contextlib.suppress(Planned), library.amp.autocast(device, dtype=torch.bfloat16):
        _ = x @ weight
        raise Planned
    with torch.no_grad():
        update(weight)
    with library.amp.autocast(device, dtype=torch.bfloat16):
        return (x @ weight)[0, 0].item()


@clause("amp.autocast_mode.autocast.cache_after_exception")
@pytest.mark.parametrize("update", [lambda w: w.fill_(3), lambda w: w.data.copy_(torch.full((2, 2), 3.0))])
def test_region_after_exception_casts_updated_weights(
    subject: Library, device: str, update: Callable[[Any], None]
) -> None:
    assert product_after_update(subject, device, update) == 6.0


@clause("amp.autocast_mode.autocast.cache")
@pytest.mark.parametrize("enabled", [True, False])
def test_outermost_exit_drops_cached_casts(subject: Library, device: str, enabled: bool) -> None:
    """Cached casts are dropped when the outermost region ends, even if that region is disabled."""
    weight, x = torch.nn.Parameter(torch.ones(2, 2, device=device)), torch.ones(2, 2, device=device)
    products = []
    for value in (1.0, 3.0):
        with torch.no_grad():
            weight.fill_(value)
        with subject.amp.autocast(device, enabled=enabled), subject.amp.autocast(device):
            products.append((x @ weight)[0, 0].item())
    assert products == [2.0, 6.0]


@clause("amp.autocast_mode.autocast.cache_sees_optimizer_steps")
@pytest.mark.deviation("autocast.cache_sees_optimizer_steps")
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_inside_a_region(deviation: DeviationJudge, device: str, optimizer: str, depth: int) -> None:
    def probe(library: Library) -> list[bool]:
        """Return whether the product after the step uses the old weight, and whether it uses the new one."""
        weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
        x = torch.ones(2, 2, device=device)
        stepper = getattr(torch.optim, optimizer)([weight], lr=0.5)
        with contextlib.ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(library.amp.autocast(device, dtype=torch.bfloat16))
            former = x @ weight
            former.sum().backward()
            stepper.step()
            used = x @ weight
        expected = x.bfloat16() @ weight.detach().bfloat16()
        return [torch.equal(used, weight) for weight in (former, expected)]

    deviation.judge(probe, we_do=lambda matches: matches == [False, True])


@clause("amp.autocast_mode.autocast.cache_sees_optimizer_steps")
def test_clearing_the_cache_by_hand(subject: Library, device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
    x = torch.ones(2, 2, device=device)
    with subject.amp.autocast(device, dtype=torch.bfloat16):
        _ = x @ weight
        weight.data.fill_(3)
        torch.clear_autocast_cache()
        assert (x @ weight)[0, 0].item() == 6.0
