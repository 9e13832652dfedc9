"""Autocast regions on their own: casts by device type, defaults, attributes and invalid arguments."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.judge.sandbox import seeding
from conformance.ranks import Rank, RankPool
from conformance.strategies.regions import LOW, cuda_reported, operands, state


@clause("amp.autocast_mode.autocast.casts_by_operator")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_region_sets_dispatcher_state_and_casts(subject: Library, device: str, dtype: torch.dtype) -> None:
    a, b = operands(device)
    with subject.amp.autocast(device, dtype=dtype) as entered:
        assert torch.is_autocast_enabled(device)
        assert torch.get_autocast_dtype(device) == dtype
        assert (a @ b).dtype == dtype
        assert isinstance(entered, subject.amp.autocast)
    assert (a @ b).dtype == torch.float32


@clause("amp.autocast_mode.autocast.gradients")
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_gradients_match_torch(
    compare: Compare, device: str, dtype: torch.dtype, cache_enabled: bool
) -> None:
    def trained(library: Library) -> Outcome:
        seeding.seed_all(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)).to(
            device
        )
        a, _ = operands(device)

        def run() -> torch.Tensor:
            with library.amp.autocast(device, dtype=dtype, cache_enabled=cache_enabled):
                loss = model(model[0].weight.sum() * a).float().pow(2).mean()
            loss.backward()
            return loss.detach()

        return observe(run, watch=list(model.parameters()))

    compare(trained)


@clause("amp.autocast_mode.autocast.device_type")
@pytest.mark.parametrize(
    "name", ["cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla", "ipu", "privateuseone"]
)
@pytest.mark.parametrize("enabled", [True, False])
def test_region_changes_state_of_its_device_type_only(compare: Compare, name: str, enabled: bool) -> None:
    def inside(library: Library) -> Outcome:
        def run() -> Any:
            with library.amp.autocast(name, enabled=enabled):
                return state(), torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)

        return observe(run)

    compare(inside)


@clause("amp.autocast_mode.autocast.device_type")
@pytest.mark.parametrize("name", ["meta", "tpu", "", "CPU", "cpu:0"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_device_types_without_autocast(compare: Compare, name: str, dtype: torch.dtype | None) -> None:
    """torch accepts a device type with an index."""
    [outcome] = compare(lambda library: observe(lambda: library.amp.autocast(name, dtype).device))
    assert (outcome.raised is None) == (name == "cpu:0")


_NAME = "theirs"


_MODULES: dict[str, dict[str, Any] | None] = {
    "no module": None,
    "a module that says nothing": {},
    "a module without dtypes": {"get_amp_supported_dtype": list},
    "a module with dtypes": {"get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float32]},
}


def regions(rank: Rank, *, reference: str, subject: str) -> list[Outcome]:
    torch.utils.rename_privateuse1_backend(_NAME)
    return [observe(_all_of, load_library(spec)) for spec in (reference, subject)]


def _all_of(library: Library) -> dict[str, Outcome]:
    outcomes = {}
    for title, module in _MODULES.items():
        if module is not None:
            setattr(torch, _NAME, types.SimpleNamespace(**module))
        for dtype in (None, torch.bfloat16, torch.float16, torch.float32):
            for enabled in (True, False):
                outcomes[f"{title}, {dtype}, {enabled}"] = observe(_inside, library, dtype, enabled)
    delattr(torch, _NAME)
    return outcomes


def _inside(library: Library, dtype: torch.dtype | None, enabled: bool) -> Any:
    with library.amp.autocast(_NAME, dtype, enabled) as region:
        return region._enabled, torch.is_autocast_enabled(_NAME), torch.get_autocast_dtype(_NAME)


@clause("amp.autocast_mode.autocast.device_type")
def test_renamed_backend_matches_torch(subject: Library) -> None:
    """Run in a separate process, because a backend can name itself only once."""
    with RankPool(1) as pool:
        [(expected, actual)] = pool.run(regions, reference="torch", subject=subject.spec)
    assert_same_outcome(expected, actual)
    enabled = [outcome.value[0] for outcome in actual.value.values() if outcome.raised is None]
    assert {*enabled} == {True, False}


@clause("amp.autocast_mode.autocast.default_dtype")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_default_dtype_is_read_when_region_is_built(
    subject: Library, device: str, dtype: torch.dtype
) -> None:
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, dtype)
    try:
        region = subject.amp.autocast(device)
        torch.set_autocast_dtype(device, before)
        with region:
            assert torch.get_autocast_dtype(device) == dtype
        assert torch.get_autocast_dtype(device) == before
    finally:
        torch.set_autocast_dtype(device, before)


@clause("amp.autocast_mode.autocast.unsupported_dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.complex64], ids=str)
@pytest.mark.parametrize("enabled", [True, False])
def test_unsupported_dtype(compare: Compare, device: str, dtype: torch.dtype, enabled: bool) -> None:
    def inside(library: Library) -> Outcome:
        a, b = operands(device)

        def run() -> Any:
            with library.amp.autocast(device, dtype=dtype, enabled=enabled):
                return a @ b, state()

        return observe(run)

    [outcome] = compare(inside)
    is_enabled = outcome.value[1]["enabled"][device]
    # A device from outside torch may support float32.
    assert not is_enabled or dtype == torch.float32
    assert bool(outcome.warned) == (enabled and not is_enabled)


@clause("amp.autocast_mode.autocast.unsupported_dtype")
@pytest.mark.parametrize("dtype", [None, *LOW, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_cuda_region_matches_torch_by_bfloat16_support(
    compare: Compare, dtype: torch.dtype | None, enabled: bool, has_bfloat16: bool
) -> None:
    def inside(library: Library) -> Outcome:
        def run() -> Any:
            with cuda_reported(has_bfloat16), library.amp.autocast("cuda", dtype, enabled):
                return state()

        return observe(run)

    compare(inside)


@clause("amp.autocast_mode.autocast.attributes")
@pytest.mark.parametrize("dtype", [None, *LOW, torch.float32], ids=str)
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("cache_enabled", [None, True, False])
def test_attributes_match_torch(
    compare: Compare, device: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
) -> None:
    def read(library: Library) -> Outcome:
        def attributes() -> tuple[Any, ...]:
            region = library.amp.autocast(device, dtype, enabled, cache_enabled)
            return region.device, region.fast_dtype, region._enabled, region._cache_enabled

        return observe(attributes)

    compare(read)


BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "no device type": ((), {}),
    "a device": ((torch.device("cpu"),), {}),
    "None": ((None,), {}),
    "a number": ((0,), {}),
    "a dtype by name": (("cpu", "bfloat16"), {}),
    "an unknown keyword": (("cpu",), {"cached": True}),
    "enabled a string": (("cpu",), {"enabled": "no"}),
}


@clause("amp.autocast_mode.autocast.bad_arguments")
@pytest.mark.parametrize("call", list(BAD))
def test_bad_arguments(subject: Library, reference: Library, call: str) -> None:
    args, kwargs = BAD[call]

    def entered(library: Library) -> Outcome:
        before = state()

        def run() -> bool:
            with library.amp.autocast(*args, **kwargs):
                return True

        outcome = observe(run)
        # If entering fails half way, torch leaves autocast enabled.
        torch.set_autocast_enabled("cpu", before["enabled"]["cpu"])
        return outcome

    expected, actual = entered(reference), entered(subject)
    if expected.raised is not None and actual.raised is not None and "set_autocast" in expected.raised.text:
        # The error is from the dispatcher's own functions, and its text names their caller.
        assert issubclass(actual.raised.kind, expected.raised.kind)
    else:
        assert_same_outcome(expected, actual)


@clause("amp.autocast_mode.is_autocast_available.answers")
@pytest.mark.parametrize(
    "name",
    ["cpu", "cuda", "mps", "xpu", "meta", "xla", "privateuseone", "tpu", "cpu:0", "cuda:x", "", 3, None],
    ids=repr,
)
def test_availability_matches_torch(compare: Compare, name: Any) -> None:
    compare(lambda library: observe(library.amp.is_autocast_available, name))
