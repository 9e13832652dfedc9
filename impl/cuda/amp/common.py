"""torch's path for a question that `impl.amp` asks too."""

from impl.amp._availability import amp_definitely_not_available

__all__ = ["amp_definitely_not_available"]
