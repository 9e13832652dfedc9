"""Optimizer steps: captured."""

from impl.optim.captured import Explanation, GraphExplanation, capture, explain, release

__all__ = ["Explanation", "GraphExplanation", "capture", "explain", "release"]
