"""Ranks that differ from the others in order, gradients, settings or shards, and differences that are equivalent."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp.scenes.desync_programs import (
    ASTRAY,
    GRACE_S,
    LARGE,
    ORDERS,
    SHORT_GRACE_S,
    WIDTH,
    Blocks,
    Program,
    RankReports,
    reports_in,
    run,
    train_step,
    wrap_fsdp,
)
from conformance.distributed.fsdp.scenes.fully_shard_training import FULLY_SHARD
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE, Twins, TwinsOf
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library, load_library
from conformance.judge.sandbox import seeding
from conformance.judge.surface import is_torch_in
from conformance.judge.tolerances import TRAINED
from conformance.ranks import Rank, RankFault, RankPool

pytestmark = pytest.mark.deadline(90)  # new pools of ranks take seconds


def reports_of(library: Library, program: Program) -> RankReports:
    """Run the program without the difference and with it. Return what the ranks report."""
    with RankPool(2, grace_s=GRACE_S) as pool:
        try:
            together = pool.run(run, library=library.spec, program=replace(program, differs_at=None))
            apart = pool.run(run, library=library.spec, program=program)
        except RankFault as fault:
            return reports_in(fault)
    pairs = zip(together[1 - ASTRAY], apart[1 - ASTRAY], strict=True)
    return RankReports(is_right=all(torch.equal(*pair) for pair in pairs))


def reports_both(
    outcome: RankReports,
    astray: str = "gathered 'blocks.2'",
    other: str = "gathered 'blocks.1'",
    summary: str = "Forward order differs across ranks",  # torch's words
) -> bool:
    """Return whether both ranks raised an error that says what both did."""
    first, second = (re.escape(f"rank {rank} {did}") for rank, did in ((ASTRAY, astray), (1 - ASTRAY, other)))
    reported = f"{summary}: ({first} where {second}|{second} where {first});"
    return len(outcome.raised) == 2 and all(re.search(reported, text) for text in outcome.raised.values())


def steps_late(outcome: RankReports, program: Program) -> list[int]:
    """Return how many steps after the divergence the ranks raised, in ascending order."""
    assert program.differs_at is not None
    raised_in = [re.match(r"in step (\d+): ", text) for text in outcome.raised.values()]
    return sorted(int(step[1]) - program.differs_at for step in raised_in if step)


def is_silently_wrong(outcome: RankReports) -> bool:
    return not outcome.raised and not outcome.diverged and not outcome.is_right


def judge_raises_at_once(
    deviation: DeviationJudge, program: Program, *texts: str, are_alike: bool = False
) -> None:
    """Both ranks of the subject must raise the error that `reports_both` describes, in the step in which they diverge.

    torch's ranks issue collectives of unequal sizes. If the sizes are equal, torch silently computes wrong values.
    """
    deviation.judge(
        lambda library: reports_of(library, program),
        torch_does=is_silently_wrong if are_alike else lambda outcome: outcome.diverged,
        we_do=lambda outcome: reports_both(outcome, *texts) and steps_late(outcome, program) == [0, 0],
    )


@clause("distributed.fsdp.fsdp_desync.parts_with_equal_sizes")
@pytest.mark.deviation("fsdp.order_of_units")
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("api", "differs_at", "hidden"),
    [
        ("FSDP1", 0, 8),
        ("FSDP1", 2, 8),
        pytest.param("FSDP1", 2, LARGE, marks=FULL_PROFILE),
        ("fully_shard", 2, 8),
        pytest.param("fully_shard", 0, 8, marks=FULL_PROFILE),
    ],
)
def test_units_of_equal_sizes_in_another_order_raise(
    deviation: DeviationJudge, mode: str, api: str, differs_at: int, hidden: int
) -> None:
    program = Program(hidden=(hidden,) * 3, mode=mode, differs_at=differs_at, api=api)
    deviation.judge(
        lambda library: reports_of(library, program),
        torch_does=is_silently_wrong,
        we_do=lambda outcome: reports_both(outcome) and max(steps_late(outcome, program)) <= 1,
    )


@clause("distributed.fsdp.fsdp_desync.parts_with_unequal_sizes")
@pytest.mark.deviation("fsdp.order_of_units")
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("api", "hidden"),
    [
        ("FSDP1", (8, 16, 24)),
        ("FSDP1", (8, 24, 16)),
        pytest.param("FSDP1", (8, LARGE, 2 * LARGE), marks=FULL_PROFILE),
        pytest.param("fully_shard", (8, 16, 24), marks=FULL_PROFILE),
    ],
)
@pytest.mark.parametrize("differs_at", [pytest.param(0, marks=FULL_PROFILE), 2])
def test_units_of_unequal_sizes_in_another_order_raise(
    deviation: DeviationJudge, mode: str, api: str, hidden: tuple[int, ...], differs_at: int
) -> None:
    """torch's ranks gather shards of unequal sizes, instead of raising an error."""
    judge_raises_at_once(deviation, Program(hidden=hidden, mode=mode, differs_at=differs_at, api=api))


