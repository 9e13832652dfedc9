"""What the benchmarks share: shapes, inputs from a fixed seed, and the subjects by name.

Shapes are only ever added to: an old commit is timed with today's benchmarks.
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
# "kept": the gradients stay where they are. "renewed": each call finds gradients at other addresses, as a training
# loop does that sets them to None.
GRADIENTS = ["kept", "renewed"]


def _gpt2() -> list[tuple[int, ...]]:
    """The parameters of GPT-2's smallest model: 148 tensors, 124 million elements."""
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
# A billion parameters, which `ci/gpu` alone times: too many for the benchmarks that take all of SHAPES.
LARGE_SHAPES: dict[str, list[tuple[int, ...]]] = {"64x16m": [(1 << 24,)] * 64}
HEADLINES = ["1000x1k", "gpt2"]
# Values of parameters. Memory is measured with torch's other ways too, which no commit of ours changes.
LEFT_OUT_OF_HISTORY: LeftOut = {
    "shapes": set(SHAPES) - {"1x1k", *HEADLINES},
    "gradients": {"renewed"},
    "norm_type": {1.0, float("inf")},
    "subject": {"FSDP2", "DDP"},
}
# Steps of more ranks than cores are long and tell least; foreach and FSDP1 are other ways of torch's for the same step
# of ours. What each rank saves of its own takes no time beside whole states.
LEFT_OUT_OF_QUICK: LeftOut = {
    **LEFT_OUT_OF_HISTORY,
    "world_size": {1, 4},
    "against": {"foreach", "FSDP1"},
    "shards": {"saved", "loaded"},
    "what": {"optimizer"},
    "kind": {"FULL"},
}


def tells_most(given: Mapping[str, Any], left_out: LeftOut) -> bool:
    """Whether none of a case's parameters, by name, has a value that is left out."""
    return not any(given.get(name) in values for name, values in left_out.items())


def member(subject: str, path: str) -> Any:
    """`member("impl", "nn.utils.clip_grad_norm_")`: the same path in every subject.

    Raises NotImplementedError where the subject, or the commit being timed, has no such name: asv shows n/a.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{subject}.{module}"), name)
    except (ImportError, AttributeError) as missing:
        raise NotImplementedError(f"{subject} has no {path} ({missing})") from missing


@functools.cache
def ranks(world_size: int) -> Any:
    """Of all cases that train on so many."""
    from conformance.ranks import RankPool  # noqa: PLC0415 (brings what only the judge needs)

    return RankPool(world_size)


def require(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise NotImplementedError("no CUDA device")


def some_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of a few thousand elements of each of at most 1000 tensors, the last element among them."""
    flat = [tensor.detach().flatten() for tensor in tensors[:1_000]]
    steps = [len(one) // 4_096 + 1 for one in flat]
    return [one[(len(one) - 1) % step :: step].clone() for one, step in zip(flat, steps, strict=True)]


def shapes_of(name: str) -> list[tuple[int, ...]]:
    return (SHAPES | LARGE_SHAPES)[name]


class TrainingTensors:
    """Parameters, gradients and torch's fused AdamW over them.

    Both subjects work on the same one, so that neither is favoured by where its memory happens to lie.
    """

    def __init__(self, shapes: str, dtype: str, device: str) -> None:
        require(device)
        self.device = device
        # On the device itself: one host thread takes seconds for the numbers of a large list.
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
        """Put the gradients where they have always been."""
        self._give(self._gradients)

    def renew(self) -> None:
        """Put gradients of the same values at other addresses, those of the call before last."""
        if not self._others:
            self._others = [gradient.clone() for gradient in self._gradients]
        self._give(self._others)
        self._gradients, self._others = self._others, self._gradients

    def _give(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def effect_on_gradients(self, call: Callable[[], object]) -> list[torch.Tensor]:
        """What `call` returned, if a tensor, and some of the gradients after it; all put back.

        Earlier calls may have left them clipped: they are made large again, so that this one has something to do.
        """
        before = [gradient.clone() for gradient in self._gradients]
        self.keep()
        torch._foreach_mul_(self._gradients, 1e-2 / float(some_of(self._gradients[:1])[0].double().std()))
        returned = call()
        after = some_of(self._gradients)
        torch._foreach_copy_(self._gradients, before)
        return [returned.clone(), *after] if isinstance(returned, torch.Tensor) else after

    def effect_on_step(self, call: Callable[[], object]) -> list[torch.Tensor]:
        """Some of the parameters after a first step by `call`, and what it did to the gradients; all put back."""
        before = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer.state.clear()
        gradients = self.effect_on_gradients(call)
        after = some_of(self.parameters)
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, before)
        return gradients + after

    def effect_on_parameters(self, call: Callable[[], object]) -> list[torch.Tensor]:
        """What `call` returned and some of the parameters after a first step by it; all put back."""
        returned, *effect = self.effect_on_step(call)
        return [returned, *effect[len(effect) // 2 :]]


@functools.lru_cache(maxsize=1)
def training(shapes: str, dtype: str, device: str) -> TrainingTensors:
    return TrainingTensors(shapes, dtype, device)


def scaler_of(subject: str, device: str) -> Any:
    """A scaler whose factor stays 1, so that its calls can be repeated on the same gradients."""
    require(device)
    scaler = member(subject, "amp.GradScaler")(device, init_scale=1.0, growth_interval=2**30)
    scaler.scale(torch.ones((), device=device))  # it makes its tensors when it is first used
    return scaler
