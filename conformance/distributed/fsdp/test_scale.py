"""World sizes up to 4096 on one rank. The collectives of a fake process group return at once and move nothing."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks.collective_traces import Collective, report_collectives
from conformance.ranks.fake_group import fake_group

SMALL = 8
WORLD_SIZES = [64, 512, 4096]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP"]
WIDTH, UNITS = 96, 3  # each of 4096 ranks has some of a unit's 9312 parameters


def world_of(size: int) -> AbstractContextManager[None]:
    return fake_group(size, rank=size // 2)


def wrap(library: Library, module: nn.Module, strategy: str, use_orig_params: bool = False) -> nn.Module:
    fsdp = library.distributed.fsdp
    return fsdp.FullyShardedDataParallel(
        module,
        sharding_strategy=fsdp.ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )


def wrapped(library: Library, *how: Any) -> nn.Module:
    """Return a model of `UNITS` units. `how` are arguments of `wrap`."""
    layers = (wrap(library, nn.Linear(WIDTH, WIDTH), *how) for _ in range(UNITS))
    return wrap(library, nn.Sequential(*layers), *how)


def trained(model: nn.Module) -> list[Collective]:
    """Return the collectives of the second of two steps."""
    collectives: list[Collective] = []
    for _ in range(2):
        collectives.clear()
        reporting = report_collectives(collectives.append)
        model(torch.ones(2, WIDTH)).sum().backward()
        del reporting
    return collectives


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@clause("distributed.fsdp.scale.memory")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_rank_stores_only_its_share(
    subject: Library, size: int, strategy: str, use_orig_params: bool
) -> None:
    with world_of(size):
        model = wrapped(subject, strategy, use_orig_params)
        trained(model)
        storage_bytes = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for parameter in model.parameters()
            for tensor in (parameter, parameter.grad)
            if tensor is not None
        }
    elements = UNITS * (WIDTH * WIDTH + WIDTH)
    fair = 2 * elements // size
    stored = sum(storage_bytes.values()) // 4
    assert fair <= stored <= fair + 2 * UNITS, f"{stored} elements, fair are {fair}"


@clause("distributed.fsdp.scale.memory")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unsharded_parameters_are_freed_after_wrapping(subject: Library, strategy: str) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    refs = [weakref.ref(parameter) for parameter in linear.parameters()]
    with world_of(SMALL):
        model = wrap(subject, linear, strategy)
        gc.collect()
        assert [ref() for ref in refs] == [None, None]
        del model


@clause("distributed.fsdp.scale.collectives")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_collectives_per_step_are_independent_of_world_size(
    subject: Library, size: int, strategy: str
) -> None:
    counts: list[Counter[str]] = []
    for world_size in (SMALL, size):
        with world_of(world_size):
            counts.append(Counter(call.name for call in trained(wrapped(subject, strategy))))
    assert counts[0] == counts[1]
    assert counts[0].total() > 0


@clause("distributed.fsdp.scale.construction")
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_operators_of_wrapping_are_independent_of_world_size(subject: Library, size: int) -> None:
    counts: list[int] = []
    for world_size in (SMALL, size):
        with world_of(world_size), Counting() as counting:
            wrapped(subject, "FULL_SHARD")
        counts.append(counting.calls)
    assert counts[0] == counts[1] > 0
