"""Phases of a unit and the moves between them."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Phase of a unit. While it is summoned, its parameters are unsharded for the user to read and write."""

    __hash__ = object.__hash__  # Enum's own hashes the name, at each move

    IDLE = "idle"  # a forward or a backward may begin
    FORWARD = "forward"
    BACKWARD = "backward"  # gradients are being computed
    SUMMONED = "summoned"  # every rank has the full parameters
    SUMMONED_ON_FIRST_RANK = "summoned on the first rank"  # other ranks have their shards
    # A forward inside has computed with the summoned parameters, or the unit has no parameters.
    SUMMONED_AND_USED = "summoned and used"
    SUMMONED_FORWARD = "forward inside summon_full_params"
    SUMMONED_BACKWARD = "backward inside summon_full_params"


class Move(Enum):
    __hash__ = object.__hash__

    BEGIN_FORWARD = "begin_forward"
    END_FORWARD = "end_forward"  # called too if the forward raised
    BEGIN_BACKWARD = "begin_backward"
    END_BACKWARD = "end_backward"
    SUMMON = "summon"
    SUMMON_ON_FIRST_RANK = "summon_on_first_rank"
    SUMMON_NOTHING = "summon_nothing"  # a unit without parameters
    END_SUMMON = "end_summon"


class TrainingState(Enum):
    """torch's names of the phases, which its errors contain."""

    IDLE = 1
    FORWARD_BACKWARD = 2
    SUMMON_FULL_PARAMS = 3


def not_idle(state: TrainingState) -> str:
    """Return torch's text for calls that are only allowed between steps."""
    return f"expected to be in states {[TrainingState.IDLE]} but current state is {state}"


FORWARDS = (Phase.FORWARD, Phase.SUMMONED_FORWARD)
BACKWARDS = (Phase.BACKWARD, Phase.SUMMONED_BACKWARD)
# The user may read and write the full parameters, and no forward or backward runs.
SUMMONED_ON_ALL_RANKS = (Phase.SUMMONED, Phase.SUMMONED_AND_USED)
SUMMONED = (*SUMMONED_ON_ALL_RANKS, Phase.SUMMONED_ON_FIRST_RANK)
_SUMMONS = (Move.SUMMON, Move.SUMMON_ON_FIRST_RANK, Move.SUMMON_NOTHING)

_NEXT = {
    (Phase.IDLE, Move.BEGIN_FORWARD): Phase.FORWARD,
    (Phase.FORWARD, Move.END_FORWARD): Phase.IDLE,
    (Phase.IDLE, Move.BEGIN_BACKWARD): Phase.BACKWARD,
    (Phase.BACKWARD, Move.END_BACKWARD): Phase.IDLE,
    (Phase.IDLE, Move.SUMMON): Phase.SUMMONED,
    (Phase.IDLE, Move.SUMMON_ON_FIRST_RANK): Phase.SUMMONED_ON_FIRST_RANK,
    (Phase.IDLE, Move.SUMMON_NOTHING): Phase.SUMMONED_AND_USED,
    (Phase.SUMMONED, Move.BEGIN_FORWARD): Phase.SUMMONED_FORWARD,
    (Phase.SUMMONED_AND_USED, Move.BEGIN_FORWARD): Phase.SUMMONED_FORWARD,
    (Phase.SUMMONED_FORWARD, Move.END_FORWARD): Phase.SUMMONED_AND_USED,
    (Phase.SUMMONED_AND_USED, Move.BEGIN_BACKWARD): Phase.SUMMONED_BACKWARD,
    (Phase.SUMMONED_BACKWARD, Move.END_BACKWARD): Phase.SUMMONED_AND_USED,
    # An exception inside may have left a forward or backward open.
    **{
        (phase, Move.END_SUMMON): Phase.IDLE
        for phase in (*SUMMONED, Phase.SUMMONED_FORWARD, Phase.SUMMONED_BACKWARD)
    },
}

_IN_USE = "Cannot manually unshard parameters during forward/backward"
_IN_THE_MIDDLE = "{move} reached {name} while it is in the middle of {phase}"
# Error of each move that the table does not have. The last three are raised only by a bug of ours.
_REFUSALS: dict[Move, tuple[type[Exception], str]] = {
    Move.BEGIN_FORWARD: (RuntimeError, _IN_THE_MIDDLE.replace("{move}", "a forward")),
    Move.BEGIN_BACKWARD: (RuntimeError, _IN_THE_MIDDLE.replace("{move}", "backward")),
    **dict.fromkeys(_SUMMONS, (AssertionError, _IN_USE)),
    **dict.fromkeys(
        (Move.END_FORWARD, Move.END_BACKWARD, Move.END_SUMMON),
        (AssertionError, "{name} is {phase}, so nothing ends"),
    ),
}
_REFUSED = {
    (phase, move): refusal
    for move, refusal in _REFUSALS.items()
    for phase in Phase
    if (phase, move) not in _NEXT
} | {
    (Phase.SUMMONED_ON_FIRST_RANK, Move.BEGIN_FORWARD): (
        RuntimeError,
        "the forward of {name} was called inside summon_full_params(rank0_only=True), which leaves the other ranks "
        "without its parameters; leave the context first, or have every rank see them",
    ),
    **{
        (phase, Move.BEGIN_BACKWARD): (ValueError, not_idle(TrainingState.SUMMON_FULL_PARAMS))
        for phase in (Phase.SUMMONED, Phase.SUMMONED_ON_FIRST_RANK)
    },
    **{
        (phase, move): (
            AssertionError,
            "Cannot manually unshard parameters when already unsharding parameters",
        )
        for phase in SUMMONED
        for move in _SUMMONS
    },
}


def next_phase(phase: Phase, move: Move, name: str) -> Phase:
    """Return the phase of the unit `name` after a move.

    Raises:
        RuntimeError, ValueError, AssertionError: the phase does not allow the move.
    """
    try:
        return _NEXT[phase, move]
    except KeyError:
        error_type, sentence = _REFUSED[phase, move]
        raise error_type(sentence.format(name=name, phase=phase.value)) from None


def training_state_of(phase: Phase) -> TrainingState:
    if phase is Phase.IDLE:
        return TrainingState.IDLE
    return TrainingState.SUMMON_FULL_PARAMS if phase in SUMMONED else TrainingState.FORWARD_BACKWARD
