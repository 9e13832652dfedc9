"""Patches injected into the captured step, each of which the scripts of `test_captured` have to catch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from impl.kernels import RULES
from impl.optim import _counters, _fused_operators, _list_cache, captured
from impl.optim._counters import Counters
from impl.optim._list_cache import Bucket, GroupLists, ListCache
from impl.optim.tests.captured_twins import CapturedTwins
from impl.optim.tests.patches import Patch, Patches, first_failure
from impl.optim.tests.test_captured import SCRIPTS, play

pytestmark = pytest.mark.deadline(120)

FAULTS = Patches()


def replaced(owner: Any, name: str, new: Any) -> Patch:
    return lambda patch: patch.setattr(owner, name, new)


def deaf_to(*reasons: str) -> Patch:
    """A list cache that does not hear a guard: it goes on with the lists that it has."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        real = GroupLists.take_gradients

        def take(self: GroupLists) -> str | None:
            why = real(self)
            if why is None or not any(reason in why for reason in reasons):
                return why
            grads = [param.grad for param in self.params]
            if any(grad is None for grad in grads):
                grads = [torch.zeros_like(param) for param in self.params]
            self.grads[:] = grads
            for bucket in self.buckets:
                bucket.grads[:] = bucket._own(grads)
            self.guards_have_held = True
            return None

        patch.setattr(GroupLists, "take_gradients", take)

    return apply


FAULTS["a gradient that is None now is not noticed"] = deaf_to("is None")
FAULTS["a gradient that is there now is not noticed"] = deaf_to("had no gradient")
FAULTS["replaced state is not noticed"] = deaf_to("other state")
FAULTS["a moved step counter is not noticed"] = deaf_to("other memory")
FAULTS["other parameters are not noticed"] = deaf_to("other parameters")
FAULTS["a switch of the group is not noticed"] = deaf_to("changed")
FAULTS["sparse gradients and other dtypes are not noticed"] = deaf_to("mismatch")
FAULTS["another dictionary of state is not noticed"] = replaced(
    ListCache, "_check_state", lambda self, optimizer: None
)
FAULTS["step counters are not advanced"] = replaced(Counters, "advance", lambda self: None)
FAULTS["step counters count skipped steps"] = replaced(Counters, "undo_advance", lambda self, found_inf: None)
FAULTS["found_inf and grad_scale are forgotten"] = replaced(
    _fused_operators, "to_device", lambda value, device: None
)


@FAULTS.named("gradients of an earlier step are used")
def _(patch: pytest.MonkeyPatch) -> None:
    real = GroupLists.take_gradients

    def take(self: GroupLists) -> str | None:
        first_grads = self.attached_grads = getattr(self, "attached_grads", None) or [
            p.grad for p in self.params
        ]
        why = real(self)
        if why is None:
            self.grads[:] = first_grads
            for bucket in self.buckets:
                bucket.grads[:] = bucket._own(first_grads)
        return why

    patch.setattr(GroupLists, "take_gradients", take)


@FAULTS.named("gradients are those of the bucket before")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bucket, "take", lambda self, grads: None)


@FAULTS.named("the learning rate is that of the first step")
def _(patch: pytest.MonkeyPatch) -> None:
    for rule in RULES:
        first: dict[int, Any] = {}

        def settings_of(group: Any, real: Any = rule.settings_of, first: Any = first) -> Any:
            return {**real(group), "lr": first.setdefault(id(group), group["lr"])}

        patch.setattr(rule, "settings_of", staticmethod(settings_of))


@FAULTS.named("every group has the values of the first")
def _(patch: pytest.MonkeyPatch) -> None:
    real = captured._Capture._run

    def run(self: Any, optimizer: Any, group_lists: Any, lists: Any) -> None:
        own, group_lists.group = group_lists.group, optimizer.param_groups[0]
        real(self, optimizer, group_lists, lists)
        group_lists.group = own

    patch.setattr(captured._Capture, "_run", run)


@FAULTS.named("hyperparameters of other kinds stay those of the first step")
def _(patch: pytest.MonkeyPatch) -> None:
    for rule in RULES:
        first: dict[int, Any] = {}

        def settings_of(group: Any, real: Any = rule.settings_of, first: Any = first) -> Any:
            return {**first.setdefault(id(group), real(group)), "lr": group["lr"]}

        patch.setattr(rule, "settings_of", staticmethod(settings_of))


@FAULTS.named("counters that share memory are pulled apart")
def _(patch: pytest.MonkeyPatch) -> None:
    def moved(steps: list[torch.Tensor]) -> Any:
        flat = torch.stack(steps)
        for step, place in zip(steps, flat.unbind(), strict=True):
            step.data = place
        return flat

    patch.setattr(_counters, "moved_into_one_buffer", moved)


@FAULTS.named("a copy goes on sharing the list cache")
def _(patch: pytest.MonkeyPatch) -> None:
    real = torch.optim.Optimizer.__getstate__
    patch.setattr(
        torch.optim.Optimizer,
        "__getstate__",
        lambda self: real(self) | {k: v for k, v in vars(self).items() if k == "_init_group"},
    )


@FAULTS.named("what _init_group returns is lost")
def _(patch: pytest.MonkeyPatch) -> None:
    real = captured._Capture.__call__

    def call(self: Any, *args: Any) -> Any:
        returned = real(self, *args)
        return (False, False) if isinstance(returned, tuple) else False

    patch.setattr(captured._Capture, "__call__", call)


@FAULTS.named("numbers are guarded by nothing")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_list_cache, "_guard_value", lambda value: None)


def share_counters(side: Any) -> None:
    states = list(side.optimizer.state.values())
    for state in states[1:]:
        state["step"] = states[0]["step"]


MORE = {
    "shared counters": [*SCRIPTS["steps"], (share_counters, {}), *SCRIPTS["steps"]],
}
# The least that sees them all; each is a fused or a listed optimizer's.
PLAYED = [
    ("AdamW fused", 1, "gradients kept"),
    ("AdamW fused", 1, "steps"),
    ("AdamW fused", 1, "some gradients missing"),
    ("AdamW fused", 2, "another group"),
    ("AdamW fused", 1, "state replaced"),
    ("AdamW fused", 1, "state moved"),
    ("AdamW fused", 1, "state cleared"),
    ("AdamW fused", 1, "another group's parameter"),
    ("AdamW fused", 1, "skipped by itself"),
    ("AdamW fused", 1, "lr is 0.5"),
    ("AdamW fused", 1, "weight_decay is 0.5"),
    ("AdamW fused", 1, "fused is None"),
    ("AdamW fused", 1, "a deepcopy"),
    ("SGD foreach", 1, "momentum is 0.0"),
    ("AdamW fused", 1, "sparse gradients"),
    ("Adagrad foreach", 1, "sparse gradients"),
    ("AdamW fused", 1, "shared counters"),
]


def check(kind: str, groups: int, script: str) -> None:
    twins = CapturedTwins(kind, groups=groups, dtypes=(torch.float32, torch.bfloat16))
    play(twins, (SCRIPTS | MORE)[script])


CHECKS = {
    f"{kind}, {script}": functools.partial(check, kind, groups, script) for kind, groups, script in PLAYED
}


@pytest.mark.parametrize("says", list(FAULTS))
def test_injected_fault_is_caught(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[says](monkeypatch)
    assert first_failure(CHECKS) is not None, f"no script notices that {says}"


def test_checks_pass_without_fault() -> None:
    assert first_failure(CHECKS) is None
