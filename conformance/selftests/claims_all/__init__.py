"""torch, with every extension claimed: a clause that it passes is none."""

from __future__ import annotations

from typing import Any

import torch


def __getattr__(name: str) -> Any:
    return getattr(torch, name)
