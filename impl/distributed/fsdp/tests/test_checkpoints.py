"""Checkpoints of sharded training in impl: no kill loses data, and no file executes code."""

from __future__ import annotations

import enum
import io
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.ranks import RankFault, RankPool
from impl.distributed.fsdp import FullyShardedDataParallel
from impl.distributed.fsdp.checkpoint import LoadPlanner, Reader
from impl.distributed.fsdp.tests.checkpointed_runs import Payload, with_payload

RUNS = "impl.distributed.fsdp.tests.checkpointed_runs"
WORLDS = [1, 2, 3, 4]
# Name to save under, over the old checkpoint or beside it, and the ranks to kill.
KILLS = [(name, victims) for victims in ((0,), (1,), (0, 1)) for name in ("step-3", "step-5")]
# Share of a save's time from its first file to its renaming, approximately.
WRITING = 0.15


def are_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and value.dtype is other.dtype and torch.equal(value, other)
    if isinstance(value, Mapping):
        return value.keys() == other.keys() and all(
            are_same(value, other[key]) for key, value in value.items()
        )
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(are_same, value, other))
    return value == other


class Saved:
    """Checkpoints by number of ranks, each saved when it is first requested. Tests must not change them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[int, tuple[Path, list[Any]]] = {}

    def by(self, pool: RankPool) -> tuple[Path, list[Any]]:
        """Return the path, and the results of the ranks that saved it."""
        number = pool.world_size
        if number not in self._made:
            path = self._folder / f"by-{number}" / "step-3"
            self._made[number] = path, pool.run(f"{RUNS}:trained_and_saved", path=path)
        return self._made[number]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def copied(saved: Saved, ranks: Callable[..., RankPool], tmp_path: Path) -> Path:
    """Return a copy of a checkpoint of two ranks, which a test may damage."""
    path, _ = saved.by(ranks(2))
    return Path(shutil.copytree(path, tmp_path / path.name))


# Resuming


@pytest.mark.parametrize("number", WORLDS)
def test_training_resumed_is_training_not_interrupted(
    ranks: Callable[..., RankPool], saved: Saved, number: int
) -> None:
    """Checkpoints of flat parameters can be loaded with `use_orig_params`, too."""
    pool = ranks(number)
    path, ends = saved.by(pool)
    again = pool.run(f"{RUNS}:resumed", paths=[path], wrapping="original")
    for (saved_state, expected, _), [(loaded, actual)] in zip(ends, again, strict=True):
        assert are_same(loaded, saved_state)
        assert are_same(actual, expected)
        assert not are_same(saved_state, expected)


def test_parameters_of_their_own_are_resumed_as_flat_ones(
    ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    pool, path = ranks(3), tmp_path / "runs" / "step-3"
    ends = pool.run(f"{RUNS}:trained_and_saved", path=path, wrapping="original")
    again = pool.run(f"{RUNS}:resumed", paths=[path])
    for (saved_state, expected, _), [(loaded, actual)] in zip(ends, again, strict=True):
        assert are_same(loaded, saved_state)
        assert are_same(actual, expected)


@pytest.mark.parametrize("number", WORLDS)
def test_another_number_of_ranks_loads_the_same(
    ranks: Callable[..., RankPool], saved: Saved, number: int
) -> None:
    others = [saved.by(ranks(other)) for other in WORLDS if other != number]
    for outcome in ranks(number).run(f"{RUNS}:resumed", paths=[path for path, _ in others]):
        for (loaded, _), (_, ends) in zip(outcome, others, strict=True):
            assert are_same(loaded, ends[0][0])


@pytest.mark.parametrize(
    ("saved_from", "loaded_into"),
    [
        ("fully_shard", "fully_shard"),
        ("fully_shard", "flat"),
        ("flat", "fully_shard"),
        ("flat", "compiled"),
        ("compiled", "flat"),
    ],
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_checkpoint_moves_between_wrapping_and_fully_shard(
    ranks: Callable[..., RankPool], tmp_path: Path, saved_from: str, loaded_into: str, number: int
) -> None:
    path = tmp_path / "step-3"
    ends = ranks(2).run(f"{RUNS}:trained_and_saved", path=path, wrapping=saved_from)
    saved_state, expected, _ = ends[0]
    for [(loaded, actual)] in ranks(number).run(f"{RUNS}:resumed", paths=[path], wrapping=loaded_into):
        assert are_same(loaded, saved_state)
        if number == 2 and saved_from == loaded_into:
            assert are_same(actual, expected)


def test_optimizer_state_of_unwrapped_model_names_functions_to_use() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for call in (
        lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer),
        lambda: FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, optimizer.state_dict()),
    ):
        with pytest.raises(
            ValueError, match=r"Linear has no FullyShardedDataParallel; .*set_optimizer_state_dict"
        ):
            call()


def test_states_of_any_name_and_numbers_of_numpy(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    for expected, actual, kind in ranks(2).run(f"{RUNS}:kept_otherwise", path=tmp_path / "step-1"):
        assert are_same(actual, expected)
        assert kind == "float"


# Excerpt of every rank's error by the value to save.
UNREADABLE = {
    "an error": "KeyError: 'injected'",
    "an object": "others.mine cannot be loaded again: it holds pathlib.PosixPath",
    "a function": "others.mine cannot be loaded again: it holds",
    "a group": "optimizer.param_groups cannot be loaded again: it holds pathlib.PosixPath",
    "an extra state": "model.extra._extra_state cannot be loaded again: it holds pathlib.PosixPath",
    "a number for a name": "optimizer.state has the key 0, which is no string",
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_save_rejects_unloadable_values(ranks: Callable[..., RankPool], tmp_path: Path, kind: str) -> None:
    for text in ranks(2).run(f"{RUNS}:refused_to_save", path=tmp_path / "step-1", kind=kind):
        assert UNREADABLE[kind] in str(text)
    assert not list(tmp_path.iterdir())


# Being killed


@dataclass
class Generations:
    """Two states of one run, the first of them saved, and how long that took."""

    path: Path
    old: Any
    new: Any
    took_s: float

    def name_of(self, state: Any) -> str:
        both = {"old": self.old, "new": self.new}
        return next((name for name, saved_state in both.items() if are_same(saved_state, state)), "neither")


@pytest.fixture
def generations(
    saved: Saved, ranks: Callable[..., RankPool], tmp_path_factory: pytest.TempPathFactory
) -> Generations:
    pool, whole = ranks(2), tmp_path_factory.mktemp("whole") / "step-5"
    path, ends = saved.by(pool)
    old, _, took_s = ends[0]
    pool.run(f"{RUNS}:killed_while_saving", path=path, over=whole, victims=(), after_s=0.0)
    return Generations(path, old, pool.run(f"{RUNS}:latest_loaded", folder=whole.parent)[0], took_s)


@pytest.mark.deadline(900)
@pytest.mark.parametrize(
    ("kills", "once_written"),
    [
        pytest.param(KILLS, False, id="each once"),
        pytest.param(KILLS, True, id="each once written"),
        pytest.param(9 * KILLS, False, id="each nine times", marks=pytest.mark.profile("deep")),
        pytest.param(9 * KILLS, True, id="each nine times written", marks=pytest.mark.profile("deep")),
    ],
)
def test_latest_complete_checkpoint_loads_after_kill(
    generations: Generations,
    ranks: Callable[..., RankPool],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    kills: Sequence[tuple[str, tuple[int, ...]]],
    once_written: bool,
) -> None:
    """The save is killed at any point of its time, with an older checkpoint of the same or another name."""
    within_s = generations.took_s * (WRITING if once_written else 1.0)
    for number, (name, victims) in enumerate(kills):
        folder = tmp_path / str(number)
        shutil.copytree(generations.path, folder / "step-3")
        kill_while_saving(folder, name, victims, within_s * (number + 0.5) / len(kills), once_written)
        record_property("left by a kill", " ".join(left_in(folder)))
        states = ranks(2).run(f"{RUNS}:latest_loaded", folder=folder)
        assert {generations.name_of(state) for state in states} < {"old", "new"}, states


def left_in(folder: Path) -> list[str]:
    """Return the folders, each with its number of files. A folder that is being written is empty at first."""
    return sorted(f"{entry.name}:{len(list(entry.iterdir()))}" for entry in folder.iterdir())


def kill_while_saving(
    folder: Path, name: str, victims: tuple[int, ...], after_s: float, once_written: bool
) -> None:
    arguments: dict[str, Any] = {
        "path": folder / "step-3",
        "over": folder / name,
        "victims": victims,
        "after_s": after_s,
        "once_written": once_written,
    }
    with RankPool(2, grace_s=0.5) as pool, pytest.raises(RankFault):
        pool.run(f"{RUNS}:killed_while_saving", **arguments)


# Refused checkpoints

# Excerpt of every rank's error by the damage to a checkpoint.
REFUSALS = {
    "cut off": "is cut off or damaged",
    "a bit": "is damaged",
    "a file lost": "No such file or directory",
    "metadata cut off": ".metadata is cut off or damaged",
    "no metadata": "holds a dict, no metadata of a checkpoint",
    "another model": "model.0.weight was saved with the shape torch.Size([5, 7])",
    "a name lost": "lacks ['model.0.weight']",
    "none": "the scaler refuses",
}


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("damage", REFUSALS)
def test_failed_load_changes_nothing(
    ranks: Callable[..., RankPool], copied: Path, damage: str, number: int
) -> None:
    width = 6 if damage == "another model" else 5
    do_damage(copied, damage)
    outcomes = ranks(number).run(f"{RUNS}:refused", path=copied, width=width, by_scaler=damage == "none")
    for text, before, after in outcomes:
        assert text is not None
        assert REFUSALS[damage] in text
        assert are_same(before, after)


def do_damage(folder: Path, damage: str) -> None:
    file, metadata = folder / "__0_0.distcp", folder / ".metadata"
    data = file.read_bytes()
    match damage:
        case "cut off":
            file.write_bytes(data[: len(data) * 2 // 3])
        case "a bit":
            places = pickle.loads(metadata.read_bytes()).storage_data
            place = next(info for index, info in places.items() if index.fqn == "model.0.weight")
            file = folder / place.relative_path
            data = file.read_bytes()
            middle = place.offset + first_element_in(data[place.offset : place.offset + place.length])
            file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        case "a file lost":
            file.unlink()
        case "metadata cut off":
            metadata.write_bytes(metadata.read_bytes()[:-20])
        case "no metadata":
            metadata.write_bytes(pickle.dumps({"not": "metadata"}))
        case "a name lost":
            contents = pickle.loads(metadata.read_bytes())
            del contents.state_dict_metadata["model.0.weight"]
            metadata.write_bytes(pickle.dumps(contents))


def first_element_in(saved: bytes) -> int:
    """Return the offset of a tensor's first element in a file of `torch.save`."""
    with zipfile.ZipFile(io.BytesIO(saved)) as written:
        header = next(info for info in written.infolist() if info.filename.endswith("data/0")).header_offset
    name, extra = struct.unpack_from("<HH", saved, header + 26)
    return header + 30 + name + extra


