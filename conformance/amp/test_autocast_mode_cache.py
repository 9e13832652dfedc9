"""Cached casts of an autocast region: how often it casts, and when cached casts are out of date."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.regions import Planned


class CastCounter(TorchDispatchMode):
    """Counts the casts of tensors that actually run."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.casts += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@clause("amp.autocast_mode.autocast.cache")
@pytest.mark.parametrize("cache_enabled", [None, True, False])
@pytest.mark.parametrize("leaf", [True, False])
def test_casts_of_leaves_are_cached(
    subject: Library, device: str, cache_enabled: bool | None, leaf: bool
) -> None:
    """Use a weight, or the result of an operation, five times in each of two regions."""
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    used = weight if leaf else weight * 2
    x = torch.ones(4, 4, device=device, dtype=torch.bfloat16)
    with CastCounter() as counter:
        for _ in range(2):
            with subject.amp.autocast(device, dtype=torch.bfloat16, cache_enabled=cache_enabled):
                for _ in range(3):
                    _ = x @ used
                with subject.amp.autocast(device, dtype=torch.bfloat16, cache_enabled=cache_enabled):
                    _ = x @ used
                _ = x @ used
    assert counter.casts == (2 if leaf and cache_enabled is not False else 10)


class CastScene:
    """A weight of ones, regions, and a record of the weight's uses."""

    def __init__(self, library: Library, device: str) -> None:
        self.library, self.device = library, device
        self.weight = self.leaf(1.0)
        self.records: list[Any] = []
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
            self.records.append((casts, product.dtype, product[0, 0].item(), product.requires_grad))
            total = total + product.float().sum()
        return total


@torch.no_grad()
def fill(weight: torch.Tensor, value: float) -> None:
    weight.fill_(value)


Script = Callable[[CastScene], Any]


def frozen(scene: CastScene) -> None:
    """Use a weight that does not require grad, whose casts are not kept."""
    weight = scene.weight.requires_grad_(False)
    with scene.region():
        scene.use(weight, times=2)
        fill(weight, 3.0)
        scene.use(weight)


def starts_to_require_gradients(scene: CastScene) -> None:
    """Change a weight after its use without grad, and use it with grad."""
    weight = scene.weight.requires_grad_(False)
    with scene.region():
        scene.use(weight)
        fill(weight, 3.0)
        scene.use(weight.requires_grad_(), times=2)


def stops_to_require_gradients(scene: CastScene) -> None:
    """Change a weight after its use with grad, and use it without grad."""
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
    """Use the weight of a copied module, and a weight that two modules share."""
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
    """Use views of a weight, which are cast each time."""
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
    """Use weights in 16-bit dtypes."""
    with scene.region():
        scene.use(scene.leaf(2.0, torch.float16), scene.leaf(3.0, torch.bfloat16), times=2)


def short_lived(scene: CastScene) -> None:
    """Use short-lived weights one after the other, which may have the memory and address of an earlier one."""
    with scene.region():
        for value in range(20):
            scene.use(scene.leaf(float(value)))
            gc.collect(0)


def twins(scene: CastScene) -> None:
    """Use two equal weights, each with its own cast and gradient."""
    first, second = scene.leaf(1.0), scene.leaf(1.0)
    with scene.region():
        scene.use(first, second, times=2)
        (scene.use(first) * 2 + scene.use(second)).backward()
    scene.records.append((first.grad, second.grad))


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
    """Use a weight first in an inner region, whose cast is kept until the outer region ends, also a disabled one."""
    with scene.region():
        with scene.region():
            scene.use(scene.weight)
        scene.use(scene.weight)
    for value in (1.0, 3.0):
        fill(scene.weight, value)
        with scene.region(enabled=False):
            for _ in range(2):
                with scene.region():
                    scene.use(scene.weight)


def not_kept_inside(scene: CastScene) -> None:
    """Switch the cache off in an inner region."""
    weight = scene.weight
    with scene.region():
        scene.use(weight)
        with scene.region(cache_enabled=False):
            scene.use(weight, times=2)
            fill(weight, 3.0)
            scene.use(weight)


def kept_inside_alone(scene: CastScene) -> None:
    """Switch the cache on in inner regions only."""
    with scene.region(cache_enabled=False):
        scene.use(scene.weight, times=2)
        with scene.region(cache_enabled=True):
            scene.use(scene.weight, times=2)
        scene.use(scene.weight)
        with scene.region(cache_enabled=True):
            scene.use(scene.weight)


def switched_by_hand(scene: CastScene) -> None:
    """Switch the cache off and on within a region."""
    with scene.region():
        scene.use(scene.weight, times=2)
        torch.set_autocast_cache_enabled(False)
        scene.use(scene.weight, times=2)
        torch.set_autocast_cache_enabled(True)
        scene.use(scene.weight)


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
        scene.records.append(weight.grad.clone())
        scene.use(weight).backward()
    scene.records.append(weight.grad)


