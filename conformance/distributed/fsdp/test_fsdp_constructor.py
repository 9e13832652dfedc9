"""Wrapping: what is refused or warned about, modules on the meta device, states that are made equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from conformance.distributed.fsdp.construct_cases import THE_ROOT_IGNORED, WAYS
from conformance.distributed.fsdp.fsdp_cases import Setup, Step, Training
from conformance.distributed.fsdp.judging import assert_like_unsharded, assert_ranks_agree, outcomes
from conformance.distributed.fsdp.method_cases import TREE
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import raised
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge, StaleRow
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.ranks import RankFault, RankPool

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
HYBRID = Setup("HYBRID_SHARD", ranks="meshes", shards=2)


def agreed(
    pool: RankPool, libraries: tuple[Library, Library], case: str, **arguments: object
) -> list[Outcome]:
    expected, actual = (
        outcomes(pool, library, f"construct_cases:{case}", **arguments) for library in libraries
    )
    assert_ranks_agree(expected, actual)
    return actual


@clause("distributed.fsdp.fully_sharded_data_parallel.arguments")
@pytest.mark.parametrize("way", [way for way in WAYS if way != THE_ROOT_IGNORED])
def test_arguments_are_taken_or_refused_as_by_torch(
    subject: Library, reference: Library, rank_pool: RankPool, way: str
) -> None:
    agreed(rank_pool, (reference, subject), "construct", way=way)


@clause("distributed.fsdp.fully_sharded_data_parallel.arguments")
@pytest.mark.parametrize("argument", ["limit_all_gathers", "use_orig_params"])
def test_units_differ_in_what_they_must_have_alike(
    subject: Library, reference: Library, rank_pool: RankPool, argument: str
) -> None:
    for outcome in agreed(rank_pool, (reference, subject), "differing", argument=argument):
        assert outcome.raised is not None


@clause("distributed.fsdp.fully_sharded_data_parallel.arguments")
def test_ignoring_the_root_warns(subject: Library, reference: Library, rank_pool: RankPool) -> None:
    """torch's warning ends with another module than the one that it is about."""
    expected, actual = (
        [_with_short_warnings(outcome) for outcome in seen]
        for seen in (
            outcomes(rank_pool, library, "construct_cases:construct", way=THE_ROOT_IGNORED)
            for library in (reference, subject)
        )
    )
    assert_ranks_agree(expected, actual)


@clause("distributed.fsdp.fully_sharded_data_parallel.arguments")
def test_what_nobody_asked_for_is_not_warned_of_in_logs(subject: Library, reference: Library) -> None:
    """In a pool of its own, since such warnings come once a process."""
    with RankPool(2) as pool:
        expected, actual = (
            pool.run("conformance.distributed.fsdp.construct_cases:logged", library=library.spec)
            for library in (reference, subject)
        )
    for of_reference, of_subject in zip(expected, actual, strict=True):
        assert set(of_subject) <= set(of_reference)


def _with_short_warnings(outcome: Outcome) -> Outcome:
    return replace(outcome, warned=tuple((kind, text.partition(": ")[0]) for kind, text in outcome.warned))


