"""Steps with parameters on several meshes, of which a rank may not be in all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.judge.judgement import unavailable
from conformance.ranks import RankPool
from conformance.simulator import NAME, Unavailable, ensure_built

CASES = "impl.distributed.fsdp.tests.mesh_cases"


@pytest.mark.parametrize("is_replicated", [False, True])
def test_slices_of_one_mesh_have_one_norm(ranks: Callable[..., RankPool], is_replicated: bool) -> None:
    """No slice has all ranks, but every rank has a slice."""
    norms = ranks(4, "cpu").run(f"{CASES}:norm_over_slices", is_replicated=is_replicated)
    expected = 6.0 if is_replicated else 8.0  # numbers of elements
    assert [norm**2 for norm in norms] == pytest.approx([expected] * 4)


@pytest.mark.parametrize("mesh_of_all_is_first", [False, True])
def test_inf_on_some_ranks_skips_step_on_all(
    ranks: Callable[..., RankPool], mesh_of_all_is_first: bool
) -> None:
    """Otherwise parameters on all ranks would be stepped on some of them."""
    case = f"{CASES}:scale_after_inf_on_some_ranks"
    assert ranks(4, "cpu").run(case, mesh_of_all_is_first=mesh_of_all_is_first) == [(False, 4.0)] * 4


@pytest.mark.deadline(300)
@pytest.mark.parametrize("on", ["cpu", NAME])
def test_failure_on_one_rank_leaves_no_peer_waiting(ranks: Callable[..., RankPool], on: str) -> None:
    """Ranks of an accelerator do not read the report, and skip the step without an error."""
    if on == NAME:
        try:
            ensure_built()
        except Unavailable as error:
            unavailable(str(error))
    (error, total), *peers = ranks(4, on).run(f"{CASES}:step_that_fails_on_rank_0")
    assert "max_norm is nan" in error
    assert [total, *(total for _, total in peers)] == [16.0] * 4
    assert all("another rank" in error if on == "cpu" else error == "None" for error, _ in peers)
