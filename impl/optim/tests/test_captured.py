"""`impl.optim.capture` against the same optimizer without it: every optimizer of torch, one kind of event at a time."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from impl.optim import capture, explain, release
from impl.optim.tests import captured_twins as on
from impl.optim.tests.captured_twins import EAGER, FUSED, KINDS, LISTED, CapturedTwins, Side

TrainingEvent = tuple[Callable[..., Any], dict[str, Any]]

pytestmark = pytest.mark.deadline(120)


def steps(count: int, **kwargs: Any) -> list[TrainingEvent]:
    return [(on.iteration, {"seed": seed, **kwargs}) for seed in range(count)]


def after(event: Callable[..., Any], **kwargs: Any) -> list[TrainingEvent]:
    """The event, once the step is replayed, and steps after it that are replayed too."""
    return [*steps(3), (event, kwargs), *steps(3)]


SCRIPTS: dict[str, list[TrainingEvent]] = {
    "steps": steps(4),
    "gradients kept": [*steps(2), (on.add_to_gradients, {}), (on.step, {}), (on.step, {})],
    "gradients zeroed": [*steps(2), (on.zero_grad, {"set_to_none": False}), (on.step, {}), (on.step, {})],
    "some gradients missing": [*steps(2), *steps(2, missing=(0,)), *steps(2, missing=(1, 2)), *steps(2)],
    "no gradients": [(on.step, {}), *steps(2), (on.zero_grad, {}), (on.step, {}), *steps(2)],
    "a shared gradient": after(on.share_a_gradient),
    "sparse gradients": [*steps(2), (on.give_gradients, {"sparse": True}), (on.step, {}), *steps(2)],
    "a closure": after(on.step_with_closure),
    "a closure that fails": after(on.step_with_closure, fails=True),
    "hooks": after(on.hook_steps),
    "a schedule": [(on.schedule, {}), *steps(1), (on.schedule_step, {}), *after(on.schedule_step)],
    "a schedule after steps": [
        *steps(2),
        (on.schedule, {}),
        (on.schedule_step, {}),
        *after(on.schedule_step),
    ],
    "another group": after(on.add_group),
    "a group less": [(on.add_group, {}), *after(on.drop_last_group)],
    "another group's parameter": [(on.add_group, {}), *after(on.move_parameter_to_last_group)],
    "saved and loaded": [*steps(2), (on.save, {}), *steps(2), (on.load, {}), *steps(2)],
    "loaded from a file": [*steps(2), (on.save, {}), *steps(2), (on.load, {"through_file": True}), *steps(2)],
    "its own state loaded": after(on.load),
    "state cleared": after(on.clear_state),
    "one state forgotten": after(on.forget_one_state),
    "states swapped": [(on.add_group, {}), *after(on.swap_states)],
    "state edited": after(on.edit_states, how="in place"),
    "state replaced": after(on.edit_states, how="replaced"),
    "state moved": after(on.edit_states, how="moved"),
    "steps counted by numbers": after(on.count_by_numbers),
    "parameters moved": after(on.move_parameters),
    "dtype changed": after(on.change_dtype),
    "dtype changed to a complex one": after(on.change_dtype, dtype=torch.complex64),
    "a deepcopy": after(on.go_on_with_a_copy, how="deepcopy"),
    "a pickle": after(on.go_on_with_a_copy, how="pickle"),
    "unscaled by itself": [*steps(2), (on.scaled, {}), (on.scaled, {"unscaled": True}), *steps(1)],
    "skipped by itself": [*steps(2), (on.scaled, {"inf": True}), (on.scaled, {"unscaled": True}), *steps(1)],
    "inference mode": after(on.in_inference_mode),
    **{
        f"{name} is {value!r}": after(on.set_values, **{name: value})
        for name, value in (
            ("lr", 0.5),
            ("lr", torch.tensor(0.5)),
            ("betas", (0.5, 0.6)),
            ("weight_decay", 0.0),
            ("weight_decay", 0.5),
            ("eps", 0.5),
            ("momentum", 0.0),
            ("momentum", 0.5),
            ("dampening", 0.5),
            ("lr_decay", 0.5),
            ("maximize", True),
            ("nesterov", False),
            ("amsgrad", True),
            ("foreach", False),
            ("fused", None),
        )
    },
}


def play(twins: CapturedTwins, events: list[TrainingEvent]) -> None:
    for event, kwargs in events:
        twins.do(event, **kwargs)


@pytest.mark.parametrize("script", list(SCRIPTS))
@pytest.mark.parametrize("kind", list(FUSED))
def test_fused_step_matches_plain_step(kind: str, script: str) -> None:
    play(CapturedTwins(kind, dtypes=(torch.float32, torch.bfloat16)), SCRIPTS[script])


def with_profile(kind: str) -> Any:
    """All scripts are played on one of each form of those optimizers whose lists the cache only hands on."""
    soon = kind in ("Adam foreach", "SGD momentum", "RMSprop", "Adagrad", "ASGD", *EAGER)
    return pytest.param(kind, marks=() if soon else pytest.mark.profile("deep"))


@pytest.mark.parametrize("script", list(SCRIPTS))
@pytest.mark.parametrize("kind", [*map(with_profile, (*LISTED, *EAGER))])
def test_step_matches_plain_step(kind: str, script: str) -> None:
    play(CapturedTwins(kind), SCRIPTS[script])


@pytest.mark.parametrize("kind", [*LISTED, *EAGER])
def test_steps_of_every_optimizer_are_the_plain_ones(kind: str) -> None:
    play(
        CapturedTwins(kind, groups=1 if kind == "LBFGS" else 2),
        [*steps(3), *steps(2, missing=(0,)), *steps(2)],
    )


def test_nested_parameter_matches_plain_step() -> None:
    def trained(is_captured: bool) -> list[list[float]]:
        rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
        nested, plain = torch.nn.Parameter(rows), torch.nn.Parameter(torch.ones(2, 3, 4))
        optimizer = torch.optim.SGD([plain, nested], lr=0.1, momentum=0.5, foreach=False)
        if is_captured:
            capture(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            (plain.sum() + (2 * nested).to_padded_tensor(0.0).sum()).backward()
            optimizer.step()
        if is_captured:
            assert "nested" in str(explain(optimizer))
        return [param.flatten().tolist() for param in (plain, *nested.unbind())]

    assert trained(True) == trained(False)


def test_every_optimizer_of_torch_is_asked_about() -> None:
    kinds = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    assert {name for name, _ in KINDS.values()} == kinds


def forget_number(side: Side, name: str) -> None:
    side.optimizer.param_groups[0].pop(name, None)


@pytest.mark.parametrize("name", ["eps", "lr", "weight_decay", "maximize", "betas", "lr_decay"])
@pytest.mark.parametrize("kind", ["AdamW fused", "SGD fused momentum", "Adagrad fused"])
@pytest.mark.parametrize("graph", [False, True])
def test_missing_group_entry_changes_nothing(kind: str, name: str, graph: bool) -> None:
    """Step counters are not advanced for an update that is not made."""
    play(CapturedTwins(kind, graph=graph), [*steps(3), (forget_number, {"name": name}), *steps(2)])


def widen_one(side: Side) -> None:
    """A parameter gets another dtype, not its gradient: torch updates those of the other dtype, then raises."""
    on.give_gradients(side)
    side.params[0].data = side.params[0].data.double()
    on.step(side)


@pytest.mark.parametrize(
    "kind", ["AdamW fused", "SGD fused momentum", "Adagrad fused", "AdamW", "SGD foreach"]
)
def test_single_parameter_dtype_change_matches_plain_step(kind: str) -> None:
    play(CapturedTwins(kind), [*steps(3), (widen_one, {}), (on.step, {})])


@pytest.mark.parametrize("function", [capture, release, explain])
@pytest.mark.parametrize(("other", "actual"), [(None, "NoneType"), (torch.optim.SGD, "the class SGD")])
def test_capture_rejects_non_optimizer(function: Callable[..., Any], other: Any, actual: str) -> None:
    with pytest.raises(
        TypeError, match=f"^expected an instance of torch.optim.Optimizer, got {actual}; pass"
    ):
        function(other)


def test_released_it_is_plain_again() -> None:
    twins = CapturedTwins("AdamW fused")
    play(twins, steps(2))
    assert release(twins.captured.optimizer) is twins.captured.optimizer
    assert vars(twins.captured.optimizer).keys() == vars(twins.plain.optimizer).keys() - {"_init_group"}
    play(twins, steps(2))
    capture(capture(twins.captured.optimizer))
    play(twins, steps(3))


def test_counters_are_one_buffer_and_the_tensors_they_were() -> None:
    side = Side("AdamW fused", captured=True)
    on.iteration(side)
    counters = [state["step"] for state in side.optimizer.state.values()]
    assert len({step.untyped_storage().data_ptr() for step in counters}) == len(counters)
    on.iteration(side)
    after = [state["step"] for state in side.optimizer.state.values()]
    assert all(counter is later for counter, later in zip(counters, after, strict=True))
    assert len({step.untyped_storage().data_ptr() for step in after}) == 1
    assert [float(step) for step in after] == [2.0] * len(after)


def test_counters_that_processes_share_stay_shared() -> None:
    side = Side("AdamW fused", captured=True)
    on.iteration(side, 0)
    counters = [state["step"] for state in side.optimizer.state.values()]
    for counter in counters:
        counter.share_memory_()
    for seed in range(1, 4):
        on.iteration(side, seed)
    assert [(counter.is_shared(), float(counter)) for counter in counters] == [(True, 4.0)] * len(counters)


def test_counters_that_share_memory_stay_as_they_are() -> None:
    """torch adds once for each parameter, so that a counter of two counts twice."""

    def share(side: Side) -> None:
        states = list(side.optimizer.state.values())
        states[1]["step"] = states[0]["step"]
        states[2]["step"] = states[0]["step"].view(())

    twins = CapturedTwins("AdamW fused")
    play(twins, [*steps(3), (share, {}), *steps(3)])


def test_two_optimizers_that_share_state_share_it_still() -> None:
    """A load within a process gives both the same tensors."""

    def together(side: Side) -> list[Any]:
        other = Side("AdamW fused", captured=side.captured)
        other.optimizer.load_state_dict(side.optimizer.state_dict())
        for seed in range(4):
            on.iteration(side, seed)
            on.iteration(other, seed + 10)
        return [side.seen(), other.seen()]

    twins = CapturedTwins("AdamW fused")
    play(twins, [*steps(3), (together, {}), *steps(2)])


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        (kind, implementation)
        for kind in ("AdamW", "AdamW fused", "Adam foreach", "SGD momentum", "Adagrad fused", "RMSprop")
        for implementation in ("fused", "foreach", "single")
        if (kind, implementation) != ("RMSprop", "fused")  # missing in torch
    ],
)
@pytest.mark.parametrize("before", [0, 2])
def test_another_implementation(kind: str, implementation: Any, before: int) -> None:
    """The optimizer then equals one built with that implementation and the same state."""
    name, options = KINDS[kind]
    flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}[
        implementation
    ]
    built, changed = Side(kind, captured=False), Side(kind, captured=True)
    without = {key: value for key, value in options.items() if key not in ("fused", "foreach")}
    for seed in range(before):
        on.iteration(changed, seed)
    built.optimizer = getattr(torch.optim, name)(built.params, **{**without, **flags})
    with torch.no_grad():
        for param, other in zip(built.params, changed.params, strict=True):
            param.copy_(other)
    if before:
        groups = built.optimizer.state_dict()["param_groups"]
        built.optimizer.load_state_dict(
            {"state": on.copy.deepcopy(changed.optimizer.state_dict()["state"]), "param_groups": groups}
        )
    capture(changed.optimizer, implementation=implementation)
    assert explain(changed.optimizer).implementation == implementation
    twins = CapturedTwins.of(built, changed)
    play(twins, steps(3))
    unscales_by_itself = [
        getattr(side.optimizer, "_step_supports_amp_scaling", None) for side in (built, changed)
    ]
    assert unscales_by_itself[0] == unscales_by_itself[1]


@pytest.mark.parametrize(
    ("kind", "implementation", "error", "words"),
    [
        (
            "RMSprop",
            "fused",
            ValueError,
            "RMSprop has no fused implementation; leave the argument out to capture the single one",
        ),
        ("Muon", "foreach", ValueError, "Muon has no foreach implementation"),
        ("AdamW", "quick", ValueError, "implementation is 'quick'; expected one of"),
        (
            "Adam fused tensor lr",
            "foreach",
            ValueError,
            "lr as a Tensor is not supported for capturable=False and foreach=True",
        ),
    ],
)
def test_unsupported_implementation_raises_without_change(
    kind: str, implementation: Any, error: Any, words: str
) -> None:
    side = Side(kind, captured=False)
    on.iteration(side)
    before = side.seen()
    with pytest.raises(error, match=words):
        capture(side.optimizer, implementation=implementation)
    assert side.seen() == before
    assert not explain(side.optimizer).captured


@pytest.mark.parametrize("kind", ["AdamW fused", "SGD", "RMSprop"])
def test_captured_optimizer_is_freed_without_collector(kind: str) -> None:
    """The garbage collector is disabled, because capture must not add reference cycles."""
    gc.disable()
    try:
        side = Side(kind, captured=True)
        for seed in range(3):
            on.iteration(side, seed)
        watched = [weakref.ref(side.optimizer), *map(weakref.ref, side.params)]
        watched += [weakref.ref(value) for state in side.optimizer.state.values() for value in state.values()]
        del side
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["AdamW fused", "RMSprop"])
def test_gradients_go_when_they_are_set_to_none(kind: str) -> None:
    """Kept until the next step, they would add their size to the peak of the next forward and backward."""
    side = Side(kind, captured=True, groups=2, dtypes=(torch.float32, torch.float64))
    for seed in range(3):
        on.iteration(side, seed)
        watched = [weakref.ref(param.grad) for param in side.params]
        side.optimizer.zero_grad()
        assert [ref() for ref in watched] == [None] * len(watched)


@pytest.mark.deadline(280)
@pytest.mark.parametrize(
    "count",
    [
        500,
        pytest.param(10_000, marks=pytest.mark.profile("deep")),
    ],
)
@pytest.mark.parametrize("kind", ["AdamW fused", "SGD momentum"])
def test_nothing_grows(kind: str, count: int) -> None:
    """Not with the steps, nor with what makes the lists be built again."""
    side = Side(kind, captured=True, groups=2)

    def four_steps() -> None:
        on.iteration(side, 1)
        on.iteration(side, 2, missing=(0,))
        on.load(side)
        on.iteration(side, 3)
        on.iteration(side, 4)
        side.optimizer.zero_grad()

    def objects_after(rounds: int) -> int:
        for _ in range(rounds):
            four_steps()
        gc.collect()
        return len(gc.get_objects())

    objects_after(2)
    sizes = [objects_after(count // 40) for _ in range(10)]
    assert max(sizes[5:]) <= max(sizes[:5])


def test_lr_schedule_builds_no_lists() -> None:
    side = Side("SGD fused momentum", captured=True)
    scheduler = lr_scheduler.OneCycleLR(side.optimizer, max_lr=0.5, total_steps=20)
    for seed in range(3):
        on.iteration(side, seed)
    builds = explain(side.optimizer).builds
    for seed in range(10):
        on.iteration(side, seed)
        scheduler.step()
    assert explain(side.optimizer).builds == builds


class _Forthright(torch.optim.SGD):
    """Copied and pickled with all its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


@pytest.mark.parametrize("how", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copied_optimizer_is_captured_separately(how: Callable[[Optimizer], Optimizer]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = capture(_Forthright([weight], lr=0.5), graph=True)
    optimizer.step()
    copied = how(optimizer)
    [other] = copied.param_groups[0]["params"]
    other.grad = torch.full((3,), 3.0)
    copied.step()
    optimizer.step()
    assert other.tolist() == [-1.0] * 3
    assert weight.tolist() == [0.0] * 3
    assert explain(copied).captured
    assert explain(copied).graph is not None
    assert (explain(optimizer).builds, explain(copied).builds) == (1, 1)


def test_default_device_does_not_matter() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with torch.device("meta"):
        capture(optimizer, implementation="fused").step()
    assert weight.tolist() == [0.5] * 3
