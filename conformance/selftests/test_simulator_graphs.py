"""Graphs on the simulated device: calls that a capture rejects like CUDA, and memory of graphs."""

from __future__ import annotations

import json

import pytest

from conformance.ranks.fixtures import require_simulator
from conformance.selftests.processes import LIMIT_S, run_python

pytestmark = pytest.mark.deadline(LIMIT_S + 60)

LOST = "the capture is lost: "
# By call: its error, and the error at the end of the capture.
REFUSED = {
    "nothing": ["", ""],
    "item": [LOST + "the host may not call item", LOST],
    "an event's query": [LOST + "the host may not call query", LOST],
    "an event's synchronize": [LOST + "the host may not call synchronize of an event", LOST],
    "a stream's query": [LOST + "the host may not call query", LOST],
    "synchronize": [LOST + "the host may not call synchronize", LOST],
    "a copy to the host": [LOST + "the host may not call a copy to the host", LOST],
    "what depends on data": [LOST + "the host may not call aten::nonzero", LOST],
    "a wait for what is not captured": ["is captured, and waits for what is not", LOST],
    "a wait of the default stream": ["the default stream waits for what is captured", LOST],
    "a stream that is not waited for": ["", "joined it and was not waited for"],
    "a replay": [LOST + "a graph is replayed in it", LOST],
    "numbers drawn": ["aten::normal_ draws its numbers on the host", ""],
    "memory that is not pinned": ["a copy from memory that is not pinned is captured", ""],
    "relaxed, an event's query": ["", ""],
    "in the default stream": ["a graph is captured in a stream that is not the default stream"],
    "a replay of nothing": ["a graph is replayed once it is captured"],
    "an event of a capture that is over": ["query of an event of a capture"],
    "a wait for an event of a capture that is over": ["waits for an event of a capture that is over"],
    "memory that is gone": ["a graph reads memory, in aten::add, that was freed since it was captured"],
}


def reported_by(case: str) -> dict:
    require_simulator()
    code = (
        "import json; from conformance import simulator; from conformance.selftests import simulator_graph_programs;"
        f"simulator.enable(); print(json.dumps(simulator_graph_programs.{case}()))"
    )
    ended = run_python("-c", code)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_capture_rejects_unsupported_calls() -> None:
    refused = reported_by("refusals")
    assert list(refused) == list(REFUSED)
    for name, expected in REFUSED.items():
        for words, text in zip(expected, refused[name], strict=True):
            assert words in text, name
            assert bool(words) is bool(text), name


def test_graph_owns_memory_and_runs_only_in_replays() -> None:
    facts = reported_by("facts")
    assert len(facts) == 9
    assert [name for name, is_so in facts.items() if not is_so] == []
