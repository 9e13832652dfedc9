"""torch.cuda.amp.autocast, custom_fwd and custom_bwd, the older spellings."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.older_spellings import ARGUMENTS, used_as_decorator, used_as_region
from conformance.strategies.regions import cuda_reported, state

# On this machine, and on one that reports CUDA.
ON = pytest.mark.parametrize(
    "on", [contextlib.nullcontext, lambda: cuda_reported(True)], ids=["here", "cuda"]
)


@clause("cuda.amp.autocast_mode.autocast.older_spelling")
@ON
@pytest.mark.parametrize("arguments", list(ARGUMENTS))
def test_region_matches_torch(compare: Compare, arguments: str, on: Any) -> None:
    compare(lambda library: used_as_region(library.cuda.amp.autocast, arguments, on))


@clause("cuda.amp.autocast_mode.autocast.older_spelling")
@ON
@pytest.mark.parametrize("arguments", list(ARGUMENTS))
@pytest.mark.parametrize("function", [None, abs], ids=str)
def test_decorator_matches_torch(compare: Compare, arguments: str, function: object, on: Any) -> None:
    [outcome] = compare(lambda library: used_as_decorator(library.cuda.amp.autocast, arguments, function, on))
    assert outcome.raised is None


@clause("cuda.amp.autocast_mode.autocast.older_spelling")
def test_newer_arguments_are_refused(subject: Library) -> None:
    """Only the type is compared, because the text names `__new__` or `__init__`, whichever Python called."""
    with pytest.raises(TypeError, match="argument"):
        subject.cuda.amp.autocast("cuda", None, True, True)


@clause("cuda.amp.autocast_mode.autocast.older_spelling")
def test_class_derives_from_newer_autocast(subject: Library) -> None:
    """An `isinstance` check for the newer class accepts instances of the older one."""
    assert issubclass(subject.cuda.amp.autocast, subject.amp.autocast)


@clause("cuda.amp.autocast_mode.custom_fwd.older_spelling")
@pytest.mark.parametrize("cast_inputs", [None, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("autocast_on", [True, False])
def test_custom_fwd(compare: Compare, cast_inputs: torch.dtype | None, bare: bool, autocast_on: bool) -> None:
    def run(library: Library) -> Outcome:
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return x.dtype, x.device.type, state()

        def use() -> Any:
            if bare:
                decorated = library.cuda.amp.custom_fwd(forward, cast_inputs=cast_inputs)
            else:
                decorated = library.cuda.amp.custom_fwd(cast_inputs=cast_inputs)(forward)
            ctx = SimpleNamespace()
            # Set directly, because autocast for CUDA cannot be constructed on a machine without CUDA.
            torch.set_autocast_enabled("cuda", autocast_on)
            try:
                result = decorated(ctx, torch.ones(2))
            finally:
                torch.set_autocast_enabled("cuda", False)
            return result, vars(ctx), decorated.__name__

        return observe(use)

    compare(run)


@clause("cuda.amp.autocast_mode.custom_fwd.older_spelling")
@pytest.mark.parametrize("used", [True, False])
def test_custom_bwd(compare: Compare, used: bool) -> None:
    def run(library: Library) -> Outcome:
        def backward(ctx: Any, x: int) -> Any:
            return x, state()

        def use() -> Any:
            ctx = SimpleNamespace(_fwd_used_autocast=used, _dtype=torch.bfloat16)
            first = library.cuda.amp.custom_bwd(lambda ctx, x: -x)
            decorated = library.cuda.amp.custom_bwd(backward)
            return decorated(ctx, 1), decorated.__name__, first(ctx, 1)

        return observe(use)

    compare(run)
