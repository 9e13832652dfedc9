"""Injection of the fault that a library's spec names, in the process that loads the library."""

from __future__ import annotations

import importlib

from conformance.judge.library import Library
from conformance.strength.faults import handmade

_CHANGED_SOURCE = ("mutant:", "lines:")  # prefixes of faults by `conformance.strength.mutation`


def inject(library: Library) -> None:
    if library.fault_id.startswith(_CHANGED_SOURCE):
        # Importing `mutants` reads all mutated files, which takes seconds.
        mutants = importlib.import_module("conformance.strength.mutation.mutants")
        mutants.change_source(library.package, library.fault_id)
    else:
        fault = handmade.find(library.fault_id)
        library.replace(fault.breaks, fault.make)
