"""Mixed precision: the dtypes of parameters, reductions, buffers, inputs and gradients, and the results of training."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Training, clean, states_of
from conformance.distributed.fsdp.scenes.module_trees import (
    INPUT_FORMS,
    Leaf,
    ModuleGroup,
    ModuleTree,
    call,
    loss_of,
    out_of_form,
)
from conformance.distributed.fsdp.scenes.rank_judging import (
    assert_ranks_agree,
    share_of_examples,
    tolerance_of_policy,
)
from conformance.distributed.fsdp.scenes.scene import SIMPLE, TREE, Scene, tried
from conformance.distributed.fsdp.scenes.twins import (
    STRATEGIES,
    Twins,
    Wrapping,
    each_strategy,
    each_wrapping,
    leaf_by_leaf,
    raises,
)
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.tolerances import SAME_BITS, Tolerance
from conformance.strategies.modules import CHECKPOINTING, KINDS
from conformance.strategies.sharding import steps, trainings

LOW = (torch.bfloat16, torch.float16)
HOLLOW = ModuleTree(
    ModuleGroup((Leaf("affine", 4), Leaf("affine"), Leaf("counted"))), dtype=torch.float32, head="none"
)


def _keeps_what_it_can(policy: dict[str, Any]) -> bool:
    """Return whether torch can keep low-precision gradients.

    torch fails if the kept gradients would have another dtype than the parameters compute in.
    """
    dtypes = {policy["param_dtype"], policy["reduce_dtype"]} - {None}
    return not policy["keep_low_precision_grads"] or len(dtypes) == 1


def _shows_low_precision_twice(training: Training) -> bool:
    """Return whether a low-precision gradient appears at two places of a tied parameter.

    torch cannot show it at the second place, which is a deviation.
    """
    keeps = (training.setup.mixed_precision or {}).get("keep_low_precision_grads")
    accumulates = any(step.order == "no_sync" for step in training.steps)
    is_tied = any(leaf.kind == "tied" for leaf in training.tree.body.leaves())
    return is_tied and training.setup.uses_orig_params and bool(keeps or accumulates)


def _adds_in_one_order(training: Training, world_size: int) -> bool:
    """Return whether nothing but dtypes decides how gradients are rounded.

    Without sharding, torch rounds existing gradients again (deviation fsdp.existing_gradients_rounded). The gradients
    of a unit that is called twice may be added to those of earlier backwards one by one or together.
    """
    is_whole = training.setup.strategy == "NO_SHARD" or world_size == 1
    adds_whole = is_whole and any(step.forwards > 1 for step in training.steps)
    return not adds_whole and all(group.calls == 1 for group in training.tree.body.groups())


# Low precision and casts are drawn often, because they reveal differences between dtypes.
policies = st.fixed_dictionaries(
    {
        "param_dtype": st.sampled_from([*LOW, *LOW, torch.float32, None]),
        "reduce_dtype": st.sampled_from([None, torch.float32, *LOW]),
        "buffer_dtype": st.sampled_from([None, torch.float32, *LOW]),
        "keep_low_precision_grads": st.sampled_from([False, False, True]),
        "cast_forward_inputs": st.booleans(),
        "cast_root_forward_inputs": st.sampled_from([True, True, False]),
    }
).filter(_keeps_what_it_can)


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.trains")
@each_strategy
@share_of_examples(0.4)
@given(data=st.data(), policy=policies)
def test_mixed_precision_rounds_like_torch(
    twins: Twins, strategy: str, data: st.DataObject, policy: dict[str, Any]
) -> None:
    """Compare bit by bit, because a tolerance hides in which dtype gradients are accumulated, reduced and averaged."""
    ignored = data.draw(st.sampled_from(["", "ignored_modules"]))
    training = data.draw(
        trainings(
            strategy=strategy,
            dtype=torch.float32,
            schedule=steps(orders=("in turn", "no_sync"), befores=("", "eval", "no_grad", "write")),
            tree={
                "kinds": (*KINDS, "bare", "counted"),
                "heads": ("trained", "trained", "none"),
                # deviation fsdp.recomputed_without_cast
                "checkpointing": ("none",) if policy["cast_forward_inputs"] else CHECKPOINTING,
            },
            wraps=("root", "leaves") if ignored else ("root", "leaves", "groups", "manual"),
            mixed_precision=policy,
            ignored=ignored,
        ).filter(lambda drawn: not (drawn.mixes_frozen_with_trained or _shows_low_precision_twice(drawn)))
    )
    by_library = [twins.trained(library, training) for library in (twins.reference, twins.subject)]
    has_one_order = twins.world_size <= 2 and _adds_in_one_order(training, twins.world_size)
    assert_ranks_agree(*by_library, SAME_BITS if has_one_order else tolerance_of_policy(policy))


def recomputed(scene: Scene, *, around: str) -> dict[str, torch.Tensor]:
    """Return the gradients with activation checkpointing around each `unit`, around the `root` or around `nothing`."""
    body = replace(scene.tree.body, checkpointing="plain" if around == "unit" else "none")
    model, batch = scene.wrapped(replace(scene.tree, body=body).build()), scene.batch()
    forward = partial(checkpoint, model, use_reentrant=False) if around == "root" else model
    loss_of(forward(batch.x, ids=batch.ids)).backward()
    return scene.whole_gradients(model)


def judge_recomputed(twins: Twins, strategy: str, *, around: str) -> None:
    """The gradients must be those of torch without activation checkpointing."""
    precision = {
        "param_dtype": torch.bfloat16,
        "cast_forward_inputs": True,
        "cast_root_forward_inputs": False,
    }
    setup = leaf_by_leaf(strategy, mixed_precision=precision)
    tree = ModuleTree(ModuleGroup((Leaf("affine", 2),)), dtype=torch.float32, head="none")
    expected = twins.of(twins.reference, recomputed, setup, tree=tree, around="nothing")
    twins.deviate(
        recomputed,
        setup,
        tree=tree,
        around=around,
        torch_does=raises(RuntimeError, "must have the same dtype"),
        we_do=partial(does_as, expected),
        may_agree=around == "root",
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.recomputed")
@pytest.mark.deviation("fsdp.recomputed_without_cast")
@each_strategy
def test_recomputed_forward_casts_inputs(twins: Twins, strategy: str) -> None:
    """torch raises RuntimeError about dtypes, because the unit is recomputed with float32 inputs."""
    judge_recomputed(twins, strategy, around="unit")


@clause("distributed.fsdp.fsdp_torch_limit_removed.computed_again_in_low_precision")
@pytest.mark.deviation("fsdp.recomputed_without_cast")
@each_strategy
def test_recomputed_root_casts_inputs(twins: Twins, strategy: str) -> None:
    """torch raises RuntimeError about dtypes, because the root is recomputed with float32 inputs."""
    judge_recomputed(twins, strategy, around="root")


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.explicit_full_precision")
@each_strategy
def test_explicit_float32_equals_no_mixed_precision(twins: Twins, strategy: str) -> None:
    policy = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    setups = (Setup(strategy), Setup(strategy, mixed_precision=policy))
    assert_ranks_agree(*(twins.trained(twins.subject, Training(TREE, setup)) for setup in setups))


def gradients(scene: Scene) -> dict[str, Any]:
    scene.backward()
    return {"shards": states_of(scene.model), "whole": scene.whole_gradients()}


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.reduce_dtype")
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@each_wrapping
def test_gradients_are_rounded_to_the_dtype_they_are_reduced_in(
    twins: Twins, wrapping: Wrapping, reduce_dtype: torch.dtype | None
) -> None:
    """Gradients are rounded, but the master weights stay in float32."""
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    setup = leaf_by_leaf(**wrapping, mixed_precision=policy)
    for value in twins.values(gradients, setup, tree=SIMPLE):
        whole = torch.cat([grad.values.reshape(-1) for grad in value["whole"].values()])
        weights = [state["value"] for state in value["shards"].values()]
        assert {weight.dtype for weight in weights} == {torch.float32}
        values = torch.cat([weight.values.reshape(-1) for weight in weights])
        assert values.numel() == 0 or not torch.equal(values, values.bfloat16().float())
        is_rounded = torch.equal(whole, whole.bfloat16().float())
        # A single rank has nothing to sum, so gradients that were rounded before stay rounded.
        assert is_rounded is (reduce_dtype is not torch.float32 or twins.is_alone), whole


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.kept_in_low_precision")
@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
@each_wrapping
def test_gradients_are_kept_in_low_precision(twins: Twins, wrapping: Wrapping, name: str) -> None:
    """Gradients of shards are in float32 if only their reduction has low precision."""
    precision = {name: torch.bfloat16, "keep_low_precision_grads": True}
    setup = leaf_by_leaf(**wrapping, mixed_precision=precision)
    tolerance = tolerance_of_policy({name: torch.bfloat16})
    is_sharded = wrapping["strategy"] != "NO_SHARD" and not twins.is_alone
    kept_dtype = torch.float32 if is_sharded and name == "reduce_dtype" else torch.bfloat16
    for outcome in twins.agree(gradients, setup, tolerance, tree=SIMPLE):
        grads = [state["grad"] for state in outcome.value["shards"].values()]
        assert {grad.dtype for grad in grads if grad is not None} == {kept_dtype}


def inside(scene: Scene, *, training: bool) -> dict[str, Any]:
    """Return the dtypes in the forward of each plain module, of the output, and of the input's gradient."""
    dtypes: dict[str, Any] = {}
    for name, module in scene.model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.register_forward_pre_hook(_noting(dtypes, clean(name)))
    scene.model.train(training)
    batch = scene.batch()
    output = out_of_form(call(scene.model, scene.tree, batch))
    output.sum().backward()
    return {"inside": dtypes, "output": output.dtype, "input gradient": batch.x.grad.dtype}