LEFT = "left 'blocks.1' for the end of backward without blocks.1.{}.bias"


@clause("distributed.fsdp.fsdp_desync.parts_by_gradients")
@pytest.mark.deviation("fully_shard.gradients_of_some_ranks")
@pytest.mark.parametrize("differs_at", [2, pytest.param(0, marks=FULL_PROFILE)])
@pytest.mark.parametrize(
    ("differs_by", "astray", "other"),
    [
        pytest.param("unused bias", LEFT.format(0), "reduced 'blocks.1'", marks=FULL_PROFILE),
        ("other unused bias", LEFT.format(0), LEFT.format(2)),
        ("frozen bias", "reduced 'blocks.1' without blocks.1.0.bias", "reduced 'blocks.1'"),
    ],
    ids=["unused bias", "other unused bias", "frozen bias"],
)
def test_gradients_on_one_rank_only_raise(
    deviation: DeviationJudge, differs_at: int, differs_by: str, astray: str, other: str
) -> None:
    """torch's ranks reduce buffers of unequal sizes, or silently sum gradients of different parameters."""
    # With a width of 4, the two biases of a block have the same size.
    program = Program(hidden=(4,) * 3, differs_at=differs_at, api="fully_shard", differs_by=differs_by)
    texts = (astray, other, "the ranks have gradients of different parameters")
    judge_raises_at_once(deviation, program, *texts, are_alike=differs_by == "other unused bias")


@clause("distributed.fsdp.fsdp_desync.parts_where_orders_change")
@pytest.mark.deviation("fsdp.order_of_units")
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_earlier_order_on_one_rank_is_reported(deviation: DeviationJudge, mode: str) -> None:
    program = Program((*ORDERS, *ORDERS, ORDERS[0], ORDERS[0], ORDERS[0], ORDERS[0]), mode=mode, differs_at=4)
    deviation.judge(
        lambda library: reports_of(library, program),
        torch_does=is_silently_wrong,
        we_do=lambda outcome: (
            reports_both(outcome) and steps_late(outcome, program) in ([0, 0], [0, 1], [1, 1], [1, 2])
        ),
    )


DROPPED = ((0, 1, 2), (0, 2), (1, 2), (0, 1, 2), (2,), (2, 1, 0), (0, 2), (1, 0), (0, 1, 2))


@clause("distributed.fsdp.fsdp_desync.parts_by_settings")
@pytest.mark.deviation("fully_shard.settings_of_one_rank")
@pytest.mark.parametrize("differs_at", [2, pytest.param(0, marks=FULL_PROFILE)])
@pytest.mark.parametrize(
    ("differs_by", "astray", "other"),
    [
        ("blocks kept unsharded", "reduced 'blocks.2'", "gathered 'blocks.2'"),
        pytest.param("unsynchronised block", "reduced 'Blocks'", "reduced 'blocks.1'", marks=FULL_PROFILE),
    ],
    ids=["blocks kept unsharded", "unsynchronised block"],
)
def test_settings_of_one_rank_only_raise(
    deviation: DeviationJudge, differs_at: int, differs_by: str, astray: str, other: str
) -> None:
    """torch's ranks issue different collectives, instead of raising an error."""
    program = Program(differs_at=differs_at, api="fully_shard", differs_by=differs_by)
    judge_raises_at_once(deviation, program, astray, other, "the ranks issue different collectives")


_SHARDED = "the ranks have sharded a module differently"
# From torch 2.15 on, gradients of float32 parameters that compute in bfloat16 are reduced in float32.
_REDUCED = ", reduce_dtype=torch.float32" if is_torch_in(">=2.15") else ""


@clause("distributed.fsdp.fsdp_desync.parts_by_sharding")
@pytest.mark.deviation("fully_shard.settings_of_one_rank")
@pytest.mark.parametrize(
    ("differs_by", "differs_at", "astray", "summary"),
    [
        ("mp_policy", 0, f"gathered 'blocks.1' with param_dtype=torch.bfloat16{_REDUCED}", _SHARDED),
        pytest.param(
            *("shard_placement_fn", 0),
            "gathered 'blocks.1' with blocks.1.0.weight as Shard(1), blocks.1.2.weight as Shard(1)",
            _SHARDED, marks=FULL_PROFILE,
        ),
        pytest.param(
            *("mixed_precision", 0), "gathered 'Blocks' with param_dtype=torch.bfloat16", _SHARDED, marks=FULL_PROFILE
        ),
        ("divide factor", 2, "reduced 'blocks.1' divided by 3.0", "the ranks divide gradients by different factors"),
    ],
    ids=["mp_policy", "shard_placement_fn", "mixed_precision", "divide factor"],
)  # fmt: skip
def test_different_sharding_on_one_rank_raises(
    deviation: DeviationJudge, *, differs_by: str, differs_at: int, astray: str, summary: str
) -> None:
    """torch's ranks silently compute wrong values, or issue collectives of unequal sizes."""
    api = "FSDP1" if differs_by == "mixed_precision" else "fully_shard"
    other = astray.partition("' ")[0] + "'"
    program = Program(differs_at=differs_at, api=api, differs_by=differs_by)
    are_alike = differs_by in ("shard_placement_fn", "divide factor")
    judge_raises_at_once(deviation, program, astray, other, summary, are_alike=are_alike)


