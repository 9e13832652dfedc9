"""Races that torch's fully_shard had and has mended, planted again: each with a training that meets it."""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from conformance.ranks import Rank
from conformance.selftests.simulator_sharded import (
    ScheduledTraining,
    ShardedProgram,
    course_of,
    per_parameter,
)

Patch = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class Bug:
    way: ShardedProgram
    patch: Callable[[], Patch]


class Headless(nn.Module):
    """Model whose last layer the loss calls, chunk by chunk."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        *body, self.norm, self.head = layers
        self.body = nn.Sequential(*body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def headless(library: ModuleType, model: nn.Sequential, rank: Rank) -> nn.Module:
    model_without_head, mesh = Headless(list(model)), rank.mesh(rank.world_size)
    for layer in model_without_head.body:
        library.fully_shard(layer, mesh=mesh)
    library.fully_shard([model_without_head.norm, model_without_head.head], mesh=mesh)
    return library.fully_shard(model_without_head, mesh=mesh)


def chunked(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    losses = [model.head(chunk).square().mean() for chunk in model(batch).chunk(4)]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach()


def in_replicas_offloaded(library: ModuleType, model: nn.Sequential, rank: Rank) -> nn.Module:
    mesh = rank.mesh(rank.world_size, 1, names=("replicas", "shards"))
    for layer in (*model, model):
        library.fully_shard(layer, mesh=mesh, offload_policy=library.CPUOffloadPolicy())
    return model


def stepped_by_hooks(library: ModuleType, model: nn.Sequential, rank: Rank) -> nn.Module:
    sharded = per_parameter(offload_policy=lambda library: library.CPUOffloadPolicy())(library, model, rank)
    for parameter in sharded.parameters():
        parameter.register_post_accumulate_grad_hook(_step)
    return sharded


@torch.no_grad()
def _step(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def rewritten(owner: Any, name: str, *replaced: tuple[str, str]) -> Patch:
    """Return a patch that replaces words in the source of a function of torch, wherever its lines break."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in replaced:
        words = r"\s*".join(map(re.escape, re.findall(r"\w+|\S", old)))
        source, count = re.subn(words, new, source)
        assert count == 1, f"{name} of this torch has {old!r} {count} times, not once"
    names = dict(inspect.unwrap(function).__globals__)
    exec(compile(source, f"<{name}, with a bug>", "exec"), names)
    return mock.patch.object(owner, name, names[name])


def accumulates_behind_the_computation() -> Patch:
    """Free the input of a chunk's reduction too early, and drop the wait for the reduction before the next chunk."""
    return rewritten(
        _fsdp_param_group.FSDPParamGroup,
        "post_backward",
        ("ReduceScatterState(reduce_scatter_input,", "ReduceScatterState(None,"),
        (
            "self.device_handle.current_stream().wait_event(self._post_reduce_event)",
            "del reduce_scatter_input",
        ),
    )


def frees_what_is_all_reduced() -> Patch:
    """Free the all-reduced memory before it is copied to the host."""
    return rewritten(
        _fsdp_param_group.FSDPParamGroup,
        "post_backward",
        ("AllReduceState(all_reduce_input,", "AllReduceState(None,"),
    )


def copies_beside_hooks() -> Patch:
    """Make hooks read pinned memory that is still being filled."""
    return rewritten(_fsdp_param_group, "foreach_reduce", ("and not has_post_acc_grad_hook", ""))


BUGS = {
    "a chunked loss": Bug(ShardedProgram(headless, backward=chunked), accumulates_behind_the_computation),
    "replicas, offloaded": Bug(ShardedProgram(in_replicas_offloaded), frees_what_is_all_reduced),
    "a step in a gradient's hook": Bug(
        ShardedProgram(stepped_by_hooks, step=lambda model, optimizer: None), copies_beside_hooks
    ),
}


def course(rank: Rank, bug: str, seed: int, planted: bool) -> ScheduledTraining:
    planted_bug = BUGS[bug]
    with planted_bug.patch() if planted else contextlib.nullcontext():
        return course_of(rank, "torch", planted_bug.way, seed)