def _noting(dtypes: dict[str, Any], name: str) -> Any:
    def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        dtypes[name] = [args[0].dtype, module.weight.dtype, tuple(module.weight.shape)]

    return note


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.inside")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrap", ["root", "leaves"])
@share_of_examples(0.5)
@given(
    policy=policies,
    strategy=st.sampled_from(STRATEGIES),
    use_orig_params=st.booleans(),
    takes=st.sampled_from(["keyword", *INPUT_FORMS]),
    head=st.sampled_from(["trained", "none"]),
)
def test_dtypes_inside_modules_match_torch(
    twins: Twins,
    wrap: str,
    training: bool,
    policy: dict[str, Any],
    strategy: str,
    use_orig_params: bool,
    takes: str,
    head: str,
) -> None:
    """Compare the dtypes of inputs and parameters in forward, of the output, and of the input's gradient.

    Wrapped leaf by leaf, the root without a head has no parameters.
    """
    setup = Setup(strategy, wrap=wrap, arguments={"use_orig_params": use_orig_params}, mixed_precision=policy)
    tree = replace(SIMPLE, takes=takes, head=head)
    twins.agree(inside, setup, tree=tree, training=training, may_raise=True)


def buffers(scene: Scene) -> dict[str, torch.dtype]:
    """Return the dtypes of buffers after a forward, which fails if batch statistics do not take the dtype."""
    tried(scene.forward)
    return {clean(name): buffer.dtype for name, buffer in scene.model.named_buffers()}


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.buffers")
@pytest.mark.parametrize("buffer_dtype", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("wrap", ["root", "leaves"])
def test_integer_buffers_keep_their_dtype(twins: Twins, wrap: str, buffer_dtype: torch.dtype | None) -> None:
    setup = Setup(wrap=wrap, mixed_precision={"buffer_dtype": buffer_dtype})
    for outcome in twins.agree(buffers, setup):
        assert torch.int64 in outcome.value.values(), outcome.value


def run_sequence(scene: Scene, *, calls: str) -> list[Any]:
    """Run the calls: summon, backward, or a forward (eval runs without gradients). Return outputs and gradients."""
    results: list[Any] = []
    for number, name in enumerate(calls.split()):
        if name == "summon":
            with scene.fsdp.summon_full_params(scene.model):
                pass
        elif name == "backward":
            results[-1].sum().backward()
            results[-1] = results[-1].detach()
            results.append(scene.gradients())
            scene.model.zero_grad()
        else:
            scene.model.train(name != "eval")
            with torch.set_grad_enabled(name != "eval"):
                results.append(out_of_form(scene.forward(number)))
    return results


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.sequences")
@each_wrapping
@pytest.mark.parametrize(
    "sequence", ["forward summon forward", "train eval", "train backward eval train backward"]
)
def test_sequence_of_forwards_matches_torch(twins: Twins, wrapping: Wrapping, sequence: str) -> None:
    setup = leaf_by_leaf(**wrapping, mixed_precision={"param_dtype": torch.bfloat16})
    tolerance = Tolerance(8, "two forwards and backwards", torch.bfloat16, terms=1.0)
    twins.agree(run_sequence, setup, tolerance, tree=SIMPLE, calls=sequence)


def _full_precision_in_eval(setting: str) -> Any:
    """Return a context manager that sets the environment variable, which is read at wrapping."""
    return mock.patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL=setting)


