"""Training with every setup on real ranks, compared with torch's ranks and with one unsharded process.

Units may hold nothing, only buffers or only frozen parameters, and activations may be checkpointed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples, trains_like_unsharded
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import (
    FULL_PROFILE,
    STRATEGIES,
    RankOutcomes,
    Twins,
    TwinsOf,
    Wrapping,
    both_kinds,
    each_strategy,
    each_wrapping,
    flat_or_originals,
    leaf_by_leaf,
)
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import RankFault
from conformance.strategies.sharding import steps, trainings

HYBRIDS = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
# Units of half a megabyte and more, as in real models. Such units may use another transport between ranks.
LARGE = ModuleTree(ModuleGroup((Leaf("affine", 20_001), Leaf("affine", 2), Leaf("affine", 40_001))))


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@each_strategy
@share_of_examples(0.3)
@given(data=st.data())
def test_training_matches_torch_and_unsharded(twins: Twins, strategy: str, data: st.DataObject) -> None:
    twins.agree_on_training(data.draw(trainings(strategy=strategy)))


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize("more_ranks", [3, 4])
@share_of_examples(0.4)
@given(training=st.sampled_from(STRATEGIES[:2]).flatmap(lambda strategy: trainings(strategy=strategy)))
def test_trains_on_more_ranks_than_some_parameters_have_elements(
    twins_of: TwinsOf, more_ranks: int, training: Training
) -> None:
    twins_of(more_ranks).agree_on_training(training)


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize("more_ranks", [2, 3, pytest.param(4, marks=FULL_PROFILE)])
@pytest.mark.parametrize(
    "setup",
    [leaf_by_leaf(use_orig_params=True), leaf_by_leaf("SHARD_GRAD_OP")],
    ids=lambda setup: setup.strategy,
)
def test_units_of_real_sizes_train_like_torch(twins_of: TwinsOf, setup: Setup, more_ranks: int) -> None:
    twins_of(more_ranks).agree_on_training(Training(LARGE, setup, (Step(), Step())))


@clause("distributed.fsdp.fully_sharded_data_parallel.hybrid")
@pytest.mark.parametrize("strategy", HYBRIDS)
@pytest.mark.parametrize(
    ("all_ranks", "shards"),
    [(4, 2), pytest.param(2, 2, marks=FULL_PROFILE), pytest.param(4, 4, marks=FULL_PROFILE)],
)
@share_of_examples(0.1)
@given(data=st.data())
def test_replicas_train_like_torch_and_unsharded(
    twins_of: TwinsOf, strategy: str, all_ranks: int, shards: int, data: st.DataObject
) -> None:
    """Each of the `all_ranks // shards` replicas is sharded over `shards` ranks."""
    drawn = trainings(strategy=strategy, shards=shards, ranks=("groups", "meshes"))
    twins_of(all_ranks).agree_on_training(data.draw(drawn))


@clause("distributed.fsdp.fully_sharded_data_parallel.hybrid")
@pytest.mark.parametrize("strategy", HYBRIDS)
@FULL_PROFILE
def test_single_replica_trains(cpu_twins: Twins, strategy: str) -> None:
    setup = Setup(strategy, ranks="meshes", shards=cpu_twins.world_size, wrap="leaves")
    cpu_twins.agree_on_training(Training(LARGE, setup, (Step(), Step())))


@clause("distributed.fsdp.fully_sharded_data_parallel.ignored")
@pytest.mark.parametrize("ignored", ["ignored_modules", "ignored_states", "parameters"])
@share_of_examples(0.3)
@given(data=st.data())
def test_ignored_parameters_stay_local(twins: Twins, ignored: str, data: st.DataObject) -> None:
    trained = trainings(strategy="FULL_SHARD", ignored=ignored, wraps=("root", "leaves", "size"))
    # In a world of one, torch leaves a frozen unit without its registered parameters.
    twins.agree_on_training(
        data.draw(trained.filter(lambda training: not training.mixes_frozen_with_trained))
    )


def ignored_inside(scene: Scene, *, by: str) -> dict[str, Any]:
    """Return the gradients if an inner unit gets the ignored modules or parameters, and the root does not."""
    kind = {"use_orig_params": scene.setup.uses_orig_params}
    part = scene.plain.body.parts[0]
    ignored = [part] if by == "ignored_modules" else list(part.parameters())
    scene.plain.body = scene.wrap(scene.plain.body, **{by: ignored}, **kind)
    scene.model = scene.wrap(scene.plain, **kind)
    return {"loss": scene.backward(), "gradients": scene.gradients()}


@clause("distributed.fsdp.fully_sharded_data_parallel.ignored")
@pytest.mark.parametrize("by", ["ignored_modules", "ignored_states"])
@flat_or_originals
def test_parameters_ignored_by_inner_unit_are_ignored_by_outer(
    cpu_twins: Twins, setup: Setup, by: str
) -> None:
    cpu_twins.agree(ignored_inside, setup, by=by)


TRAINABLE, FROZEN = Leaf("affine", 4), Leaf("affine", 3, frozen="all")
# Trained units are around and after the hollow ones. Wrapped leaf by leaf, the outermost unit holds only the head.
HOLLOW_TREES = {
    "root holds nothing": ModuleTree(ModuleGroup((TRAINABLE, Leaf("tied"))), head="none"),
    "root holds a buffer": ModuleTree(
        ModuleGroup((TRAINABLE, Leaf("batched"), Leaf("counted"))), head="none"
    ),
    "root is frozen": ModuleTree(ModuleGroup((TRAINABLE, Leaf("tied"))), head="frozen"),
    "units hold nothing": ModuleTree(
        ModuleGroup((Leaf("bare"), TRAINABLE, Leaf("bare"), Leaf("tied"), Leaf("bare")))
    ),
    "units hold buffers": ModuleTree(ModuleGroup((Leaf("counted"), TRAINABLE, Leaf("counted")))),
    "first unit is frozen": ModuleTree(ModuleGroup((FROZEN, TRAINABLE))),
    "units between are frozen": ModuleTree(ModuleGroup((TRAINABLE, FROZEN, Leaf("bare"), FROZEN, TRAINABLE))),
    "one of two ways is frozen": ModuleTree(ModuleGroup((FROZEN, TRAINABLE), kind="branches", calls=2)),
    "one unit is trained": ModuleTree(
        ModuleGroup((FROZEN, Leaf("counted"), TRAINABLE, FROZEN)), head="frozen"
    ),
    "a hollow root of hollow units": ModuleTree(
        ModuleGroup((Leaf("bare"), TRAINABLE, Leaf("counted"))), head="none"
    ),
}
STEPS_OF_HOLLOW_MODELS = (
    Step(),
    Step(before="eval"),
    Step(forwards=2, order="no_sync"),
    Step(forwards=2, order="together"),
)


@clause("distributed.fsdp.fully_sharded_data_parallel.hollow")
@pytest.mark.parametrize("tree", HOLLOW_TREES.values(), ids=HOLLOW_TREES)
@each_wrapping
@pytest.mark.world_sizes(fewest=2)
def test_hollow_models_train_like_torch(twins: Twins, wrapping: Wrapping, tree: ModuleTree) -> None:
    twins.agree_on_training(Training(tree, leaf_by_leaf(**wrapping), STEPS_OF_HOLLOW_MODELS))


plain_steps = steps(orders=("in turn",), befores=("",))


def penalized_gradients(scene: Scene, *, order: str, accumulates: bool) -> list[dict[str, torch.Tensor]]:
    """Return the full gradients after each of two steps with a penalty on parameters, which are not cleared.

    Args:
        order: the penalty is computed "before" or "after" the forward, or has a backward "apart".
        accumulates: each step has a backward inside no_sync before its last backward.
    """

    def penalty() -> torch.Tensor:
        return torch.stack([parameter.square().sum() for parameter in scene.model.parameters()]).sum()

    terms = [scene.loss, penalty] if order == "after" else [penalty, scene.loss]
    gradients = []
    for _ in range(2):
        for context in [scene.model.no_sync()] * accumulates + [contextlib.nullcontext()]:
            with context:
                if order == "apart":
                    for term in terms:
                        term().backward()
                else:
                    (terms[0]() + terms[1]()).backward()
        gradients.append(scene.whole_gradients())
    return gradients


@clause("distributed.fsdp.fully_sharded_data_parallel.penalties")
@pytest.mark.parametrize("order", ["before", "after", "apart"])
@pytest.mark.parametrize(
    "setup",
    [*(leaf_by_leaf(strategy, use_orig_params=True) for strategy in STRATEGIES), leaf_by_leaf("NO_SHARD")],
    ids=[*STRATEGIES, "flat"],
)
def test_penalties_on_parameters_train_like_torch(cpu_twins: Twins, setup: Setup, order: str) -> None:
    """Compare on the CPU, because torch's gradients are wrong on an asynchronous device.

    torch raises for flat parameters that are sharded, if a forward precedes the penalty's backward.
    """
    cpu_twins.agree(penalized_gradients, setup, order=order, accumulates=False)


@clause("distributed.fsdp.fully_sharded_data_parallel.penalties")
@pytest.mark.parametrize("order", ["before", "after", "apart"])
@both_kinds
def test_penalties_accumulate_in_no_sync(cpu_twins: Twins, use_orig_params: bool, order: str) -> None:
    setup = leaf_by_leaf("NO_SHARD", use_orig_params)
    cpu_twins.agree(penalized_gradients, setup, order=order, accumulates=True)


def outputs_in_autocast_region(scene: Scene, **wrapping: Any) -> dict[str, torch.Tensor]:
    """Change parameters by a step, a load and a write inside one autocast region. Return the outputs in between."""
    layers = filled(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).to(scene.rank.device)
    model = scene.wrap(layers, units=[nn.Linear], **wrapping)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    x = torch.ones(1, 3, device=scene.rank.device)
    outputs = {}
    with torch.autocast(scene.rank.device.type, torch.bfloat16):
        outputs["at first"] = model(x)
        outputs["at first"].sum().backward()
        optimizer.step()
        outputs["after a step"] = model(x)
        model.load_state_dict({name: tensor / 2 for name, tensor in model.state_dict().items()})
        outputs["after a load"] = model(x)
        with scene.fsdp.summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        outputs["after a write"] = model(x)
    return outputs


@clause("distributed.fsdp.fully_sharded_data_parallel.autocast_region")
@each_wrapping
def test_autocast_region_computes_with_changed_parameters(twins: Twins, wrapping: Wrapping) -> None:
    outputs = twins.agree(outputs_in_autocast_region, **wrapping)[0].value.values()
    assert len({str(output.values.tolist()) for output in outputs}) == 4


class Casts(TorchDispatchMode):
    """Mode that remembers the memory of casts, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.outputs.append(StorageWeakRef(output.untyped_storage()))
        return output


