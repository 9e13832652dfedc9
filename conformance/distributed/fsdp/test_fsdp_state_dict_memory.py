"""Memory of state dicts: on which device it is, how much is used at a time, and how many bytes a rank receives."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance.distributed.fsdp.scenes import optimizer_states, state_dicts
from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.optimizer_states import Optimized, StateDictMethod, unwrapped
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.scenes.scene import TREE, Program, Scene, tried
from conformance.distributed.fsdp.scenes.state_dicts import (
    Form,
    has_values_of_other_model,
    rank_of,
    set_form,
    state_dict_of_other_model,
)
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    RankOutcomes,
    Twins,
    each,
    flat_or_originals,
    leaf_by_leaf,
    raises,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import EXACT

_TO_CPU = {"offload_to_cpu": True}


def contents_of(outcomes: Sequence[Outcome]) -> RankOutcomes:
    """Keep the dict's contents and the model's later results. Drop the settings, warnings and shared memory."""
    values_of(outcomes)
    return [
        replace(
            outcome,
            value={key: value for key, value in outcome.value.items() if key not in ("settings", "shared")},
            warned=(),
        )
        for outcome in outcomes
    ]


@clause("distributed.fsdp.fsdp_state_dict.whole_on_the_cpu")
@pytest.mark.reference_limit("fsdp.full_state_dict_to_cpu")
def test_torch_cannot_offload_full_state_dict_on_cpu(torch_cannot: Callable[..., None]) -> None:
    form = Form("FULL", _TO_CPU)
    torch_cannot(state_dicts.save_after_backward, FLAT, form=form)


@clause("distributed.fsdp.fsdp_state_dict.whole_on_the_cpu")
@pytest.mark.parametrize("rank0_only", [False, True])
@flat_or_originals
def test_full_state_dict_offloads_to_cpu(cpu_twins: Twins, setup: Setup, rank0_only: bool) -> None:
    """The dict equals torch's dict without offload."""
    config = {"rank0_only": rank0_only}
    expected, actual = (
        cpu_twins.of(library, state_dicts.save_after_backward, setup, form=Form("FULL", flags))
        for library, flags in ((cpu_twins.reference, config), (cpu_twins.subject, config | _TO_CPU))
    )
    assert_ranks_agree(contents_of(expected), contents_of(actual), EXACT)


def shard_placements(scene: Scene, *, form: Form) -> list[tuple[bool, bool]]:
    set_form(scene.library, scene.model, form)
    return _placements(scene, scene.model.state_dict(), offloads=form.config.get("offload_to_cpu", False))


def _placements(scene: Scene, saved: Mapping[str, Any], *, offloads: bool) -> list[tuple[bool, bool]]:
    """Return, for each shard of this rank, whether the shard and its metadata are on the requested device."""
    device = torch.device("cpu") if offloads else scene.rank.device
    placements: list[tuple[bool, bool]] = []
    for value in tree_leaves(saved):
        if isinstance(value, ShardedTensor):
            own_metadata = [
                shard for shard in value.metadata().shards_metadata if rank_of(shard) == scene.rank.rank
            ]
            for shard, shard_metadata in zip(value.local_shards(), own_metadata, strict=True):
                placements.append(
                    (shard.tensor.device == device, shard_metadata.placement.device() == device)
                )
    return placements


def judge_all_on_requested_device(twins: Twins, program: Program, offloads: bool, **arguments: Any) -> None:
    """Judge a deviation: all shards and their metadata must be on the requested device."""
    twins.deviate(
        program,
        FLAT,
        torch_does=each(lambda placements: {*placements} == {(not offloads, offloads)}),
        we_do=each(lambda placements: {*placements} == {(True, True)}),
        # torch agrees for LOCAL_STATE_DICT, and for groups that serve no other device.
        may_agree=True,
        **arguments,
    )


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("fsdp.offloaded_state_dicts")
@pytest.mark.parametrize(("kind", "offloads"), [("SHARDED", False), ("SHARDED", True), ("LOCAL", False)])
@pytest.mark.world_sizes(fewest=2)
def test_shards_are_on_requested_device(twins: Twins, kind: str, offloads: bool) -> None:
    """torch leaves the shards of a SHARDED_STATE_DICT on the device, while their metadata says CPU."""
    judge_all_on_requested_device(
        twins, shard_placements, offloads, form=Form(kind, {"offload_to_cpu": offloads})
    )


