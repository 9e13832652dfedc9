"""Certificates agree if runs agree, for any number of ranks, and otherwise name the first difference."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from conformance.judge.library import load_library
from conformance.judge.sandbox import seeding
from conformance.ranks import Rank, RankPool
from conformance.training.__main__ import main
from conformance.training.certificate import RunRecorder, summarize
from conformance.training.certify import Certificate, NotComparable, Verdict, certify

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


@given(
    shape=st.lists(st.integers(0, 6), max_size=3),
    dtype=st.sampled_from(DTYPES),
    dim=st.integers(0, 2),
    ranks=st.integers(1, 4),
)
@example(shape=[], dtype=torch.complex64, dim=0, ranks=1)
def test_hashes_and_sketches_of_shards_add_up(
    shape: list[int], dtype: torch.dtype, dim: int, ranks: int
) -> None:
    generator = seeding.generator(5)
    tensor = torch.randint(-9, 9, shape, generator=generator).to(dtype)
    digest, sketch, _ = summarize(tensor, shape)
    indices = [torch.arange(size) for size in shape]
    parts = tensor.chunk(ranks, dim) if dim < len(shape) else [tensor]
    start, total, sums = 0, 0, [0.0] * len(sketch)
    for part in parts:
        if dim < len(shape):
            indices[dim] = torch.arange(start, start := start + part.shape[dim])
        part_digest, part_sketch, _ = summarize(part, shape, indices)
        total += part_digest
        sums = [a + b for a, b in zip(sums, part_sketch, strict=True)]
    assert total % 2**64 == digest
    assert sums == sketch


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.view(torch.int32)[0].add_(1),
        lambda tensor: tensor[5].mul_(-1),
        lambda tensor: tensor.copy_(tensor[[1, 0, *range(2, len(tensor))]]),
        lambda tensor: tensor[3].fill_(torch.nan),
    ],
    ids=["one bit", "sign of a zero", "two elements swapped", "a nan"],
)
def test_any_change_changes_the_hash(change: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.arange(100, dtype=torch.float32)
    tensor[5] = 0
    before = summarize(tensor, tensor.shape)[0]
    change(tensor)
    assert summarize(tensor, tensor.shape)[0] != before


def test_sketch_estimates_norm_of_difference() -> None:
    generator = seeding.generator(6)
    for size in (3, 100, 10_000):
        a, b = (torch.randn(size, generator=generator) for _ in range(2))
        estimates = [torch.tensor(summarize(tensor, [size])[1]) for tensor in (a, b)]
        ratio = float((estimates[0] - estimates[1]).norm() / (a - b).norm())
        assert 0.4 < ratio < 2.5


def test_sparse_tensor_has_hash_of_dense_one() -> None:
    tensor = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert summarize(tensor.to_sparse(), [2, 2]) == summarize(tensor, [2, 2])


BATCH = 8


WRAPPINGS: dict[str, Callable[[nn.Module, Callable[[nn.Module], nn.Module]], Any]] = {
    "plain": lambda model, shard: shard(model),
    "compiled": lambda model, shard: torch.compile(shard(model), backend="eager"),
    "inner": lambda model, shard: nn.Sequential(*(shard(layer) for layer in model.children())),
}


def record_training(
    rank: Rank,
    *,
    folder: str,
    sharding: str | None,
    mistake: tuple[int, int] | None = None,
    steps: int = 3,
    wrapping: str = "plain",
    normalizes: bool = False,
) -> None:
    """Train a small model on this rank's part of each batch, and write a certificate.

    Args:
        sharding: a function or class of `distributed.fsdp`, or None for a model that is not sharded.
        mistake: a rank and a step after which it changes its part of a weight.
        wrapping: one of `WRAPPINGS`.
        normalizes: the model has statistics of this rank's batches.
    """
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(31) if normalizes else nn.Tanh()
    model: nn.Module = nn.Sequential(nn.Linear(13, 31), middle, nn.Linear(31, 7))
    if sharding:
        shard = load_library("torch").find(f"distributed.fsdp.{sharding}")
        is_flat = sharding == "FullyShardedDataParallel"
        options = {"use_orig_params": True, "device_id": torch.device("cpu")} if is_flat else {}
        model = WRAPPINGS[wrapping](model, lambda module: shard(module, **options))
    # AdamW has two states, which FullyShardedDataParallel.optim_state_dict of torch mixes up.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    recorder = RunRecorder(folder, model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        inputs = torch.randn(BATCH, 13, generator=generator).chunk(rank.world_size)[rank.rank]
        loss = model(inputs).square().mean()
        loss.backward()
        recorder.record("backward", loss=loss)
        optimizer.step()
        if mistake == (rank.rank, step):
            weight = next(model.parameters()).detach()
            with contextlib.suppress(AttributeError):
                weight = weight.to_local()
            weight.mul_(1.001)
        recorder.record("step")
        optimizer.zero_grad()


@pytest.fixture
def recorded(ranks: Callable[..., RankPool], tmp_path: Path) -> Callable[..., Certificate]:
    """Train on a number of ranks, and read the certificate."""

    def run(world_size: int, sharding: str | None, **options: object) -> Certificate:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        ranks(world_size, "cpu").run(record_training, folder=str(folder), sharding=sharding, **options)
        return Certificate.read(folder)

    return run


def test_shardings_of_one_world_give_one_certificate(recorded: Callable[..., Certificate]) -> None:
    verdict = certify(recorded(2, "fully_shard"), recorded(2, "FullyShardedDataParallel"))
    assert verdict == Verdict("6 records of 3 steps, 0 to 2", [])


@pytest.mark.parametrize("wrapping", ["compiled", "inner"])
def test_wrapping_leaves_certificate_unchanged(recorded: Callable[..., Certificate], wrapping: str) -> None:
    runs = [
        recorded(2, sharding, wrapping=wrapping) for sharding in ("fully_shard", "FullyShardedDataParallel")
    ]
    assert [certify(recorded(2, "fully_shard"), run).says for run in runs] == [[], []]
    gradients = [name for name in runs[1].points[0, "backward"].tensors if name.startswith("gradient of ")]
    assert len(gradients) == 4


def test_statistics_of_ranks_are_compared_by_rank(recorded: Callable[..., Certificate]) -> None:
    first, second = (recorded(2, "fully_shard", normalizes=True, steps=steps) for steps in (2, 3))
    assert "buffer 1.running_mean of rank 1" in first.points[0, "backward"].of_rank
    assert "buffer 1.num_batches_tracked" in first.points[0, "backward"].tensors
    assert certify(first, second) == Verdict("4 records of 2 steps, 0 to 1", [])


def test_other_world_size_differs_by_order_of_sums_only(recorded: Callable[..., Certificate]) -> None:
    verdict = certify(recorded(1, "fully_shard"), recorded(2, "fully_shard"))
    first, cause, *others = verdict.says
    assert first.startswith("step 0, backward: gradient of 0.weight differs, by about ")
    assert cause.startswith("a different order of sums may explain it: ")
    assert others[1].startswith("world_size is 1 in ")


@pytest.mark.parametrize("sharding", ["fully_shard", "FullyShardedDataParallel"])
def test_mistake_of_one_rank_is_named(recorded: Callable[..., Certificate], sharding: str) -> None:
    verdict = certify(recorded(2, sharding), recorded(2, sharding, mistake=(1, 1)))
    first, cause, *_ = verdict.says
    # FullyShardedDataParallel gathers the weight, so that each rank records all of it.
    ranks = "1" if sharding == "fully_shard" else "0, 1"
    assert first.startswith(f"step 1, step: parameter 0.weight differs on rank {ranks}, by about ")
    assert cause.startswith("a different order of sums does not explain it")


def test_replicas_that_differ_are_named(recorded: Callable[..., Certificate]) -> None:
    with pytest.raises(
        NotComparable, match=r"step 0, backward: ranks 0 and 1 have different copies of gradient"
    ):
        recorded(2, None)


def test_resumed_run_gives_certificate_of_uninterrupted_run(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    model = torch.nn.ParameterList([weight])

    def record(folder: str, first: int, stop: int) -> None:
        recorder = RunRecorder(tmp_path / folder, model, first_step=first)
        for step in range(first, stop):
            weight.data.fill_(step)
            recorder.record("step")

    record("whole", 0, 6)
    record("resumed", 0, 4)
    # Steps after the checkpoint are recorded, lost with the process, and repeated.
    lost = json.dumps({"step": 4, "phase": "step", "tensors": {}, "of_rank": {}, "scaler": {}})
    with (tmp_path / "resumed" / "rank-0.jsonl").open("a") as file:
        file.write(f"{lost}\n{lost[:20]}")
    record("resumed", 4, 6)
    whole, resumed = (Certificate.read(tmp_path / folder) for folder in ("whole", "resumed"))
    assert certify(whole, resumed) == Verdict("6 records of 6 steps, 0 to 5", [])


def step_recorded(
    folder: Path, scale: float = 1.0, dtype: torch.dtype = torch.float32, **options: object
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder = RunRecorder(folder, model, optimizer, **options)
    (model(torch.ones(1, 3, dtype=dtype)).sum().abs() * scale).backward()
    optimizer.step()
    recorder.record("step")


@pytest.mark.parametrize(
    ("scale", "code", "says"),
    [
        (1.0, 0, "same: 1 records of 1 steps, 0 to 0"),
        (1 + 2e-7, 1, "a different order of sums may explain it"),
        (2.0, 1, "a different order of sums does not explain it"),
        (torch.inf, 1, "has 0 and 6 nonfinite elements"),
    ],
)
def test_command_compares_certificates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scale: float, code: int, says: str
) -> None:
    step_recorded(tmp_path / "a")
    step_recorded(tmp_path / "b", scale)
    assert main(["--certify", str(tmp_path / "a"), str(tmp_path / "b")]) == code
    assert says in capsys.readouterr().out


def test_complex_numbers_are_rounded_like_their_parts(tmp_path: Path) -> None:
    for folder, scale in (("a", 1.0), ("b", 1 + 2e-7)):
        step_recorded(tmp_path / folder, scale, torch.complex64)
    _, cause, *_ = certify(*(Certificate.read(tmp_path / folder) for folder in "ab")).says
    assert cause.startswith("a different order of sums may explain it: ")


def test_scaler_of_one_run_only_is_named(tmp_path: Path) -> None:
    step_recorded(tmp_path / "a")
    step_recorded(tmp_path / "b", scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    first, *_ = certify(*(Certificate.read(tmp_path / folder) for folder in "ab")).says
    assert "scale is None and 2.0" in first


def test_incomparable_certificates_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step_recorded(tmp_path / "a")
    step_recorded(tmp_path / "b", first_step=1)
    step_recorded(tmp_path / "d")
    cut_off = tmp_path / "d" / "rank-0.jsonl"
    cut_off.write_text(cut_off.read_text()[:-30])
    for other, says in (
        ("b", "no phase of a step in common"),
        ("c", "has no certificate"),
        ("d", "is cut off"),
    ):
        assert main(["--certify", str(tmp_path / "a"), str(tmp_path / other)]) == 2
        assert says in capsys.readouterr().out


def test_all_runs_of_a_comparison_get_certificates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--subject", "torch", "--dtype", "fp16", "--out", str(tmp_path), "--record"]
    assert main([*arguments, "--steps", "12"]) == 1  # twelve steps teach little
    reference, *others = sorted(tmp_path.glob("*.certificate"))
    assert [len(Certificate.read(folder).points) for folder in (reference, *others)] == [24] * (
        1 + len(others)
    )
