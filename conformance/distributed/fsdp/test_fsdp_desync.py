"""Ranks that issue collectives in a different order than the others, and ranks that are lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import desync_cases
from conformance.distributed.fsdp.desync_cases import ASTRAY, LARGE, TIMEOUT_S, Program
from conformance.distributed.fsdp.twins import Twins, TwinsOf
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import assert_same_outcome, observe
from conformance.judge.surface import is_torch_in
from conformance.judge.tolerances import TRAINED
from conformance.ranks import RankFault, RankPool, RanksDiverged

GRACE_S = 20.0
SHORT_GRACE_S = 5.0  # grace for ranks that are known to hang
FULL = pytest.mark.profile("full")
WAYS = ((0, 1, 2), (0, 2, 1))
DROPPED = ((0, 1, 2), (0, 2), (1, 2), (0, 1, 2), (2,), (2, 1, 0), (0, 2), (1, 0), (0, 1, 2))


@dataclass
class SeenByRanks:
    """The error text of each rank that raised, and whether the values are those of ranks with the same program."""

    raised: dict[int, str] = field(default_factory=dict)
    diverged: bool = False  # collectives of unequal sizes were issued
    is_right: bool = False


def seen_of(library: Library, program: Program) -> SeenByRanks:
    with RankPool(2, grace_s=GRACE_S) as pool:
        try:
            together = pool.run(
                desync_cases.run, library=library.spec, program=replace(program, parts_at=None)
            )
            apart = pool.run(desync_cases.run, library=library.spec, program=program)
        except RankFault as fault:
            return _seen_in(fault)
    pairs = zip(together[1 - ASTRAY], apart[1 - ASTRAY], strict=True)
    return SeenByRanks(is_right=all(torch.equal(*pair) for pair in pairs))


def fault_of(
    library: Library,
    case: Callable[..., Any],
    *,
    world_size: int = 2,
    grace_s: float = SHORT_GRACE_S,
    **arguments: Any,
) -> RankFault:
    """Run a case that fails, in a separate pool of ranks. Return the fault."""
    with RankPool(world_size, grace_s=grace_s) as pool, pytest.raises(RankFault) as fault:
        pool.run(case, library=library.spec, **arguments)
    return fault.value


def _seen_in(fault: RankFault) -> SeenByRanks:
    raised = {failure.rank: failure.text for failure in fault.scene.failures}
    return SeenByRanks(raised, isinstance(fault, RanksDiverged))


def reports_both(
    outcome: SeenByRanks,
    astray: str = "gathered 'blocks.2'",
    other: str = "gathered 'blocks.1'",
    summary: str = "Forward order differs across ranks",  # torch's words
) -> bool:
    first, second = (re.escape(f"rank {rank} {did}") for rank, did in ((ASTRAY, astray), (1 - ASTRAY, other)))
    reported = f"{summary}: ({first} where {second}|{second} where {first});"
    return len(outcome.raised) == 2 and all(re.search(reported, text) for text in outcome.raised.values())


def steps_late(outcome: SeenByRanks, program: Program) -> list[int]:
    """Return how many steps after the divergence the ranks raised, in ascending order."""
    assert program.parts_at is not None
    raised_in = [re.match(r"in step (\d+): ", text) for text in outcome.raised.values()]
    return sorted(int(step[1]) - program.parts_at for step in raised_in if step)


def is_silently_wrong(outcome: SeenByRanks) -> bool:
    return not outcome.raised and not outcome.diverged and not outcome.is_right


def judge_at_once(deviation: DeviationJudge, program: Program, *texts: str, are_alike: bool = False) -> None:
    """Both ranks of the subject must raise the error that `reports_both` describes, in the step in which they diverge.

    torch's ranks issue collectives of unequal sizes. If the sizes are equal, torch silently computes wrong values.
    """
    deviation.judge(
        lambda library: seen_of(library, program),
        torch_does=is_silently_wrong if are_alike else lambda outcome: outcome.diverged,
        we_do=lambda outcome: reports_both(outcome, *texts) and steps_late(outcome, program) == [0, 0],
    )


@clause("distributed.fsdp.fsdp_desync.parts_with_equal_sizes")
@pytest.mark.deviation("fsdp.order_of_equal_sizes")
@pytest.mark.deadline(90)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("face", "parts_at", "hidden"),
    [
        ("FSDP1", 0, 8),
        ("FSDP1", 2, 8),
        pytest.param("FSDP1", 2, LARGE, marks=FULL),
        ("fully_shard", 2, 8),
        pytest.param("fully_shard", 0, 8, marks=FULL),
    ],
)
def test_equal_sizes_in_another_order(
    deviation: DeviationJudge, mode: str, face: str, parts_at: int, hidden: int
) -> None:
    program = Program(hidden=(hidden,) * 3, mode=mode, parts_at=parts_at, face=face)
    deviation.judge(
        lambda library: seen_of(library, program),
        torch_does=is_silently_wrong,
        we_do=lambda outcome: reports_both(outcome) and max(steps_late(outcome, program)) <= 1,
    )


@clause("distributed.fsdp.fsdp_desync.parts_with_unequal_sizes")
@pytest.mark.deviation("fsdp.order_of_unequal_sizes")
@pytest.mark.deadline(90)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("face", "hidden"),
    [
        ("FSDP1", (8, 16, 24)),
        ("FSDP1", (8, 24, 16)),
        pytest.param("FSDP1", (8, LARGE, 2 * LARGE), marks=FULL),
        pytest.param("fully_shard", (8, 16, 24), marks=FULL),
    ],
)
@pytest.mark.parametrize("parts_at", [pytest.param(0, marks=FULL), 2])
def test_unequal_sizes_in_another_order(
    deviation: DeviationJudge, mode: str, face: str, hidden: tuple[int, ...], parts_at: int
) -> None:
    judge_at_once(deviation, Program(hidden=hidden, mode=mode, parts_at=parts_at, face=face))


LEFT = "left 'blocks.1' for the end of backward without blocks.1.{}.bias"


@clause("distributed.fsdp.fsdp_desync.parts_by_gradients")
@pytest.mark.deviation("fully_shard.gradients_of_some_ranks")
@pytest.mark.deadline(90)
@pytest.mark.parametrize("parts_at", [2, pytest.param(0, marks=FULL)])
@pytest.mark.parametrize(
    ("by", "astray", "other"),
    [
        pytest.param("unused", LEFT.format(0), "reduced 'blocks.1'", marks=FULL),
        ("others unused", LEFT.format(0), LEFT.format(2)),
        ("frozen", "reduced 'blocks.1' without blocks.1.0.bias", "reduced 'blocks.1'"),
    ],
    ids=["unused", "others unused", "frozen"],
)
def test_gradients_on_one_rank_only_raise(
    deviation: DeviationJudge, parts_at: int, by: str, astray: str, other: str
) -> None:
    # With a width of 4, the two biases of a block have the same size.
    program = Program(hidden=(4,) * 3, parts_at=parts_at, face="fully_shard", by=by)
    texts = (astray, other, "the ranks have gradients of different parameters")
    judge_at_once(deviation, program, *texts, are_alike=by == "others unused")


@clause("distributed.fsdp.fsdp_desync.parts_by_settings")
@pytest.mark.deviation("fully_shard.settings_of_one_rank")
@pytest.mark.deadline(90)
@pytest.mark.parametrize("parts_at", [2, pytest.param(0, marks=FULL)])
@pytest.mark.parametrize(
    ("by", "astray", "other"),
    [
        ("kept", "reduced 'blocks.2'", "gathered 'blocks.2'"),
        pytest.param("unsynchronised", "reduced 'Blocks'", "reduced 'blocks.1'", marks=FULL),
    ],
    ids=["kept", "unsynchronised"],
)
def test_settings_of_one_rank_only_raise(
    deviation: DeviationJudge, parts_at: int, by: str, astray: str, other: str
) -> None:
    program = Program(parts_at=parts_at, face="fully_shard", by=by)
    judge_at_once(deviation, program, astray, other, "the ranks issue different collectives")


_SHARDED = "the ranks have sharded a module differently"
# From torch 2.15 on, gradients of float32 parameters that compute in bfloat16 are reduced in float32.
_REDUCED = ", reduce_dtype=torch.float32" if is_torch_in(">=2.15") else ""


@clause("distributed.fsdp.fsdp_desync.parts_by_sharding")
@pytest.mark.deviation("fully_shard.sharded_otherwise_on_one_rank")
@pytest.mark.deadline(90)
@pytest.mark.parametrize(
    ("by", "parts_at", "astray", "summary"),
    [
        ("computed", 0, f"gathered 'blocks.1' with param_dtype=torch.bfloat16{_REDUCED}", _SHARDED),
        pytest.param(
            *("placed", 0, "gathered 'blocks.1' with blocks.1.0.weight as Shard(1), blocks.1.2.weight as Shard(1)"),
            _SHARDED, marks=FULL,
        ),
        pytest.param("mixed", 0, "gathered 'Blocks' with param_dtype=torch.bfloat16", _SHARDED, marks=FULL),
        ("divided", 2, "reduced 'blocks.1' divided by 3.0", "the ranks divide gradients by different factors"),
    ],
    ids=["computed", "placed", "mixed", "divided"],
)  # fmt: skip
def test_different_sharding_on_one_rank_raises(
    deviation: DeviationJudge, *, by: str, parts_at: int, astray: str, summary: str
) -> None:
    face = "FSDP1" if by == "mixed" else "fully_shard"
    other = astray.partition("' ")[0] + "'"
    are_alike = by in ("placed", "divided")
    judge_at_once(
        deviation, Program(parts_at=parts_at, face=face, by=by), astray, other, summary, are_alike=are_alike
    )


@clause("distributed.fsdp.fsdp_desync.parts_where_orders_change")
@pytest.mark.deviation("fsdp.order_taken_before")
@pytest.mark.deadline(90)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_earlier_order_on_one_rank_is_reported(deviation: DeviationJudge, mode: str) -> None:
    program = Program((*WAYS, *WAYS, WAYS[0], WAYS[0], WAYS[0], WAYS[0]), mode=mode, parts_at=4)
    deviation.judge(
        lambda library: seen_of(library, program),
        torch_does=is_silently_wrong,
        we_do=lambda outcome: (
            reports_both(outcome) and steps_late(outcome, program) in ([0, 0], [0, 1], [1, 1], [1, 2])
        ),
    )


@clause("distributed.fsdp.fsdp_desync.parts_by_writing")
@pytest.mark.deviation("fsdp.written_on_one_rank")
@FULL
@pytest.mark.deadline(90)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_write_on_one_rank_before_backward_raises(deviation: DeviationJudge, use_orig_params: bool) -> None:
    def probe(library: Library) -> dict[int, str]:
        with RankPool(2, grace_s=SHORT_GRACE_S) as pool:
            try:
                pool.run(desync_cases.write_alone, library=library.spec, use_orig_params=use_orig_params)
            except RankFault as fault:
                return {failure.rank: failure.text for failure in fault.scene.failures}
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


@clause("distributed.fsdp.fsdp_desync.parts_while_wrapping")
@pytest.mark.deadline(90)
def test_states_synchronised_in_another_order(subject: Library) -> None:
    reported = _seen_in(fault_of(subject, desync_cases.synchronise, grace_s=GRACE_S)).raised
    assert len(reported) == 2, reported
    for text in reported.values():
        assert "'Bottleneck.0.weight' of shape (8, 4)" in text, text
        assert "'Bottleneck.0.weight' of shape (16, 4)" in text, text


@clause("distributed.fsdp.fsdp_desync.waits_elsewhere")
@pytest.mark.deviation("fsdp.waits_elsewhere")
@pytest.mark.deadline(90)
@pytest.mark.parametrize(
    ("face", "by"),
    [
        ("fully_shard", "barrier"),
        pytest.param("FSDP1", "barrier", marks=FULL),
        pytest.param("FSDP1", "all_reduce", marks=FULL),
    ],
)
def test_rank_waiting_in_other_collective_is_reported(
    deviation: DeviationJudge, reference: Library, face: str, by: str
) -> None:
    def raised(library: Library) -> str:
        # torch's ranks wait until the time-out, so theirs is short. Other ranks may need longer on a busy machine.
        timeout_s = 2.0 if library is reference else TIMEOUT_S
        fault = fault_of(library, desync_cases.wait_elsewhere, face=face, by=by, timeout_s=timeout_s)
        return " ".join(failure.text for failure in fault.scene.failures)

    named = rf"rank {ASTRAY} waits in torch\.distributed\.{by}\(\) where rank {1 - ASTRAY} gathered '\w+'"
    deviation.judge(
        raised,
        torch_does=lambda text: by not in text,
        we_do=lambda text: re.search(named, text) is not None,
    )


@clause("distributed.fsdp.fsdp_desync.states_of_one_rank")
@pytest.mark.deviation("fsdp.states_of_one_rank")
@pytest.mark.deadline(90)
@pytest.mark.parametrize(
    ("face", "pause_s"),
    [("FSDP1", 1.0), *(pytest.param(face, 0.0, marks=FULL) for face in ("FSDP1", "fully_shard"))],
)
def test_state_requested_by_one_rank_raises(
    deviation: DeviationJudge, reference: Library, face: str, pause_s: float
) -> None:
    def raised(library: Library) -> SeenByRanks:
        timeout_s = 2.0 if library is reference else TIMEOUT_S
        return _seen_in(
            fault_of(library, desync_cases.ask_alone, face=face, pause_s=pause_s, timeout_s=timeout_s)
        )

    named = (
        rf"only some ranks ask for a state dict: .*rank {ASTRAY} .*of a state dict.*; "
        "call the function that returns it on every"
    )
    deviation.judge(
        raised,
        torch_does=lambda outcome: outcome.diverged,
        we_do=lambda outcome: (
            len(outcome.raised) == 2 and all(re.search(named, text) for text in outcome.raised.values())
        ),
    )


@clause("distributed.fsdp.fsdp_desync.group_afterwards")
@pytest.mark.deadline(90)
@pytest.mark.parametrize(
    ("program", "by", "ranks"),
    [
        (Program(parts_at=0), "order", 2),
        (Program(hidden=(8, 16, 24), parts_at=2, face="fully_shard"), "order", 2),
        pytest.param(Program(hidden=(8, 16, 24), parts_at=0), "order", 3, marks=FULL),
        pytest.param(Program(hidden=(LARGE,) * 3, parts_at=2), "order", 3, marks=FULL),
        pytest.param(Program((*WAYS, *WAYS, *(WAYS[0],) * 4), parts_at=4), "order", 3, marks=FULL),
        *(
            pytest.param(Program(parts_at=2, face="fully_shard", by=by), by, 2, marks=FULL)
            for by in ("unused", "frozen", "kept", "unsynchronised", "divided")
        ),
        pytest.param(Program(parts_at=0, face="fully_shard", by="computed"), "computed", 3, marks=FULL),
        pytest.param(Program(), "wrapping", 3, marks=FULL),
        *(pytest.param(Program(face=face), "state", 2, marks=FULL) for face in ("FSDP1", "fully_shard")),
    ],
    ids=lambda value: (
        f"{value.face} {value.hidden} {value.parts_at}" if isinstance(value, Program) else str(value)
    ),
)
def test_group_is_usable_after_ranks_differed(
    subject: Library, program: Program, by: str, ranks: int
) -> None:
    with RankPool(ranks, grace_s=GRACE_S) as pool:
        results = pool.run(desync_cases.use_group_afterwards, library=subject.spec, program=program, by=by)
    factor = sum(range(1, ranks + 1)) * ranks**2
    for rank, (message, sums) in enumerate(results):
        assert "rank" in message, f"rank {rank} raised {message!r}"
        assert sums == [0.0, factor, 2.0 * factor], f"rank {rank}"


@clause("distributed.fsdp.fsdp_desync.group_afterwards")
@pytest.mark.deadline(90)
@pytest.mark.parametrize(
    "program",
    [
        Program(parts_at=2),
        Program(hidden=(8, 16, 24), parts_at=0),
        Program(hidden=(8, 16, 24), parts_at=2, face="fully_shard"),
        pytest.param(Program(hidden=(LARGE,) * 3, parts_at=2), marks=FULL),
    ],
    ids=lambda program: f"{program.face} {program.hidden} {program.parts_at}",
)
def test_model_can_be_saved_after_ranks_differed(subject: Library, program: Program) -> None:
    with RankPool(2, grace_s=GRACE_S) as pool:
        results = pool.run(desync_cases.save_afterwards, library=subject.spec, program=program)
    for rank, (message, saved, expected) in enumerate(results):
        assert "rank" in message, f"rank {rank} raised {message!r}"
        assert_same_outcome(observe(sorted, expected.items()), observe(sorted, saved.items()), TRAINED)


@clause("distributed.fsdp.fsdp_desync.changes_alike")
@pytest.mark.deadline(90)
@pytest.mark.parametrize(
    "program",
    [
        *(Program(DROPPED, (8, 5, 11), mode) for mode in ("train", "eval", "mixed")),
        Program(DROPPED, (8, 5, 11), face="fully_shard"),
        *(
            Program(parts_at=2, face="fully_shard", by=by, alike=True)
            for by in ("unused", "frozen", "kept", "divided")
        ),
        Program(parts_at=0, face="fully_shard", by="placed", alike=True),
    ],
    ids=lambda program: f"{program.face} {program.by} {program.mode}",
)
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_changes_on_all_ranks_train(cpu_twins: Twins, program: Program) -> None:
    assert_trained_alike(cpu_twins, "run", program=program)


@clause("distributed.fsdp.fsdp_desync.alike_in_other_words")
@pytest.mark.deadline(90)
@pytest.mark.parametrize(
    "program",
    [
        Program(parts_at=0, face="fully_shard", by="computed alike"),
        Program(parts_at=0, by="mixed alike"),
        Program(parts_at=2, face="fully_shard", by="divided alike"),
    ],
    ids=lambda program: f"{program.face} {program.by}",
)
def test_equivalent_settings_in_other_words_train(twins_of: TwinsOf, program: Program) -> None:
    assert_trained_alike(twins_of(2), desync_cases.run, program=program)


@clause("distributed.fsdp.fsdp_desync.alike_in_other_words")
@pytest.mark.deadline(90)
def test_explicit_gather_on_one_rank_trains(twins_of: TwinsOf) -> None:
    assert_trained_alike(twins_of(2), desync_cases.gather_by_hand)


def assert_trained_alike(twins: Twins, case: Callable[..., Any], **arguments: Any) -> None:
    expected, actual = (
        twins.pool.run(case, library=library.spec, **arguments)
        for library in (twins.reference, twins.subject)
    )
    for rank in range(len(expected)):
        for tensor, other in zip(expected[rank], actual[rank], strict=True):
            assert (excess := TRAINED.excess(tensor, other)) is None, f"rank {rank}: {excess}"


def losses_reported(library: Library, *, world_size: int = 3, **loss: Any) -> dict[int, str]:
    fault = fault_of(library, desync_cases.lose_a_rank, world_size=world_size, grace_s=GRACE_S, **loss)
    return {f.rank: f.text for f in fault.scene.failures if f.rank != loss["victim"]}


def is_named_by_none(reported: dict[int, str], victim: int) -> bool:
    return not any(re.search(rf"rank {victim}\b", text) for text in reported.values())


def is_named_in_time(reported: dict[int, str], victim: int, world_size: int = 3) -> bool:
    return len(reported) == world_size - 1 and all(
        # On a busy machine, a live rank that does not answer within seconds is named together with the victim.
        re.search(rf"ranks? (\d, )*{victim}\b", text)
        and re.search(r"'blocks\.\d'|'Blocks'", text)
        and float(text.rpartition("after ")[2].removesuffix(" s]")) < TIMEOUT_S
        for text in reported.values()
    )


@clause("distributed.fsdp.fsdp_desync.lost_rank")
@pytest.mark.deviation("fsdp.lost_rank_is_named")
@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    ("when", "hidden"),
    [
        pytest.param("before", 8, marks=FULL),
        ("middle", 8),
        ("collective", 8),
        pytest.param("middle", LARGE, marks=FULL),
        ("collective", LARGE),
        pytest.param("exception", 8, marks=FULL),
    ],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_lost_rank_is_named(deviation: DeviationJudge, when: str, hidden: int, victim: int) -> None:
    """Rank 0 is a special victim, because it serves the store."""
    deviation.judge(
        lambda library: losses_reported(library, when=when, victim=victim, hidden=hidden),
        torch_does=lambda reported: is_named_by_none(reported, victim),
        we_do=lambda reported: is_named_in_time(reported, victim),
    )


@clause("distributed.fsdp.fsdp_desync.lost_rank")
@pytest.mark.deviation("fsdp.lost_rank_is_named")
@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    "when", ["middle", "exception", *(pytest.param(when, marks=FULL) for when in ("before", "collective"))]
)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=FULL)])
def test_lost_rank_of_fully_shard_is_named(deviation: DeviationJudge, when: str, victim: int) -> None:
    deviation.judge(
        lambda library: losses_reported(
            library, world_size=2, when=when, victim=victim, hidden=8, face="fully_shard"
        ),
        torch_does=lambda reported: is_named_by_none(reported, victim),
        we_do=lambda reported: is_named_in_time(reported, victim, world_size=2),
    )


@clause("distributed.fsdp.fsdp_desync.lost_rank")
@pytest.mark.deviation("fsdp.lost_rank_is_named")
@FULL
@pytest.mark.deadline(120)
def test_lost_rank_is_named_by_indirect_waiters(deviation: DeviationJudge) -> None:
    """Rank 2 of a ring of four receives from rank 1, which raised but is alive, and sends to rank 3."""
    deviation.judge(
        lambda library: losses_reported(library, world_size=4, when="middle", victim=0, hidden=8),
        torch_does=lambda reported: is_named_by_none(reported, 0),
        we_do=lambda reported: is_named_in_time(reported, 0, world_size=4),
    )
