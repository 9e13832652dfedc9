"""Packages above the judge that serve it, by role. `conformance` registers them.

The judge imports them by name. So its imports point one way, and a process without a fault does not load the faults.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

# faults: `inject(library)` injects the fault that the library's spec names
# simulator: the simulated device, see `conformance.simulator`
Role = Literal["faults", "simulator"]

_modules: dict[Role, str] = {}


def register(role: Role, module: str) -> None:
    """Register the module of a role by name. It is imported when the judge first needs it."""
    _modules[role] = module


def provider(role: Role) -> Any:
    return importlib.import_module(_modules[role])
