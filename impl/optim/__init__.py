"""Optimizer steps: captured."""

from impl.optim.captured import Explanation, capture, explain, release

__all__ = ["Explanation", "capture", "explain", "release"]