def used_in_float32_operator(scene: CastScene) -> None:
    """Use weights in a float32 operator, which gets the original float32 weight.

    The operator casts a low-precision weight each time.
    """
    low = scene.leaf(3.0, torch.bfloat16)
    target = torch.zeros(2, 2, device=scene.device)
    with scene.region():
        scene.use(scene.weight, low)
        for weight in (scene.weight, low):
            loss = F.mse_loss(weight, target)
            scene.records.append(loss.detach())
            loss.backward()
            scene.records.append(weight.grad)
        scene.use(scene.weight, low)


def cleared_gradients(scene: CastScene) -> None:
    """Run a backward and clear the gradient, twice."""
    weight = scene.weight
    with scene.region():
        for _ in range(2):
            scene.use(weight).backward()
            scene.records.append(weight.grad)
            weight.grad = None


def first_without_gradients(scene: CastScene, mode: Callable[[], Any] = torch.no_grad) -> None:
    """Use a weight first without gradients, as in an evaluation or the forward of an autograd.Function."""
    with scene.region():
        with mode():
            scene.use(scene.weight)
        scene.use(scene.weight).backward()
    scene.records.append(scene.weight.grad)


def first_in_inference_mode(scene: CastScene) -> None:
    first_without_gradients(scene, torch.inference_mode)


def disabled_in_another_dtype(scene: CastScene) -> None:
    """Use a weight in a disabled inner region that names another dtype."""
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
    as_decorator,
    trained_inside,
    used_in_float32_operator,
    cleared_gradients,
    first_without_gradients,
    first_in_inference_mode,
    disabled_in_another_dtype,
]


def played(library: Library, device: str, script: Script) -> Outcome:
    def play() -> list[Any]:
        scene = CastScene(library, device)
        script(scene)
        return scene.records

    return observe(play)


@clause("amp.autocast_mode.autocast.cache_of_which_tensors")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_cached_casts_match_torch(compare: Compare, device: str, script: Script) -> None:
    """A script uses weights in regions. Each use records (casts, dtype, value, requires_grad)."""
    [outcome] = compare(lambda library: played(library, device, script))
    assert outcome.value


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


@clause("amp.autocast_mode.autocast.cache_of_which_dtype")
@pytest.mark.deviation("autocast.casts_of_another_dtype")
@pytest.mark.parametrize("script", IN_ANOTHER_DTYPE, ids=lambda script: script.__name__)
def test_nested_region_of_another_dtype_casts_weights_again(
    deviation: DeviationJudge, device: str, script: Script
) -> None:
    """The weight is cast for each region whose dtype differs from that of the previous region."""
    low, other = torch.bfloat16, torch.float16
    # (casts, dtype, value, requires_grad) of each use
    expected = [(1, low, 2.0, True), (1, other, 2.0, True), (1, low, 2.0, True)]

    def probe(library: Library) -> Outcome:
        return played(library, device, script)

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome.raised is not None and "same dtype" in outcome.raised.text,
        we_do=lambda outcome: outcome.value == expected,
    )


def product_after_update(
    library: Library, device: str, update: Callable[[torch.nn.Parameter], None]
) -> float:
    """Return the product of a second region with a weight of 1 that `update` changes to 3 between two regions."""
    weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
    x = torch.ones(2, 2, device=device)
    region = library.amp.autocast(device, dtype=torch.bfloat16)
    with contextlib.suppress(Planned), region, library.amp.autocast(device, dtype=torch.bfloat16):
        _ = x @ weight
        raise Planned
    with torch.no_grad():
        update(weight)
    with library.amp.autocast(device, dtype=torch.bfloat16):
        return (x @ weight)[0, 0].item()


@clause("amp.autocast_mode.autocast.cache_after_exception")
@pytest.mark.parametrize("update", [lambda w: w.fill_(3), lambda w: w.data.copy_(torch.full((2, 2), 3.0))])
def test_region_after_exception_casts_updated_weights(
    subject: Library, device: str, update: Callable[[Any], None]
) -> None:
    assert product_after_update(subject, device, update) == 6.0


@clause("amp.autocast_mode.autocast.cache_sees_optimizer_steps")
@pytest.mark.deviation("autocast.cache_sees_optimizer_steps")
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("depth", [1, 2])
def test_optimizer_step_inside_region_renews_casts(
    deviation: DeviationJudge, device: str, optimizer: str, depth: int
) -> None:
    def probe(library: Library) -> list[bool]:
        """Return whether the product after the step uses the old weight, and whether it uses the new one."""
        weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
        x = torch.ones(2, 2, device=device)
        stepper = getattr(torch.optim, optimizer)([weight], lr=0.5)
        with contextlib.ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(library.amp.autocast(device, dtype=torch.bfloat16))
            former = x @ weight
            former.sum().backward()
            stepper.step()
            used = x @ weight
        expected = x.bfloat16() @ weight.detach().bfloat16()
        return [torch.equal(used, weight) for weight in (former, expected)]

    deviation.judge(probe, we_do=lambda matches: matches == [False, True])


@clause("amp.autocast_mode.autocast.cache_sees_optimizer_steps")
def test_cleared_cache_casts_weight_again(subject: Library, device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
    x = torch.ones(2, 2, device=device)
    with subject.amp.autocast(device, dtype=torch.bfloat16):
        _ = x @ weight
        weight.data.fill_(3)
        torch.clear_autocast_cache()
        assert (x @ weight)[0, 0].item() == 6.0