def state_placements(scene: Scene, *, way: StateDictMethod) -> list[tuple[bool, bool]]:
    return _placements(scene, way.save(scene, Optimized().stepped(scene.model)), offloads=way.offloads)


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("fsdp.offloaded_state_dicts")
@pytest.mark.parametrize(
    "way",
    [
        StateDictMethod("sharded"),
        StateDictMethod("SHARDED"),
        StateDictMethod("SHARDED", offloads=False),
        StateDictMethod("LOCAL", offloads=False),
    ],
    ids=str,
)
@pytest.mark.world_sizes(fewest=2)
def test_shards_of_states_are_on_requested_device(twins: Twins, way: StateDictMethod) -> None:
    """torch leaves the shards of states on the device, while their metadata says CPU."""
    judge_all_on_requested_device(twins, state_placements, way.offloads, way=way)


def devices_of_states(scene: Scene, *, way: StateDictMethod) -> set[str]:
    """Return the device types of the saved states, or of their local shards."""
    saved = tree_leaves(way.save(scene, Optimized("momentum").stepped(scene.model))["state"])
    parts = (
        [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        for value in saved
    )
    return {part.device.type for part in itertools.chain(*parts)}


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("fsdp.offloaded_state_dicts")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_unsharded_states_are_offloaded(twins: Twins, strategy: str, device: str) -> None:
    twins.deviate(
        devices_of_states,
        leaf_by_leaf(strategy, use_orig_params=True),
        way=StateDictMethod("SHARDED"),
        torch_does=each(lambda devices: devices == {device}),
        we_do=each(lambda devices: devices == {"cpu"}),
        may_agree=True,  # torch agrees on the CPU and for sharded states
    )


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("fsdp.offloaded_state_dicts")
@pytest.mark.world_sizes(fewest=2)
def test_shards_of_flat_parameters_are_offloaded(twins: Twins) -> None:
    twins.deviate(
        shard_placements,
        FLAT,
        form=Form("LOCAL", {"offload_to_cpu": True}),
        torch_does=raises(ValueError, "requires_grad property is incompatible"),
        we_do=each(lambda placements: {*placements} == {(True, True)}),
        may_agree=True,  # torch agrees on the CPU
    )


class PeakBytes(TorchDispatchMode):
    """Mode that records the peak bytes of tensors that operators return, without the storages of `old`."""

    def __init__(self, old: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._old = {tensor.untyped_storage()._cdata for tensor in old}
        self._returned: list[weakref.ref[torch.Tensor]] = []
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._returned.append(weakref.ref(result))
        living = [(ref, tensor) for ref in self._returned if (tensor := ref()) is not None]
        self._returned = [ref for ref, _ in living]
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for _, tensor in living
        }
        held = sum(size for key, size in storages.items() if key not in self._old)
        self.most_bytes = max(self.most_bytes, held)
        return result


def peak_while_saving(scene: Scene) -> tuple[int, float]:
    """Return the bytes of one large unit's state dict on this rank, and the peak memory as a multiple of the model.

    The peak does not include this rank's shard.
    """
    torch.manual_seed(1)
    body = nn.Sequential(*(nn.Linear(1792, 1792) for _ in range(5)))
    model_bytes = sum(parameter.nbytes for parameter in body.parameters())
    model = scene.wrap(body)
    config = scene.api.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    scene.fsdp.set_state_dict_type(model, scene.api.StateDictType.FULL_STATE_DICT, config)
    with PeakBytes(model.parameters()) as held:
        state_dict = model.state_dict()
    return sum(value.nbytes for value in state_dict.values()), held.most_bytes / model_bytes


@clause("distributed.fsdp.fsdp_state_dict.held_once")
@pytest.mark.world_sizes(fewest=2)
def test_full_state_dict_is_stored_once(cpu_twins: Twins) -> None:
    (bytes_of_dict, times_the_model), *others = cpu_twins.values(peak_while_saving)
    assert bytes_of_dict == 5 * 4 * (1792 * 1792 + 1792)
    assert 1 <= times_the_model < 1.4
    assert all(bytes_of_dict == 0 and times_the_model < 0.4 for bytes_of_dict, times_the_model in others)


class OnDemand:
    """Object with a tensor's shape and dtype. A function of torch that is called with it gets the actual tensor."""

    is_meta = True

    def __init__(self, read: Callable[[], torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> None:
        self.read, self.shape, self.dtype = read, shape, dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(
            *(argument.read() if isinstance(argument, OnDemand) else argument for argument in args),
            **(kwargs or {}),
        )


def on_demand(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {key: OnDemand(value.clone, value.shape, value.dtype) for key, value in state_dict.items()}


def loads_on_demand(scene: Scene, *, fault: str) -> dict[str, Any]:
    """Load a full dict of objects that are not tensors. Return the result and whether the model has the values."""
    state_dict = state_dict_of_other_model(scene, Form("FULL"))
    if fault == "misshaped":
        state_dict |= {"body.parts.0.inner.weight": torch.ones(2), "head.bias": torch.ones(7)}
    reported = tried(lambda: repr(scene.model.load_state_dict(on_demand(state_dict))))
    return {
        "reported": reported,
        "loaded": has_values_of_other_model(scene),
        "loss": None if fault else scene.backward(),
    }


@clause("distributed.fsdp.fsdp_state_dict.on_demand")
@pytest.mark.parametrize("fault", ["", "misshaped"])
@flat_or_originals
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_state_dict_loads_values_on_demand(twins: Twins, strategy: str, setup: Setup, fault: str) -> None:
    for outcome in twins.agree(loads_on_demand, replace(setup, strategy=strategy), fault=fault):
        assert outcome.value["loaded"] is (not fault)


def peak_while_loading(scene: Scene) -> float:
    """Return the peak memory, as a multiple of the model, while many units load a dict that is read on demand."""
    torch.manual_seed(1)
    body = nn.Sequential(*(nn.Linear(256, 256) for _ in range(10)))
    model_bytes = sum(parameter.nbytes for parameter in body.parameters())
    state_dict = on_demand({key: value.clone() for key, value in body.state_dict().items()})
    model = scene.wrap(body, units=[nn.Linear])
    with PeakBytes(model.parameters()) as held:
        model.load_state_dict(state_dict)
    return held.most_bytes / model_bytes


@clause("distributed.fsdp.fsdp_state_dict.on_demand")
@pytest.mark.world_sizes(fewest=2)
def test_values_on_demand_are_freed_while_loading(cpu_twins: Twins) -> None:
    for times_the_model in cpu_twins.values(peak_while_loading):
        assert 0 < times_the_model < 0.9


@clause("distributed.fsdp.fsdp_state_dict.parameters_on_the_cpu")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_states_of_offloaded_parameters_match_torch(cpu_twins: Twins, strategy: str, kind: str) -> None:
    """Model and optimizer states of offloaded parameters equal torch's states without offload, and can be loaded."""
    plain, form = leaf_by_leaf(strategy), Form(kind)
    offloaded = replace(plain, offload_params=True)
    pairs = ((cpu_twins.reference, plain), (cpu_twins.subject, offloaded))
    expected, actual = (
        cpu_twins.of(library, state_dicts.save_after_backward, setup, form=form) for library, setup in pairs
    )
    assert_ranks_agree(contents_of(expected), contents_of(actual), EXACT)

    exchange = {"source": cpu_twins.subject.spec, "form": form}
    for state in cpu_twins.values(state_dicts.load_from_library, offloaded, **exchange):
        for name, value in state["expected"].items():
            assert torch.equal(state["whole"][name].values, value.values), name

    optimized = {"optimized": Optimized("momentum"), "way": StateDictMethod(kind, offloads=kind != "FULL")}
    expected, actual = (
        cpu_twins.of(library, optimizer_states.save_load_and_step, setup, **optimized)
        for library, setup in pairs
    )
    assert_ranks_agree(expected, actual, EXACT)


@clause("distributed.fsdp.fsdp_state_dict.parameters_on_the_cpu")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
def test_states_of_parameters_offloaded_from_device_match_torch(twins: Twins, device: str, kind: str) -> None:
    """The shards are in pinned memory, unlike those of parameters that compute on the CPU."""
    if device == "cpu":
        unavailable("an accelerator")
    offloaded = replace(leaf_by_leaf(), offload_params=True)
    twins.agree(state_dicts.save_after_backward, offloaded, form=Form(kind))


class Received(TorchDispatchMode):
    """Mode that counts the bytes of tensors that collectives leave on this rank.

    Objects by which ranks agree are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            bytes_of_optimizer_state = [
                tensor for tensor in tree_leaves(args[0]) if isinstance(tensor, torch.Tensor)
            ]
            is_exchange = func.__name__.startswith("alltoall")
            self.bytes += sum(
                tensor.nbytes
                for tensor in bytes_of_optimizer_state
                if is_exchange or tensor.is_floating_point()
            )
        return func(*args, **(kwargs or {}))


receives_all = each(lambda value: min(value["saving"], value["loading"]) >= value["whole"])


def bytes_of_optimizer_state(scene: Scene, way: StateDictMethod) -> dict[str, int]:
    """Return the bytes that this rank receives, and the bytes of full states, of single rows and of its shard."""
    optimizer = Optimized().stepped(scene.model)
    with Received() as saving:
        saved = way.save(scene, optimizer)
    with Received() as loading:
        way.load(scene, optimizer, saved)
    wholes = [tensor for tensor in tree_leaves(unwrapped(Optimized())["state"]) if tensor.dim()]
    return {
        "saving": saving.bytes,
        "loading": loading.bytes,
        "whole": sum(tensor.nbytes for tensor in wholes),
        "rows": sum(tensor[0].nbytes for tensor in wholes),
        "shard": sum(parameter.nbytes for parameter in scene.model.parameters()),
    }


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.bytes_received")
@pytest.mark.deviation("fsdp.sharded_state_dict_gathers")
@flat_or_originals
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_each_rank_receives_only_its_rows(cpu_twins: Twins, setup: Setup) -> None:
    def is_least(value: Any) -> bool:
        part = value["whole"] / cpu_twins.world_size + value["rows"]
        # Adam keeps two tensors for each parameter.
        return 0 < value["saving"] <= part and 0 < value["loading"] <= 2 * value["shard"]

    way = StateDictMethod("SHARDED")
    cpu_twins.deviate(bytes_of_optimizer_state, setup, way=way, torch_does=receives_all, we_do=each(is_least))


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.bytes_received")
@pytest.mark.deviation("fsdp.sharded_state_dict_gathers")
@flat_or_originals
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_rank0_only_saving_sends_states_to_first_rank_only(cpu_twins: Twins, setup: Setup) -> None:
    def are_right(outcomes: Any) -> bool:
        first, *others = values_of(outcomes)
        # Padding to equal shards is received too.
        is_once = first["whole"] <= first["saving"] <= 1.5 * first["whole"]
        parts = [0 < value["loading"] <= 2 * (value["shard"] + value["rows"]) for value in others]
        return is_once and all(parts) and all(value["saving"] == 0 for value in others)

    way = StateDictMethod("FULL", rank0_only=True)
    cpu_twins.deviate(bytes_of_optimizer_state, setup, way=way, torch_does=receives_all, we_do=are_right)


def bytes_of_sharded_state_dict(scene: Scene) -> dict[str, int]:
    """Return the bytes that saving and loading SHARDED_STATE_DICT leave on this rank."""
    set_form(scene.library, scene.model, Form("SHARDED"))
    with Received() as saving:
        state_dict = scene.model.state_dict()
    with Received() as loading:
        scene.model.load_state_dict(state_dict)
    return {"saving": saving.bytes, "loading": loading.bytes}


@clause("distributed.fsdp.fsdp_state_dict.bytes_moved")
@pytest.mark.deviation("fsdp.sharded_state_dict_gathers")
@pytest.mark.world_sizes(fewest=2, also=[3, 4])
@pytest.mark.parametrize("setup", [FLAT, Setup()], ids=["leaves", "root"])
def test_sharded_state_dict_moves_at_most_the_share_of_a_rank(cpu_twins: Twins, setup: Setup) -> None:
    """A rank moves at most its share of the model and one row of each parameter."""
    plain = list(TREE.build().parameters())
    elements = sum(p.numel() for p in plain) / cpu_twins.world_size + sum(p[0].numel() for p in plain)
    share = int(elements * torch.float32.itemsize)
    cpu_twins.deviate(
        bytes_of_sharded_state_dict,
        setup,
        torch_does=each(lambda value: min(value["saving"], value["loading"]) > share),
        we_do=each(lambda value: all(0 < moved <= share for moved in (value["saving"], value["loading"]))),
    )
