"""Patches injected into what replays graphs, each of which a test of `captured_graphs` has to catch.

Run by `test_captured_graphs` on a device whose graphs are torch's generic ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from impl.optim import _graphed_update
from impl.optim._graphed_update import Backoff, GraphedSettings, GraphedUpdate
from impl.optim._graphs import AcceleratorGraphs
from impl.optim.tests import captured_graphs as judging
from impl.optim.tests.patches import Patch, Patches, first_failure

pytestmark = pytest.mark.deadline(120)

FAULTS = Patches()


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Return a patch that replaces an attribute by `make` of its present value."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def blind_to(field: str) -> Patch:
    """All that a graph fixes is compared, but for one thing."""

    def made(real: Any) -> Any:
        def first_change(self: GraphedUpdate, constants: Any) -> Any:
            before = self._constants
            return real(
                self, constants if before is None else constants._replace(**{field: getattr(before, field)})
            )

        return first_change

    return replaced(GraphedUpdate, "_first_change", made)


def filled_once(setting: str) -> Patch:
    def made(real: Any) -> Any:
        first: dict[GraphedSettings, Any] = {}

        def fill(self: GraphedSettings, lr: float, grad_scale: Any, found_inf: Any) -> None:
            settings = {"lr": lr, "grad_scale": grad_scale, "found_inf": found_inf}
            settings[setting] = first.setdefault(self, settings[setting])
            real(self, **settings)

        return fill

    return replaced(GraphedSettings, "fill", made)


FAULTS["the learning rate is not filled in again"] = filled_once("lr")
FAULTS["grad_scale is not filled in again"] = filled_once("grad_scale")
FAULTS["found_inf is not filled in again"] = filled_once("found_inf")
FAULTS["memory that has moved is not noticed"] = blind_to("pointers")
FAULTS["other values are not noticed"] = blind_to("values")
FAULTS["values changed in place are not noticed"] = replaced(
    _graphed_update, "_frozen", lambda real: lambda value: value
)
FAULTS["what came of a graph is forgotten with the lists"] = replaced(
    GraphedUpdate,
    "__init__",
    lambda real: lambda self, update, bucket, optimizer, _: real(self, update, bucket, optimizer, Backoff()),
)
FAULTS["scaling of another kind is not noticed"] = blind_to("scaling")
FAULTS["another stream is not noticed"] = blind_to("stream")
FAULTS["strides are not noticed"] = replaced(
    _graphed_update, "tensor_guards", lambda real: lambda tensors: real(tensors, with_layouts=False)
)
FAULTS["it is captured in the current stream"] = replaced(
    AcceleratorGraphs, "side_stream", lambda real: AcceleratorGraphs.current_stream
)
FAULTS["what is captured runs as well"] = replaced(
    _graphed_update, "capture_graph", lambda real: lambda graphs, work: [work(), real(graphs, work)][1]
)


@FAULTS.named("a graph is not replayed in the step that captures it")
def _(patch: pytest.MonkeyPatch) -> None:
    real, captured_ids = torch.accelerator.Graph.replay, set[int]()

    def replay(self: torch.accelerator.Graph) -> None:
        if id(self) in captured_ids:
            real(self)
        captured_ids.add(id(self))

    patch.setattr(torch.accelerator.Graph, "replay", replay)


@FAULTS.named("a graph is captured without a warm-up")
def _(patch: pytest.MonkeyPatch) -> None:
    real = GraphedUpdate._follow_changes

    def follow_changes(self: GraphedUpdate, *args: Any) -> GraphedSettings:
        settings = real(self, *args)
        self._unchanged_steps = self._backoff.patience
        return settings

    patch.setattr(GraphedUpdate, "_follow_changes", follow_changes)


@FAULTS.named("memory that moves is captured for again and again")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_graphed_update, "_WORTHWHILE_REPLAYS", 0)


CALLS: list[tuple[Any, ...]] = [
    (judging.test_another_stream,),
    (judging.test_gradients_that_move_capture_little, 2),
    (judging.test_lists_that_are_built_again_capture_little, "every 3 steps", 2),
    *((judging.test_guard_failure_captures_new_graph, name) for name in judging.GUARDS),
    *(
        (judging.test_replayed_step_matches_plain_step, "AdamW fused", script)
        for script in ("lr is 0.5", "unscaled by itself", "skipped by itself")
    ),
    (judging.test_scaled_steps_are_replayed, "AdamW fused", judging.stepped),
]


def checks(device: str) -> dict[str, Callable[[], object]]:
    return {
        f"{test.__name__}{arguments}": functools.partial(test, *arguments, device=device)
        for test, *arguments in CALLS
    }


@pytest.mark.parametrize("says", list(FAULTS))
def test_injected_fault_is_caught(says: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[says](monkeypatch)
    assert first_failure(checks(device)) is not None, f"no test notices that {says}"


def test_checks_pass_without_fault(device: str) -> None:
    assert first_failure(checks(device)) is None
