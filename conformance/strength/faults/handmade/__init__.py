"""Handmade faults by area, and the lookup of all faults by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from conformance.strength.faults import generated
from conformance.strength.faults.fault import REGISTERED, Fault

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)  # registers its faults

HANDMADE: Mapping[str, Fault] = REGISTERED


def find(fault_id: str) -> Fault:
    """Return a fault by name, handmade or generated."""
    return HANDMADE[fault_id] if fault_id in HANDMADE else generated.find(fault_id)
