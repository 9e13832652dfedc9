"""What would be lost in silence is refused, on every rank and in words that name it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.distributed.fsdp.construct_cases import USED_UP
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import outcomes
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import Seen, raised
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.ranks import RankPool

Ranks = Callable[..., RankPool]


def asked(pool: RankPool, case: str) -> Callable[[Library], Seen]:
    return lambda library: outcomes(pool, library, f"torch_limit_removed_cases:{case}")


@clause("distributed.fsdp.fsdp_torch_limit_removed.change_in_forward")
def test_a_weight_changed_in_forward_is_not_lost(subject: Library, ranks: Ranks, world_size: int) -> None:
    seen = asked(ranks(world_size), "weight_changed_in_forward")(subject)
    kept = all(outcome.raised is None and bool((outcome.value.values == 2).all()) for outcome in seen)
    assert kept or any(raised(seen, RuntimeError, what) for what in ("weight", "modified inplace")), seen


@clause("distributed.fsdp.fsdp_torch_limit_removed.tied_in_two_units")
@pytest.mark.deviation("fsdp.tied_in_two_units")
def test_a_parameter_has_one_unit(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    deviation.judge(
        asked(ranks(world_size), "tied_in_two_units"),
        torch_does=lambda seen: all(outcome.raised is None and outcome.value == 2 for outcome in seen),
        we_do=lambda seen: raised(seen, ValueError, "is the same parameter as weight"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.copies")
@pytest.mark.deviation("fsdp.copies")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_copy_is_refused_with_its_cure(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, use_orig_params: bool
) -> None:
    deviation.judge(
        lambda library: outcomes(
            ranks(world_size), library, "torch_limit_removed_cases:copied", use_orig_params=use_orig_params
        ),
        torch_does=lambda seen: all(
            outcome.raised is not None and "wrapped" not in outcome.raised.text for outcome in seen
        ),
        we_do=lambda seen: raised(seen, TypeError, "copy it before it is wrapped"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.ignored_modules_used_up")
@pytest.mark.deviation("fsdp.ignored_modules_used_up")
@pytest.mark.parametrize("way", list(USED_UP))
def test_what_can_be_read_once_is_ignored(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, way: str
) -> None:
    def ignored(outcome: Outcome) -> bool:
        return any(name.endswith("head.weight") for name in outcome.value["parameters"])

    deviation.judge(
        lambda library: outcomes(ranks(world_size), library, "construct_cases:construct", way=way),
        torch_does=lambda seen: all(one.raised is None and not ignored(one) for one in seen),
        we_do=lambda seen: all(one.raised is None and ignored(one) for one in seen),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.tied_on_meta")
@pytest.mark.deviation("fsdp.tied_on_meta")
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("by", ["reset", "function", "recursive function"])
def test_weights_that_are_tied_on_the_meta_device_stay_tied(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, across: bool, by: str
) -> None:
    """A weight and a bias, instead of two weights and a bias; filled with ones, the gradients are known."""

    def seen_in(library: Library) -> Seen:
        return outcomes(
            ranks(world_size), library, "torch_limit_removed_cases:tied_on_meta", across=across, by=by
        )

    def tied(seen: Seen) -> bool:
        # Of the sum over 2 rows, 4 outputs: inner weight 2 * 4 * 5 * 4, outer 2 * 4 * 4 * 4, bias 2 * 4 * 4.
        return all(
            outcome.raised is None
            and outcome.value[0] == 2
            and (by == "reset" or outcome.value[1] == 160 + 128 + 32)
            for outcome in seen
        )

    deviation.judge(
        seen_in,
        torch_does=lambda seen: all(outcome.raised is None and outcome.value[0] == 3 for outcome in seen),
        we_do=tied,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.nonfinite_is_refused")
@pytest.mark.deviation("fsdp.clip_can_refuse")
def test_clipping_refuses_an_inf_of_another_rank(
    deviation: DeviationJudge, ranks: Ranks, world_size: int
) -> None:
    deviation.judge(
        asked(ranks(world_size), "clipped_with_an_inf"),
        torch_does=lambda seen: raised(seen, TypeError, "error_if_nonfinite"),
        we_do=lambda seen: raised(seen, RuntimeError, "non-finite"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.moved_to_meta")
@pytest.mark.deviation("fsdp.moved_to_meta")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_model_on_the_meta_device_computes_nothing(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, use_orig_params: bool
) -> None:
    refusal = (
        (NotImplementedError, "meta device") if use_orig_params else (RuntimeError, "parameters on meta")
    )
    setup = Setup(arguments={"use_orig_params": use_orig_params})
    deviation.judge(
        lambda library: outcomes(ranks(world_size), library, "construct_cases:moved_away", setup=setup),
        torch_does=lambda seen: raised(seen, NotImplementedError, "Cannot copy out of meta tensor"),
        we_do=lambda seen: raised(seen, *refusal),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.moved_to_meta")
def test_a_model_comes_back_from_the_meta_device(subject: Library, ranks: Ranks, world_size: int) -> None:
    setup = Setup()
    seen = outcomes(ranks(world_size), subject, "construct_cases:moved_away", setup=setup, returns=True)
    assert all(outcome.raised is None for outcome in seen), seen
