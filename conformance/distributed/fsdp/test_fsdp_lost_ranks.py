"""Ranks that are lost, wait in another collective than their peers, or wrap in another order."""

from __future__ import annotations

import copy
import datetime
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from conformance.distributed.fsdp.scenes.desync_programs import (
    ASTRAY,
    GRACE_S,
    LARGE,
    ORDERS,
    SHORT_GRACE_S,
    Blocks,
    Bottleneck,
    Program,
    RankReports,
    reports_in,
    run,
    shard_blocks,
    train_step,
    wait_until_raised,
)
from conformance.distributed.fsdp.scenes.fsdp_training import FSDP
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import assert_same_outcome, observe
from conformance.judge.sandbox import seeding
from conformance.judge.tolerances import TRAINED
from conformance.ranks import Rank, RankFault, RankPool

pytestmark = pytest.mark.deadline(90)  # new pools of ranks take seconds
TIMEOUT_S = 20.0  # timeout of the group in which ranks are killed


def fault_of(
    library: Library,
    case: Callable[..., Any],
    *,
    world_size: int = 2,
    grace_s: float = SHORT_GRACE_S,
    **arguments: Any,
) -> RankFault:
    """Run a case that fails, in a separate pool of ranks. Return the fault."""
    with RankPool(world_size, grace_s=grace_s) as pool, pytest.raises(RankFault) as fault:
        pool.run(case, library=library.spec, **arguments)
    return fault.value


def wait_elsewhere(rank: Rank, *, library: str, api: str, by: str, timeout_s: float) -> None:
    """Leave out a step on one rank, which enters a collective of the default group instead. Every rank raises."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    torch.manual_seed(0)
    model = shard_blocks(load_library(library), Blocks((8, 8)), api, group)
    train_step(model, "train", seeding.generator(0))
    meet = dist.barrier if by == "barrier" else functools.partial(dist.all_reduce, torch.ones(1))
    try:
        if rank.rank != ASTRAY:
            train_step(model, "train", seeding.generator(1))
    finally:
        meet()
    raise RuntimeError("a step was left out")


@clause("distributed.fsdp.fsdp_desync.waits_elsewhere")
@pytest.mark.deviation("fsdp.waits_elsewhere")
@pytest.mark.parametrize(
    ("api", "by"),
    [
        ("fully_shard", "barrier"),
        pytest.param("FSDP1", "barrier", marks=FULL_PROFILE),
        pytest.param("FSDP1", "all_reduce", marks=FULL_PROFILE),
    ],
)
def test_rank_waiting_in_other_collective_is_reported(
    deviation: DeviationJudge, reference: Library, api: str, by: str
) -> None:
    def raised(library: Library) -> str:
        # torch's ranks wait until the time-out, so theirs is short. Other ranks may need longer on a busy machine.
        timeout_s = 2.0 if library is reference else TIMEOUT_S
        fault = fault_of(library, wait_elsewhere, api=api, by=by, timeout_s=timeout_s)
        return " ".join(failure.text for failure in fault.record.failures)

    named = rf"rank {ASTRAY} waits in torch\.distributed\.{by}\(\) where rank {1 - ASTRAY} gathered '\w+'"
    deviation.judge(
        raised,
        torch_does=lambda text: by not in text,
        we_do=lambda text: re.search(named, text) is not None,
    )


def ask_alone(rank: Rank, *, library: str, api: str, pause_s: float, timeout_s: float) -> None:
    """Request a full state on one rank only, while the others begin a step `pause_s` seconds later.

    FSDP1 requests the state of the optimizer, fully_shard the state of the model.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    torch.manual_seed(0)
    loaded = load_library(library)
    model = shard_blocks(loaded, Blocks((8, 8)), api, group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.5)
    train_step(model, "train", seeding.generator(0))
    optimizer.step()
    try:
        if rank.rank != ASTRAY:
            time.sleep(pause_s)
            train_step(model, "train", seeding.generator(1))
        elif api == "FSDP1":
            model.optim_state_dict(model, optimizer, group=group)
        else:
            path = "distributed.checkpoint.state_dict.get_model_state_dict"
            get = loaded.find(path) if loaded.provides(path) else get_model_state_dict
            get(model, options=StateDictOptions(full_state_dict=True))
    except Exception:
        wait_until_raised(rank.world_size)
        raise
    raise RuntimeError("a state was asked for")


