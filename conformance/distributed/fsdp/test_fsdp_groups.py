"""Process groups built manually, implemented in Python, with threads as ranks, or without a default group.

Training tests use groups of the CPU: gloo, or torch's groups of threads, which on an accelerator wait for no stream.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import multi_threaded_pg

from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.fully_shard_training import full_parameters
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree, holds
from conformance.distributed.fsdp.scenes.scaler_programs import SCALER
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import FLAT, RankOutcomes, Twins, flat_or_originals, values_of
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.sandbox import seeding
from conformance.ranks import Rank


def assert_trains_in_group(
    twins: Twins, program: Any, at: Path, setup: Setup = FLAT, **arguments: Any
) -> None:
    """Run the program on the ranks of both libraries and compare.

    The ranks of each library rendezvous at their own file.
    """
    expected, actual = (
        twins.of(library, program, setup, path=str(at / role), **arguments)
        for role, library in (("reference", twins.reference), ("subject", twins.subject))
    )
    values_of(expected)
    assert_ranks_agree(expected, actual)


_TIMEOUT = timedelta(seconds=30)
_STEPS, _THREADS = 3, 2


class InPython(dist.ProcessGroup):
    """Process group in Python that has these methods, but no backends that torch could ask for."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def size(self) -> int:
        return self._gloo.size()

    def rank(self) -> int:
        return self._gloo.rank()

    def getBackendName(self) -> str:
        return "in_python"

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:
        return self._name

    def allreduce(self, *args: Any) -> Any:
        return self._gloo.allreduce(*args)

    def allgather(self, *args: Any) -> Any:
        return self._gloo.allgather(*args)

    def all_gather_single(self, *args: Any) -> Any:
        return self._gloo._allgather_base(*args)

    def reduce_scatter_single(self, *args: Any) -> Any:
        return self._gloo._reduce_scatter_base(*args)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # names until torch 2.12


def backend(rank: Rank, store: dist.Store) -> Any:
    """Return a gloo backend, which serves as the group itself."""
    return dist.ProcessGroupGloo(store, rank.rank, rank.world_size, _TIMEOUT)


def by_hand(rank: Rank, store: dist.Store) -> Any:
    """Return a group that is not registered with torch.distributed."""
    group = dist.ProcessGroup(store, rank.rank, rank.world_size)
    of_gloo = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), of_gloo, backend(rank, dist.PrefixStore("gloo", store)))
    group._set_default_backend(of_gloo)
    group._set_group_name("by hand")  # pyright: ignore[reportArgumentType]
    return group


def in_python(rank: Rank, store: dist.Store) -> Any:
    if not hasattr(dist.Backend, "IN_PYTHON"):
        dist.Backend.register_backend("in_python", InPython, devices=["cpu"])
    return dist.new_group(backend="in_python")


KINDS: dict[str, Callable[[Rank, dist.Store], Any]] = {
    "a backend": backend,
    "by hand": by_hand,
    "in Python": in_python,
}


@contextlib.contextmanager
def no_default_group() -> Generator[None]:
    before = distributed_c10d._get_default_group()
    distributed_c10d._update_default_pg(None)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(before)


def train(scene: Scene, *, kind: str, path: str, has_default: bool = True) -> list[Any]:
    """Train a sharded model. The data of rank 0 contain inf in the second step."""
    if kind == "of threads":
        return _trained_in_threads(scene)
    model = _model()
    with _group(scene.rank, kind, path, has_default) as group:
        return _sharded_steps(scene, group, scene.rank.rank, model)


@contextlib.contextmanager
def _group(rank: Rank, kind: str, path: str, has_default: bool) -> Generator[Any]:
    group = KINDS[kind](rank, dist.FileStore(path, rank.world_size))
    with contextlib.nullcontext() if has_default else no_default_group():
        yield group
    if kind == "in Python":
        dist.destroy_process_group(group)


def _trained_in_threads(scene: Scene) -> list[Any]:
    """Train in each process separately, with its threads as the ranks."""
    # Import the scaler here, because torch's scaler permanently keeps the default group of its module's first import.
    scene.library.find(SCALER)
    reported: list[Any] = [None] * _THREADS
    models = [_model() for _ in reported]  # created here, because threads share one random generator
    store = dist.HashStore()

    def work(number: int) -> None:
        dist.init_process_group("threaded", rank=number, world_size=_THREADS, store=store)
        reported[number] = _sharded_steps(scene, None, number, models[number])
        dist.destroy_process_group()

    with _ranks_are_threads(), ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(work, number) for number in range(_THREADS)]:
            done.result()
    return reported


@contextlib.contextmanager
def _ranks_are_threads() -> Generator[None]:
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        yield
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()
        isolate(False)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))