@clause("distributed.fsdp.fully_sharded_data_parallel.meta_device")
@pytest.mark.parametrize("by", ["reset", "function", "no reset"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_modules_on_the_meta_device_are_built_by_wrapping(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, by: str
) -> None:
    agreed(rank_pool, (reference, subject), "materialised", strategy=strategy, by=by)


@clause("distributed.fsdp.fully_sharded_data_parallel.sync_module_states")
@pytest.mark.reference_limit("fsdp.sync_module_states")
def test_torch_cannot_synchronise_on_a_cpu() -> None:
    with RankPool(2) as pool:
        setup = Setup(arguments={"sync_module_states": True})
        seen = outcomes(pool, Library("torch"), "construct_cases:synchronised", setup=setup)
        if all(outcome.raised is None for outcome in seen):
            raise StaleRow("torch synchronises states on a CPU")


@clause("distributed.fsdp.fully_sharded_data_parallel.sync_module_states")
@pytest.mark.parametrize("wrap", ["root", "leaves"])
@pytest.mark.parametrize(
    ("setup", "all_ranks"),
    [(Setup(), 1), (Setup(), 2), (Setup("NO_SHARD"), 3), (HYBRID, 4)],
    ids=["1", "2", "3-NO_SHARD", "4-HYBRID_SHARD"],
)
def test_every_rank_begins_with_the_first_ones_states(
    subject: Library, ranks: Callable[..., RankPool], setup: Setup, all_ranks: int, wrap: str
) -> None:
    setup = replace(setup, wrap=wrap, arguments={"sync_module_states": True})
    first = TREE.build()
    for outcome in outcomes(ranks(all_ranks), subject, "construct_cases:synchronised", setup=setup):
        assert outcome.raised is None, outcome.raised
        for name, parameter in first.named_parameters():
            assert torch.equal(outcome.value["whole"][name].values, parameter.detach()), name
        for name, buffer in first.named_buffers():
            assert torch.equal(outcome.value["buffers"][name].values, buffer + 1), name


@clause("distributed.fsdp.fully_sharded_data_parallel.cpu_offload")
@pytest.mark.reference_limit("fsdp.cpu_offload")
def test_torch_cannot_offload_parameters_on_a_cpu() -> None:
    with RankPool(2) as pool:
        training = Training(TREE, Setup(offload_params=True))
        try:
            seen = outcomes(pool, Library("torch"), "fsdp_cases:train", training=training)
        except RankFault:
            return
        if all(outcome.raised is None for outcome in seen):
            raise StaleRow("torch offloads parameters on a CPU")


@clause("distributed.fsdp.fully_sharded_data_parallel.cpu_offload")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_with_parameters_offloaded(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    """As without it: against torch, and against one process. Also where gradients accumulate in no_sync."""
    plain = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    steps = (Step(), Step(forwards=2, order="no_sync"), Step(before="eval"))
    tree = replace(TREE, dtype=torch.float64)
    offloaded = Training(tree, replace(plain, offload_params=True), steps)
    actual = outcomes(rank_pool, subject, "fsdp_cases:train", training=offloaded)
    assert_like_unsharded(actual, offloaded)
    expected = outcomes(rank_pool, reference, "fsdp_cases:train", training=Training(tree, plain, steps))
    assert_ranks_agree(expected, actual)


@clause("distributed.fsdp.fsdp_torch_limit_removed.moved_to_meta")
@pytest.mark.deviation("fsdp.moved_to_meta")
def test_offloaded_parameters_stay_on_the_cpu(deviation: DeviationJudge, rank_pool: RankPool) -> None:
    """Moved elsewhere they are refused, in the words that torch has for it."""
    setup = Setup(offload_params=True)
    deviation.judge(
        lambda library: outcomes(rank_pool, library, "construct_cases:moved_away", setup=setup),
        torch_does=lambda seen: raised(seen, NotImplementedError, "Cannot copy out of meta tensor"),
        we_do=lambda seen: raised(
            seen, RuntimeError, "parameter CPU offloading enabled has parameters on meta"
        ),
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.tensor_parallel")
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_parameters_of_tensor_parallelism_train_or_are_refused(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], use_orig_params: bool, ignored: bool
) -> None:
    pool = ranks(2)  # torch fails in a world of one
    expected, actual = (
        outcomes(
            pool,
            library,
            "construct_cases:tensor_parallel",
            use_orig_params=use_orig_params,
            ignored=ignored,
        )
        for library in (reference, subject)
    )
    assert all(outcome.raised is None for outcome in expected), expected[0].raised
    refused = [outcome.raised for outcome in actual if outcome.raised is not None]
    if ignored or not refused:
        assert_ranks_agree(expected, actual)
        return
    assert len(refused) == len(actual), actual
    for one in refused:
        assert one.kind is NotImplementedError, one
        assert "2.weight is a DTensor" in one.text
