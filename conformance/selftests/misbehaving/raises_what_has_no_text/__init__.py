"""Raises what cannot be told."""

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


def _raise() -> None:
    raise Untold


nn = clamping_after(_raise)
