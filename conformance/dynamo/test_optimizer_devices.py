"""Devices of an optimizer's tensors, static addresses, and tensors that remain after the optimizer is deleted."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.strategies.compiled_steps import (
    CompiledHarness,
    GraphCounter,
    Script,
    compare_compiled,
    outcome,
    soon,
    tracing_of,
)
from conformance.strategies.optimizers import Make, draw_gradient, four_parameters, maker
from conformance.strategies.user_optimizers import Collecting, CountingOnDevices, KeepingElsewhere

SGD, ADAM = maker("SGD", options=["momentum"]), maker("Adam")


@clause("dynamo.optimizer.devices.addresses")
@pytest.mark.parametrize("make", [SGD, Collecting])
def test_parameters_and_state_are_marked_as_guarded(compare: Compare, device: str, make: Make) -> None:
    def script(harness: CompiledHarness) -> Any:
        harness.without_gradient = {2}
        return harness.train().marks()["gradients"], harness.train(2).marks()

    compiled_with, marks = compare_compiled(compare, script, make, device=device)
    assert set(compiled_with) == {"None", "no tensor"}
    assert set(marks["parameters"]) == {"guarded"}
    assert set(marks["gradients"]) == {"None", "no tensor"}
    assert {mark for entry in marks["state"] for mark in entry.values()} == (
        {"guarded"} if make is SGD else set()
    )


@clause("dynamo.optimizer.devices.addresses")
def test_tensors_of_nested_state_are_marked(compare: Compare, device: str) -> None:
    def script(harness: CompiledHarness) -> Any:
        harness.train()
        factors = [torch.ones(2, device=device), torch.ones(2, device=device)]
        harness.optimizer.state[harness.parameters[1]]["factors"] = {
            "rows": factors[0],
            "columns": [factors[1]],
        }
        harness.train()
        return [getattr(factor, "_dynamo_static_input_type", None) for factor in factors], harness.seen()

    marks, _ = compare_compiled(compare, script, ADAM, device=device)
    assert marks == ["guarded", "guarded"]


def where_scalars_go(name: str) -> Script:
    """Return a script that reports the devices of scalars after plain steps, and after compiled ones."""

    def script(harness: CompiledHarness) -> Any:
        def devices() -> list[str]:
            return [str(harness.optimizer.state[parameter][name].device) for parameter in harness.parameters]

        harness.plain_train(2)
        before = devices()
        harness.train(2)
        return before, devices()

    return script


@clause("dynamo.optimizer.devices.scalars_move")
@pytest.mark.parametrize("name", soon(["Adam", "RMSprop", "Rprop"], "Adam"))
def test_loaded_step_counts_move(compare: Compare, name: str) -> None:
    """Move the counts to the meta device, which every machine has."""
    devices = compare_compiled(compare, where_scalars_go("step"), maker(name), device="meta")
    assert devices == (["cpu"] * 4, ["meta"] * 4)


@clause("dynamo.optimizer.devices.scalars_move")
@pytest.mark.deviation("optimizer_variable.products_move_too")
def test_momentum_product_moves_to_device(deviation: DeviationJudge) -> None:
    script = where_scalars_go("mu_product")

    def probe(library: Library) -> Any:
        result = outcome(library, script, maker("NAdam"), device="meta")
        return result.raised.kind.__name__ if result.raised else result.value

    deviation.judge(
        probe,
        torch_does=lambda result: result == "TorchRuntimeError",
        we_do=lambda result: result == (["cpu"] * 4, ["meta"] * 4),
    )


@clause("dynamo.optimizer.devices.scalars_move")
def test_step_counts_on_the_cpu_stay_the_same_tensors(subject: Library) -> None:
    def script(harness: CompiledHarness) -> bool:
        state = harness.plain_train(2).optimizer.state
        before = [state[parameter]["step"] for parameter in harness.parameters]
        harness.train(2)
        return all(
            state[parameter]["step"] is step
            for parameter, step in zip(harness.parameters, before, strict=True)
        )

    assert outcome(subject, script, ADAM).value is True


@clause("dynamo.optimizer.devices.capturable")
@pytest.mark.parametrize("first", ["compiled", "plain"])
def test_step_counts_are_on_capturing_device(subject: Library, device: str, first: str) -> None:
    if device != "cuda":
        unavailable("no device that can capture")

    def script(harness: CompiledHarness) -> Any:
        (harness.train if first == "compiled" else harness.plain_train)(1)
        harness.without_gradient = set()
        harness.train(2)
        return {
            harness.optimizer.state[parameter]["step"].device.type for parameter in harness.parameters
        }, harness.graphs.inputs

    devices, _ = outcome(subject, script, ADAM, device=device).value
    assert devices == {"cuda"}


@clause("dynamo.optimizer.devices.capturable")
@pytest.mark.parametrize("device_type", ["cuda", "xpu", "cpu"])
def test_step_counts_of_fake_tensors(compare: Compare, device_type: str) -> None:
    """Fake tensors can be on a device that the machine lacks. The optimizer creates them as its group says."""
    fake = FakeTensorMode()
    with fake:
        parameters = [torch.nn.Parameter(torch.ones(2, 3, device=device_type)) for _ in range(2)]

    def script(harness: CompiledHarness) -> Any:
        with fake:
            for parameter in harness.parameters:
                parameter.grad = torch.ones_like(parameter)
            harness.take_step()
        steps = [harness.optimizer.state[parameter]["step"] for parameter in harness.parameters]
        return [step.device.type for step in steps], harness.graphs.inputs

    devices, _ = compare_compiled(compare, script, CountingOnDevices, parameters=parameters)
    assert devices == [device_type if device_type in ("cuda", "xpu") else "cpu"] * 2


@clause("dynamo.optimizer.devices.capturable")
def test_no_step_reads_a_count(subject: Library, device: str) -> None:
    """No step after the first is recompiled for a count, although no group is capturable."""

    def script(harness: CompiledHarness) -> list[int]:
        return harness.train(12).compiled_after

    assert outcome(subject, script, ADAM, device=device).value == [1] * 12


def watched(harness: CompiledHarness) -> list[weakref.ref[torch.Tensor]]:
    """Return weak references to all tensors of the optimizer, in its groups, state and other attributes."""
    leaves = tree_leaves([*vars(harness.optimizer).values()])
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return [weakref.ref(tensor) for tensor in tensors.values()]


@clause("dynamo.optimizer.lifetime.freed")
@pytest.mark.parametrize("backend", soon(["eager", "aot_eager"], "aot_eager"))
@pytest.mark.parametrize("make", [SGD, ADAM])
def test_tensors_are_freed_with_optimizer(subject: Library, device: str, make: Make, backend: str) -> None:
    with tracing_of(subject):
        harness = CompiledHarness(make, device, backend)
        harness.without_gradient = {3}
        harness.train(2)
        harness.without_gradient = set()
        harness.train(2)
        alive = watched(harness)
        graphs = harness.graphs
        del harness
        gc.collect()
        assert graphs.inputs, "nothing was compiled"
        assert alive
        assert [ref().shape for ref in alive if ref() is not None] == []


def left_in_what_a_backend_keeps(
    library: Library, make: Make, device: str, graphs: int
) -> tuple[int, list[str]]:
    """Return how many tensors of a deleted optimizer are alive, and the unraisable errors of its deletion."""
    compiled_graphs: list[Any] = []
    compile_ = lookup_backend("aot_eager")

    def keep(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled_graphs.append((module, compile_(module, inputs)))
        return compiled_graphs[-1][1]

    with tracing_of(library), mock.patch.object(sys, "unraisablehook") as complain:
        harness = CompiledHarness(make, device)
        harness.step = torch.compile(harness.optimizer.step, backend=keep)
        harness.train(2)
        alive = watched(harness)
        assert alive
        del harness
        gc.collect()
        assert len(compiled_graphs) == graphs, "another number of graphs than of kinds of steps"
        complaints = [repr(call.args[0].exc_value) for call in complain.call_args_list]
        return sum(ref() is not None for ref in alive), complaints


@clause("dynamo.optimizer.lifetime.freed")
@pytest.mark.deviation("optimizer_variable.graphs_that_are_kept")
def test_tensors_leave_graphs_that_a_backend_keeps(deviation: DeviationJudge, device: str) -> None:
    """The tensors also leave the backend's compiled versions of the graphs."""
    deviation.judge(
        lambda library: left_in_what_a_backend_keeps(library, SGD, device, graphs=2),
        torch_does=lambda result: result == (1, []),
        we_do=lambda result: result == (0, []),
    )