@clause("distributed.fsdp.fsdp_desync.states_of_one_rank")
@pytest.mark.deviation("fsdp.states_of_one_rank")
@pytest.mark.parametrize(
    ("api", "pause_s"),
    [("FSDP1", 1.0), *(pytest.param(api, 0.0, marks=FULL_PROFILE) for api in ("FSDP1", "fully_shard"))],
)
def test_state_requested_by_one_rank_raises(
    deviation: DeviationJudge, reference: Library, api: str, pause_s: float
) -> None:
    """torch's ranks issue different collectives, which `outcome.diverged` reports."""

    def raised(library: Library) -> RankReports:
        timeout_s = 2.0 if library is reference else TIMEOUT_S
        return reports_in(fault_of(library, ask_alone, api=api, pause_s=pause_s, timeout_s=timeout_s))

    named = (
        rf"only some ranks ask for a state dict: .*rank {ASTRAY} .*of a state dict.*; "
        "call the function that returns it on every"
    )
    deviation.judge(
        raised,
        torch_does=lambda outcome: outcome.diverged,
        we_do=lambda outcome: (
            len(outcome.raised) == 2 and all(re.search(named, text) for text in outcome.raised.values())
        ),
    )


def sync_in_another_order(rank: Rank, *, library: str) -> None:
    """Wrap two blocks with `sync_module_states`, in the opposite order on one rank."""
    blocks = [Bottleneck(8), Bottleneck(16)]
    try:
        for block in reversed(blocks) if rank.rank == ASTRAY else blocks:
            load_library(library).find(FSDP)(block, device_id=torch.device("cpu"), sync_module_states=True)
    except Exception:
        wait_until_raised(rank.world_size)
        raise


@clause("distributed.fsdp.fsdp_desync.parts_while_wrapping")
def test_sync_module_states_in_another_order_raises(subject: Library) -> None:
    reported = reports_in(fault_of(subject, sync_in_another_order, grace_s=GRACE_S)).raised
    assert len(reported) == 2, reported
    for text in reported.values():
        assert "'Bottleneck.0.weight' of shape (8, 4)" in text, text
        assert "'Bottleneck.0.weight' of shape (16, 4)" in text, text


def use_group_afterwards(rank: Rank, *, library: str, program: Program, by: str) -> tuple[str, list[float]]:
    """Return the error of this rank, and sums over the group that it still uses."""
    message = ""
    try:
        if by == "wrapping":
            sync_in_another_order(rank, library=library)
        elif by == "state":
            ask_alone(rank, library=library, api=program.api, pause_s=0.0, timeout_s=TIMEOUT_S)
        else:
            run(rank, library=library, program=program)
    except RuntimeError as error:
        message = str(error)
    dist.barrier()
    sums = torch.arange(3.0) * (rank.rank + 1)
    for _ in range(3):
        dist.all_reduce(sums)
    return message, sums.tolist()


