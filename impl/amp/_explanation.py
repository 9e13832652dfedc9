"""Explanation of a fused step: the backend that has updated each parameter, and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from impl._names import describe_names
from impl.amp._gradients import named_params
from impl.optim._fused_updates import Served


class ParameterExplanation(NamedTuple):
    """The backend that has updated a parameter, and the reason if there is a faster one."""

    name: str
    # "triton", "native", "cpu_blocked" or "torch" for a fused update, as in `impl.kernels.backend`. "optimizer" for
    # `optimizer.step()`, after `.grad` was unscaled and clipped in place. "none" if the parameter was not updated.
    backend: str
    reason: str = ""


@dataclass(frozen=True)
class FusedStepExplanation:
    """The backend and the reason for each parameter of an optimizer. `print` shows one line for each reason."""

    parameters: tuple[ParameterExplanation, ...]

    @property
    def is_fused(self) -> bool:
        """Whether all updated parameters took a fused update, so that gradients were read only."""
        return all(parameter.backend != "optimizer" for parameter in self.parameters)

    def __str__(self) -> str:
        names: dict[tuple[str, str], list[str]] = {}
        for name, backend, reason in self.parameters:
            names.setdefault((backend, reason), []).append(name)
        return "\n".join(
            f"{backend}: {describe_names(alike, 3)}{f', because {reason}' if reason else ''}"
            for (backend, reason), alike in names.items()
        )


def explanation_of(optimizer: torch.optim.Optimizer, served: Sequence[Served]) -> FusedStepExplanation:
    """Return the explanation of the fused step that `served` describes."""
    by_param = {id(param): (backend, reason) for params, backend, reason in served for param in params}
    not_updated = "none", "it had no gradient"
    return FusedStepExplanation(
        tuple(
            ParameterExplanation(name, *by_param.get(id(param), not_updated))
            for name, param in named_params(optimizer)
        )
    )
