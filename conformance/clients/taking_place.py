"""Installation of a subject in place of torch, before libraries that only know torch are imported."""

from __future__ import annotations

import os
import sys

from conformance.judge.library import Library, load_library
from conformance.ranks import Rank
from conformance.strength.faults import handmade

# Nothing is downloaded or reported.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}


def take_place(rank: Rank, *, library: str) -> None:
    """Install the library in place of torch, like `python -m impl.drop_in`, and set the variables of torchrun."""
    # Libraries read these variables. The process group exists already.
    ranks = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "GROUP_RANK": 0}
    sizes = {"WORLD_SIZE": rank.world_size, "LOCAL_WORLD_SIZE": rank.world_size}
    os.environ.update(_ENVIRONMENT | {name: str(number) for name, number in {**ranks, **sizes}.items()})
    loaded = load_library(library)
    if install := drop_in_of(loaded):
        install()
    if loaded.fault_id:
        _inject(loaded)


def drop_in_of(library: Library):
    """Return the function that installs `library` in place of torch, or None for torch itself.

    Raises:
        NotProvided: the library has no such function.
    """
    return None if library.package == "torch" else library.find("drop_in.install")


def _inject(library: Library) -> None:
    """Inject the fault of `library` wherever a module of torch refers to the object that it breaks."""
    path = handmade.find(library.fault_id).breaks
    whole, broken = Library(library.package).find(path), library.find(path)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch":
            for place in [place for place, value in list(vars(module).items()) if value is whole]:
                setattr(module, place, broken)