def write_alone(rank: Rank, *, library: str, use_orig_params: bool) -> None:
    """Write to the unsharded root unit on one rank only, between a forward and its backward."""
    torch.manual_seed(0)
    model = wrap_fsdp(load_library(library), Blocks((8,)), use_orig_params=use_orig_params)
    loss = model(torch.ones(3, WIDTH)).sum()
    if rank.rank == ASTRAY:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "blocks" not in name:
                    parameter.mul_(0.5)
    try:
        loss.backward()
    except Exception as error:
        raise RuntimeError(" ".join([str(error), *getattr(error, "__notes__", ())])) from error


@clause("distributed.fsdp.fsdp_desync.parts_by_writing")
@pytest.mark.deviation("fsdp.written_on_one_rank")
@FULL_PROFILE
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_write_on_one_rank_before_backward_raises(deviation: DeviationJudge, use_orig_params: bool) -> None:
    def probe(library: Library) -> dict[int, str]:
        with RankPool(2, grace_s=SHORT_GRACE_S) as pool:
            try:
                pool.run(write_alone, library=library.spec, use_orig_params=use_orig_params)
            except RankFault as fault:
                return {failure.rank: failure.text for failure in fault.record.failures}
        return {}

    def is_reported(messages: dict[int, str]) -> bool:
        pattern = f"written to on some ranks only: .*rank {ASTRAY} gathered again.* 'Blocks'.*; write to them on every"
        everywhere = len(messages) == 2 and all(re.search(pattern, text) for text in messages.values())
        return everywhere and "head.weight" in messages[ASTRAY]

    def is_torchs(messages: dict[int, str]) -> bool:
        if use_orig_params:
            return messages == {}
        return messages.keys() == {ASTRAY} and "modified inplace" in messages[ASTRAY]

    deviation.judge(probe, torch_does=is_torchs, we_do=is_reported)


@clause("distributed.fsdp.fsdp_desync.changes_alike")
@pytest.mark.parametrize(
    "program",
    [
        *(Program(DROPPED, (8, 5, 11), mode) for mode in ("train", "eval", "mixed")),
        Program(DROPPED, (8, 5, 11), api="fully_shard"),
        *(
            Program(differs_at=2, api="fully_shard", differs_by=differs_by, alike=True)
            for differs_by in ("unused bias", "frozen bias", "blocks kept unsharded", "divide factor")
        ),
        Program(differs_at=0, api="fully_shard", differs_by="shard_placement_fn", alike=True),
    ],
    ids=lambda program: f"{program.api} {program.differs_by} {program.mode}",
)
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_changes_on_all_ranks_train(cpu_twins: Twins, program: Program) -> None:
    assert_trains_like_torch(cpu_twins, run, program=program)


@clause("distributed.fsdp.fsdp_desync.alike_in_other_words")
@pytest.mark.parametrize(
    "program",
    [
        Program(differs_at=0, api="fully_shard", differs_by="mp_policy of float32"),
        Program(differs_at=0, differs_by="mixed_precision of float32"),
        Program(differs_at=2, api="fully_shard", differs_by="divide factor as integer"),
    ],
    ids=lambda program: f"{program.api} {program.differs_by}",
)
def test_equivalent_settings_in_other_words_train(twins_of: TwinsOf, program: Program) -> None:
    assert_trains_like_torch(twins_of(2), run, program=program)


def gather_by_hand(rank: Rank, *, library: str) -> list[torch.Tensor]:
    """Unshard the root explicitly before the first forward, on one rank only. The root has mixed precision."""
    torch.manual_seed(0)
    loaded = load_library(library)
    policy = loaded.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = loaded.find(FULLY_SHARD)(Blocks((8,)), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if rank.rank == ASTRAY:
        model.unshard()
    tensors: list[torch.Tensor] = []
    for step in range(2):
        tensors += train_step(model, "train", seeding.generator(10 * step + rank.rank))
        optimizer.step()
        optimizer.zero_grad()
    return tensors + [p.to_local().detach().clone() for p in model.parameters()]


@clause("distributed.fsdp.fsdp_desync.alike_in_other_words")
def test_explicit_gather_on_one_rank_trains(twins_of: TwinsOf) -> None:
    assert_trains_like_torch(twins_of(2), gather_by_hand)


def assert_trains_like_torch(twins: Twins, case: Callable[..., Any], **arguments: Any) -> None:
    expected, actual = (
        twins.pool.run(case, library=library.spec, **arguments)
        for library in (twins.reference, twins.subject)
    )
    for rank in range(len(expected)):
        for tensor, other in zip(expected[rank], actual[rank], strict=True):
            assert (excess := TRAINED.excess(tensor, other)) is None, f"rank {rank}: {excess}"