def full_precision_in_eval(scene: Scene) -> dict[str, Any]:
    """Return what `_noting` notes of the head in an eval forward, for each setting of the environment variable."""
    dtypes: dict[str, Any] = {}
    for setting in ("", "1", "0"):
        with _full_precision_in_eval(setting):
            scene.model = scene.wrapped(scene.tree.build()).eval()
            scene.model.head.register_forward_pre_hook(_noting(dtypes, setting))
            scene.forward()
    return dtypes


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.full_precision_in_eval")
@each_strategy
def test_environment_variable_sets_full_precision_in_eval(twins: Twins, strategy: str) -> None:
    setup = leaf_by_leaf(strategy, mixed_precision={"param_dtype": torch.bfloat16})
    outcomes = twins.agree(full_precision_in_eval, setup, tree=SIMPLE)
    dtypes = [weight_dtype for _, weight_dtype, _ in outcomes[0].value.values()]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]


def gradients_in_eval(scene: Scene) -> dict[str, Any]:
    """Return the gradients of a backward in eval, and whether bfloat16 would round them."""
    with _full_precision_in_eval("1"):
        scene.model.eval()
        scene.backward()
    gradients = scene.gradients()
    rounds = [bool((grad != grad.bfloat16()).any()) for grad in gradients.values() if grad is not None]
    return {"gradients": gradients, "rounds": any(rounds)}


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.full_precision_in_eval")
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
@each_wrapping
def test_gradients_in_eval_have_full_precision(
    twins: Twins, wrapping: Wrapping, reduce_dtype: torch.dtype | None
) -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    setup = leaf_by_leaf(**wrapping, mixed_precision=precision)
    outcomes = twins.agree(gradients_in_eval, setup, tree=SIMPLE)
    assert any(outcome.value["rounds"] for outcome in outcomes)


