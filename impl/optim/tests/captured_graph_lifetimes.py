"""Lifetimes of graphs of `impl.optim.capture(..., graph=True)` and of their tensors: run by `test_captured_graphs`."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch

from impl.optim import capture, explain, release
from impl.optim._graphs import capture_graph, graphs_for
from impl.optim.tests import captured_twins as on
from impl.optim.tests.captured_graphs import (
    DTYPES,
    replaying,
    reported,
    run,
    schedule,  # noqa: F401  a fixture of every test
    settled,
)
from impl.optim.tests.captured_twins import CapturedTwins, Side
from impl.optim.tests.test_captured import play

pytestmark = pytest.mark.deadline(120)


def watched(side: Side) -> list[weakref.ref[Any]]:
    """Return weak references to the graphs of the optimizer and to the tensors that they could keep alive."""
    updates = vars(side.optimizer)["_init_group"].graphed()
    graphs = [weakref.ref(update._graph) for update in updates]
    assert graphs
    return [*graphs, *map(weakref.ref, side.params), weakref.ref(side.optimizer)]


def test_graphs_go_with_their_optimizer(device: str) -> None:
    """The garbage collector is disabled."""
    gc.disable()
    try:
        side = replaying("AdamW fused", device, dtypes=DTYPES)
        refs = watched(side)
        del side
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


@pytest.mark.parametrize("undo", [release, functools.partial(capture, graph=False)])
def test_graphs_go_when_they_are_not_wanted(undo: Any, device: str) -> None:
    twins = CapturedTwins("AdamW fused", device=device, graph=True)
    play(twins, settled())
    ref = watched(twins.captured)[0]
    undo(twins.captured.optimizer)
    assert ref() is None
    play(twins, settled())
    assert explain(twins.captured.optimizer).graph is None
    capture(twins.captured.optimizer, graph=True)
    play(twins, settled())
    assert reported(twins.captured).replayed
    capture(twins.captured.optimizer)
    play(twins, settled(1))
    assert reported(twins.captured).replayed


def test_gradients_are_not_kept(device: str) -> None:
    side = replaying("AdamW fused", device)
    refs = [weakref.ref(param.grad) for param in side.params]
    side.optimizer.zero_grad()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_nothing_grows(device: str) -> None:
    """The number of objects does not grow with replays or new captures."""
    side = replaying("AdamW fused", device, groups=2)

    def objects_after(rounds: int) -> int:
        for number in range(rounds):
            on.set_values(side, weight_decay=0.25 if number % 2 else 0.5)
            run(side, settled(12))
        gc.collect()
        return len(gc.get_objects())

    objects_after(2)
    sizes = [objects_after(10) for _ in range(6)]
    assert reported(side).captures == 2 + 2 + 60
    assert max(sizes[3:]) <= max(sizes[:3])


def test_graph_survives_graph_of_user(device: str) -> None:
    """A graph of the user's full step contains the operators instead of our graph."""
    twins = CapturedTwins("SGD fused momentum", device=device, graph=True)
    play(twins, settled())
    graphs = graphs_for(torch.device(device))
    assert graphs is not None
    user_graphs = [
        capture_graph(graphs, functools.partial(on.step, side)) for side in (twins.plain, twins.captured)
    ]
    assert reported(twins.captured).reason == "the user is capturing the step in another graph"
    for _ in range(2):
        for graph in user_graphs:
            graph.replay()
        assert on.snapshot(twins.plain.params) == on.snapshot(twins.captured.params)
    play(twins, settled(1))
    assert reported(twins.captured).replayed
    assert reported(twins.captured).captures == 1
