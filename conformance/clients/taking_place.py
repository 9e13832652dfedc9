"""How a subject comes to be what libraries train with that know torch alone: its drop-in first, then their import."""

from __future__ import annotations

import os
import sys

from conformance.faults import handmade
from conformance.judge.library import Library, load_library
from conformance.ranks import Rank

# Nothing is downloaded, and nothing is told to anybody.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}


def take_place(rank: Rank, *, library: str) -> None:
    """On a fresh rank: put the library in torch's places, as `python -m impl.drop_in` does, and say who it is."""
    # As torchrun tells it, for those who ask the environment; the ranks have found one another already.
    ranks = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "GROUP_RANK": 0}
    sizes = {"WORLD_SIZE": rank.world_size, "LOCAL_WORLD_SIZE": rank.world_size}
    os.environ.update(_ENVIRONMENT | {name: str(number) for name, number in {**ranks, **sizes}.items()})
    found = load_library(library)
    if install := drop_in_of(found):
        install()
    if found.fault_id:
        _inject(found)


def drop_in_of(library: Library):
    """What puts a library in torch's places; torch is there.

    Raises:
        NotProvided: it has none.
    """
    return None if library.package == "torch" else library.find("drop_in.install")


def _inject(library: Library) -> None:
    """The fault, wherever torch's modules hold what it breaks."""
    path = handmade.find(library.fault_id).breaks
    whole, broken = Library(library.package).find(path), library.find(path)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch":
            for place in [place for place, value in list(vars(module).items()) if value is whole]:
                setattr(module, place, broken)
