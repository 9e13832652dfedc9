"""Ranks of one host read one another's memory, where all can."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from conformance.judge.judgement import unavailable
from conformance.judge.sandbox import seeding
from conformance.ranks import Rank, RankFault, RankPool
from impl.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from impl.distributed.fsdp._comm import choosing, same_host
from impl.distributed.fsdp._comm.desync.collective_order import order_checker_of
from impl.distributed.fsdp._comm.same_host import SameHostPeers
from impl.distributed.fsdp._comm.transport import issue_and_wait
from impl.distributed.fsdp._layout import per_param

pytestmark = [
    pytest.mark.deadline(120),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has process_vm_readv"),
]

KEPT_APART = "this machine keeps processes from reading one another's memory"
DTYPES = [torch.float32, torch.bfloat16]


def given_by(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, few enough for any sum of them to be exact."""
    return torch.randint(-20, 20, (numel,), generator=seeding.generator(rank)).to(dtype)


def exchange(rank: Rank, *, shard_numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a gathered tensor and a shard of a sum, or None if ranks cannot read one another's memory.

    The default device is meta, on which the numbers that ranks exchange would be lost.
    """
    whole = torch.full((rank.world_size * shard_numel,), float("nan")).to(dtype)
    shard = torch.full((shard_numel,), float("nan")).to(dtype)
    shard_of_rank, buffer = (given_by(rank.rank, numel, dtype) for numel in (shard_numel, whole.numel()))
    with torch.device("meta"), _new_group() as (_, peers):
        if peers is None:
            return None
        peers.all_gather(whole, shard_of_rank, issue_and_wait)
        peers.reduce_scatter(shard, buffer, issue_and_wait)
    return whole, shard


@contextmanager
def _new_group() -> Generator[tuple[dist.ProcessGroup, SameHostPeers | None]]:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    try:
        yield group, same_host.same_host_peers_in(group, issue_and_wait)
    finally:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunks", "beyond"), [(1, -1), (3, 1)])
@pytest.mark.parametrize("more_ranks", [2, 3])
def test_exchange_returns_other_ranks_values(
    ranks: Callable[..., RankPool], more_ranks: int, chunks: int, beyond: int, dtype: torch.dtype
) -> None:
    shard_numel = chunks * same_host._CHUNK_BYTES // dtype.itemsize + beyond
    outcomes = ranks(more_ranks).run(exchange, shard_numel=shard_numel, dtype=dtype)
    if outcomes == [None] * more_ranks:
        unavailable(KEPT_APART)
    whole = torch.cat([given_by(rank, shard_numel, dtype) for rank in range(more_ranks)])
    total = torch.stack([given_by(rank, more_ranks * shard_numel, dtype) for rank in range(more_ranks)]).sum(
        0
    )
    for (actual, shard), expected in zip(outcomes, total.split(shard_numel), strict=True):
        assert torch.equal(actual, whole)
        assert torch.equal(shard, expected)


KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "columns": {"shard_placement_fn": lambda parameter: Shard(1) if parameter.ndim > 1 else None},
    "fewer ranks": {"reshard_after_forward": 2},
    "low precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "several dtypes": {},
}


def unshard(rank: Rank, *, kind: str) -> list[bool]:
    """Return whether unsharded parameters are the original ones, and whether the last gather filled row by row."""
    filled: list[bool] = []

    def noted(*arguments: Any) -> bool:
        filled.append(choosing.fills_rows(*arguments))
        return filled[-1]

    with (
        mock.patch.multiple(choosing, LEAST_BYTES=0, ROW_BYTES=0),
        mock.patch.object(per_param, "fills_rows", noted),
    ):
        mesh = DeviceMesh("cpu", torch.arange(rank.world_size))
        layer = nn.Linear(4, 5)
        with torch.no_grad():
            for number, parameter in enumerate(layer.parameters()):
                parameter.copy_(given_by(number, parameter.numel(), torch.float32).view_as(parameter))
        if kind == "several dtypes":
            layer.register_parameter("numbers", nn.Parameter(torch.arange(7), requires_grad=False))
        whole = [parameter.detach().clone() for parameter in layer.parameters()]
        fully_shard(layer, mesh=mesh, **KINDS[kind])
        model = fully_shard(nn.Sequential(layer), mesh=mesh)
        same: list[bool] = []

        def compare(*_: object) -> None:
            pairs = zip(layer.parameters(), whole, strict=True)
            same.append(all(torch.equal(param, expected.to(param.dtype)) for param, expected in pairs))

        layer.register_forward_pre_hook(compare)
        model.register_full_backward_pre_hook(lambda *_: layer.unshard())
        for _ in range(2):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
            layer.unshard()
            compare()
            layer.reshard()
    return [all(same), filled[-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_read_to_where_they_belong(ranks: Callable[..., RankPool], kind: str) -> None:
    outcomes = ranks(4).run(unshard, kind=kind)
    if not any(fills for _, fills in outcomes):
        unavailable(KEPT_APART)
    assert outcomes == [[True, True]] * 4


def meet_one_that_cannot_read(rank: Rank, *, blind: int) -> bool:
    """Whether this rank would read the others' memory."""
    reader = same_host._process_vm_readv
    if rank.rank == blind:
        same_host._process_vm_readv = lambda: None
    try:
        with _new_group() as (_, peers):
            return peers is not None
    finally:
        same_host._process_vm_readv = reader


@pytest.mark.parametrize("blind", [0, 2])
def test_no_rank_reads_if_any_rank_cannot(ranks: Callable[..., RankPool], blind: int) -> None:
    assert ranks(3).run(meet_one_that_cannot_read, blind=blind) == [False] * 3


def meet_one_that_checks_for_nan(rank: Rank, *, checking: int) -> bool:
    """Whether this rank would read the others' memory, which a check of the group's collectives does not see."""
    checks = {"TORCH_DIST_NAN_CHECK": "1"} if rank.rank == checking else {}
    with mock.patch.dict(os.environ, checks), _new_group() as (_, peers):
        return peers is not None


@pytest.mark.parametrize("checking", [0, 1])
def test_no_rank_reads_if_any_rank_checks_for_nan(ranks: Callable[..., RankPool], checking: int) -> None:
    assert ranks(2).run(meet_one_that_checks_for_nan, checking=checking) == [False] * 2


def offer_unequal_sizes(rank: Rank) -> str | None:
    """Return the raised error, or None if ranks cannot read one another's memory."""
    with _new_group() as (_, peers):
        if peers is None:
            return None
        numel = 5 + rank.rank
        try:
            peers.all_gather(torch.empty(2 * numel), torch.zeros(numel), issue_and_wait)
        except RuntimeError as error:
            return str(error)
    return ""


def test_unequal_sizes_are_refused_before_anything_is_read(ranks: Callable[..., RankPool]) -> None:
    reported = ranks(2).run(offer_unequal_sizes)
    if reported == [None, None]:
        unavailable(KEPT_APART)
    assert reported == [
        f"rank {1 - rank} of the group offers {4 * (6 - rank)} bytes, this one {4 * (5 + rank)}"
        for rank in (0, 1)
    ]


def lose_one_whose_memory_is_read(rank: Rank, *, victim: int) -> None:
    """Kill a rank after it has published its address, before the others read its memory. The others raise."""
    read = SameHostPeers._read

    def read_too_late(self: SameHostPeers, peer: int, address: int, into: torch.Tensor) -> None:
        read(self, peer, address, into)
        while peer == victim:
            time.sleep(0.01)
            read(self, peer, address, into)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with _new_group() as (group, peers):
        if peers is None:
            return
        shard = torch.zeros(5)
        whole = torch.empty(5 * rank.world_size)
        order_checker = order_checker_of(group)
        for late in (False, True):
            if late:
                SameHostPeers._read = die if rank.rank == victim else read_too_late
            order_checker.exchange(
                "gathered 'a'", group, shard.device, functools.partial(peers.all_gather, whole, shard)
            )


@pytest.mark.parametrize("victim", [0, 2])
def test_error_names_lost_rank_and_gathered_unit(victim: int) -> None:
    """The first rank serves the store."""
    with RankPool(3, grace_s=20.0) as pool:
        try:
            pool.run(lose_one_whose_memory_is_read, victim=victim)
        except RankFault as fault:
            reported = {
                failure.rank: failure.text for failure in fault.record.failures if failure.rank != victim
            }
        else:
            unavailable(KEPT_APART)
    assert len(reported) == 2, reported
    for text in reported.values():
        assert re.search(rf"gathered 'a' without success; .*ranks? (\d, )*{victim}\b", text), text
