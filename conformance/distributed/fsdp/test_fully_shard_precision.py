"""`fully_shard` units with parameters of different dtypes, or with masters in a wider dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import fully_shard_precision_cases as cases
from conformance.distributed.fsdp.fully_shard_judging import Sites
from conformance.distributed.fsdp.fully_shard_precision_cases import FULL, LOW, Dtypes
from conformance.distributed.fsdp.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.twins import values_of
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.surface import is_torch_in

_FULL_PRECISION: Dtypes = (FULL, None, FULL)
_COMPLEX: Mapping[str, Any] = {"dtype": torch.complex64, "has_scale": False, "replicates": False}


@clause("distributed.fsdp.fully_shard.complex_parameters")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("has_scale", [False, True], ids=["alone", "beside real ones"])
@pytest.mark.parametrize("replicates", [False, True], ids=["sharded", "replicated"])
def test_trains_complex_parameters(
    sites: Sites, dtype: torch.dtype, has_scale: bool, replicates: bool
) -> None:
    sites.agree(cases.of_complex, dtype=dtype, has_scale=has_scale, replicates=replicates, policy={})


@clause("distributed.fsdp.fully_shard.complex_parameters")
@pytest.mark.parametrize(
    "policy",
    [{"param_dtype": LOW}, {"reduce_dtype": torch.complex128}],
    ids=["computed in low precision", "reduced in full"],
)
def test_complex_parameters_keep_their_dtype(sites: Sites, policy: Mapping[str, torch.dtype]) -> None:
    sites.agree(cases.of_complex, policy=policy, **_COMPLEX)


@clause("distributed.fsdp.fully_shard.complex_parameters")
@pytest.mark.deviation("fully_shard.complex_gradients")
@pytest.mark.parametrize(("param_dtype", "reduce_dtype"), [(None, LOW), (LOW, FULL), (LOW, LOW)], ids=str)
def test_real_reduce_dtype_keeps_imaginary_parts(
    sites: Sites, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype
) -> None:
    expected = sites.of(sites.reference, cases.of_complex, policy={"param_dtype": param_dtype}, **_COMPLEX)
    sites.deviate(
        cases.of_complex,
        policy={"param_dtype": param_dtype, "reduce_dtype": reduce_dtype},
        we_do=partial(does_as, expected),
        may_agree=param_dtype == reduce_dtype and not is_torch_in(">=2.15"),
        **_COMPLEX,
    )


@clause("distributed.fsdp.fully_shard.complex_parameters")
@pytest.mark.deviation("fully_shard.complex_gradients")
def test_real_reduce_dtype_accumulates_complex_gradients(sites: Sites) -> None:
    expected = sites.of(sites.reference, cases.accumulated, policy={}, dtype=torch.complex64)
    sites.deviate(
        cases.accumulated,
        policy={"param_dtype": LOW, "reduce_dtype": LOW},
        dtype=torch.complex64,
        we_do=partial(does_as, expected),
        may_agree=not is_torch_in(">=2.15"),
    )


@clause("distributed.fsdp.fully_shard.accumulation_in_low_precision")
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ({"reduce_dtype": LOW}, FULL),
        ({"reduce_dtype": FULL}, torch.float64),
        ({"param_dtype": LOW, "reduce_dtype": FULL}, FULL),
        ({"param_dtype": LOW, "reduce_dtype": LOW}, FULL),
    ],
    ids=["lower", "lower than double", "higher", "as low"],
)
def test_accumulates_with_torchs_roundings(
    sites: Sites, policy: Mapping[str, torch.dtype], dtype: torch.dtype
) -> None:
    sites.agree(cases.accumulated, policy=policy, dtype=dtype)


@clause("distributed.fsdp.fully_shard.dtypes_in_a_group")
@pytest.mark.deviation("fully_shard.dtypes_in_a_group")
@pytest.mark.parametrize(
    "thaws", ["", "inner", "router"], ids=["trained", "thaws alone", "thaws with others"]
)
def test_trains_parameters_of_two_dtypes(sites: Sites, thaws: str) -> None:
    expected, *_ = sites.of_subject(cases.of_two_dtypes_by_hand, thaws=thaws)
    # torch 2.15 requires one dtype only of the parameters that are trainable at first, so it trains thawed ones.
    may_agree = thaws == "inner" and is_torch_in(">=2.15")
    sites.deviate_by_hand(expected, cases.of_two_dtypes, thaws=thaws, may_agree=may_agree)


@clause("distributed.fsdp.fully_shard.precision_per_parameter")
@pytest.mark.parametrize(
    ("everywhere", "apart"),
    [
        ((LOW, FULL, FULL), {}),
        ((None, None, FULL), {}),
        ((LOW, FULL, FULL), {"norm": _FULL_PRECISION, "router": _FULL_PRECISION}),
        ((None, None, None), {"inner": (LOW, LOW, FULL), "router": (FULL, LOW, FULL)}),
    ],
    ids=["masters", "masters alone", "in full apart", "each otherwise"],
)
def test_computes_reduces_and_steps_by_parameter(
    sites: Sites, everywhere: Dtypes, apart: Mapping[str, Dtypes]
) -> None:
    expected, actual = (
        sites.of_subject(asks, everywhere=everywhere, apart=apart)
        for asks in (cases.by_policy_by_hand, cases.by_policy)
    )
    assert_ranks_agree(expected, actual)
    values_of(actual)


@clause("distributed.fsdp.fully_shard.param_dtype_override")
@pytest.mark.parametrize("layers", [[], ["norm"], ["norm", "router"]], ids=str)
def test_dtype_override_trains_like_unsharded(sites: Sites, layers: Sequence[str]) -> None:
    expected, actual = (
        sites.of_subject(program, layers=layers) for program in (cases.overridden_by_hand, cases.overridden)
    )
    assert_ranks_agree(expected, actual)
    values_of(actual)
    if is_torch_in(">=2.15"):
        sites.agree(cases.overridden, layers=layers)


@clause("distributed.fsdp.fully_shard.param_dtype_override")
@pytest.mark.parametrize("returned", [torch.float64, "bfloat16"], ids=str)
def test_invalid_dtype_override_raises(sites: Sites, returned: object) -> None:
    text, *_ = values_of(sites.of_subject(cases.refused_override, returned=returned))
    assert text.startswith("ValueError: param_dtype_override_fn must return")
    if is_torch_in(">=2.15"):
        sites.agree(cases.refused_override, returned=returned)


@clause("distributed.fsdp.fully_shard.masters")
def test_lost_masters_raise(sites: Sites) -> None:
    reported, *_ = values_of(sites.of_subject(cases.lost_masters))
    assert reported["loaded"] == [str(FULL)]
    assert reported["rounded"].startswith("RuntimeError: norm.weight (torch.bfloat16)")
    assert reported["partly"].startswith("RuntimeError: norm.weight (torch.bfloat16)")
    assert "router.weight" not in reported["partly"]
    assert reported["reloaded"] is None
    assert reported["into low"].startswith("RuntimeError: norm.weight (torch.bfloat16)")
    assert reported["cast"].startswith("RuntimeError")
    assert "router.weight" in reported["cast"]
    assert "inner.weight" not in reported["cast"]
    assert reported["narrow"].startswith("ValueError")
    assert "norm.weight" in reported["narrow"]


@clause("distributed.fsdp.fully_shard.param_precisions")
def test_param_precisions_reports_each_parameter(sites: Sites) -> None:
    reported, *_ = values_of(sites.of_subject(cases.report_precisions))
    for name, has in reported["wrapped"].items():
        own = torch.float64 if name.startswith("inner") else FULL
        assert has == str((LOW, FULL, own)), name
        assert reported["plain"][name] == str((own, None, own)), name
    assert len(reported["plain"]) == len(reported["wrapped"]) == 6
