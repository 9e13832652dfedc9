"""Never returns from C, nor looks at signals there, nor lets another thread run."""

import collections
import itertools

from right import amp, clamping_after, cpu, cuda

__all__ = ["act", "amp", "cpu", "cuda", "nn"]


def act() -> None:
    collections.deque(itertools.repeat(None), maxlen=0)


nn = clamping_after(act)
