"""Scripts about a weight inside autocast regions. They record every use of the weight."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.judge.library import Library
from conformance.strategies.regions import Planned


class CastCounter(TorchDispatchMode):
    """Counts the casts of tensors that actually run."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.casts += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


class CastScene:
    """A weight of ones, regions, and a record of the weight's uses."""

    def __init__(self, library: Library, device: str) -> None:
        self.library, self.device = library, device
        self.weight = self.leaf(1.0)
        self.seen: list[Any] = []
        self._counter = CastCounter()

    def leaf(self, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((2, 2), value, device=self.device, dtype=dtype).requires_grad_()

    def region(self, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
        return self.library.amp.autocast(self.device, dtype=dtype, **options)

    def use(
        self, *weights: torch.Tensor, times: int = 1, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        """Multiply by each weight.

        Record the number of casts, the product's dtype and value, and whether it requires grad.
        """
        x = torch.ones(2, 2, device=self.device, dtype=dtype)
        total = torch.zeros((), device=self.device)
        for weight in weights * times:
            before = self._counter.casts
            with self._counter:
                product = x @ weight
            casts = self._counter.casts - before
            self.seen.append((casts, product.dtype, product[0, 0].item(), product.requires_grad))
            total = total + product.float().sum()
        return total


@torch.no_grad()
def fill(weight: torch.Tensor, value: float) -> None:
    weight.fill_(value)


Script = Callable[[CastScene], Any]


def frozen(scene: CastScene) -> None:
    weight = scene.weight.requires_grad_(False)
    with scene.region():
        scene.use(weight, times=2)
        fill(weight, 3.0)
        scene.use(weight)


def starts_to_require_gradients(scene: CastScene) -> None:
    weight = scene.weight.requires_grad_(False)
    with scene.region():
        scene.use(weight)
        fill(weight, 3.0)
        scene.use(weight.requires_grad_(), times=2)


def stops_to_require_gradients(scene: CastScene) -> None:
    weight = scene.weight
    with scene.region():
        scene.use(weight, times=2)
        weight.requires_grad_(False)
        fill(weight, 3.0)
        scene.use(weight, times=2)


def copies(scene: CastScene) -> None:
    """Use copies of a weight whose cast is cached. Each copy is a different tensor, even if it shares memory."""
    with scene.region():
        scene.use(scene.weight)
        for copied in (
            copy.deepcopy(scene.weight),
            scene.weight.clone(),
            scene.weight.detach(),
            scene.weight.detach().requires_grad_(),
            scene.weight.detach().clone().requires_grad_(),
            torch.nn.Parameter(scene.weight.detach().clone()),
        ):
            fill(copied.detach(), scene.weight[0, 0].item() + 1.0)
            scene.use(copied, times=2)


def copied_modules(scene: CastScene) -> None:
    module = torch.nn.Linear(2, 2, bias=False).to(scene.device)
    fill(module.weight, 1.0)
    with scene.region():
        scene.use(module.weight)
        twin = copy.deepcopy(module)
        fill(twin.weight, 3.0)
        scene.use(twin.weight, module.weight)
        other = torch.nn.Linear(2, 2, bias=False).to(scene.device)
        fill(other.weight, 5.0)
        other.weight = module.weight
        scene.use(other.weight)


def views(scene: CastScene) -> None:
    weight = scene.weight
    with scene.region():
        scene.use(weight, weight[:, :1], weight.t(), weight.view(2, 2), times=2)
        scene.use(weight.detach()[:, :1].requires_grad_(), times=2)


def results(scene: CastScene) -> None:
    """Use the result of an operation on a weight, which is cast each time."""
    with scene.region():
        doubled = scene.weight * 2
        scene.use(doubled, times=2)


def other_dtypes(scene: CastScene) -> None:
    with scene.region():
        scene.use(scene.leaf(2.0, torch.float16), scene.leaf(3.0, torch.bfloat16), times=2)


def short_lived(scene: CastScene) -> None:
    """Use short-lived weights one after the other, which may have the memory and address of an earlier one."""
    with scene.region():
        for value in range(20):
            scene.use(scene.leaf(float(value)))
            gc.collect(0)


def twins(scene: CastScene) -> None:
    first, second = scene.leaf(1.0), scene.leaf(1.0)
    with scene.region():
        scene.use(first, second, times=2)
        (scene.use(first) * 2 + scene.use(second)).backward()
    scene.seen.append((first.grad, second.grad))


def nested(scene: CastScene) -> None:
    """Use a weight in nested regions, which must not drop the cached casts of the outer region."""
    weight = scene.weight
    with scene.region():
        scene.use(weight)
        with scene.region():
            scene.use(weight)
        scene.use(weight)
        with scene.region(enabled=False):
            scene.use(weight, dtype=torch.float32)
        scene.use(weight)
        with contextlib.suppress(Planned), scene.region():
            scene.use(weight)
            raise Planned
        scene.use(weight)
    fill(weight, 3.0)
    with scene.region():
        scene.use(weight)


def first_used_inside(scene: CastScene) -> None:
    """Use a weight first in an inner region, whose cast is kept for the outer region."""
    with scene.region():
        with scene.region():
            scene.use(scene.weight)
        scene.use(scene.weight)
    with scene.region(enabled=False):
        with scene.region():
            scene.use(scene.weight)
        with scene.region():
            scene.use(scene.weight)


def not_kept_inside(scene: CastScene) -> None:
    weight = scene.weight
    with scene.region():
        scene.use(weight)
        with scene.region(cache_enabled=False):
            scene.use(weight, times=2)
            fill(weight, 3.0)
            scene.use(weight)


def kept_inside_alone(scene: CastScene) -> None:
    with scene.region(cache_enabled=False):
        scene.use(scene.weight, times=2)
        with scene.region(cache_enabled=True):
            scene.use(scene.weight, times=2)
        scene.use(scene.weight)
        with scene.region(cache_enabled=True):
            scene.use(scene.weight)


def switched_by_hand(scene: CastScene) -> None:
    with scene.region():
        scene.use(scene.weight, times=2)
        torch.set_autocast_cache_enabled(False)
        scene.use(scene.weight, times=2)
        torch.set_autocast_cache_enabled(True)
        scene.use(scene.weight)


def ended_by_an_exception(scene: CastScene) -> None:
    with contextlib.suppress(Planned), scene.region(), scene.region():
        scene.use(scene.weight)
        raise Planned
    fill(scene.weight, 3.0)
    with scene.region():
        scene.use(scene.weight, times=2)


def as_decorator(scene: CastScene) -> None:
    """Call a decorated function. Each call is its own region, unless it runs inside another region."""
    use = scene.region()(lambda: scene.use(scene.weight, times=2))
    for value in (1.0, 2.0):
        fill(scene.weight, value)
        use()
    with scene.region():
        use(), use()


def trained_inside(scene: CastScene) -> None:
    """Run several backwards through one cached cast."""
    weight = scene.weight
    with scene.region():
        scene.use(weight, times=2).backward()
        scene.seen.append(weight.grad.clone())
        scene.use(weight).backward()
    scene.seen.append(weight.grad)


def precise_beside(scene: CastScene) -> None:
    """Use weights in a float32 operator, which gets the original float32 weight.

    The operator casts a low-precision weight each time.
    """
    low = scene.leaf(3.0, torch.bfloat16)
    target = torch.zeros(2, 2, device=scene.device)
    with scene.region():
        scene.use(scene.weight, low)
        for weight in (scene.weight, low):
            loss = F.mse_loss(weight, target)
            scene.seen.append(loss.detach())
            loss.backward()
            scene.seen.append(weight.grad)
        scene.use(scene.weight, low)


def cleared_gradients(scene: CastScene) -> None:
    weight = scene.weight
    with scene.region():
        for _ in range(2):
            scene.use(weight).backward()
            scene.seen.append(weight.grad)
            weight.grad = None


def first_without_gradients(scene: CastScene) -> None:
    """Use a weight first without gradients, as in an evaluation or the forward of an autograd.Function."""
    with scene.region():
        with torch.no_grad():
            scene.use(scene.weight)
        scene.use(scene.weight).backward()
    scene.seen.append(scene.weight.grad)


def first_in_inference_mode(scene: CastScene) -> None:
    with scene.region():
        with torch.inference_mode():
            scene.use(scene.weight)
        scene.use(scene.weight).backward()
    scene.seen.append(scene.weight.grad)


def disabled_in_another_dtype(scene: CastScene) -> None:
    with scene.region():
        scene.use(scene.weight)
        with scene.region(torch.float16, enabled=False):
            scene.use(scene.weight, dtype=torch.float32)
        scene.use(scene.weight)


SCRIPTS: list[Script] = [
    frozen,
    starts_to_require_gradients,
    stops_to_require_gradients,
    copies,
    copied_modules,
    views,
    results,
    other_dtypes,
    short_lived,
    twins,
    nested,
    first_used_inside,
    not_kept_inside,
    kept_inside_alone,
    switched_by_hand,
    ended_by_an_exception,
    as_decorator,
    trained_inside,
    precise_beside,
    cleared_gradients,
    first_without_gradients,
    first_in_inference_mode,
    disabled_in_another_dtype,
]


def in_another_dtype(scene: CastScene) -> None:
    """Use a weight in an inner region of another dtype, and in the outer region again."""
    with scene.region():
        scene.use(scene.weight)
        with scene.region(torch.float16):
            scene.use(scene.weight, dtype=torch.float16)
        scene.use(scene.weight)


def in_another_dtype_behind_a_disabled_one(scene: CastScene) -> None:
    """Use a weight in a region of another dtype inside a disabled region that names that dtype."""
    with scene.region():
        scene.use(scene.weight)
        with scene.region(torch.float16, enabled=False), scene.region(torch.float16):
            scene.use(scene.weight, dtype=torch.float16)
        scene.use(scene.weight)


def in_another_dtype_out_of_order(scene: CastScene) -> None:
    """Leave the outer region first, then enter a region of its dtype inside the other one."""
    device = scene.device
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
        stack.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
        outer = stack.enter_context(contextlib.ExitStack())
        outer.enter_context(scene.region())
        scene.use(scene.weight)
        stack.enter_context(scene.region(torch.float16))
        scene.use(scene.weight, dtype=torch.float16)
        outer.close()
        stack.enter_context(scene.region())
        scene.use(scene.weight)


IN_ANOTHER_DTYPE: list[Script] = [
    in_another_dtype,
    in_another_dtype_behind_a_disabled_one,
    in_another_dtype_out_of_order,
]
