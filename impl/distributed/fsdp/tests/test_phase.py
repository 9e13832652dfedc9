"""The table of phases: every move in every phase has one answer, and what is refused says so in its words."""

from __future__ import annotations

import itertools

import pytest

from impl.distributed.fsdp._engine.phase import _NEXT, _REFUSED, SUMMONED, Move, Phase, next_phase

PAIRS = set(itertools.product(Phase, Move))


def test_table_and_refusals_cover_every_pair_once() -> None:
    assert _NEXT.keys() | _REFUSED.keys() == PAIRS
    assert not _NEXT.keys() & _REFUSED.keys()


@pytest.mark.parametrize("pair", sorted(PAIRS, key=str), ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_move_changes_phase_or_raises_with_unit_name(pair: tuple[Phase, Move]) -> None:
    phase, move = pair
    if pair in _NEXT:
        assert next_phase(phase, move, "blocks.1") is _NEXT[pair]
        return
    kind, sentence = _REFUSED[pair]
    with pytest.raises(kind) as raised:
        next_phase(phase, move, "blocks.1")
    assert "{" not in str(raised.value)
    assert ("blocks.1" in str(raised.value)) == ("{name}" in sentence)


def test_every_phase_is_reached_and_left() -> None:
    reached, last = {Phase.IDLE}, set[Phase]()
    while reached != last:
        last = set(reached)
        reached |= {after for (phase, _), after in _NEXT.items() if phase in last}
    assert reached == set(Phase)
    assert {phase for phase, _ in _NEXT} == set(Phase)


def test_end_of_summoning_returns_to_idle() -> None:
    assert {_NEXT[phase, Move.END_SUMMON] for phase in SUMMONED} == {Phase.IDLE}
