"""Libraries train over the subject as over torch. Each rank is one side's for life, because libraries bind names."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.clients.sides import Sides, assert_same
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable
from conformance.judge.tolerances import EXACT

# The first one waits for all imports, on both sides.
pytestmark = [pytest.mark.profile("full"), pytest.mark.deadline(900)]
IN_BOTH_KINDS = pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
ON_BOTH_LAYOUTS = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
BY_LIGHTNING = pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
OPTIMIZERS = pytest.mark.parametrize(
    "optimizer",
    [
        "bitsandbytes.AdamW",
        "bitsandbytes.AdamW8bit",
        "bitsandbytes.Lion8bit",
        "bitsandbytes.PagedAdamW8bit",
        "torchao.AdamW8bit",
        "torchao.AdamW4bit",
    ],
    indirect=True,
)


@pytest.fixture
def optimizer(request: pytest.FixtureRequest) -> str:
    """Name of the optimizer. Optimizers of torchao compile their step, which takes a C++ compiler."""
    if request.param.startswith("torchao.") and not any(map(shutil.which, ("g++", "clang++"))):
        unavailable("no C++ compiler")
    return request.param


@pytest.fixture
def _torchtitan() -> None:
    if importlib.util.find_spec("torchtitan") is None:
        unavailable("no torchtitan: pip install --no-deps -r conformance/clients/requirements.txt")


def assert_sharded(returned: list[dict[str, Any]]) -> None:
    """Fail if a library changed how it wraps models, so that both sides trained without sharding."""
    assert all(outcome["sharded"] for outcome in returned)


@clause("clients.libraries.accelerate")
@ON_BOTH_LAYOUTS
@IN_BOTH_KINDS
def test_accelerate_matches_torch(
    sides: Sides, tmp_path: Path, state_dict_type: str, use_orig_params: bool
) -> None:
    options = {"state_dict_type": state_dict_type, "use_orig_params": use_orig_params}
    assert_sharded(
        sides.assert_alike("accelerate_training:train", tmp_path, **options, dtype=torch.float32, lora=False)
    )


@clause("clients.libraries.accelerate_version_2")
@IN_BOTH_KINDS
@pytest.mark.parametrize("lora", [False, True], ids=["all_trained", "adapters"])
@pytest.mark.parametrize("from_the_first_rank", [False, True], ids=["own_weights", "first_rank's_weights"])
def test_accelerate_version_2(
    sides: Sides, tmp_path: Path, from_the_first_rank: bool, lora: bool, state_dict_type: str
) -> None:
    options = {"state_dict_type": state_dict_type, "from_the_first_rank": from_the_first_rank, "lora": lora}
    assert_sharded(sides.assert_alike("accelerate_training:train_version_2", tmp_path, **options))


@clause("clients.libraries.accelerate_upcasts")
@ON_BOTH_LAYOUTS
def test_accelerate_upcasts(sides: Sides, tmp_path: Path, use_orig_params: bool) -> None:
    options = {"state_dict_type": "SHARDED_STATE_DICT", "use_orig_params": use_orig_params}
    actual = sides.assert_alike(
        "accelerate_training:train", tmp_path, **options, dtype=torch.bfloat16, lora=False
    )
    assert_sharded(actual)


@clause("clients.libraries.peft")
@ON_BOTH_LAYOUTS
@IN_BOTH_KINDS
def test_peft_adapters_match_torch(
    sides: Sides, tmp_path: Path, state_dict_type: str, use_orig_params: bool
) -> None:
    options = {"state_dict_type": state_dict_type, "use_orig_params": use_orig_params}
    actual = sides.assert_alike(
        "accelerate_training:train", tmp_path, **options, dtype=torch.float32, lora=True
    )
    assert_sharded(actual)
    # Two adapters for each of three layers in each of two blocks.
    assert sum(".lora_" in name for name in actual[0]["saved"]) == 12


@clause("clients.libraries.torchtitan")
@pytest.mark.usefixtures("_torchtitan")
@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole_loss", "chunked_loss"])
@pytest.mark.parametrize(
    ("is_tied", "reshards"), [(False, "always"), (True, "default")], ids=["apart", "tied"]
)
def test_torchtitan_matches_torch(sides: Sides, is_tied: bool, reshards: str, is_chunked: bool) -> None:
    options = {"is_tied": is_tied, "reshards": reshards, "is_chunked": is_chunked, "recomputes": is_tied}
    assert_sharded(sides.assert_alike("torchtitan_training:train", **options, dtype=torch.bfloat16))


@clause("clients.libraries.transformers_trainer")
@IN_BOTH_KINDS
def test_transformers_trainer_resumes_from_checkpoint(
    sides: Sides, tmp_path: Path, state_dict_type: str
) -> None:
    actual = sides.assert_alike("accelerate_training:trainer", tmp_path, state_dict_type=state_dict_type)
    assert_sharded([outcome["resumed"] for outcome in actual])


@clause("clients.libraries.transformers_generate")
@pytest.mark.parametrize("recurse", [True, False], ids=["all_whole", "outermost_whole"])
def test_transformers_generate(sides: Sides, recurse: bool) -> None:
    sides.assert_alike("accelerate_training:generate", tolerance=EXACT, recurse=recurse)


@clause("clients.libraries.lightning_fabric")
@BY_LIGHTNING
def test_lightning_fabric(sides: Sides, tmp_path: Path, state_dict_type: str) -> None:
    actual = sides.assert_alike("lightning_training:fabric", tmp_path, state_dict_type=state_dict_type)
    assert_sharded(actual)


@clause("clients.libraries.lightning_trainer")
@BY_LIGHTNING
def test_lightning_trainer(sides: Sides, tmp_path: Path, state_dict_type: str) -> None:
    actual = sides.assert_alike(
        "lightning_training:trainer", tmp_path, EXACT, state_dict_type=state_dict_type
    )
    assert_sharded([outcome["resumed"] for outcome in actual])


@clause("clients.libraries.distributed_checkpoint")
@pytest.mark.parametrize("torch_writes", [True, False], ids=["torch_writes", "torch_reads"])
@ON_BOTH_LAYOUTS
@pytest.mark.parametrize("full", [True, False], ids=["full", "sharded"])
def test_distributed_checkpoint(
    sides: Sides, tmp_path: Path, full: bool, use_orig_params: bool, torch_writes: bool
) -> None:
    way = {"folder": str(tmp_path), "full": full, "use_orig_params": use_orig_params}
    writer, reader = (sides.reference, sides.subject) if torch_writes else (sides.subject, sides.reference)
    wrote = sides.run(writer, "dcp_checkpoints:write", **way)
    assert_same(wrote, sides.run(reader, "dcp_checkpoints:read", **way), EXACT)


@clause("clients.libraries.pipelining")
@pytest.mark.parametrize(
    "schedule",
    ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"],
)
@pytest.mark.parametrize("reshards", [False, True], ids=["kept", "resharded"])
def test_pipeline_schedules_match_torch(sides: Sides, reshards: bool, schedule: str) -> None:
    options = {"schedule": schedule, "reshards": reshards}
    assert_sharded(sides.assert_alike("pipelines:train", tolerance=EXACT, **options))


@clause("clients.libraries.quantized_optimizers")
@OPTIMIZERS
def test_quantized_optimizers(sides: Sides, optimizer: str) -> None:
    sides.assert_alike("quantized_training:scaled", tolerance=EXACT, optimizer=optimizer)


@clause("clients.libraries.quantized_optimizers_in_one_call")
@OPTIMIZERS
def test_quantized_optimizers_in_one_call(sides: Sides, optimizer: str) -> None:
    sides.subject.find("optim.capture")  # missing here rather than on the ranks
    expected = sides.run(sides.reference, "quantized_training:scaled", optimizer=optimizer)
    captured = {"capture_of": sides.subject.spec}
    for how in (captured, {"fused": True}, captured | {"fused": True}):
        assert_same(
            expected, sides.run(sides.subject, "quantized_training:scaled", optimizer=optimizer, **how), EXACT
        )


@clause("clients.libraries.quantized_optimizers_sharded")
@ON_BOTH_LAYOUTS
@pytest.mark.parametrize("optimizer", ["bitsandbytes.AdamW8bit", "torchao.AdamW8bit"], indirect=True)
def test_quantized_optimizers_sharded(sides: Sides, optimizer: str, use_orig_params: bool) -> None:
    options = {"optimizer": optimizer, "use_orig_params": use_orig_params}
    sides.assert_alike("quantized_training:sharded", tolerance=EXACT, **options)
