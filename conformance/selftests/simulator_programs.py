"""Small programs with streams for the simulator's tests, each correct and with one step left out.

`python -m conformance.selftests.simulator_programs SEEDS` runs all programs in one process, because a process cannot
release the simulated device. It prints the result of each program under every seed as JSON. The result of a correct
program is 6000.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from unittest import mock

import torch
from torch.distributed import ReduceOp
from torch.testing._internal.distributed import multi_threaded_pg

from conformance import simulator
from conformance.simulator.device import host_view

N = 1000
PROGRAMS: dict[str, Callable[[bool], float]] = {}


def program(function: Callable[[bool], float]) -> Callable[[bool], float]:
    PROGRAMS[function.__name__] = function
    return function


def filled(value: float) -> torch.Tensor:
    return torch.empty(N, device="sim").fill_(value)


def main_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


@program
def wait_before_reading(right: bool) -> float:
    side, x = torch.Stream("sim"), filled(2.0)
    if right:
        side.wait_stream(main_stream())
    with side:
        y = x * 3
    main_stream().wait_stream(side)
    return y.sum().item()


@program
def wait_for_what_was_written(right: bool) -> float:
    side, x, y = torch.Stream("sim"), filled(1.0), torch.empty(N, device="sim")
    side.wait_stream(main_stream())
    with side:
        y.copy_(x)
        y.mul_(6)
    if right:
        main_stream().wait_stream(side)
    return y.sum().item()


@program
def wait_before_writing_what_is_read(right: bool) -> float:
    side, x = torch.Stream("sim"), filled(2.0)
    side.wait_stream(main_stream())
    with side:
        y = x * 3
    if right:
        main_stream().wait_stream(side)
    x.fill_(7.0)
    main_stream().wait_stream(side)
    return y.sum().item()


@program
def record_stream(right: bool) -> float:
    side, x = torch.Stream("sim"), filled(2.0)
    side.wait_stream(main_stream())
    with side:
        y = x * 3
    if right:
        x.record_stream(side)
    del x
    filled(7.0).add_(1)
    main_stream().wait_stream(side)
    return y.sum().item()


@program
def wait_for_event(right: bool) -> float:
    first, second, x = torch.Stream("sim"), torch.Stream("sim"), filled(1.0)
    for stream in (first, second):
        stream.wait_stream(main_stream())
    event = torch.Event("sim")
    with first:
        x.mul_(6)
        event.record()
    with second:
        if right:
            second.wait_event(event)
        y = x + 0
    for stream in (first, second):
        main_stream().wait_stream(stream)
    return y.sum().item()


@program
def event_after_the_work(right: bool) -> float:
    side, x, event = torch.Stream("sim"), filled(1.0), torch.Event("sim")
    side.wait_stream(main_stream())
    with side:
        if not right:
            event.record()
        x.mul_(6)
        if right:
            event.record()
    main_stream().wait_event(event)
    return x.sum().item()


@program
def synchronize_before_the_host_reads(right: bool) -> float:
    host = filled(6.0).to("cpu", non_blocking=True)
    if right:
        torch.accelerator.synchronize()
    return host.sum().item()


@program
def event_before_the_host_reads(right: bool) -> float:
    host, event = torch.empty(N, pin_memory=True), torch.Event("sim")
    host.copy_(filled(6.0), non_blocking=True)
    event.record()
    if right:
        event.synchronize()
    return float(host.numpy().sum())


@program
def synchronize_before_the_host_writes(right: bool) -> float:
    host = torch.full((N,), 6.0).pin_memory()
    x = host.to("sim", non_blocking=True)
    if right:
        main_stream().synchronize()
    host.fill_(1.0)
    return x.sum().item()


@program
def keep_pinned_memory_that_a_kernel_reads(right: bool) -> float:
    host = torch.full((N,), 6.0).pin_memory()
    x = torch.empty(N, device="sim")
    address, out = host.data_ptr(), host_view(x)
    simulator.launch(lambda: torch.add(_floats_at(address), 0, out=out), [host], [x], "a kernel of one's own")
    if not right:
        del host
    torch.full((N,), 1.0).pin_memory()
    return x.sum().item()


@program
def wait_for_a_backward_elsewhere(right: bool) -> float:
    side, weight = torch.Stream("sim"), torch.ones(N, device="sim", requires_grad=True)
    side.wait_stream(main_stream())
    with side:
        (weight * 6).sum().backward()
    if right:
        main_stream().wait_stream(side)
    return weight.grad.sum().item()


@program
def wait_for_a_copy_between_devices(right: bool) -> float:
    x = filled(6.0)
    with torch.Stream("sim:1") as side:
        y = torch.empty(N, device="sim:1").copy_(x)
    if right:
        torch.accelerator.current_stream("sim:1").wait_stream(side)
    return y.sum().item()


@program
def wait_around_a_sum_of_threads(right: bool) -> float:
    """Sum over a threaded group of torch, whose first rank copies for all ranks, on its own stream.

    torch waits for the streams of the other ranks since 2.15, so the wrong program leaves these waits out.
    """
    streams, parts = [torch.Stream("sim"), torch.Stream("sim")], []
    for stream in streams:
        with stream:
            parts.append(filled(3.0))
    group = SimpleNamespace(_terminate=threading.Event())
    total = multi_threaded_pg.Collective(2, multi_threaded_pg.AllReduce(ReduceOp(ReduceOp.SUM)), group)

    def join(rank: int) -> None:
        with streams[rank]:
            total.join(rank, [parts[rank]])

    if right:
        streams[0].wait_stream(streams[1])
    with contextlib.nullcontext() if right else _without_waits_of_threaded_group():
        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if right:
        streams[1].wait_stream(streams[0])
    main_stream().wait_stream(streams[1])
    return parts[1].sum().item()


def _without_waits_of_threaded_group() -> AbstractContextManager[object]:
    # torch before 2.15 has no such function.
    return mock.patch.object(multi_threaded_pg, "_wait_current_stream_events", create=True)


def _floats_at(address: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * N).from_address(address), dtype=torch.float32)


def main(seeds: int) -> None:
    simulator.enable(devices=2)
    torch.set_num_threads(1)
    simulator.log_hazards()
    outcomes = []
    for name, function in PROGRAMS.items():
        for right in (True, False):
            for seed in [*range(seeds), *range(seeds)]:
                simulator.set_schedule(seed)
                number = function(right)
                simulator.synchronize()
                hazards = [vars(hazard) for hazard in simulator.take_hazards()]
                outcomes.append(
                    {
                        "program": name,
                        "right": right,
                        "seed": seed,
                        "number": repr(number),
                        "course": simulator.course(),
                        "hazards": hazards,
                    }
                )
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
