"""fully_shard combined with other features: blocks, transforms, replicas, chunked losses, checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import fully_shard_beside_cases as cases
from conformance.distributed.fsdp import fully_shard_evaluation_cases as evaluation_cases
from conformance.distributed.fsdp import fully_shard_graph_cases as graph_cases
from conformance.distributed.fsdp.fully_shard_beside_cases import blocks
from conformance.distributed.fsdp.fully_shard_judging import Sites
from conformance.distributed.fsdp.twins import RankOutcomes, TwinsOf, each, raises
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.judgement import unavailable
from conformance.judge.outcome import observe


@clause("distributed.fsdp.fully_shard.reduction")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sums_alone", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_hooks_and_user_communication_get_same_inputs_as_in_torch(
    sites: Sites, dtype: torch.dtype, sums_alone: bool, own: bool
) -> None:
    sites.agree(cases.hooked, dtype=dtype, sums_alone=sums_alone, own=own)


@clause("distributed.fsdp.fully_shard.reduction")
@pytest.mark.world_sizes(fewest=2)
def test_user_all_gather_gets_same_inputs_as_in_torch(sites: Sites) -> None:
    sites.agree(cases.gathered_by_own)


@clause("distributed.fsdp.fully_shard.pinned")
@pytest.mark.parametrize("pins", [True, False])
def test_offloaded_shards_are_pinned(sites: Sites, device: str, pins: bool) -> None:
    if device == "cpu":
        unavailable("an accelerator")
    (actual, *_) = sites.agree(cases.pinned, pins=pins)
    assert set(actual.value.pop("waits", [0])) == {0}
    assert {is_pinned for where in actual.value.values() for is_pinned in where} == {pins}, actual.value


@clause("distributed.fsdp.fully_shard.offloaded_and_changed")
@pytest.mark.deviation("fully_shard.offloaded_and_changed")
def test_output_is_unaffected_by_later_writes_to_offloaded_parameters(sites: Sites, device: str) -> None:
    if device == "cpu":
        unavailable("an accelerator")
    sites.deviate(
        cases.changed_behind,
        torch_does=lambda outcomes: not all(outcome.value for outcome in outcomes),
        we_do=lambda outcomes: all(outcome.value for outcome in outcomes),
        may_agree=True,  # unless copies end after the host writes
    )


@clause("distributed.fsdp.fully_shard.without_accelerator")
@pytest.mark.deviation("fully_shard.without_accelerator")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("feature", ["pinned", "divided"])
def test_accelerator_features_work_on_cpu(sites: Sites, device: str, feature: str) -> None:
    if torch.accelerator.is_available() or device != "cpu":
        unavailable("a machine without an accelerator")
    gradient = torch.arange(1.0, 4.0).repeat(2, 1)
    expected = observe(lambda: gradient * sites.world_size / 3 if feature == "divided" else gradient)
    sites.deviate_by_hand(expected, cases.without_accelerator, feature=feature)


@clause("distributed.fsdp.fully_shard.without_elements")
@pytest.mark.deviation("fully_shard.without_elements")
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize(("shape", "dim"), [((0, 4), 0), ((4, 0), 0), ((0, 4), 1)])
def test_parameter_without_elements_trains(
    sites: Sites, shape: tuple[int, ...], dim: int, has_weight: bool
) -> None:
    expected = observe(cases.without_elements_by_hand, shape, has_weight)
    arguments = {"shape": shape, "dim": dim, "has_weight": has_weight}
    words = (RuntimeError, "_chunk_cat") if dim == 0 else (AssertionError, "requires even sharding")
    sites.deviate_by_hand(expected, cases.without_elements, torch_does=raises(*words), **arguments)


@clause("distributed.fsdp.fully_shard.gathered_for_no_backward")
def test_unit_unused_by_backward_is_gathered_again(sites: Sites) -> None:
    sites.agree(cases.gathered_for_no_backward)


@clause("distributed.fsdp.fully_shard.stepped_before_backward")
@pytest.mark.deviation("fully_shard.stepped_before_backward")
@pytest.mark.parametrize(
    ("stays_unsharded", "how"),
    [(False, {"fused": True}), (True, {"foreach": True}), (True, {"foreach": False})],
)
def test_backward_after_step_raises(sites: Sites, stays_unsharded: bool, how: dict[str, bool]) -> None:
    sites.deviate(
        graph_cases.stepped_before_backward,
        stays_unsharded=stays_unsharded,
        how=how,
        we_do=raises(RuntimeError, "has been modified by an inplace operation"),
    )


@clause("distributed.fsdp.fully_shard.stepped_before_backward")
@pytest.mark.parametrize("options", [{"only": "inner.bias"}, {"cleared": True}], ids=["unread", "nothing"])
@pytest.mark.parametrize("stays_unsharded", [False, True])
def test_step_of_parameters_unread_by_backward_is_allowed(
    sites: Sites, stays_unsharded: bool, options: dict[str, Any]
) -> None:
    sites.agree(
        graph_cases.stepped_before_backward, stays_unsharded=stays_unsharded, how={"foreach": True}, **options
    )


@clause("distributed.fsdp.fully_shard.cast_between")
@pytest.mark.deviation("fully_shard.cast_between")
@pytest.mark.parametrize("stays_unsharded", [False, True])
def test_cast_between_forward_and_backward_is_an_error(sites: Sites, stays_unsharded: bool) -> None:
    sites.deviate(
        graph_cases.cast_between,
        stays_unsharded=stays_unsharded,
        torch_does=each(lambda outcome: outcome["next forward"].startswith("RuntimeError")),
        we_do=each(
            lambda outcome: (
                "between its forward and its backward" in outcome["backward"]
                and outcome["next forward"] == "torch.float32"
            )
        ),
    )


@clause("distributed.fsdp.fully_shard.plain_in_its_place")
@pytest.mark.deviation("fully_shard.plain_in_its_place")
@pytest.mark.parametrize("trained", [False, True])
def test_plain_parameter_in_place_of_sharded_one_is_refused(sites: Sites, trained: bool) -> None:
    def says(*words: str) -> Callable[[RankOutcomes], bool]:
        return lambda outcomes: all(all(word in str(outcome.value) for word in words) for outcome in outcomes)

    sites.deviate(
        graph_cases.plain_in_its_place,
        torch_does=says("tensor(") if trained else says("AttributeError", "_local_tensor"),
        we_do=says("TypeError", "inner.bias", "assign a DTensor"),
        trained=trained,
    )


@clause("distributed.fsdp.fully_shard.whole_assigned")
@pytest.mark.deviation("fully_shard.whole_assigned")
def test_assignment_of_whole_tensors_names_them(sites: Sites) -> None:
    def names(value: Any) -> bool:
        raised = str(value["raised"])
        return raised.startswith("RuntimeError") and "0.inner.weight" in raised and value["is as before"]

    sites.deviate(
        graph_cases.whole_assigned,
        torch_does=each(lambda value: str(value["raised"]).startswith("AttributeError")),
        we_do=each(names),
    )


@clause("distributed.fsdp.fully_shard.no_sync")
def test_no_sync_adds_up_gradients_unreduced(sites: Sites) -> None:
    assert sites.values(graph_cases.no_sync) == [[True] * 4] * sites.world_size


@clause("distributed.fsdp.fully_shard.data_assigned")
@pytest.mark.deviation("fully_shard.data_assigned")
def test_assignment_to_data_warns(sites: Sites) -> None:
    def is_warned(value: Any) -> bool:
        names = ["0.inner.weight", "1.inner.weight", "2.inner.weight"]
        warned = value["warned"]
        return len(warned) == 3 and all(name in text for name, text in zip(names, warned, strict=True))

    sites.deviate(
        graph_cases.data_assigned,
        how="assigned",
        torch_does=each(lambda value: not value["warned"]),
        we_do=each(is_warned),
    )


@clause("distributed.fsdp.fully_shard.data_assigned")
@pytest.mark.deviation("fully_shard.data_assigned")
@pytest.mark.parametrize("name", ["1.norm.weight", "1.norm.bias", "1.inner.weight", "1.inner.bias"])
def test_assignment_to_data_of_one_parameter_warns(sites: Sites, name: str) -> None:
    sites.deviate(
        graph_cases.data_assigned,
        how="assigned",
        only=name,
        torch_does=each(lambda value: not value["warned"]),
        we_do=each(lambda value: len(value["warned"]) == 1 and name in value["warned"][0]),
    )


@clause("distributed.fsdp.fully_shard.data_assigned")
@pytest.mark.parametrize("how", ["copied", "cast"])
def test_other_writes_do_not_warn(sites: Sites, how: str) -> None:
    sites.agree(graph_cases.data_assigned, how=how)


_BY_INPUTS = pytest.mark.parametrize("by", ["inputs", "grad"])


@clause("distributed.fsdp.fully_shard.gradients_by_inputs")
@pytest.mark.deviation("fully_shard.gradients_by_inputs")
@_BY_INPUTS
def test_forward_after_gradients_by_inputs_warns(sites: Sites, by: str) -> None:
    _warns_without_gradients(sites, by=by, is_flat=False)


@clause("distributed.fsdp.fully_shard.gradients_by_inputs")
@pytest.mark.deviation("fsdp.gradients_by_inputs")
@_BY_INPUTS
def test_forward_after_gradients_of_original_parameters_by_inputs_warns(sites: Sites, by: str) -> None:
    _warns_without_gradients(sites, by=by, is_flat=True)


def _warns_without_gradients(sites: Sites, **arguments: Any) -> None:
    def is_warned(value: Any) -> bool:
        return len(value["warned"]) == 1 and "call loss.backward()" in value["warned"][0]

    sites.deviate(
        graph_cases.gradients_by_inputs,
        **arguments,
        torch_does=each(lambda value: value == {"warned": [], "grads": 0}),
        we_do=each(is_warned),
    )


@clause("distributed.fsdp.fully_shard.gradients_by_inputs")
@pytest.mark.parametrize("is_flat", [False, True])
def test_forward_after_backward_does_not_warn(sites: Sites, is_flat: bool) -> None:
    sites.agree(graph_cases.gradients_by_inputs, by="backward", is_flat=is_flat)


@clause("distributed.fsdp.fully_shard.optimizer_made_before")
@pytest.mark.deviation("fully_shard.optimizer_made_before")
def test_step_of_optimizer_made_before_sharding_is_an_error(sites: Sites) -> None:
    sites.deviate(
        graph_cases.optimizer_made_before,
        is_replaced=False,
        torch_does=each(lambda outcome: outcome["step"] is None),
        we_do=each(lambda outcome: str(outcome["step"]).startswith("RuntimeError: ")),
    )


@clause("distributed.fsdp.fully_shard.optimizer_made_before")
def test_optimizer_made_before_sharding_steps_parameters_put_into_it(sites: Sites) -> None:
    sites.agree(graph_cases.optimizer_made_before, is_replaced=True)


@clause("distributed.fsdp.fully_shard.unsharded_optimizer_states")
@pytest.mark.deviation("fully_shard.unsharded_optimizer_states")
def test_step_with_unsharded_states_is_an_error(sites: Sites) -> None:
    sites.deviate(
        graph_cases.stepped_with_unsharded_states,
        torch_does=each(
            lambda value: "got mixed torch.Tensor and DTensor" in value["step"] and value["is changed"]
        ),
        we_do=each(lambda value: value["step"].startswith("RuntimeError: ") and not value["is changed"]),
    )


@clause("distributed.fsdp.fully_shard.hooks_after_accumulation")
@pytest.mark.parametrize("syncs_first", [True, False])
def test_optimizers_step_in_the_backward(sites: Sites, syncs_first: bool) -> None:
    sites.agree(graph_cases.stepped_in_backward, syncs_first=syncs_first)


@clause("distributed.fsdp.fully_shard.hooks_on_gradients")
@pytest.mark.deviation("fully_shard.hooks_on_gradients")
@pytest.mark.parametrize("before", [False, True])
def test_hooks_on_gradients_of_sharded_parameters_run(sites: Sites, before: bool) -> None:
    after_accumulation = [name for name, _ in blocks().named_parameters()]

    def ran(value: Any) -> bool:
        on_gradients = [f"{name} {layout}" for name, layout in value["layouts"].items()]
        # Two of the three backwards synchronise.
        expected = dict.fromkeys([*after_accumulation, *on_gradients], 2)
        return value["are tripled"] and Counter(value["events"]) == expected

    sites.deviate(
        graph_cases.hooks_on_gradients,
        before=before,
        torch_does=each(lambda value: set(value["events"]) <= set(after_accumulation)),
        we_do=each(ran),
    )


@clause("distributed.fsdp.failures.in_a_forward")
def test_forward_error_after_inner_backward_matches_torch(sites: Sites) -> None:
    sites.agree(graph_cases.raised_behind_an_inner_backward)


@clause("distributed.fsdp.fully_shard.without_a_backward")
@pytest.mark.world_sizes(fewest=2)
def test_output_kept_by_one_rank_keeps_collective_order(sites: Sites) -> None:
    sites.agree(graph_cases.kept_by_one_rank)


@clause("distributed.fsdp.fully_shard.without_a_backward")
def test_forwards_alone_leave_nothing(sites: Sites) -> None:
    sites.agree(graph_cases.without_a_backward)


@clause("distributed.fsdp.fully_shard.kept_for_backward")
@pytest.mark.parametrize("rows", [13, 5])
def test_shards_kept_for_backward_are_padded_with_zeros(sites_of: TwinsOf, rows: int) -> None:
    outcomes = sites_of(4).agree(cases.kept_for_backward, rows=rows)
    assert outcomes[1].value["shown"][-1]["local"].values[-1].count_nonzero() == 0


@clause("distributed.fsdp.fully_shard.compiled_blocks")
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_blocks_may_be_compiled(sites: Sites, how: str) -> None:
    sites.agree(cases.compiled, how=how)


@clause("distributed.fsdp.fully_shard.transforms")
@pytest.mark.parametrize("how", ["vjp", "jvp", "grad"])
def test_transforms_differentiate_sharded_model(sites: Sites, how: str) -> None:
    sites.agree(cases.transformed, how=how)


@clause("distributed.fsdp.fully_shard.loss_in_chunks")
@pytest.mark.parametrize("keeps", [False, True])
def test_chunked_loss_calls_head_unit(sites: Sites, keeps: bool) -> None:
    sites.agree(cases.in_chunks, keeps=keeps)


@clause("distributed.fsdp.fully_shard.loss_in_chunks")
@pytest.mark.deviation("fully_shard.root_behind_a_part")
def test_root_moves_inputs_after_call_of_submodule(sites: Sites) -> None:
    sites.deviate(
        cases.evaluated_again,
        torch_does=raises(RuntimeError, "Expected all tensors to be on the same device"),
        we_do=lambda outcomes: all(outcome.raised is None for outcome in outcomes),
        may_agree=True,  # torch agrees if the inputs are on the CPU
    )


@clause("distributed.fsdp.fully_shard.replicated")
def test_model_around_units_is_replicated(sites: Sites) -> None:
    sites.agree(cases.replicated)


@clause("distributed.fsdp.fully_shard.checkpoint_helpers")
@pytest.mark.parametrize("whole", [False, True])
def test_torchs_helpers_save_and_load(sites: Sites, whole: bool) -> None:
    sites.agree(cases.checkpointed, whole=whole)


@clause("distributed.fsdp.fully_shard.whole_states")
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_states_are_put_together(sites: Sites, flat: bool, offloads: bool) -> None:
    sites.agree(cases.full_states, flat=flat, offloads=offloads)


@clause("distributed.fsdp.fully_shard.written_after_evaluation")
@pytest.mark.deviation("fully_shard.written_after_evaluation")
@pytest.mark.parametrize("method", ["forward", "generate"])
@pytest.mark.parametrize("how", ["foreach", "data"])
def test_evaluation_sees_writes_to_shards_of_kept_units(sites: Sites, how: str, method: str) -> None:
    sites.deviate(
        evaluation_cases.written_after_evaluation,
        how=how,
        method=method,
        torch_does=each(lambda outputs: torch.equal(outputs[0].values, outputs[1].values)),
        we_do=each(lambda outputs: does_as(outputs[2:], outputs[:2])),
    )


@clause("distributed.fsdp.fully_shard.written_after_evaluation")
@pytest.mark.deviation("fully_shard.optimizer_made_after_evaluation")
@pytest.mark.parametrize("method", ["forward", "generate"])
def test_optimizer_made_after_evaluation_trains(sites: Sites, method: str) -> None:
    sites.deviate(
        evaluation_cases.optimizer_made_after_evaluation,
        method=method,
        we_do=each(lambda outputs: does_as(outputs[1], outputs[0])),
    )


@clause("distributed.fsdp.fully_shard.written_after_evaluation")
@pytest.mark.deviation("fully_shard.written_after_evaluation")
@pytest.mark.parametrize("method", ["forward", "generate"])
def test_writes_to_parameters_listed_after_evaluation_outlive_reshard(sites: Sites, method: str) -> None:
    sites.deviate(
        evaluation_cases.written_after_evaluation,
        how="data",
        method=method,
        is_listed_before=False,
        torch_does=each(lambda outputs: torch.equal(outputs[0].values, outputs[1].values)),
        we_do=each(lambda outputs: does_as(outputs[2:], outputs[:2])),
    )


@clause("distributed.fsdp.fully_shard.written_after_evaluation")
@pytest.mark.deviation("fully_shard.written_after_evaluation")
@pytest.mark.parametrize("trains", ["backward", "forward", "accumulation"])
def test_training_goes_on_with_weights_exchanged_for_evaluation(sites: Sites, trains: str) -> None:
    sites.deviate(
        evaluation_cases.exchanged_for_evaluation,
        trains=trains,
        torch_does=each(lambda outputs: not torch.equal(outputs[0].values, outputs[2].values)),
        we_do=each(lambda outputs: does_as(outputs[:2], outputs[2:])),
    )


@clause("distributed.fsdp.fully_shard.unshard")
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"reshard_after_forward": True}])
def test_unsharded_root_outlives_evaluation(sites: Sites, options: dict[str, bool]) -> None:
    sites.agree(evaluation_cases.unsharded_through_evaluation, **options)
