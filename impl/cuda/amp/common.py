"""torch's path of `amp_definitely_not_available`, which `impl.amp` uses too."""

from impl.amp._availability import amp_definitely_not_available

__all__ = ["amp_definitely_not_available"]