@clause("distributed.fsdp.fsdp_desync.group_afterwards")
@pytest.mark.parametrize(
    ("program", "by", "ranks"),
    [
        (Program(differs_at=0), "order", 2),
        (Program(hidden=(8, 16, 24), differs_at=2, api="fully_shard"), "order", 2),
        pytest.param(Program(hidden=(8, 16, 24), differs_at=0), "order", 3, marks=FULL_PROFILE),
        pytest.param(Program(hidden=(LARGE,) * 3, differs_at=2), "order", 3, marks=FULL_PROFILE),
        pytest.param(
            Program((*ORDERS, *ORDERS, *(ORDERS[0],) * 4), differs_at=4), "order", 3, marks=FULL_PROFILE
        ),
        *(
            pytest.param(Program(differs_at=2, api="fully_shard", differs_by=by), by, 2, marks=FULL_PROFILE)
            for by in (
                "unused bias",
                "frozen bias",
                "blocks kept unsharded",
                "unsynchronised block",
                "divide factor",
            )
        ),
        pytest.param(
            Program(differs_at=0, api="fully_shard", differs_by="mp_policy"),
            "mp_policy",
            3,
            marks=FULL_PROFILE,
        ),
        pytest.param(Program(), "wrapping", 3, marks=FULL_PROFILE),
        *(pytest.param(Program(api=api), "state", 2, marks=FULL_PROFILE) for api in ("FSDP1", "fully_shard")),
    ],
    ids=lambda value: (
        f"{value.api} {value.hidden} {value.differs_at}" if isinstance(value, Program) else str(value)
    ),
)
def test_group_is_usable_after_ranks_differed(
    subject: Library, program: Program, by: str, ranks: int
) -> None:
    with RankPool(ranks, grace_s=GRACE_S) as pool:
        results = pool.run(use_group_afterwards, library=subject.spec, program=program, by=by)
    factor = sum(range(1, ranks + 1)) * ranks**2
    for rank, (message, sums) in enumerate(results):
        assert "rank" in message, f"rank {rank} raised {message!r}"
        assert sums == [0.0, factor, 2.0 * factor], f"rank {rank}"


def save_afterwards(
    rank: Rank, *, library: str, program: Program
) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the error of this rank, the state dict that it saves then, and the parameters that it should have."""
    torch.manual_seed(0)
    loaded, blocks = load_library(library), Blocks(program.hidden)
    plain = copy.deepcopy(blocks)
    model = shard_blocks(loaded, blocks, program.api)
    optimizers = [torch.optim.SGD(trained.parameters(), 0.01, momentum=0.5) for trained in (model, plain)]
    message = ""
    try:
        for step, common in enumerate(program.orders):
            is_astray = rank.rank == ASTRAY and step == program.differs_at
            blocks.order = program.other_order if is_astray else common
            train_step(model, "train", seeding.generator(10 * step + rank.rank))
            for number in range(rank.world_size):
                train_step(plain, "train", seeding.generator(10 * step + number))
            for parameter in plain.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(rank.world_size)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        message = str(error)
    states: dict[str, Any] = {}
    if program.api == "FSDP1":
        saved = model.state_dict()
        states = loaded.find(FSDP).optim_state_dict(model, optimizers[0])["state"]
    else:
        saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    saved |= {f"momentum of {name}": state["momentum_buffer"] for name, state in states.items()}
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    expected |= {
        f"momentum of {name}": optimizers[1].state[parameter]["momentum_buffer"]
        for name, parameter in plain.named_parameters()
        if states
    }
    return message, saved, expected


@clause("distributed.fsdp.fsdp_desync.group_afterwards")
@pytest.mark.parametrize(
    "program",
    [
        Program(differs_at=2),
        Program(hidden=(8, 16, 24), differs_at=0),
        Program(hidden=(8, 16, 24), differs_at=2, api="fully_shard"),
        pytest.param(Program(hidden=(LARGE,) * 3, differs_at=2), marks=FULL_PROFILE),
    ],
    ids=lambda program: f"{program.api} {program.hidden} {program.differs_at}",
)
def test_model_can_be_saved_after_ranks_differed(subject: Library, program: Program) -> None:
    with RankPool(2, grace_s=GRACE_S) as pool:
        results = pool.run(save_afterwards, library=subject.spec, program=program)
    for rank, (message, saved, expected) in enumerate(results):
        assert "rank" in message, f"rank {rank} raised {message!r}"
        assert_same_outcome(observe(sorted, expected.items()), observe(sorted, saved.items()), TRAINED)


_PAUSE_S = 1.5


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(*_: Any) -> None:
    raise ValueError("it fails")


def lose_a_rank(rank: Rank, *, library: str, when: str, victim: int, hidden: int, api: str = "FSDP1") -> None:
    """Kill one rank, or let it exit after an exception.

    `when` is `before` (wrapping), `middle` (of a step), `collective` (which the others enter late) or `exception`. The
    other ranks raise their error together with the seconds that it took.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier(group)
    is_victim = rank.rank == victim
    if is_victim and when == "before":
        _die()
    torch.manual_seed(0)
    blocks = Blocks((hidden,) * 3)
    model = shard_blocks(load_library(library), blocks, api, group)
    began = time.monotonic()
    try:
        if when != "before":
            train_step(model, "train", seeding.generator(0))
        if is_victim and when == "collective":
            threading.Timer(_PAUSE_S / 3, _die).start()
        elif is_victim:
            blocks.blocks[1].register_forward_pre_hook(_fail if when == "exception" else _die)
        elif when == "collective":
            time.sleep(_PAUSE_S)
        train_step(model, "train", seeding.generator(1))
    except Exception as error:
        if is_victim:
            os._exit(1)
        wait_until_raised(rank.world_size - 1)
        raise RuntimeError(f"{error} [after {time.monotonic() - began:.1f} s]") from error


