"""Small programs with graphs for the simulator's tests, each correct and with one step left out.

`python -m conformance.selftests.simulator_graph_programs SEEDS` runs them and the programs of `simulator_programs`.
`refusals` returns the errors of calls that a capture does not allow. `facts` describes a graph's memory and stream.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch

from conformance.selftests.simulator_programs import N, filled, main, main_stream, program


def captured(work: Callable[[], None], **options: object) -> torch.accelerator.Graph:
    """Capture a graph that runs after all earlier work and before all later work."""
    graph, stream = torch.accelerator.Graph(**options), torch.Stream("sim")
    stream.wait_stream(main_stream())
    with stream:
        graph.capture_begin()
        try:
            work()
        finally:
            graph.capture_end()
    main_stream().wait_stream(stream)
    return graph


@program
def wait_before_a_replay(right: bool) -> float:
    side, x, y = torch.Stream("sim"), filled(1.0), filled(0.0)
    graph = captured(lambda: y.copy_(x).mul_(2))
    side.wait_stream(main_stream())
    with side:
        x.fill_(3.0)
    if right:
        main_stream().wait_stream(side)
    graph.replay()
    main_stream().wait_stream(side)
    return y.sum().item()


@program
def wait_for_a_replay(right: bool) -> float:
    side, x, y = torch.Stream("sim"), filled(3.0), filled(0.0)
    graph = captured(lambda: y.copy_(x).mul_(2))
    side.wait_stream(main_stream())
    with side:
        graph.replay()
    if right:
        main_stream().wait_stream(side)
    return y.sum().item()


@program
def wait_before_writing_what_a_replay_reads(right: bool) -> float:
    side, x, y = torch.Stream("sim"), filled(3.0), filled(0.0)
    graph = captured(lambda: y.copy_(x).mul_(2))
    side.wait_stream(main_stream())
    with side:
        graph.replay()
    if right:
        main_stream().wait_stream(side)
    x.fill_(7.0)
    main_stream().wait_stream(side)
    return y.sum().item()


@program
def event_after_a_replay(right: bool) -> float:
    side, event, y = torch.Stream("sim"), torch.Event("sim"), filled(3.0)
    graph = captured(lambda: y.mul_(2))
    side.wait_stream(main_stream())
    with side:
        if not right:
            event.record()
        graph.replay()
        if right:
            event.record()
    main_stream().wait_event(event)
    return y.sum().item()


@program
def wait_inside_a_graph(right: bool) -> float:
    """Wait between captured streams by an event that each replay records again."""
    side, x, y, z = torch.Stream("sim"), filled(0.0), filled(0.0), filled(0.0)

    def work() -> None:
        origin = main_stream()
        side.wait_stream(origin)
        with side:
            y.copy_(x)
            y.mul_(2)
        if right:
            origin.wait_stream(side)
        z.copy_(y)
        origin.wait_stream(side)

    graph = captured(work)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
    return z.sum().item()


@program
def wait_between_two_graphs(right: bool) -> float:
    """The replays of one graph follow each other in whatever stream; those of two do not."""
    side, y = torch.Stream("sim"), filled(1.0)
    once, twice = captured(lambda: y.add_(0.5)), captured(lambda: y.mul_(2))
    side.wait_stream(main_stream())
    with side:
        once.replay()
        once.replay()
    once.replay()
    once.replay()
    if right:
        side.wait_stream(main_stream())
    with side:
        twice.replay()
    main_stream().wait_stream(side)
    return y.sum().item()


@program
def wait_for_a_graph_of_a_backward(right: bool) -> float:
    side, weight = torch.Stream("sim"), torch.ones(N, device="sim", requires_grad=True)
    weight.grad = filled(0.0)
    graph = captured(lambda: (weight * weight * 3).sum().backward(inputs=[weight]))
    side.wait_stream(main_stream())
    with side:
        graph.replay()
    if right:
        main_stream().wait_stream(side)
    return weight.grad.sum().item()


@program
def wait_for_what_a_graph_allocated(right: bool) -> float:
    """Read memory that belongs to the graph. Memory of later work is elsewhere."""
    side, x, results = torch.Stream("sim"), filled(3.0), []
    graph = captured(lambda: results.append((x * 2 + x * 4) / 3))
    filled(7.0).add_(1)
    side.wait_stream(main_stream())
    with side:
        graph.replay()
    if right:
        main_stream().wait_stream(side)
    return results[0].sum().item()


@program
def wait_before_the_host_writes_what_a_replay_reads(right: bool) -> float:
    host, y = torch.full((N,), 1.0).pin_memory(), filled(0.0)
    graph = captured(lambda: y.copy_(host, non_blocking=True))
    host.fill_(6.0)
    graph.replay()
    if right:
        main_stream().synchronize()
    host.fill_(1.0)
    return y.sum().item()


def _waits_for_what_is_not_captured() -> None:
    other = torch.Stream("sim")
    main_stream().wait_stream(other)


def _is_not_waited_for() -> None:
    side, x = torch.Stream("sim"), torch.empty(N, device="sim")
    side.wait_stream(main_stream())
    with side:
        x.fill_(1.0)


def refusals() -> dict[str, list[str]]:
    """Return the error of each call in a capture and at the end of the capture, and of calls outside."""
    x, default, event, host = filled(1.0), main_stream(), torch.Event("sim"), torch.ones(N)
    event.record()
    done = captured(lambda: x.add_(1))
    calls: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "item": lambda: x.sum().item(),
        "an event's query": event.query,
        "an event's synchronize": event.synchronize,
        "a stream's query": lambda: main_stream().query(),
        "synchronize": torch.accelerator.synchronize,
        "a copy to the host": x.cpu,
        "what depends on data": lambda: torch.nonzero(x),
        "a wait for what is not captured": _waits_for_what_is_not_captured,
        "a wait of the default stream": lambda: default.wait_stream(main_stream()),
        "a stream that is not waited for": _is_not_waited_for,
        "a replay": done.replay,
        "numbers drawn": x.normal_,
        "memory that is not pinned": lambda: x.copy_(host, non_blocking=True),
        "relaxed, an event's query": event.query,
    }
    errors: dict[str, list[str]] = {}
    for name, call in calls.items():
        mode = "relaxed" if name.startswith("relaxed") else "default"
        graph = torch.accelerator.Graph(capture_error_mode=mode)
        with torch.Stream("sim"):
            graph.capture_begin()
            errors[name] = [_error_of(call), _error_of(graph.capture_end)]
    others: dict[str, Callable[[], object]] = {
        "in the default stream": torch.accelerator.Graph().capture_begin,
        "a replay of nothing": torch.accelerator.Graph().replay,
        "an event of a capture that is over": _event_of_a_capture().query,
        "a wait for an event of a capture that is over": lambda: main_stream().wait_event(
            _event_of_a_capture()
        ),
        "memory that is gone": _replay_of_what_is_gone,
    }
    return errors | {name: [_error_of(call)] for name, call in others.items()}


def _error_of(call: Callable[[], object]) -> str:
    """Return the first line of the error that a call raises, or an empty text."""
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _event_of_a_capture() -> torch.Event:
    event = torch.Event("sim")
    captured(lambda: main_stream().record_event(event))
    return event


def _replay_of_what_is_gone() -> None:
    x = filled(1.0)
    graph = captured(functools.partial(x.add_, 1))
    del x
    graph.replay()


def facts() -> dict[str, object]:
    """Return statements about a graph's memory and stream, and whether each is true, as it is on CUDA."""
    x, results, facts_by_name = filled(1.0), [], {}

    def work() -> None:
        facts_by_name["its stream says that it captures"] = main_stream().is_capturing()
        results.append(x * 2)
        results.append(torch.empty(N, device="sim") + x)  # reads memory that nothing writes

    graph = captured(work)
    facts_by_name["other streams do not"] = not main_stream().is_capturing()
    facts_by_name["what it captures does not run"] = results[0].isnan().all().item()
    pointers = {tensor.data_ptr() for tensor in results}
    graph.replay()
    facts_by_name["a replay runs it"] = results[0].sum().item() == 2 * N
    facts_by_name["memory that a replay does not write is poison"] = results[1].isnan().all().item()
    results[1].fill_(0.0)
    graph.replay()
    facts_by_name["in each replay"] = results[1].isnan().all().item()
    results.clear()
    torch.accelerator.empty_cache()
    others = [filled(1.0) for _ in range(4000)]
    facts_by_name["its memory is nobody else's"] = pointers.isdisjoint(tensor.data_ptr() for tensor in others)
    graph.replay()
    torch.accelerator.synchronize()
    facts_by_name["nor written by it"] = all(tensor.sum().item() == N for tensor in others[:100])
    before = torch.sim.memory_reserved()
    graph.reset()
    torch.accelerator.empty_cache()
    facts_by_name["and given back with it"] = torch.sim.memory_reserved() < before
    return facts_by_name


if __name__ == "__main__":
    main(int(sys.argv[1]))