def casts_of_evaluation(scene: Scene, **wrapping: Any) -> dict[str, bool]:
    """Evaluate three units inside an autocast region. Return whether there were casts, and whether any remain."""
    model = scene.wrap(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), units=[nn.Linear], **wrapping)
    with torch.no_grad(), torch.autocast(scene.rank.device.type, torch.bfloat16), Casts() as casts:
        model(torch.ones(1, 3, device=scene.rank.device))
        remains = any(not output.expired() for output in casts.outputs)
    return {"casts": len(casts.outputs) > 3, "remains": remains}


@clause("distributed.fsdp.fully_sharded_data_parallel.autocast_memory")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@both_kinds
@pytest.mark.world_sizes(fewest=2)
def test_evaluation_in_autocast_region_keeps_no_casts(
    twins: Twins, strategy: str, use_orig_params: bool
) -> None:
    outcomes = twins.agree(casts_of_evaluation, strategy=strategy, use_orig_params=use_orig_params)
    assert outcomes[0].value == {"casts": True, "remains": False}


CHECKPOINTED = ModuleTree(
    ModuleGroup(
        (Leaf("affine", 4), ModuleGroup((Leaf("tied"), Leaf("lookup", 2))), Leaf("batched")),
        checkpointing="reentrant",
    )
)