def _sharded_steps(scene: Scene, group: Any, number: int, model: Any) -> list[Any]:
    uses_orig_params = scene.setup.uses_orig_params
    options = {"process_group": group, "use_orig_params": uses_orig_params}
    model[0] = scene.wrap(model[0], **options)
    model[1] = scene.wrap(model[1], strategy="NO_SHARD", **options)
    model = scene.wrap(model, **options)
    reported = _steps(scene, group, number, model)
    with scene.fsdp.summon_full_params(model, with_grads=uses_orig_params):
        reported += [parameter.detach().clone() for parameter in model.parameters()]
        reported += [parameter.grad.clone() for parameter in model.parameters() if uses_orig_params]
    return [*reported, model.state_dict()]


def _steps(scene: Scene, group: Any, number: int, model: Any) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = scene.library.find(SCALER)("cpu", init_scale=4.0, process_group=group)
    reported: list[Any] = []
    for step in range(_STEPS):
        x = torch.randn(2, 8, generator=seeding.generator(10 * step + number))
        if (step, number) == (1, 0):
            x[0, 0] = torch.inf
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        if hasattr(model, "clip_grad_norm_"):
            reported.append(model.clip_grad_norm_(0.5, (torch.inf, 2.0)[step % 2]))
        scaler.step(optimizer)
        scaler.update()
        reported.append(scaler.get_scale())
    return reported


@clause("distributed.fsdp.fully_sharded_data_parallel.process_groups_of_other_kinds")
@pytest.mark.parametrize(
    ("kind", "has_default"),
    [("by hand", True), ("by hand", False), ("in Python", True), ("of threads", True)],
)
@flat_or_originals
@pytest.mark.world_sizes(fewest=2)
def test_training_works_with_other_kinds_of_group(
    cpu_twins: Twins, setup: Setup, kind: str, has_default: bool, tmp_path: Path
) -> None:
    if kind == "of threads" and not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):
        unavailable(f"torch {torch.__version__} cannot end groups of threads")
    assert_trains_in_group(cpu_twins, train, tmp_path, setup, kind=kind, has_default=has_default)


@clause("distributed.fsdp.fsdp_torch_limit_removed.backend_as_group")
@pytest.mark.deviation("fsdp.backend_as_group")
@pytest.mark.world_sizes(fewest=2)
def test_backend_works_in_place_of_group(cpu_twins: Twins, tmp_path: Path) -> None:
    """torch 2.13 raises ValueError, because the backend is not in the world group map."""
    paths = (str(tmp_path / str(number)) for number in itertools.count())

    def probe(library: Library, kind: str = "a backend") -> RankOutcomes:
        return cpu_twins.of(library, train, kind=kind, path=next(paths))

    cpu_twins.judge(
        probe,
        we_do=lambda outcomes: holds(assert_ranks_agree, probe(cpu_twins.reference, "by hand"), outcomes),
        may_agree=not hasattr(dist.ProcessGroup, "all_gather_single"),
    )


def scale(scene: Scene, *, kind: str, path: str, has_default: bool = True) -> list[Any]:
    """Train an unsharded model on the same data, with a scaler that uses the group."""
    model = _model()
    with _group(scene.rank, kind, path, has_default) as group:
        return [*_steps(scene, group, scene.rank.rank, model), *model.parameters()]


@clause("distributed.fsdp.sharded_grad_scaler.constructor.process_group_of_other_kinds")
@pytest.mark.parametrize("has_default", [True, False], ids=["default", "none"])
@pytest.mark.parametrize("kind", ["a backend", "by hand"])
@pytest.mark.world_sizes(fewest=2)
def test_scaler_works_with_other_kinds_of_group(
    twins: Twins, kind: str, has_default: bool, tmp_path: Path
) -> None:
    assert_trains_in_group(twins, scale, tmp_path, kind=kind, has_default=has_default)


def scale_dtensors(scene: Scene, *, kind: str, path: str, has_default: bool = True) -> list[Any]:
    """Train a model of DTensors on the same data, with a scaler that uses the group."""
    model = fully_shard(_model(), mesh=scene.rank.mesh(scene.rank.world_size))
    with _group(scene.rank, kind, path, has_default) as group, warnings.catch_warnings():
        # torch's operator warns of its own arguments.
        warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1")
        return [*_steps(scene, group, scene.rank.rank, model), *full_parameters(model).values()]


@clause("distributed.fsdp.sharded_grad_scaler.constructor.process_group_of_other_kinds")
@pytest.mark.parametrize("kind", ["a backend", "by hand"])
@pytest.mark.world_sizes(fewest=2)
def test_scaler_checks_dtensors_with_other_kinds_of_group(
    cpu_twins: Twins, kind: str, tmp_path: Path
) -> None:
    assert_trains_in_group(cpu_twins, scale_dtensors, tmp_path, kind=kind)
