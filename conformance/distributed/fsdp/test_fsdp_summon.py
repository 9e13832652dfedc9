"""summon_full_params: unsharded parameters inside, shards outside, and which changes are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, states_of
from conformance.distributed.fsdp.scenes.module_trees import call, loss_of, out_of_form
from conformance.distributed.fsdp.scenes.rank_judging import (
    assert_ranks_agree,
    share_of_examples,
    tolerance_of_policy,
)
from conformance.distributed.fsdp.scenes.scene import SIMPLE, TREE, Scene, filled, named, tried
from conformance.distributed.fsdp.scenes.state_dicts import Form, state_dict_of_other_model
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    STRATEGIES,
    RankOutcomes,
    Twins,
    Wrapping,
    both_kinds,
    each,
    each_strategy,
    each_wrapping,
    flat_or_originals,
    leaf_by_leaf,
    raises,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable
from conformance.judge.tolerances import ONE_STEP, TRAINED

options = st.fixed_dictionaries(
    {}, optional={name: st.booleans() for name in ("recurse", "writeback", "rank0_only", "with_grads")}
)


def summon(
    scene: Scene, *, options: Mapping[str, Any], at: int = 0, adds: float = 0.0, infers: bool = False
) -> dict[str, Any]:
    """Return the tensors inside `summon_full_params`, perhaps in inference mode, and after it.

    If `adds` is not zero, `adds` plus the rank is added to each parameter, and with `with_grads` to each gradient. `at`
    is the number of the unit, counted from the root.
    """
    scene.backward()
    with torch.inference_mode(infers), scene.fsdp.summon_full_params(scene.units[at], **options):
        inside = states_of(scene.model)
        buffers = [name for name, _ in scene.model.named_buffers()]
        with torch.no_grad():
            for parameter in scene.model.parameters():
                if adds:
                    parameter.add_(adds + scene.rank.rank)
                if adds and parameter.grad is not None and options.get("with_grads"):
                    parameter.grad.add_(adds + scene.rank.rank)
    return {
        "inside": inside,
        "buffers": buffers,
        "shards": states_of(scene.model),
        "whole": scene.whole_parameters(),
        "trained": [parameter.requires_grad for parameter in scene.model.parameters()],
    }


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.options")
@each_strategy
@share_of_examples(0.7)
@given(
    options=options,
    use_orig_params=st.booleans(),
    at=st.sampled_from([0, 0, 1]),
    adds=st.sampled_from([0.0, 0.5]),
    infers=st.booleans(),
)
@example(options={"with_grads": True}, use_orig_params=True, at=0, adds=0.5, infers=False)
@example(options={}, use_orig_params=False, at=0, adds=0.5, infers=True)
@example(
    options={"with_grads": True, "rank0_only": True, "writeback": False},
    use_orig_params=True,
    at=0,
    adds=0.0,
    infers=False,
)
def test_summon_with_any_option_matches_torch(
    twins: Twins, strategy: str, use_orig_params: bool, **arguments: Any
) -> None:
    twins.agree(summon, leaf_by_leaf(strategy, use_orig_params), may_raise=True, **arguments)


def load_inside(scene: Scene, *, kind: str, writeback: bool) -> dict[str, Any]:
    """Load the state dict of another model inside `summon_full_params`."""
    state_dict = state_dict_of_other_model(scene, Form(kind))
    with scene.fsdp.summon_full_params(scene.model, writeback=writeback):
        scene.model.load_state_dict(state_dict)
        inside = named(scene.model)
    return {"inside": inside, "whole": scene.whole_parameters(), "loss": scene.backward()}


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.options")
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@each_wrapping
def test_load_inside_summon_is_kept_by_writeback(
    twins: Twins, wrapping: Wrapping, kind: str, writeback: bool
) -> None:
    loaded = dict(TREE.build(1).named_parameters())
    for outcome in twins.agree(load_inside, leaf_by_leaf(**wrapping), kind=kind, writeback=writeback):
        assert all(
            torch.equal(values.values, loaded[name]) for name, values in outcome.value["inside"].items()
        )


def save_and_load_on_first_rank(scene: Scene, *, offload_to_cpu: bool = False) -> dict[str, Any]:
    """Save, and load another model's state dict, on the first rank alone, which is the only one to see parameters."""
    saved: dict[str, Any] = {}
    loaded: dict[str, Any] = {}
    options = {"rank0_only": True, "writeback": False, "offload_to_cpu": offload_to_cpu}
    with scene.fsdp.summon_full_params(scene.model, **options):
        if scene.rank.rank == 0:
            with torch.no_grad():
                for parameter in scene.model.parameters():
                    parameter.add_(1)
            saved = scene.model.state_dict()
            scene.model.load_state_dict(TREE.build(1).state_dict())
            loaded = named(scene.model)
    whole = scene.whole_parameters()
    devices = [value.device.type for value in saved.values()]
    return {"saved": saved, "devices": devices, "loaded": loaded, "whole": whole, "loss": scene.backward()}


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.options")
@each_wrapping
def test_first_rank_saves_and_loads_alone_inside_summon(twins: Twins, wrapping: Wrapping) -> None:
    loaded = dict(TREE.build(1).named_parameters())
    first, *_ = twins.agree(save_and_load_on_first_rank, leaf_by_leaf(**wrapping))
    assert first.value["saved"].keys() >= loaded.keys()
    assert all(torch.equal(values.values, loaded[name]) for name, values in first.value["loaded"].items())


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.offload_to_cpu")
@pytest.mark.world_sizes(fewest=2)
def test_state_saved_from_offloaded_parameters_is_on_the_cpu(twins: Twins) -> None:
    if twins.pool.device == "cpu":
        unavailable("torch cannot offload parameters of a CPU")
    twins.agree(save_and_load_on_first_rank, leaf_by_leaf(use_orig_params=True), offload_to_cpu=True)


