"""Parameters and state after compiled steps, compared with torch's compiled steps and with plain steps."""

from __future__ import annotations

import contextlib
import inspect
import shutil
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace

import pytest
import torch
import torch._inductor.config
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.judge.sandbox.global_state import put_back, read
from conformance.judge.sandbox.process_state import PROCESS
from conformance.strategies.compiled_steps import CompiledHarness, compare_compiled, outcome, soon, tracing_of
from conformance.strategies.optimizers import (
    COMPILED,
    WAYS,
    Make,
    against_eager,
    decay_cases,
    draw_gradient,
    four_parameters,
    has_way,
    is_compiled,
    maker,
    option_groups,
    options_of,
)

STEPS = 5
CASES = [(name, way) for name in COMPILED for way in WAYS if has_way(name, way)]
# torch's compiled steps with differentiable=True raise outside of no_grad.
OUTSIDE_NO_GRAD = [(name, way) for name, way in CASES if way != "differentiable"]
# These differ in the lists that their _init_group collects.
SOONEST = ("SGD", "Adam", "Muon")
# Fused steps are not part of a graph, and the other modes need a device that can capture.
IN_ONE_GRAPH = ("defaults", "foreach", "differentiable")
EACH_OPTION_SOON = [("SGD", "defaults"), ("Adam", "foreach")]


@contextlib.contextmanager
def inductor_cleared_up() -> Generator[None]:
    """Context manager in which inductor compiles in this thread, and after which its process settings are restored."""
    set_by_it = {name: PROCESS[name] for name in ("the environment", "the recursion limit")}
    before = read(set_by_it)
    try:
        with torch._inductor.config.patch(compile_threads=1):
            yield
    finally:
        put_back(set_by_it, before)


def after_each_step(harness: CompiledHarness) -> list[object]:
    return [harness.train().values() for _ in range(STEPS)]


def assert_as_torch_compiles(
    compare: Compare,
    device: str,
    name: str,
    way: str = "defaults",
    options: Iterable[str] = (),
    backend: str = "aot_eager",
) -> None:
    compare_compiled(
        compare,
        after_each_step,
        maker(name, way, options),
        must_compile=is_compiled(name, way),
        device=device,
        backend=backend,
    )


@clause("dynamo.optimizer.values.as_torch_compiles")
@pytest.mark.parametrize("name", soon(COMPILED, *SOONEST))
def test_steps_with_all_options_match_compiled_torch(compare: Compare, device: str, name: str) -> None:
    way = "foreach" if has_way(name, "foreach") else "defaults"
    assert_as_torch_compiles(compare, device, name, way, options_of(name))


@clause("dynamo.optimizer.values.as_torch_compiles")
@pytest.mark.profile("full")
@pytest.mark.parametrize(("name", "way"), OUTSIDE_NO_GRAD)
def test_each_way(compare: Compare, device: str, name: str, way: str) -> None:
    assert_as_torch_compiles(compare, device, name, way)


@clause("dynamo.optimizer.values.as_torch_compiles")
@pytest.mark.parametrize("name", soon(["SGD", "Adam"], "Adam"))
def test_complex_parameters(compare: Compare, device: str, name: str) -> None:
    """Multi-tensor code learns of complex parameters from the result of _init_group."""

    def script(harness: CompiledHarness) -> list[object]:
        for parameter in harness.parameters:
            parameter.data = torch.complex(parameter.data, parameter.data.flip(0))
        return after_each_step(harness)

    compare_compiled(compare, script, maker(name, "foreach"), device=device, backend="aot_eager")


@clause("dynamo.optimizer.values.as_torch_compiles")
@pytest.mark.profile("deep")
@settings(max_examples=100)
@given(data=st.data())
def test_any_options(compare: Compare, device: str, data: st.DataObject) -> None:
    name, way = data.draw(st.sampled_from(OUTSIDE_NO_GRAD))
    options = data.draw(st.sets(st.sampled_from(options_of(name) or ["weight_decay"])))
    if name == "SGD" and "nesterov" in options:
        options |= {"momentum"}
    assert_as_torch_compiles(compare, device, name, way, options & {*options_of(name)})


