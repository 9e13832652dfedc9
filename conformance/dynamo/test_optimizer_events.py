"""Changes between two compiled steps: values, graphs and recompilations match torch's."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.strategies.compiled_steps import (
    CompiledHarness,
    Script,
    after,
    compare_compiled,
    outcome,
    soon,
    tracing_of,
)
from conformance.strategies.optimizers import COMPILED, four_parameters, is_compiled, maker

SGD = maker("SGD", options=["momentum"])
ADAM = maker("Adam", options=["weight_decay"])


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.01, "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@clause("dynamo.optimizer.graphs.one_for_a_step")
def test_graphs_of_two_groups_match_torch(compare: Compare, device: str) -> None:
    compare_compiled(compare, after(lambda harness: harness.train(3)), two_groups, device=device)


@clause("dynamo.optimizer.graphs.one_for_a_step")
@pytest.mark.parametrize("name", soon(COMPILED, "SGD", "Adam"))
def test_graphs_of_each_optimizer_match_torch(compare: Compare, device: str, name: str) -> None:
    script = after(lambda harness: harness.train(3))
    compare_compiled(compare, script, maker(name), must_compile=is_compiled(name), device=device)


def set_number(name: str, values: list[Any], group: int = 0) -> Script:
    def script(harness: CompiledHarness) -> None:
        for value in values:
            harness.train()
            harness.optimizer.param_groups[group][name] = value
        harness.train()

    return script


def scheduled(make_scheduler: Any) -> Script:
    def script(harness: CompiledHarness) -> None:
        scheduler = make_scheduler(harness.optimizer)
        for _ in range(4):
            harness.train()
            scheduler.step()

    return script


def fill_tensor_lr(harness: CompiledHarness) -> None:
    for value in (0.1, 0.2, 0.3):
        harness.optimizer.param_groups[0]["lr"].fill_(value)
        harness.train()


NUMBERS = {
    "lr": (set_number("lr", [0.1, 0.2, 0.3]), ADAM),
    "lr of the second group": (set_number("lr", [0.1, 0.2, 0.3], group=1), two_groups),
    "betas": (set_number("betas", [(0.5, 0.9), (0.6, 0.8), (0.7, 0.95)]), ADAM),
    "momentum": (set_number("momentum", [0.5, 0.6, 0.7]), SGD),
    "tensor lr": (fill_tensor_lr, maker("Adam", "tensor lr")),
    "tensor lr replaced": (
        set_number("lr", [torch.tensor(0.1), torch.tensor(0.2)]),
        maker("Adam", "tensor lr"),
    ),
    "tensor lr of another dtype": (
        set_number("lr", [torch.tensor(0.1), torch.tensor(0.2, dtype=torch.float64)]),
        maker("Adam", "tensor lr"),
    ),
    "StepLR": (scheduled(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)), SGD),
    "OneCycleLR": (
        scheduled(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)),
        ADAM,
    ),
}


@clause("dynamo.optimizer.guards.schedules")
@pytest.mark.parametrize(
    "case", soon(NUMBERS, "lr of the second group", "betas", "tensor lr", "tensor lr of another dtype")
)
def test_numbers_that_change(compare: Compare, device: str, case: str) -> None:
    script, make = NUMBERS[case]
    compare_compiled(compare, after(script), make, device=device)


def gradients_go(*which: int) -> Script:
    def script(harness: CompiledHarness) -> None:
        for lacking in (which, (), which):
            harness.without_gradient = set(lacking)
            harness.train(2)

    return script


def zero_grad(set_to_none: bool) -> Script:
    def script(harness: CompiledHarness) -> None:
        for _ in range(3):
            harness.set_gradients()
            gradients = [parameter.grad for parameter in harness.parameters]
            harness.optimizer.zero_grad(set_to_none=set_to_none)
            for parameter, gradient in zip(harness.parameters, gradients, strict=True):
                if set_to_none:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(len(harness.compiled_after) + 1.0)
            harness.take_step()

    return script


GRADIENTS = {
    "the first's": (gradients_go(0), ADAM),
    "the last's": (gradients_go(3), SGD),
    "the second group's": (gradients_go(2, 3), two_groups),
    "all but one": (gradients_go(0, 1, 2), ADAM),
    "none at all": (gradients_go(0, 1, 2, 3), SGD),
    "other tensors": (zero_grad(True), ADAM),
    "the same tensors": (zero_grad(False), ADAM),
}


@clause("dynamo.optimizer.guards.gradients")
@pytest.mark.parametrize("case", soon(GRADIENTS, "the last's", "the second group's"))
def test_gradients_come_and_go(compare: Compare, device: str, case: str) -> None:
    script, make = GRADIENTS[case]
    compare_compiled(compare, after(script), make, device=device)


def add_group(harness: CompiledHarness) -> None:
    harness.train(2)
    added = four_parameters(harness.parameters[0].device.type)[:1]
    harness.parameters += added
    harness.optimizer.add_param_group({"params": added, "lr": 0.2})
    harness.train(2)


GROUPS = {
    "added": (add_group, ADAM),
    "maximize of the second": (set_number("maximize", [True, False, True], group=1), two_groups),
    "nesterov of the second": (set_number("nesterov", [True, False], group=1), two_groups),
    "weight_decay from 0": (set_number("weight_decay", [0.1, 0, 0.2]), SGD),
    "decoupled_weight_decay": (set_number("decoupled_weight_decay", [True, False]), ADAM),
    "capturable": (set_number("capturable", [False, True]), maker("Adam", "capturable")),
}


@clause("dynamo.optimizer.guards.groups")
@pytest.mark.parametrize("case", soon(GROUPS, "added", "maximize of the second"))
def test_groups_that_change(compare: Compare, device: str, case: str) -> None:
    script, make = GROUPS[case]
    compare_compiled(compare, after(script), make, device=device)


def load_own(harness: CompiledHarness) -> None:
    saved = copy.deepcopy(harness.train(2).optimizer.state_dict())
    harness.train(1).optimizer.load_state_dict(saved)
    harness.train(2)


def load_aliasing(harness: CompiledHarness) -> None:
    """Load the state of another optimizer, so that both hold the same tensors."""
    other = CompiledHarness(ADAM, harness.parameters[0].device.type).plain_train(2)
    harness.train(1).optimizer.load_state_dict(other.optimizer.state_dict())
    harness.train(2)


def clear_state(harness: CompiledHarness) -> None:
    harness.train(2).optimizer.state.clear()
    harness.train(2)


def forget_one(index: int) -> Script:
    def script(harness: CompiledHarness) -> None:
        del harness.train(2).optimizer.state[harness.parameters[index]]
        harness.train(2)

    return script


def replace_one(index: int, name: str) -> Script:
    def script(harness: CompiledHarness) -> None:
        entry = harness.train(2).optimizer.state[harness.parameters[index]]
        entry[name] = torch.full_like(entry[name], 0.5)
        harness.train(2)

    return script


def plain_first(harness: CompiledHarness) -> None:
    harness.plain_train(2).train(2)


STATES = {
    "loaded": (load_own, ADAM),
    "loaded, SGD": (load_own, SGD),
    "loaded from another, shared": (load_aliasing, ADAM),
    "cleared": (clear_state, ADAM),
    "cleared, SGD": (clear_state, SGD),
    "the first's forgotten": (forget_one(0), SGD),
    "the last's forgotten": (forget_one(3), ADAM),
    "the first's replaced": (replace_one(0, "exp_avg"), ADAM),
    "the last's replaced": (replace_one(3, "momentum_buffer"), SGD),
    "made by plain steps": (plain_first, ADAM),
}


@clause("dynamo.optimizer.guards.state")
@pytest.mark.parametrize("case", soon(STATES, "loaded", "the last's replaced", "cleared, SGD"))
def test_state_that_changes(compare: Compare, device: str, case: str) -> None:
    script, make = STATES[case]
    compare_compiled(compare, after(script), make, device=device)


def made_double(harness: CompiledHarness) -> None:
    harness.train(2)
    for parameter in harness.parameters:
        parameter.data = parameter.data.double()


def reshaped(harness: CompiledHarness) -> None:
    harness.train(2)
    for parameter in harness.parameters:
        parameter.data = parameter.data.reshape(-1)


def other_layout(harness: CompiledHarness) -> None:
    harness.train(2)
    for parameter in harness.parameters:
        parameter.data = parameter.data.t().contiguous().t()


KINDS = {"double": made_double, "another shape": reshaped, "another layout": other_layout}


@clause("dynamo.optimizer.guards.kinds_of_tensors")
@pytest.mark.deviation("optimizer_variable.state_of_each_parameter")
@pytest.mark.parametrize("kind", soon(KINDS, "double"))
def test_kinds_of_tensors_are_guarded(deviation: DeviationJudge, device: str, kind: str) -> None:
    def script(harness: CompiledHarness) -> list[int]:
        KINDS[kind](harness)
        for parameter in harness.parameters:
            parameter.grad = torch.ones_like(parameter)
        harness.take_step()
        return harness.compiled_after

    def probe(library: Library) -> Any:
        return outcome(library, script, maker("SGD"), device=device).value

    deviation.judge(
        probe,
        torch_does=lambda compiled_after: compiled_after == [1, 1, 1],
        we_do=lambda compiled_after: compiled_after[:2] == [1, 1] and compiled_after[2] > 1,
    )


@clause("dynamo.optimizer.guards.kinds_of_tensors")
@pytest.mark.parametrize("kind", soon(KINDS, "double"))
def test_values_after_another_kind(subject: Library, device: str, kind: str) -> None:
    def script(harness: CompiledHarness) -> bool:
        KINDS[kind](harness)
        expected = []
        for parameter in harness.parameters:
            parameter.grad = torch.ones_like(parameter)
            expected.append(parameter.detach() - 0.05)
        harness.take_step()
        return all(map(torch.equal, expected, harness.parameters))

    assert outcome(subject, script, maker("SGD"), device=device).value is True


def pickled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@clause("dynamo.optimizer.optimizer.several")
@pytest.mark.profile("full")
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copied_optimizer_continues_like_original(compare: Compare, device: str, copied: Any) -> None:
    def script(harness: CompiledHarness) -> Any:
        harness.train(2)
        twin = copied(harness.optimizer)
        harness.train(1)
        first = harness.values()
        harness.optimizer, harness.parameters = twin, list(twin.param_groups[0]["params"])
        harness.recompile()
        harness.compiled_after.pop()
        harness.train(1)
        return first, harness.seen()

    first, second = compare_compiled(compare, script, ADAM, device=device)
    for original, copied_value in zip(first["parameters"], second["parameters"], strict=True):
        assert torch.equal(original.values, copied_value.values)


@clause("dynamo.optimizer.optimizer.several")
@pytest.mark.parametrize("name", soon(["SGD", "Adam"], "SGD"))
def test_two_in_turn(compare: Compare, device: str, name: str) -> None:
    make = maker(name)

    def script(harness: CompiledHarness) -> Any:
        other = CompiledHarness(make, device)
        step = torch.compile(lambda optimizer: optimizer.step(), backend=harness.graphs)
        for _ in range(3):
            for current in (harness, other):
                current.set_gradients()
                step(current.optimizer)
                current.compiled_after.append(len(harness.graphs.inputs))
        return harness.seen(), other.seen()

    compare_compiled(compare, script, make, device=device)


@clause("dynamo.optimizer.optimizer.hooks")
def test_hooks_run_once_a_step(compare: Compare, device: str) -> None:
    def script(harness: CompiledHarness) -> Any:
        ran: list[str] = []
        harness.optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
        harness.optimizer.register_step_post_hook(lambda *_: ran.append("after"))
        harness.train(3)
        return ran, harness.seen()

    ran, _ = compare_compiled(compare, script, SGD, device=device)
    assert ran == ["before", "after"] * 3


@clause("dynamo.optimizer.graphs.whole_functions")
@pytest.mark.parametrize("name", soon(["SGD", "Adam", "RAdam"], "Adam"))
def test_whole_functions(compare: Compare, device: str, name: str) -> None:
    """Compile the unwrapped step, because torch breaks the graph on purpose in the wrapper."""

    def script(harness: CompiledHarness) -> None:
        bare = inspect.unwrap(type(harness.optimizer).step)

        def run() -> None:
            bare(harness.optimizer)

        harness.step = torch.compile(run, backend=harness.graphs, fullgraph=True)
        with torch.no_grad():
            harness.train(3)

    compare_compiled(compare, after(script), maker(name), device=device)


@clause("dynamo.optimizer.graphs.whole_functions")
@pytest.mark.parametrize("mode", [True, False])
def test_grad_mode_stays(subject: Library, device: str, mode: bool) -> None:
    def script(harness: CompiledHarness) -> list[bool]:
        with torch.set_grad_enabled(mode):
            return [torch.is_grad_enabled() for _ in range(3) if harness.train()]

    assert outcome(subject, script, SGD, device=device).value == [mode] * 3


@clause("dynamo.optimizer.graphs.whole_functions")
def test_grad_mode_after_an_exception(subject: Library, device: str) -> None:
    def failing() -> torch.Tensor:
        raise ZeroDivisionError

    with tracing_of(subject):
        harness = CompiledHarness(SGD, device).train()
        with pytest.raises(ZeroDivisionError):
            harness.take_step(failing)
        assert torch.is_grad_enabled()
        harness.train()


@clause("dynamo.optimizer.init_group.pending_changes")
def test_gradients_dropped_in_the_same_function(subject: Library, device: str) -> None:
    """Code before the step in the same function takes effect: without a gradient there is no update."""

    def script(harness: CompiledHarness) -> bool:
        def run() -> None:
            harness.parameters[1].grad = None
            harness.optimizer.step()

        compiled = torch.compile(run, backend=harness.graphs)
        harness.set_gradients()
        before = [parameter.detach().clone() for parameter in harness.parameters]
        compiled()
        return [torch.equal(*pair) for pair in zip(before, harness.parameters, strict=True)]

    assert outcome(subject, script, SGD, device=device).value == [False, True, False, False]


@clause("dynamo.optimizer.graphs.left_alone")
def test_lbfgs_matches_torch(compare: Compare, reference: Library, device: str) -> None:
    def script(harness: CompiledHarness) -> Any:
        def closure() -> torch.Tensor:
            harness.optimizer.zero_grad()
            loss = sum(parameter.square().sum() for parameter in harness.parameters)
            loss.backward()
            return loss

        return [float(harness.take_step(closure)) for _ in range(2)], harness.seen()

    # Run once without using the result, because Dynamo remembers skipped frames of the process even after a reset.
    outcome(reference, script, maker("LBFGS"), device=device)
    compare_compiled(compare, script, maker("LBFGS"), must_compile=False, device=device)


def with_sparse_gradients(harness: CompiledHarness) -> None:
    for _ in range(3):
        harness.set_gradients()
        for parameter in harness.parameters:
            parameter.grad = parameter.grad.to_sparse()
        harness.take_step()


def called_by_what_is_compiled(harness: CompiledHarness) -> None:
    optimizer = harness.optimizer

    def call() -> None:
        optimizer.step()

    harness.step = torch.compile(call, backend=harness.graphs)
    with_sparse_gradients(harness)


@clause("dynamo.optimizer.graphs.left_alone")
@pytest.mark.parametrize("script", [with_sparse_gradients, called_by_what_is_compiled])
def test_sparse_adam(compare: Compare, device: str, script: Any) -> None:
    compare_compiled(compare, after(script), maker("SparseAdam"), must_compile=False, device=device)