@clause("dynamo.optimizer.lifetime.freed")
def test_tensors_outside_state_leave_kept_graphs(subject: Library, device: str) -> None:
    assert left_in_what_a_backend_keeps(subject, KeepingElsewhere, device, graphs=1) == (0, [])


@clause("dynamo.optimizer.optimizer.several")
def test_new_optimizer_at_old_address_steps_its_own_parameters(subject: Library, device: str) -> None:
    with tracing_of(subject):
        graphs = GraphCounter("eager")
        step = torch.compile(lambda optimizer: optimizer.step(), backend=graphs)
        addresses = []
        optimizer: Any = None
        for _ in range(4):
            parameters = four_parameters(device)
            # Free the old optimizer immediately before the new one is created, which then gets its memory.
            optimizer = None
            optimizer = SGD(parameters)
            addresses.append(id(optimizer))
            for index, parameter in enumerate(parameters):
                parameter.grad = draw_gradient(parameter, index)
            lr = optimizer.param_groups[0]["lr"]
            expected = [p.detach() - lr * p.grad for p in parameters]
            step(optimizer)
            torch.testing.assert_close([p.detach() for p in parameters], expected)
        assert graphs.inputs, "nothing was compiled"
        assert len({*addresses}) < len(addresses), "no optimizer is at the address of an earlier one"
