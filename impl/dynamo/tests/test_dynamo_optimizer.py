"""Decisions of impl.dynamo about an optimizer, in every combination, and its installation in Dynamo."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch._dynamo.variables.builder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import impl.dynamo
from impl import drop_in
from impl.dynamo.optimizer import belongs_with_parameter, may_be_capturable

DEVICES = ("cpu", "cuda", "xpu", "mps", "meta")


@pytest.mark.parametrize(
    "types", [types for size in range(4) for types in itertools.product(DEVICES, repeat=size)], ids=str
)
def test_capturable_needs_cuda_or_xpu_parameters(types: tuple[str, ...]) -> None:
    assert may_be_capturable(types) == (
        bool(types) and all(device_type in ("cuda", "xpu") for device_type in types)
    )


@pytest.mark.parametrize("name", ["step", "mu_product", "exp_avg"])
@pytest.mark.parametrize(("at", "parameter_at"), list(itertools.product(DEVICES, repeat=2)))
def test_cpu_scalars_move_to_parameter_device(name: str, at: str, parameter_at: str) -> None:
    moves = belongs_with_parameter(name, at, parameter_at)
    assert moves == (name != "exp_avg" and at == "cpu" and parameter_at != "cpu")


def tracker() -> type:
    return torch._dynamo.variables.builder.OptimizerVariable


@pytest.fixture(autouse=True)
def _no_hooks_of_other_tests() -> Iterator[None]:
    """Dynamo traces the hooks of all optimizers, and compiles a graph for what follows a break before them."""
    with (
        mock.patch.dict(_global_optimizer_pre_hooks, clear=True),
        mock.patch.dict(_global_optimizer_post_hooks, clear=True),
    ):
        yield


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = tracker()
    assert before is not impl.dynamo.OptimizerVariable
    yield
    impl.dynamo.uninstall()
    drop_in.uninstall()
    assert tracker() is before


def test_install_lasts_until_uninstall() -> None:
    impl.dynamo.install()
    impl.dynamo.install()
    assert tracker() is impl.dynamo.OptimizerVariable
    assert torch._dynamo.variables.OptimizerVariable is impl.dynamo.OptimizerVariable
    impl.dynamo.uninstall()
    assert tracker() is not impl.dynamo.OptimizerVariable


def test_installed_block_ends_after_exception() -> None:
    with pytest.raises(ZeroDivisionError), impl.dynamo.installed():
        _ = 1 / 0
    assert tracker() is not impl.dynamo.OptimizerVariable


def test_drop_in_brings_it_along() -> None:
    with drop_in.installed():
        assert tracker() is impl.dynamo.OptimizerVariable
    assert tracker() is not impl.dynamo.OptimizerVariable


def test_drop_in_leaves_what_was_installed_before_it() -> None:
    impl.dynamo.install()
    with drop_in.installed():
        pass
    assert tracker() is impl.dynamo.OptimizerVariable
    with drop_in.installed():
        impl.dynamo.uninstall()
        assert tracker() is impl.dynamo.OptimizerVariable
    assert tracker() is not impl.dynamo.OptimizerVariable


def test_installed_tracker_traces_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.Adam([parameter], lr=0.5)
    optimizer.add_param_group({"params": []})
    torch._dynamo.reset()
    with impl.dynamo.installed():
        torch.compile(optimizer.step, backend="eager")()
    torch._dynamo.reset()
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 0.5))
    assert [group["capturable"] for group in optimizer.param_groups] == [False, False]


class CountsCalls(torch.optim.SGD):
    calls = 0

    def _init_group(self, *args, **kwargs):
        self.calls += 1
        return super()._init_group(*args, **kwargs)


def test_init_group_runs_once_outside_the_trace() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = CountsCalls([parameter], lr=0.25)
    with impl.dynamo.installed():
        step = torch.compile(optimizer.step, backend="eager")
        step()
        step()
    assert parameter.tolist() == [0.5, 0.5]
    assert optimizer.calls == 1  # a trace would count in both steps


def test_parameters_are_static_after_a_compiled_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with impl.dynamo.installed():
        torch.compile(torch.optim.SGD([parameter], lr=0.5).step, backend="eager")()
    assert torch._dynamo.utils.get_static_address_type(parameter) == "guarded"
    assert torch._dynamo.utils.get_static_address_type(parameter.grad) is None


# The optimizers of `torch.optim` with `capturable` whose states fake tensors can hold in every supported torch.
CAPTURABLE = ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop")


@pytest.mark.parametrize("has_closure", [False, True])
@pytest.mark.parametrize("accelerator", ["cuda", "xpu"])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_step_on_fake_accelerator_is_compiled(name: str, accelerator: str, has_closure: bool) -> None:
    """Compile multi-tensor steps, the default on an accelerator. torch traces them only as capturable."""
    fake = FakeTensorMode()
    graphs: list[torch.fx.GraphModule] = []

    class InFakeMode(getattr(torch.optim, name)):
        def _init_group(self, *args, **kwargs):
            # Dynamo leaves the mode for this call, and the machine may lack the device.
            with fake:
                return super()._init_group(*args, **kwargs)

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    def closure() -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return torch.tensor(7.0)

    with fake:
        parameters = [torch.nn.Parameter(torch.ones(2, 3, device=accelerator)) for _ in range(2)]
        optimizer = InFakeMode(parameters, lr=0.1)
        torch._dynamo.reset()
        with impl.dynamo.installed():
            step = torch.compile(optimizer.step, backend=keep)
            for _ in range(3):
                if has_closure:
                    step(closure)
                else:
                    closure()
                    step()
    torch._dynamo.reset()
    assert len(graphs) == (2 if has_closure else 1)
    assert {optimizer.state[parameter]["step"].device.type for parameter in parameters} == {accelerator}
    assert [group["capturable"] for group in optimizer.param_groups] == [False]


@pytest.mark.parametrize("foreach", [False, True])
def test_closure_is_no_part_of_the_step_if_it_sets_gradients(foreach: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(len(inputs))
        return graph.forward

    def closures(gradient: float) -> object:
        def closure() -> float:
            parameter.grad = torch.full((2,), gradient)
            return gradient

        return closure

    optimizer = torch.optim.Adam([parameter], lr=0.5, betas=(0.0, 0.0), eps=0.0, foreach=foreach)
    torch._dynamo.reset()
    with impl.dynamo.installed():
        step = torch.compile(optimizer.step, backend=count)
        for gradient in (1.0, -1.0, 2.0):
            assert step(closures(gradient)) == gradient
        assert parameter.tolist() == [0.5, 0.5]
        # The code that calls a closure must not serve a step without one.
        parameter.grad = torch.ones(2)
        step()
    torch._dynamo.reset()
    assert parameter.tolist() == [0.0, 0.0]
