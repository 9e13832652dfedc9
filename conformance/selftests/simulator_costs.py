"""Costs of a program whose cost is known, and of the real sharding of four layers. The program prints them as JSON."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from conformance.simulator.cost import training_step
from conformance.simulator.cost.durations import hardware
from conformance.simulator.cost.llama import LlamaConfig
from conformance.simulator.cost.timeline import schedule, step_cost
from conformance.simulator.cost.trace import MARK, Trace, tracing

MIB = 1 << 20
RANKS = 8
SMALL = training_step.CostedTraining(LlamaConfig(layers=4), batch=1, length=2048)


def cost(trace: Trace) -> dict[str, Any]:
    on = hardware("h100")
    return asdict(step_cost(schedule(trace.entries, on.seconds, on.host_s))) | {
        "reserved": trace.reserved_bytes
    }


def begins(trace: Trace, name: str, slow: str) -> list[float]:
    """Return when operators `name` of the last step begin, if each operator `slow` takes 1 s and the others no time."""
    timeline = schedule(trace.entries, lambda entry: float(slow in entry.name), 0.0)
    step, _ = timeline.marks[-2:]
    first = [index for index, entry in enumerate(trace.entries) if entry.kind == MARK][-2]
    of_step = {id(entry) for entry in trace.entries[first:]}
    return [
        span.begin - step for span in timeline.spans if name in span.entry.name and id(span.entry) in of_step
    ]


def known() -> Trace:
    """Two buffers of 64 MiB, a third for as long as the sum takes, and a gather into 512 on the group's stream."""
    with tracing(RANKS) as tracer:
        tracer.mark()
        x = torch.empty(16 * MIB, device="sim")
        y = x + 1
        (y * 2).sum().item()
        out = torch.empty(128 * MIB, device="sim")
        work = dist.all_gather_into_tensor(out, y, async_op=True)
        for _ in range(4):
            x.add_(1)
        work.wait()
        x.copy_(out[: x.numel()])
        tracer.mark()
        return tracer.trace()


def main() -> None:
    costs = {"known": cost(known())}
    for name, subject in list(training_step.SUBJECTS.items()):
        trace = training_step.traced(name, SMALL, RANKS)
        gathers = begins(trace, "all_gather", slow="nll_loss_forward")
        training_step.SUBJECTS["hybrid"] = replace(
            subject, shard=functools.partial(subject.shard, replicas=2)
        )
        hybrid = training_step.traced("hybrid", SMALL, RANKS)
        scatters = begins(hybrid, "reduce_scatter", slow="all_reduce")
        costs[name] = cost(trace) | {"gathers": gathers, "scatters": scatters}
    subject = training_step.SUBJECTS["torch FSDP"]
    unprefetched = functools.partial(subject.shard, backward_prefetch=None)
    training_step.SUBJECTS["nothing prefetched"] = replace(subject, shard=unprefetched)
    costs["nothing prefetched"] = cost(training_step.traced("nothing prefetched", SMALL, RANKS))
    json.dump(costs, sys.stdout)


if __name__ == "__main__":
    main()