def losses_reported(library: Library, *, world_size: int = 3, **loss: Any) -> dict[int, str]:
    fault = fault_of(library, lose_a_rank, world_size=world_size, grace_s=GRACE_S, **loss)
    return {f.rank: f.text for f in fault.record.failures if f.rank != loss["victim"]}


def is_named_by_none(reported: dict[int, str], victim: int) -> bool:
    return not any(re.search(rf"rank {victim}\b", text) for text in reported.values())


def is_named_in_time(reported: dict[int, str], victim: int, world_size: int) -> bool:
    return len(reported) == world_size - 1 and all(
        # On a busy machine, a live rank that does not answer within seconds is named together with the victim.
        re.search(rf"ranks? (\d, )*{victim}\b", text)
        and re.search(r"'blocks\.\d'|'Blocks'", text)
        and float(text.rpartition("after ")[2].removesuffix(" s]")) < TIMEOUT_S
        for text in reported.values()
    )


_LOSSES: list[tuple[dict[str, Any], bool]] = [
    # Rank 0 is a special victim, because it serves the store.
    *(
        ({"when": when, "hidden": hidden, "victim": victim}, is_full)
        for victim in (0, 2)
        for when, hidden, is_full in [
            ("before", 8, True),
            ("middle", 8, False),
            ("collective", 8, False),
            ("middle", LARGE, True),
            ("collective", LARGE, False),
            ("exception", 8, True),
        ]
    ),
    *(
        (
            {"when": when, "hidden": 8, "victim": victim, "api": "fully_shard", "world_size": 2},
            is_full or victim == 1,
        )
        for victim in (0, 1)
        for when, is_full in [("middle", False), ("exception", False), ("before", True), ("collective", True)]
    ),
    # Rank 2 of a ring of four receives from rank 1, which raised but is alive, and sends to rank 3.
    ({"when": "middle", "hidden": 8, "victim": 0, "world_size": 4}, True),
]


@clause("distributed.fsdp.fsdp_desync.lost_rank")
@pytest.mark.deviation("fsdp.lost_rank_is_named")
@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, marks=FULL_PROFILE if is_full else (), id=" ".join(map(str, loss.values())))
        for loss, is_full in _LOSSES
    ],
)
def test_lost_rank_is_named(deviation: DeviationJudge, loss: dict[str, Any]) -> None:
    victim, world_size = loss["victim"], loss.get("world_size", 3)
    deviation.judge(
        lambda library: losses_reported(library, **loss),
        torch_does=lambda reported: is_named_by_none(reported, victim),
        we_do=lambda reported: is_named_in_time(reported, victim, world_size),
    )