@clause("dynamo.optimizer.values.as_eager")
@pytest.mark.parametrize("name", soon(COMPILED, "RMSprop"))
def test_against_plain_steps(subject: Library, device: str, name: str) -> None:
    make = maker(name, "defaults", options_of(name))
    plain = observe(lambda: CompiledHarness(make, device).plain_train(STEPS).weights())
    compiled = outcome(
        subject,
        lambda harness: harness.train(STEPS).weights(),
        make,
        must_compile=is_compiled(name),
        device=device,
        backend="aot_eager",
    )
    assert compiled.raised is None
    assert_same_outcome(plain, compiled, against_eager(name))


def trained_in_one_graph(
    makers: Sequence[Make], device: str, *, compiled: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters and gradients of optimizers of one parameter each, after three joint steps.

    Compiled, one graph has the full steps of all optimizers.
    """
    parameters = [four_parameters(device)[0] for _ in makers]
    optimizers = [make([parameter]) for make, parameter in zip(makers, parameters, strict=True)]

    def step() -> None:
        for optimizer in optimizers:
            inspect.unwrap(type(optimizer).step)(optimizer)

    run = torch.compile(step, backend="eager", fullgraph=True) if compiled else step
    for number in range(3):
        for parameter in parameters:
            parameter.grad = draw_gradient(parameter, number)
        with torch.no_grad():
            run()
    return [(parameter.detach(), parameter.grad) for parameter in parameters]


def steps_in_one_graph(subject: Library, makers: Sequence[Make], device: str) -> tuple[Outcome, Outcome]:
    """Return the outcomes of plain and of compiled steps."""
    plain = observe(trained_in_one_graph, makers, device, compiled=False)
    with tracing_of(subject):
        compiled = observe(trained_in_one_graph, makers, device, compiled=True)
    assert plain.raised is None, "the optimizer refuses these options"
    return plain, replace(compiled, warned=plain.warned)


@clause("dynamo.optimizer.values.each_option")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, way) in EACH_OPTION_SOON else pytest.mark.profile("full"))
        for name, way in CASES
        if way in IN_ONE_GRAPH
    ],
)
def test_each_option(subject: Library, device: str, name: str, way: str) -> None:
    makers = [maker(name, way, **options) for options in option_groups(name)]
    assert_same_outcome(*steps_in_one_graph(subject, makers, device), against_eager(name))


@clause("dynamo.optimizer.values.each_option")
def test_weight_decay_of_each_optimizer(subject: Library, device: str) -> None:
    cases = decay_cases()
    makers = [maker(name, **options) for name, options in cases]
    plain, compiled = steps_in_one_graph(subject, makers, device)
    assert compiled.raised is None
    for (name, _), expected, actual in zip(cases, plain.value, compiled.value, strict=True):
        assert_same_outcome(Outcome((name, expected)), Outcome((name, actual)), against_eager(name))


@clause("dynamo.optimizer.values.as_eager")
@pytest.mark.profile("full")
def test_plain_steps_after_compiled_ones(subject: Library, device: str) -> None:
    """Plain steps can continue from the state that compiled steps leave."""
    make = maker("Adam", options=["amsgrad", "weight_decay"])
    plain = observe(lambda: CompiledHarness(make, device).plain_train(STEPS).weights())
    mixed = outcome(
        subject,
        lambda harness: harness.train(2).plain_train(2).train(1).weights(),
        make,
        device=device,
    )
    assert mixed.raised is None
    assert_same_outcome(plain, mixed, against_eager("Adam"))


@clause("dynamo.optimizer.values.inductor")
@pytest.mark.profile("deep")
@pytest.mark.deadline(600)
@pytest.mark.parametrize("name", COMPILED)
def test_through_inductor(compare: Compare, device: str, name: str) -> None:
    if device == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        unavailable("no C++ compiler")
    with inductor_cleared_up():
        assert_as_torch_compiles(compare, device, name, backend="inductor")
