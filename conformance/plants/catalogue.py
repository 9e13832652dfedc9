"""The catalogue of bugs that real implementations had, each planted in a few lines.

A plant is a function from the original class or function to the broken one; it must work on any subject that
mirrors torch, so it uses public names and the hooks that torch documents or that other libraries override.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.library import Library


@dataclass(frozen=True)
class Plant:
    id: str
    breaks: str  # the public name whose implementation is replaced
    says: str  # what is wrong with it
    thread: str  # where the public can read about it, or "own" for one of ours
    make: Callable[[Any], Any]

    def put_into(self, library: Library) -> None:
        library.replace(self.breaks, self.make)


CATALOGUE: dict[str, Plant] = {}
_AREAS = ("amp_grad_scaler", "amp_autocast_mode", "nn_utils_clip_grad")


def planted(
    plant_id: str, *, breaks: str, says: str, thread: str
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Enter a maker of a broken class or function into the catalogue."""

    def enter(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if plant_id in CATALOGUE:
            raise ValueError(f"two plants are called {plant_id}")
        CATALOGUE[plant_id] = Plant(plant_id, breaks, says, thread, make)
        return make

    return enter


for _area in _AREAS:
    importlib.import_module(f"conformance.plants.{_area}")