def test_nothing_else_is_written_over(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one")
    with pytest.raises(Exception, match="is no checkpoint"):
        ranks(2).run(f"{RUNS}:trained_and_saved", path=tmp_path / "thesis")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["thesis", "chapter"]


# Code that is not executed


def test_metadata_that_carries_a_payload(
    ranks: Callable[..., RankPool], copied: Path, tmp_path: Path
) -> None:
    metadata, witness = copied / ".metadata", tmp_path / "witness"
    metadata.write_bytes(with_payload(metadata.read_bytes(), witness))
    for text, before, after in ranks(2).run(f"{RUNS}:refused", path=copied):
        assert "which checkpoints never contain; no code was executed" in text
        assert are_same(before, after)
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system"):
        Reader(copied).read_metadata()
    assert not witness.exists()
    dcp.FileSystemReader(copied).read_metadata()
    assert witness.exists(), "torch's own reader runs it no more: the documentation says it does"


class GetattrPickler(pickle.Pickler):
    """Pickler that writes members of enumerations, and given attributes, as Python 3.11.0 to 3.11.3 did."""

    attributes: tuple[tuple[Any, str], ...] = ()

    def reducer_override(self, obj: Any) -> Any:
        owners = [(of, name) for of, name in self.attributes if getattr(of, name) is obj]
        if isinstance(obj, enum.Enum):
            owners = [(type(obj), obj.name)]
        return (getattr, owners[0]) if owners else NotImplemented


def test_metadata_of_an_older_python(copied: Path) -> None:
    metadata = copied / ".metadata"
    expected = pickle.loads(metadata.read_bytes())
    with metadata.open("wb") as file:
        GetattrPickler(file).dump(expected)
    assert b"getattr" in metadata.read_bytes()
    assert Reader(copied).read_metadata().state_dict_metadata == expected.state_dict_metadata


def test_attributes_of_other_classes(copied: Path) -> None:
    metadata = copied / ".metadata"
    with metadata.open("wb") as file:
        pickler = GetattrPickler(file)
        pickler.attributes = ((torch.Size, "numel"),)
        pickler.dump(torch.Size.numel)
    with pytest.raises(pickle.UnpicklingError, match=r"refers to numel of <class 'torch\.Size'>"):
        Reader(copied).read_metadata()


def test_values_that_carry_a_payload(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    path = tmp_path / "one"
    dcp.save({"value": Payload(witness), "tensor": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    state: dict[str, Any] = {"value": 0, "tensor": torch.zeros(2)}
    with pytest.raises(dcp.CheckpointException, match="Weights only load failed"):
        dcp.load(state, storage_reader=Reader(path), planner=LoadPlanner(), no_dist=True)
    assert not witness.exists()
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert witness.exists(), "torch's own load runs it no more: the documentation says it does"


def test_plain_checkpoints_are_read(tmp_path: Path) -> None:
    saved = {"value": {"list": [1, 2.5, "three"]}, "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3)}
    dcp.save(saved, checkpoint_id=tmp_path / "one", no_dist=True)
    state: dict[str, Any] = {"value": {"list": None}, "tensor": torch.zeros(2, 3, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=Reader(tmp_path / "one"), planner=LoadPlanner(), no_dist=True)
    assert are_same(state, saved)


@pytest.mark.parametrize("place", ["../outside", "/etc/hostname"])
def test_places_outside_the_folder(copied: Path, place: str) -> None:
    metadata = copied / ".metadata"
    contents = pickle.loads(metadata.read_bytes())
    next(iter(contents.storage_data.values())).relative_path = place
    metadata.write_bytes(pickle.dumps(contents))
    with pytest.raises(ValueError, match="outside the checkpoint"):
        Reader(copied).read_metadata()


# torch's own helpers


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_torchs_helpers_know_the_class_that_is_dropped_in(
    ranks: Callable[..., RankPool], use_orig_params: bool
) -> None:
    options = {"use_orig_params": use_orig_params}
    expected = ranks(2).run(f"{RUNS}:taken_by_torch", how="torch", **options)
    assert are_same(ranks(2).run(f"{RUNS}:taken_by_torch", how="dropped in", **options), expected)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_torchs_helpers_write_nothing_wrong_of_a_class_that_they_do_not_know(use_orig_params: bool) -> None:
    with RankPool(2) as pool, pytest.raises(RankFault, match=r"call impl\.drop_in\.install\(\) before"):
        pool.run(f"{RUNS}:taken_by_torch", how="impl", use_orig_params=use_orig_params)
