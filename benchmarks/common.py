"""Shapes, seeded inputs and subjects of all benchmarks.

Shapes are only added and never changed, because old commits are timed with today's benchmarks.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

LeftOut = Mapping[str, AbstractSet[Any]]
SEED = 20_260_101
SUBJECTS = ["impl", "torch"]
DEVICES = ["cpu", "cuda"]
DTYPES = ["float32", "bfloat16"]
# "kept": the gradients keep their addresses. "renewed": each call gets gradients at other addresses, as in a training
# loop that sets them to None.
GRADIENTS = ["kept", "renewed"]


def _gpt2() -> list[tuple[int, ...]]:
    """Return the parameter shapes of the smallest GPT-2: 148 tensors, 124 million elements."""
    width, layers, vocabulary, context = 768, 12, 50_257, 1_024
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    feed_forward = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    block = [*norm, *attention, *norm, *feed_forward]
    return [(vocabulary, width), (context, width), *(block * layers), *norm]


SHAPES: dict[str, list[tuple[int, ...]]] = {
    **{f"{count}x1k": [(1_000,)] * count for count in (1, 4, 16, 100, 1_000, 10_000)},
    "gpt2": _gpt2(),
}
# A billion parameters. Only `ci/gpu` times them, because they are too many for benchmarks of all SHAPES.
LARGE_SHAPES: dict[str, list[tuple[int, ...]]] = {"64x16m": [(1 << 24,)] * 64}
HEADLINES = ["1000x1k", "gpt2"]
# Excluded parameter values. Memory is also measured for other APIs of torch, which no commit of impl changes.
LEFT_OUT_OF_HISTORY: LeftOut = {
    "shapes": set(SHAPES) - {"1x1k", *HEADLINES},
    "gradients": {"renewed"},
    "norm_type": {1.0, float("inf")},
    "subject": {"FSDP2", "DDP"},
}
# Steps on more ranks than cores are slow and say little. With foreach and FSDP1 only the reference differs. Saving the
# shards of each rank takes little time compared with full states. One size of each growth curve stays.
LEFT_OUT_OF_QUICK: LeftOut = {
    **LEFT_OUT_OF_HISTORY,
    "world_size": {1, 4, 8},
    "tensors": {1, 100, 10_000, 100_000},
    "groups": {100},
    "meshes": {2},
    "against": {"foreach", "FSDP1"},
    "shards": {"saved", "loaded"},
    "what": {"optimizer"},
    "kind": {"FULL"},
}


def is_included(parameters: Mapping[str, Any], left_out: LeftOut) -> bool:
    """Return whether a case has none of the values in `left_out`. Both map parameter names to values."""
    return not any(parameters.get(name) in values for name, values in left_out.items())


def member(subject: str, path: str) -> Any:
    """Return the object at `path` in a subject, for example `member("impl", "nn.utils.clip_grad_norm_")`.

    Raises:
        NotImplementedError: the subject, or the commit being timed, has no such name. asv shows n/a.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{subject}.{module}"), name)
    except (ImportError, AttributeError) as missing:
        raise NotImplementedError(f"{subject} has no {path} ({missing})") from missing


@functools.cache
def ranks(world_size: int) -> Any:
    """Return the pool of ranks for all cases with this world size."""
    from conformance.ranks import RankPool  # noqa: PLC0415 (imports modules that only the judge needs)

    return RankPool(world_size)


def require(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise NotImplementedError("no CUDA device")


def some_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of a few thousand elements of each of the first 1000 tensors, always with the last element."""
    flat = [tensor.detach().flatten() for tensor in tensors[:1_000]]
    steps = [len(tensor) // 4_096 + 1 for tensor in flat]
    return [
        tensor[(len(tensor) - 1) % step :: step].clone() for tensor, step in zip(flat, steps, strict=True)
    ]


def shapes_of(name: str) -> list[tuple[int, ...]]:
    return (SHAPES | LARGE_SHAPES)[name]


class TrainingTensors:
    """Parameters, their gradients, and torch's fused AdamW for them.

    Both subjects use the same instance, so that memory addresses favour neither.
    """

    def __init__(self, shapes: str, dtype: str, device: str) -> None:
        require(device)
        self.device = device
        # Draw on the device, because a host thread takes seconds for a large list.
        self._random = torch.Generator(device).manual_seed(SEED)
        draw = functools.partial(self._draw, dtype=getattr(torch, dtype))
        self.parameters = [torch.nn.Parameter(draw(shape)) for shape in shapes_of(shapes)]
        self._gradients = [draw(shape) for shape in shapes_of(shapes)]
        self._others: list[torch.Tensor] = []
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        self.keep()

    def _draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, device=self.device).mul_(0.01).to(dtype)

    def keep(self) -> None:
        """Restore the gradients with constant addresses."""
        self._give(self._gradients)

    def renew(self) -> None:
        """Set gradients with the same values at other addresses. Two buffers alternate."""
        if not self._others:
            self._others = [gradient.clone() for gradient in self._gradients]
        self._give(self._others)
        self._gradients, self._others = self._others, self._gradients

    def _give(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def effect_on_gradients(self, call: Callable[[], object]) -> list[torch.Tensor]:
        """Return the result of `call`, if a tensor, and samples of the gradients after it. Restore the gradients.

        Earlier calls may have clipped the gradients. They are scaled up first, so that this call has work to do.
        """
        before = [gradient.clone() for gradient in self._gradients]
        self.keep()
        torch._foreach_mul_(self._gradients, 1e-2 / float(some_of(self._gradients[:1])[0].double().std()))
        returned = call()
        after = some_of(self._gradients)
        torch._foreach_copy_(self._gradients, before)
        return [returned.clone(), *after] if isinstance(returned, torch.Tensor) else after

    def effect_on_step(self, call: Callable[[], object]) -> list[torch.Tensor]:
        """Return `effect_on_gradients` of a first step by `call`, and samples of the parameters. Restore both."""
        before = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer.state.clear()
        gradients = self.effect_on_gradients(call)
        after = some_of(self.parameters)
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, before)
        return gradients + after

    def effect_on_parameters(self, call: Callable[[], object]) -> list[torch.Tensor]:
        """Return the result of a first step by `call` and samples of the parameters. Restore all tensors."""
        returned, *effect = self.effect_on_step(call)
        return [returned, *effect[len(effect) // 2 :]]


@functools.lru_cache(maxsize=1)
def training(shapes: str, dtype: str, device: str) -> TrainingTensors:
    return TrainingTensors(shapes, dtype, device)


def scaler_of(subject: str, device: str) -> Any:
    """Return a scaler with a constant scale of 1, so that its calls can be repeated on the same gradients."""
    require(device)
    scaler = member(subject, "amp.GradScaler")(device, init_scale=1.0, growth_interval=2**30)
    scaler.scale(torch.ones((), device=device))  # creates the tensors of the scaler
    return scaler
