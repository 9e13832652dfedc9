"""Calls of `impl` that are allowed, recorded while it trains."""

from __future__ import annotations

import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.api import MixedPrecision

from conformance.strategies.wrapping import StandInWrapper
from impl.tests.rewritten import ALLOWED, REWRITTEN, is_product, is_within


class CallRecorder:
    """Notes each call from `impl` into a function of a rewritten module, however it was reached."""

    # Decorators are between the two: the function that they wrap counts.
    BETWEEN = ("torch.utils._contextlib", "contextlib", "functools")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seen = 0

    def __enter__(self) -> CallRecorder:
        self._before = sys.getprofile()
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _on_event(self, frame: types.FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        name = self._module(frame)
        self.seen += is_product(name)
        if is_within(name, REWRITTEN) and not is_within(name, ALLOWED):
            caller = next(above for above in self._above(frame) if above not in self.BETWEEN)
            if is_product(caller):
                self.calls.append(f"{caller} calls {name}.{frame.f_code.co_name}")

    @staticmethod
    def _module(frame: types.FrameType) -> str:
        return str(frame.f_globals.get("__name__", ""))

    def _above(self, frame: types.FrameType) -> Iterator[str]:
        above = frame.f_back
        while above is not None:
            yield self._module(above)
            above = above.f_back
        yield ""


def train() -> None:
    amp, utils = importlib.import_module("impl.amp"), importlib.import_module("impl.nn.utils")
    doubled = doubling(amp)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for step in range(3):
        optimizer.zero_grad()
        with amp.autocast("cpu", dtype=torch.bfloat16), amp.autocast("cpu", enabled=step > 0):
            loss = doubled.apply(model(torch.ones(3, 4))).float().pow(2).mean()
        scaler.scale([loss])[0].backward()
        if step == 1:
            model.weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        utils.clip_grad_norm_(model.parameters(), 1.0)
        utils.clip_grads_with_norm_(model.parameters(), 1.0, utils.get_total_norm([model.weight.grad]))
        utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    copy = amp.GradScaler("cpu")
    copy.load_state_dict(scaler.state_dict())
    assert copy.get_scale() == scaler.get_scale()
    amp.autocast("cpu")(model)(torch.ones(1, 4))
    amp.is_autocast_available("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils.clip_grad_norm(model.parameters(), 1.0)
        for old in ("cpu", "cuda"):
            older = importlib.import_module(f"impl.{old}.amp")
            older.autocast(enabled=False)
            older.GradScaler(enabled=False)


def doubling(amp: Any) -> Any:
    class Doubling(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    return Doubling


def test_training_step_calls_no_reimplemented_function() -> None:
    with CallRecorder() as watch:
        train()
    assert watch.seen > 20, "the watch saw hardly anything of impl run"
    assert watch.calls == []


def wrap_modules() -> None:
    wrapping = importlib.import_module("impl.distributed.fsdp.wrap")
    with wrapping.enable_wrap(wrapper_cls=torch.nn.Sequential):
        wrapping.wrap(torch.nn.ReLU())
    linear = {torch.nn.Linear}
    for policy in (
        wrapping.always_wrap_policy,
        wrapping.ModuleWrapPolicy(linear),
        wrapping.CustomPolicy(lambda module: isinstance(module, torch.nn.Linear)),
        functools.partial(wrapping.lambda_auto_wrap_policy, lambda_fn=lambda _: True),
        functools.partial(wrapping.size_based_auto_wrap_policy, min_num_params=1),
        functools.partial(wrapping.transformer_auto_wrap_policy, transformer_layer_cls=linear),
    ):
        wrapping.auto_wrap(
            torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)]),
            policy,
            ignored_modules=set(),
            ignored_params=set(),
            wrapper_cls=StandInWrapper,
            wrapper_kwargs={"mixed_precision": MixedPrecision(), "use_orig_params": True},
        )


@pytest.mark.filterwarnings("ignore:Both mixed precision")
def test_wrapping_calls_nothing_of_what_impl_rewrites() -> None:
    with CallRecorder() as watch:
        wrap_modules()
    assert watch.seen > 20, "the watch saw hardly anything of impl run"
    assert watch.calls == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.autocast("cpu"),
        lambda: torch.amp.GradScaler("cpu", enabled=False).get_scale(),
        lambda: torch.nn.utils.clip_grad_norm_([], 1.0),
        lambda: torch.utils.swap_tensors,
    ],
    ids=["autocast", "GradScaler", "clip_grad_norm_", "none of them"],
)
def test_call_recorder_sees_disguised_calls(request: pytest.FixtureRequest, call: Callable[[], Any]) -> None:
    """Run the same code twice: once as if it were in impl, and once as code of this test."""
    disguised = types.FunctionType(call.__code__, {"__name__": "impl.disguised", "torch": torch})
    with CallRecorder() as watch:
        disguised()
    assert bool(watch.calls) is (request.node.callspec.id != "none of them")
    with CallRecorder() as watch:
        call()
    assert watch.calls == []
