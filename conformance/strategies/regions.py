"""Autocast regions: programs of nested regions for either library, the autocast state, and operands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from conformance.judge.library import Library
from conformance.judge.sandbox import seeding

DEVICE_TYPES = ("cpu", "cuda")
LOW = [torch.bfloat16, torch.float16]


class Planned(Exception):
    """Raised on purpose inside a region."""


@dataclass(frozen=True)
class RegionProgram:
    device_type: str = "cpu"
    dtype: torch.dtype | None = None
    enabled: bool = True
    cache_enabled: bool | None = None
    as_decorator: bool = False
    raises: bool = False  # raises when the inner regions have run
    inner: tuple[RegionProgram, ...] = ()

    def run(self, library: Library, note: Any) -> None:
        """Run this region's program. Call `note()` at every point between the steps."""
        region = library.amp.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        )

        def body() -> None:
            note()
            for inner in self.inner:
                with contextlib.suppress(Planned):
                    inner.run(library, note)
                note()
            if self.raises:
                raise Planned

        if self.as_decorator:
            region(body)()
        else:
            with region:
                body()


@contextlib.contextmanager
def cuda_reported(has_bfloat16: bool) -> Iterator[None]:
    """Context manager that makes torch.cuda report a device, with or without bfloat16. The machine needs none."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=has_bfloat16),
    ):
        yield


def state() -> dict[str, Any]:
    """Return autocast's state of this thread, including that of a device type from outside torch."""
    devices = (*DEVICE_TYPES, *({torch._C._get_privateuse1_backend_name()} - {"privateuseone"}))
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "enabled": {name: torch.is_autocast_enabled(name) for name in devices},
        "dtype": {name: torch.get_autocast_dtype(name) for name in devices},
        "cache": torch.is_autocast_cache_enabled(),
        "depth": depth,
    }


def operands(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two float32 matrices, the same at each call."""
    generator = seeding.generator(5)
    left, right = (torch.randn(4, 4, generator=generator).to(device) for _ in range(2))
    return left, right


_leaves = st.builds(
    RegionProgram,
    device_type=st.sampled_from(DEVICE_TYPES),
    dtype=st.sampled_from([None, torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    enabled=st.booleans(),
    cache_enabled=st.sampled_from([None, True, False]),
    as_decorator=st.booleans(),
    raises=st.booleans(),
)


def _with_inner(regions: st.SearchStrategy[RegionProgram]) -> st.SearchStrategy[RegionProgram]:
    return st.builds(
        lambda leaf, inner: RegionProgram(**{**leaf.__dict__, "inner": tuple(inner)}),
        _leaves,
        st.lists(regions, max_size=3),
    )


programs = st.recursive(_leaves, _with_inner, max_leaves=8)
