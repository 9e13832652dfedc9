"""What a unit is in the middle of, in our words and in torch's."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """What a unit is in the middle of."""

    IDLE = "idle"  # its forward may run, or a backward begin
    FORWARD = "forward"
    BACKWARD = "backward"  # its gradients are being computed
    SUMMONED = "summoned"  # its parameters are unsharded for the user to read


class TrainingState(Enum):
    """What torch calls the phases, and what its errors name."""

    IDLE = 1
    FORWARD_BACKWARD = 2
    SUMMON_FULL_PARAMS = 3


_TORCHS_NAMES = {
    Phase.IDLE: TrainingState.IDLE,
    Phase.FORWARD: TrainingState.FORWARD_BACKWARD,
    Phase.BACKWARD: TrainingState.FORWARD_BACKWARD,
    Phase.SUMMONED: TrainingState.SUMMON_FULL_PARAMS,
}


def torchs_name(phase: Phase) -> TrainingState:
    return _TORCHS_NAMES[phase]
