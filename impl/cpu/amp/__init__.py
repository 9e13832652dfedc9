"""The older spellings of `impl.amp` for the CPU."""

from impl.cpu.amp.autocast_mode import autocast

__all__ = ["autocast"]