def stepped_after_summon(scene: Scene, *, strategy: str, is_cleared: bool) -> dict[str, Any]:
    """Step after a summon with gradients. Two ranks share the elements of one unit, and one rank has the other unit.

    If `is_cleared`, the last rank has no gradients.
    """
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    scene.model = model = scene.wrap(
        filled(model), units=[nn.Linear], strategy=strategy, use_orig_params=True
    )
    model(torch.ones(3, 2, device=scene.rank.device)).sum().backward()
    if is_cleared and scene.rank.rank == scene.rank.world_size - 1:
        model.zero_grad()
    with scene.fsdp.summon_full_params(model, with_grads=True):
        inside = scene.gradients()
    after = scene.gradients()
    torch.optim.SGD(model.parameters(), 0.5).step()
    return {"inside": inside, "after": after, "stepped": scene.whole_parameters()}


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.options")
@pytest.mark.parametrize("is_cleared", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_ranks_without_gradients_step_after_summon(twins: Twins, strategy: str, is_cleared: bool) -> None:
    twins.agree(stepped_after_summon, strategy=strategy, is_cleared=is_cleared)


def unsharded(scene: Scene, *, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the full parameters and gradients on the device where they are shown."""
    scene.backward()
    with scene.fsdp.summon_full_params(scene.model, **options):
        return states_of(scene.model)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.whole")
@each_strategy
def test_parameters_are_whole_and_named_as_before_wrapping(twins: Twins, strategy: str) -> None:
    plain = {name: parameter.detach() for name, parameter in TREE.build().named_parameters()}
    setup, options = leaf_by_leaf(strategy, use_orig_params=True), {"with_grads": True}
    for whole in twins.values(unsharded, setup, options=options):
        assert list(whole) == list(plain)
        for name, state in whole.items():
            assert torch.equal(state["value"].values, plain[name]), name
            assert state["grad"].values.shape == plain[name].shape


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.options")
def test_summoned_gradients_keep_low_precision_without_sharding(twins: Twins) -> None:
    precision = {"param_dtype": torch.bfloat16, "keep_low_precision_grads": True}
    setup = leaf_by_leaf("NO_SHARD", use_orig_params=True, mixed_precision=precision)
    options = {"with_grads": True}
    ranks = twins.agree(unsharded, setup, tolerance_of_policy(precision), tree=SIMPLE, options=options)
    assert {state["grad"].dtype for rank in ranks for state in rank.value.values()} == {torch.bfloat16}


def train_after_changes(scene: Scene) -> list[torch.Tensor]:
    """Return the losses before and after a summon that changes the parameters."""
    losses = [scene.backward()]
    with scene.fsdp.summon_full_params(scene.model), torch.no_grad():
        for parameter in scene.model.parameters():
            parameter.mul_(0.5)
    losses.append(scene.backward(1))
    return losses


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.writeback")
@each_wrapping
def test_changes_inside_summon_are_trained_on(twins: Twins, wrapping: Wrapping) -> None:
    twins.agree(train_after_changes, leaf_by_leaf(**wrapping))


def summon_in_use(scene: Scene, *, where: str) -> list[Any]:
    """Return the errors of a summon inside another summon, or in a forward or backward of an inner unit."""
    attempts: list[Any] = []

    def summon(*_: Any) -> None:
        attempts.append(tried(lambda: scene.fsdp.summon_full_params(scene.model).__enter__()))

    if where == "summon":
        with scene.fsdp.summon_full_params(scene.model):
            summon()
    else:
        head = scene.model.head
        (head.register_forward_pre_hook if where == "forward" else head.register_full_backward_hook)(summon)
        scene.backward()
    return attempts


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.refused")
@pytest.mark.parametrize("where", ["summon", "forward", "backward"])
def test_summon_is_refused_while_parameters_are_in_use(twins: Twins, where: str) -> None:
    for outcome in twins.agree(summon_in_use, FLAT, where=where):
        assert "Cannot manually unshard parameters" in str(outcome.value)


def backward_in_summon(scene: Scene) -> Any:
    loss = loss_of(scene.forward())
    with scene.fsdp.summon_full_params(scene.model):
        return tried(loss.backward)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.refused")
@each_wrapping
def test_backward_of_earlier_forward_inside_summon_is_refused(twins: Twins, wrapping: Wrapping) -> None:
    setup = replace(leaf_by_leaf(**wrapping), wrap="root")
    for outcome in twins.agree(backward_in_summon, setup):
        assert "expected to be in states" in str(outcome.value)


def forward_inside(
    scene: Scene, *, options: Mapping[str, Any], by: str = "unit", backward: str = "", adds: float = 0.0
) -> dict[str, Any]:
    """Run a forward inside, of the root unit or of the `module` that it wraps.

    `backward` is `inside`, `after` or empty.
    """
    with scene.fsdp.summon_full_params(scene.model, **options):
        with torch.no_grad():
            for parameter in scene.model.parameters() if adds else ():
                parameter.add_(adds)
        with torch.set_grad_enabled(bool(backward)):
            model = scene.model if by == "unit" else scene.model.module
            output = out_of_form(call(model, scene.tree, scene.batch().on(scene.rank.device)))
        inside = [parameter.shape for parameter in scene.model.parameters()]
        if backward == "inside":
            loss_of(output).backward()
    if backward == "after":
        loss_of(output).backward()
    gradients = scene.gradients()
    scene.model.zero_grad()
    return {
        "output": output.detach(),
        "inside": inside,
        "gradients": gradients,
        "whole": scene.whole_parameters(),
        "loss": scene.backward(1),
    }


def forward_outside(scene: Scene) -> torch.Tensor:
    with torch.no_grad():
        return out_of_form(scene.forward())


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.computes")
@pytest.mark.parametrize(
    ("by", "backward"), [("unit", ""), ("unit", "inside"), ("unit", "after"), ("module", "")]
)
@pytest.mark.parametrize("recurse", [True, False])
@each_strategy
def test_forward_inside_summon_matches_torch(
    twins: Twins, strategy: str, recurse: bool, by: str, backward: str
) -> None:
    """The module inside the outermost unit runs no backward, because its own parameters would not be averaged."""
    arguments = {
        "options": {"recurse": recurse, "writeback": False},
        "by": by,
        "backward": backward,
        "tree": SIMPLE,
    }
    setup = leaf_by_leaf(strategy, use_orig_params=True)
    expected, actual = twins.of_both(forward_inside, setup, **arguments)
    assert_ranks_agree(_without_shapes(expected), _without_shapes(actual), ONE_STEP)
    values_of(actual)


def _without_shapes(outcomes: RankOutcomes) -> RankOutcomes:
    """Drop the shapes of parameters after a forward inside, because torch's units are resharded by then."""
    return [
        outcome if outcome.raised else replace(outcome, value=outcome.value | {"inside": None})
        for outcome in outcomes
    ]


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.computes")
@pytest.mark.parametrize("writeback", [True, False])
@flat_or_originals
def test_forward_of_inner_units_inside_summon_matches_torch(
    twins: Twins, setup: Setup, writeback: bool
) -> None:
    """Only the outermost unit is summoned, as for a model that generates."""
    options = {"recurse": False, "writeback": writeback}
    arguments = {"options": options, "by": "module", "adds": 0.5 if writeback else 0.0, "tree": SIMPLE}
    twins.agree(forward_inside, setup, **arguments)


@clause("distributed.fsdp.fsdp_torch_limit_removed.computes_while_summoned")
@pytest.mark.deviation("fsdp.computes_while_summoned")
@pytest.mark.parametrize("backward", ["", "inside", "after"])
@pytest.mark.parametrize("writeback", [True, False])
@each_wrapping
def test_forward_inside_summon_leaves_parameters_unsharded(
    twins: Twins, wrapping: Wrapping, writeback: bool, backward: str
) -> None:
    """torch writes back wrong values with original parameters, and raises AssertionError with flat parameters."""
    adds, model = 0.5 if writeback else 0.0, SIMPLE.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(adds)
    plain = dict(model.named_parameters())
    expected = [
        out_of_form(call(model, SIMPLE, SIMPLE.batch(0, rank))).detach() for rank in range(twins.world_size)
    ]

    def is_right(outcomes: RankOutcomes) -> bool:
        return all(
            outcome.raised is None
            and outcome.value["inside"] == [parameter.shape for parameter in plain.values()]
            and all(
                torch.equal(outcome.value["whole"][name].values, parameter)
                for name, parameter in plain.items()
            )
            and ONE_STEP.excess(expected[rank], outcome.value["output"].values) is None
            for rank, outcome in enumerate(outcomes)
        )

    twins.deviate(
        forward_inside,
        leaf_by_leaf(**wrapping),
        tree=SIMPLE,
        options={"writeback": writeback},
        backward=backward,
        adds=adds,
        we_do=is_right,
        may_agree=not writeback or wrapping["strategy"] == "NO_SHARD" or twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.computes_while_summoned")
@pytest.mark.deviation("fsdp.computes_while_summoned")
@each_wrapping
def test_forward_inside_summon_uses_mixed_precision(twins: Twins, wrapping: Wrapping) -> None:
    """The output equals that of a forward outside, bit by bit."""
    setup = leaf_by_leaf(**wrapping, mixed_precision={"param_dtype": torch.bfloat16})
    outputs = twins.values(forward_outside, setup, tree=SIMPLE)
    shapes = [parameter.shape for parameter in SIMPLE.build().parameters()]

    def is_right(outcomes: RankOutcomes) -> bool:
        return all(
            outcome.raised is None
            and outcome.value["inside"] == shapes
            and outcome.value["output"].dtype is torch.bfloat16
            and torch.equal(outcome.value["output"].values, output.values)
            for outcome, output in zip(outcomes, outputs, strict=True)
        )

    twins.deviate(
        forward_inside,
        setup,
        tree=SIMPLE,
        options={"writeback": True},
        torch_does=raises(RuntimeError, "dtype"),
        we_do=is_right,
    )


def restores_after_an_error(scene: Scene) -> dict[str, Any]:
    """Raise inside the context. Return the error, the restored shards and the next loss."""

    def raises() -> None:
        with scene.fsdp.summon_full_params(scene.model):
            raise KeyError("injected")

    return {"raised": tried(raises), "shards": named(scene.model), "loss": scene.backward()}


def of_plain_modules(scene: Scene) -> dict[str, torch.Tensor]:
    """Summon a module that is not a unit, with units inside and around it."""
    with scene.fsdp.summon_full_params(scene.model.body):
        return named(scene.model.body)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.restores")
@pytest.mark.parametrize("program", [restores_after_an_error, of_plain_modules])
@each_strategy
def test_summon_restores_shards(twins: Twins, strategy: str, program: Any) -> None:
    twins.agree(program, leaf_by_leaf(strategy, use_orig_params=True))


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.offload_to_cpu")
@pytest.mark.reference_limit("fsdp.summon_offloaded_to_cpu")
def test_torch_cannot_offload_summoned_parameters_on_a_cpu(torch_cannot: Callable[..., None]) -> None:
    """torch's ranks fail when they free the gathered parameters."""
    options = {"offload_to_cpu": True, "writeback": False}
    torch_cannot(unsharded, Setup(), options=options)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.offload_to_cpu")
@pytest.mark.parametrize("rank0_only", [False, True])
@both_kinds
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@pytest.mark.world_sizes(fewest=2)
def test_summon_offloads_gathered_parameters(
    twins: Twins, strategy: str, use_orig_params: bool, rank0_only: bool
) -> None:
    """Compare the parameters, and expect a warning about memory.

    On the CPU, torch cannot offload, so it runs without the option there.
    """
    setup = leaf_by_leaf(strategy, use_orig_params)
    options = {"writeback": False, "rank0_only": rank0_only}
    offloading = options | {"offload_to_cpu": True}
    asked_of_torch = options if twins.pool.device == "cpu" else offloading
    expected = twins.of(twins.reference, unsharded, setup, options=asked_of_torch)
    actual = twins.of_subject(unsharded, setup, options=offloading)
    for outcome in actual:
        assert any("may result in" in text for _, text in outcome.warned) is not rank0_only, outcome.warned
    assert_ranks_agree(
        *([replace(outcome, warned=()) for outcome in ranks] for ranks in (expected, actual)), TRAINED
    )


def changed_behind(scene: Scene) -> dict[str, torch.Tensor]:
    """Return the tensors that a second summon showed. The parameters are zeroed right after it.

    The second summon shows them in memory that the first one kept.
    """
    shown: dict[str, torch.Tensor] = {}
    for _ in range(2):
        with scene.fsdp.summon_full_params(scene.model, writeback=False):
            shown = named(scene.model)
    with torch.no_grad():
        for parameter in scene.model.parameters():
            parameter.zero_()
    return shown


@clause("distributed.fsdp.fsdp_torch_limit_removed.offloaded_and_changed")
@pytest.mark.deviation("fsdp.offloaded_and_changed")
@each_wrapping
def test_summoned_values_precede_later_host_writes(twins: Twins, wrapping: Wrapping) -> None:
    setup = replace(leaf_by_leaf(**wrapping), offload_params=True)
    plain = dict(TREE.build().named_parameters())

    def is_right(parameters: dict[str, Any]) -> bool:
        return all(torch.equal(parameters[name].values, parameter) for name, parameter in plain.items())

    twins.deviate(
        changed_behind,
        setup,
        torch_does=lambda outcomes: not each(is_right)(outcomes),
        we_do=each(is_right),
        may_agree=True,  # unless the copy ends after the host writes
    )
