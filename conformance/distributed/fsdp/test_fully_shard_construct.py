"""Construction with fully_shard: errors, the sharded modules, and features that their parameters support."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import fully_shard_construct_cases as cases
from conformance.distributed.fsdp import fully_shard_extension_cases as extension_cases
from conformance.distributed.fsdp.fully_shard_judging import Sites
from conformance.distributed.fsdp.rank_judging import assert_ranks_agree, run_on_ranks
from conformance.distributed.fsdp.twins import RankOutcomes, TwinsOf, each, values_of
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.library import Library
from conformance.judge.outcome import assert_same_outcome, observe
from conformance.judge.surface import is_torch_in


@clause("distributed.fsdp.fully_shard.refusals")
@pytest.mark.parametrize("way", cases.WAYS)
def test_invalid_arguments_are_refused(sites: Sites, way: str) -> None:
    sites.agree(cases.refused, may_raise=True, way=way)


@clause("distributed.fsdp.fully_shard.later_refusals")
@pytest.mark.parametrize("way", cases.LATER_WAYS)
def test_arguments_that_older_torch_took_are_refused(sites: Sites, way: str) -> None:
    sites.agree(cases.refused, may_raise=True, way=way)


@clause("distributed.fsdp.fully_shard.refusals")
@pytest.mark.world_sizes(fewest=2)
def test_refuses_uneven_columns(sites: Sites) -> None:
    (actual, *_) = sites.agree(cases.uneven, may_raise=True)
    assert actual.raised is not None


@clause("distributed.fsdp.fully_shard.module_class")
def test_sharded_modules_get_new_class(sites: Sites) -> None:
    sites.agree(cases.attributes)


@clause("distributed.fsdp.fully_shard.named_by_modules")
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("gives", ["fewer", "others"])
def test_named_parameters_override_selects_parameters(sites: Sites, gives: str, around: bool) -> None:
    (actual, *_) = sites.agree(cases.adapted, gives=gives, around=around, may_raise=True)
    assert (actual.raised is None) == (gives == "fewer"), actual.raised


@clause("distributed.fsdp.fully_shard.state")
def test_state_function_returns_module_state(sites: Sites) -> None:
    sites.agree(cases.states)


@pytest.mark.parametrize(
    "asks",
    [
        pytest.param(cases.policies, marks=clause("distributed.fsdp.fully_shard.policies")),
        pytest.param(cases.named_dimensions, marks=clause("distributed.fsdp.fully_shard.named_dimensions")),
    ],
    ids=["policies", "dimensions"],
)
def test_policies_are_plain_objects(
    subject: Library, reference: Library, asks: Callable[[Library], Any]
) -> None:
    expected, actual = (observe(asks, library) for library in (reference, subject))
    assert_same_outcome(expected, actual)
    assert actual.raised is None, actual.raised


@clause("distributed.fsdp.fully_shard.meta_device")
@pytest.mark.parametrize("materialises", ["", "filled", "loaded"])
def test_begins_on_the_meta_device(sites: Sites, materialises: str) -> None:
    (actual, *_) = sites.agree(cases.from_meta, may_raise=not materialises, materialises=materialises)
    assert (actual.raised is None) == bool(materialises), actual.raised


@clause("distributed.fsdp.fully_shard.meta_device")
@pytest.mark.deviation("fully_shard.refused_first_forward")
def test_forward_works_after_refused_forward_on_meta(sites: Sites) -> None:
    expected = observe(lambda: {"refused": True, "output": torch.full((1, 2), 4.0)})
    sites.deviate_by_hand(expected, cases.materialised_late)


@clause("distributed.fsdp.fully_shard.training_tools")
@pytest.mark.parametrize("by", ["2", "inf", "value"])
def test_gradients_are_clipped(sites: Sites, by: str) -> None:
    sites.agree(cases.clipped, by=by)


@clause("distributed.fsdp.fully_shard.training_tools")
@pytest.mark.parametrize("overflows", [False, True])
def test_steps_are_scaled(sites: Sites, overflows: bool) -> None:
    sites.agree(cases.scaled, overflows=overflows)


@clause("distributed.fsdp.fully_shard.register_fsdp_forward_method")
@pytest.mark.parametrize("registers", [True, False])
def test_other_methods_compute(sites: Sites, registers: bool) -> None:
    sites.agree(cases.forward_method, may_raise=not registers, registers=registers)


@clause("distributed.fsdp.fully_shard.share_comm_ctx")
def test_two_models_share(sites: Sites) -> None:
    sites.agree(cases.shared_context)


@clause("distributed.fsdp.fully_shard.dp_mesh_dims")
@pytest.mark.parametrize(
    ("dims", "sizes", "names", "parallel"),
    [
        ({"shard": "data"}, (2,), ("data",), None),
        ({"replicate": "data"}, (2,), ("data",), None),
        ({"shard": "data"}, (2, 2), ("data", "model"), "model"),
        ({"shard": "data"}, (2, 2), ("model", "data"), "model"),
        ({"shard": "data", "replicate": "copies"}, (2, 2), ("copies", "data"), None),
        ({"shard": ("a", "b")}, (2, 2), ("a", "b"), None),
        pytest.param(
            {"shard": "data", "replicate": "copies"},
            (2, 2, 2),
            ("copies", "data", "model"),
            "model",
            marks=pytest.mark.profile("deep"),
        ),
    ],
    ids=["sharded", "replicated", "before another", "behind another", "both", "flattened", "three"],
)
@pytest.mark.parametrize(
    "policies",
    [
        pytest.param("", id="plain"),
        *(pytest.param(policy, marks=pytest.mark.profile("full")) for policy in ("mixed", "offloaded")),
    ],
)
@pytest.mark.world_sizes(fewest=2)
def test_shards_over_named_dimensions(
    twins_of: TwinsOf,
    *,
    dims: dict[str, Any],
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    parallel: str | None,
    policies: str,
    world_size: int,
) -> None:
    twins = twins_of(math.prod(sizes))
    arguments = {"dims": dims, "sizes": sizes, "names": names, "parallel": parallel, "policies": policies}
    expected, actual = (
        run_on_ranks(twins.pool, library, cases.on_whole_mesh, **arguments)
        for library in (twins.reference, twins.subject)
    )
    assert_ranks_agree(expected, actual)
    assert actual[0].raised is None, actual[0].raised


@clause("distributed.fsdp.fully_shard.settings_of_meshes")
def test_copies_have_no_placement(sites: Sites) -> None:
    (actual, *_) = sites.agree(cases.placed_copies, may_raise=True)
    assert actual.raised is not None


@clause("distributed.fsdp.fully_shard.settings_of_copies")
@pytest.mark.deviation("fully_shard.settings_of_copies")
@pytest.mark.parametrize("method", ["set_reshard_after_forward", "set_separate_reduce_scatter_group"])
def test_shard_settings_of_replicas_are_refused(sites: Sites, method: str) -> None:
    def torch_does(outcomes: RankOutcomes) -> bool:
        is_silent = method == "set_reshard_after_forward"
        words = "" if is_silent else "Expected mesh_info to be FSDPMeshInfo, got "
        # If torch's error has no text, torch has already changed the root, which by default stays unsharded.
        return all(
            refused.startswith(f"AssertionError: {words}")
            and (refused == "AssertionError: ") is is_silent
            and ("Shard" in shown["0.weight"]) is is_silent
            for refused, shown in values_of(outcomes)
        )

    def we_do(outcomes: RankOutcomes) -> bool:
        names = "2.weight, 2.bias"
        # The root stays unsharded, as by default.
        return all(
            refused.startswith(f"AssertionError: {method}() reached {names}, for which")
            and "Shard" not in shown["0.weight"]
            for refused, shown in values_of(outcomes)
        )

    arguments = {"method": method, "argument": True}
    sites.deviate(cases.settings_of_copies, **arguments, torch_does=torch_does, we_do=we_do)


@clause("distributed.fsdp.fully_shard.extensions")
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        (extension_cases.Halved, {}),
        (extension_cases.Halved, {"param_dtype": torch.float32}),
        (extension_cases.Quantised, {}),
    ],
)
@pytest.mark.world_sizes(fewest=2)
def test_extension_hooks_control_gathering(
    sites: Sites, kind: type[torch.Tensor], policy: dict[str, Any]
) -> None:
    sites.agree(extension_cases.extended, kind=kind, policy=policy)


@clause("distributed.fsdp.fully_shard.extensions")
@pytest.mark.parametrize("kind", [extension_cases.OneMethod, extension_cases.TwoArguments])
def test_incomplete_extension_is_refused(sites: Sites, kind: type[torch.Tensor]) -> None:
    (actual, *_) = sites.agree(extension_cases.extended, may_raise=True, kind=kind)
    assert actual.raised is not None


@clause("distributed.fsdp.fully_shard.extensions")
@pytest.mark.world_sizes(fewest=2)
def test_refuses_what_is_gathered_without_padding(sites: Sites) -> None:
    """Check the last rank, whose shard has fewer rows than the others."""
    *_, actual = sites.agree(extension_cases.unpadded, may_raise=True)
    assert actual.raised is None, actual.raised


@clause("distributed.fsdp.fully_shard.released_gather_outputs")
@pytest.mark.world_sizes(fewest=2)
def test_gathered_tensors_are_released_on_request(sites: Sites) -> None:
    releasing, keeping = (
        values_of(sites.of_subject(extension_cases.released, kind=kind))
        for kind in (extension_cases.Released, extension_cases.NotReleased)
    )
    for outcome, reference in zip(releasing, keeping, strict=True):
        assert outcome.pop("allocated") == [[False, False]] * 2
        assert reference.pop("allocated") == [[True, True]] * 2
        assert str(outcome) == str(reference)


@clause("distributed.fsdp.fully_shard.released_gather_outputs")
@pytest.mark.parametrize(
    "kind",
    [
        extension_cases.Released,
        extension_cases.NotReleased,
        extension_cases.NoAnswer,
        extension_cases.ReleasedAlone,
    ],
)
@pytest.mark.world_sizes(fewest=2)
def test_release_hook_without_gather_hooks_or_bool_raises(sites: Sites, kind: type[torch.Tensor]) -> None:
    raises = [outcome.raised is not None for outcome in sites.of_subject(extension_cases.released, kind=kind)]
    assert set(raises) == {kind in (extension_cases.NoAnswer, extension_cases.ReleasedAlone)}
    if is_torch_in(">=2.15"):
        sites.agree(extension_cases.released, may_raise=True, kind=kind)


@clause("distributed.fsdp.fully_shard.extensions_of_one_rank")
@pytest.mark.deviation("fully_shard.extensions_of_one_rank")
def test_extension_hooks_run_on_single_rank(sites_of: TwinsOf) -> None:
    """Train in float64, because the float32 halves of the extension lose precision."""
    expected = extension_cases.extended_by_hand()
    sites_of(1).deviate(
        extension_cases.extended,
        kind=extension_cases.Halved,
        we_do=each(lambda value: does_as(expected, value["losses"][0].values)),
    )