@clause("distributed.fsdp.fully_sharded_data_parallel.checkpointing.plain")
@each_strategy
@share_of_examples(0.2)
@given(data=st.data())
def test_non_reentrant_checkpointing_trains(twins: Twins, strategy: str, data: st.DataObject) -> None:
    twins.agree_on_training(data.draw(trainings(strategy=strategy, tree={"checkpointing": ("plain",)})))


@clause("distributed.fsdp.fully_sharded_data_parallel.checkpointing.reentrant")
@each_wrapping
def test_reentrant_checkpointing_trains(twins: Twins, wrapping: Wrapping) -> None:
    schedule = (Step(), Step(forwards=2, order="no_sync"), Step(forwards=2))
    twins.agree_on_training(Training(CHECKPOINTED, leaf_by_leaf(**wrapping), schedule))


@clause("distributed.fsdp.fsdp_torch_limit_removed.reentrance_anywhere")
@pytest.mark.deviation("fsdp.reentrance_anywhere")
@each_strategy
@share_of_examples(0.25)
@given(data=st.data())
def test_reentrant_checkpointing_trains_any_module(twins: Twins, strategy: str, data: st.DataObject) -> None:
    """torch trains wrongly or raises in some of these cases: modules that are called twice, and nested regions."""
    kinds = {"checkpointing": ("reentrant", "none")}
    training = data.draw(trainings(strategy=strategy, tree=kinds, schedule=plain_steps))

    def probe(library: Library) -> RankOutcomes | RankFault:
        try:
            return twins.trained(library, training)
        except RankFault as fault:
            return fault

    twins.judge(probe, we_do=lambda outcomes: trains_like_unsharded(outcomes, training), may_agree=True)
