"""Planted faults: subjects that are right but for one thing, by which the suite's own strength is measured.

Two kinds, both named after a `+` in a subject's spec (`impl+ignore:amp.GradScaler(init_scale)`):
    generated  one for each parameter, method and getter of the public surface (`conformance.plants.generated`)
    catalogue  one for each bug that a real implementation once had (`amp_grad_scaler_step`, `amp_autocast_mode`, ...)
A plant counts as killed only by the unmodified suite, which is told nothing about it.
"""

from conformance.plants import generated
from conformance.plants.catalogue import CATALOGUE, find

__all__ = ["CATALOGUE", "find", "generated"]