def buffers_in_eval(scene: Scene) -> list[dict[str, torch.dtype]]:
    """Return the dtypes of buffers after forwards in which none, all or some of the modules evaluate.

    One buffer has low precision itself. A forward may fail, because batch statistics do not take every dtype.
    """
    dtypes = []
    scene.plain.register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16))
    with _full_precision_in_eval("1"):
        model = scene.model
    for evaluates in ("nothing", "all", "the body", "all", "a part of it", "nothing"):
        model.train(evaluates != "all")
        model.body.train(evaluates in ("nothing", "a part of it"))
        model.body.parts[0].train(evaluates == "nothing")
        tried(scene.forward)
        dtypes.append({clean(name): buffer.dtype for name, buffer in model.named_buffers()})
    return dtypes


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.full_precision_in_eval")
@pytest.mark.parametrize("dtype", ["param_dtype", "reduce_dtype", "buffer_dtype"])
@pytest.mark.parametrize("wrap", ["root", "manual", "hollow"])
def test_buffers_are_in_full_precision_in_eval(twins: Twins, wrap: str, dtype: str) -> None:
    """Buffers are in full precision in eval if parameters or gradients have low precision too.

    `dtype` is the setting with low precision besides buffer_dtype. A root that holds nothing follows its units.
    """
    precision = {"buffer_dtype": torch.bfloat16, dtype: torch.bfloat16}
    setup = Setup(wrap="leaves" if wrap == "hollow" else wrap, mixed_precision=precision)
    tree = HOLLOW if wrap == "hollow" else TREE
    trained, evaluated = twins.agree(buffers_in_eval, setup, tree=tree)[0].value[:2]
    assert (trained == evaluated) is (dtype == "buffer_dtype"), (trained, evaluated)
