"""Regions on a backend that registers its own name, which is possible once per process."""

from __future__ import annotations

import types
from typing import Any

import torch

from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

_NAME = "theirs"
_MODULES: dict[str, dict[str, Any] | None] = {
    "no module": None,
    "a module that says nothing": {},
    "a module without dtypes": {"get_amp_supported_dtype": list},
    "a module with dtypes": {"get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float32]},
}


def regions(rank: Rank, *, reference: str, subject: str) -> list[Outcome]:
    torch.utils.rename_privateuse1_backend(_NAME)
    return [observe(_all_of, load_library(spec)) for spec in (reference, subject)]


def _all_of(library: Library) -> dict[str, Outcome]:
    outcomes = {}
    for title, module in _MODULES.items():
        if module is not None:
            setattr(torch, _NAME, types.SimpleNamespace(**module))
        for dtype in (None, torch.bfloat16, torch.float16, torch.float32):
            for enabled in (True, False):
                outcomes[f"{title}, {dtype}, {enabled}"] = observe(_inside, library, dtype, enabled)
    delattr(torch, _NAME)
    return outcomes


def _inside(library: Library, dtype: torch.dtype | None, enabled: bool) -> Any:
    with library.amp.autocast(_NAME, dtype, enabled) as region:
        return region._enabled, torch.is_autocast_enabled(_NAME), torch.get_autocast_dtype(_NAME)
