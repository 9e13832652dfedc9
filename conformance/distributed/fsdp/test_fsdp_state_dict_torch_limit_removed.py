"""Where state dicts do what torch's do not: nothing is lost, nothing is moved in vain, every form loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import state_dict_cases, state_dict_hook_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import probed
from conformance.distributed.fsdp.method_cases import TREE
from conformance.distributed.fsdp.state_dict_cases import Form
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.ranks import RankPool

LEAVES = Setup(wrap="leaves")
ORIGINALS = Setup(wrap="leaves", arguments={"use_orig_params": True})
Ranks = Callable[..., RankPool]


def values_of(seen: Sequence[Outcome]) -> list[Any]:
    assert all(outcome.raised is None for outcome in seen), [outcome.raised for outcome in seen]
    return [outcome.value for outcome in seen]


@clause("distributed.fsdp.fsdp_state_dict.all_or_nothing")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
@pytest.mark.parametrize("fault", ["missing", "misshaped", "without values"])
@pytest.mark.parametrize("setup", [LEAVES, ORIGINALS], ids=["flat", "originals"])
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_a_load_that_fails_on_one_rank(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, setup: Setup, fault: str
) -> None:
    def probe(library: Library) -> Any:
        asks = state_dict_cases.failed
        return values_of(probed(ranks(world_size), library, asks, setup, form=Form(), fault=fault, on=[1]))

    def we_do(seen: Any) -> bool:
        reported = ["rank 1 could not load" in str(one["error"]) for one in seen]
        return reported == [rank != 1 for rank in range(world_size)] and not any(
            one["changed"] for one in seen
        )

    deviation.judge(probe, torch_does=lambda seen: all(one["changed"] for one in seen), we_do=we_do)


@clause("distributed.fsdp.fsdp_state_dict.all_or_nothing")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
def test_a_load_that_fails_on_all_ranks(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    def probe(library: Library) -> Any:
        asks = state_dict_cases.failed
        form = Form("SHARDED")
        return values_of(
            probed(ranks(world_size), library, asks, LEAVES, form=form, fault="missing", on=range(world_size))
        )

    deviation.judge(
        probe,
        torch_does=lambda seen: all(one["changed"] for one in seen),
        we_do=lambda seen: not any(one["changed"] for one in seen),
    )


@clause("distributed.fsdp.fsdp_state_dict.all_or_nothing")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
@pytest.mark.parametrize("kind", ["SHARDED", "LOCAL"])
@pytest.mark.parametrize("fault", ["missing buffer", "misshaped buffer"])
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_parts_are_loaded_by_all_or_by_none(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, kind: str, fault: str
) -> None:
    last = world_size - 1

    def probe(library: Library) -> Any:
        asks, form = state_dict_cases.failed, Form(kind)
        return values_of(probed(ranks(world_size), library, asks, LEAVES, form=form, fault=fault, on=[last]))

    def we_do(seen: Any) -> bool:
        reported = [f"rank {last} could not load" in str(one["error"]) for one in seen]
        return reported == [rank != last for rank in range(world_size)] and not any(
            one["changed"] for one in seen
        )

    deviation.judge(probe, torch_does=lambda seen: all(one["changed"] for one in seen), we_do=we_do)


@clause("distributed.fsdp.fsdp_state_dict.all_or_nothing")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
@pytest.mark.world_sizes(fewest=2)
def test_a_load_that_fails_below_a_module_around_units(
    deviation: DeviationJudge, ranks: Ranks, world_size: int
) -> None:
    """There nothing is loaded into the unit with the fault; nn.Module goes on to the next one."""

    def probe(library: Library) -> Any:
        return values_of(probed(ranks(world_size), library, state_dict_cases.failed_below, LEAVES))

    def first_unit_changed(seen: Any) -> list[bool]:
        return ["body.parts.0.inner.bias" in one["changed"] for one in seen]

    deviation.judge(
        probe,
        torch_does=lambda seen: all(first_unit_changed(seen)),
        we_do=lambda seen: (
            not any(first_unit_changed(seen))
            and "rank 1 could not load" in seen[0]["error"]
            and "size mismatch" in seen[1]["error"]
        ),
    )


@clause("distributed.fsdp.fsdp_state_dict.all_or_nothing")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
def test_extra_states_of_a_load_that_fails(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    def probe(library: Library) -> Any:
        return values_of(probed(ranks(world_size), library, state_dict_hook_cases.remembered, LEAVES))

    deviation.judge(
        probe,
        torch_does=lambda seen: seen == [["old"]] * world_size,
        we_do=lambda seen: seen == [["new"]] * world_size,
    )


@clause("distributed.fsdp.fsdp_state_dict.all_or_nothing")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
def test_a_hook_that_raises(deviation: DeviationJudge, ranks: Ranks) -> None:
    def probe(library: Library) -> Any:
        return values_of(probed(ranks(1), library, state_dict_hook_cases.raised_by_a_hook, ORIGINALS))

    deviation.judge(
        probe,
        torch_does=lambda seen: seen[0]["error"] == "KeyError: 'injected'" and bool(seen[0]["changed"]),
        we_do=lambda seen: seen[0]["error"] == "KeyError: 'injected'" and not seen[0]["changed"],
    )


@clause("distributed.fsdp.fsdp_state_dict.misfits")
def test_what_a_module_puts_in_and_does_not_fit(subject: Library, ranks: Ranks, world_size: int) -> None:
    asks = state_dict_hook_cases.loaded_in_its_own_way
    for one in values_of(probed(ranks(world_size), subject, asks, LEAVES, fits=False)):
        assert "head.weight: rank" in one["error"]
        assert "shape (1, 7), but keeps a tensor of shape (2, 7)" in one["error"]
        assert not one["changed"]


@clause("distributed.fsdp.fsdp_state_dict.misfits")
@pytest.mark.parametrize(
    ("setup", "kind"),
    [
        (LEAVES, "ShardedTensor"),
        (ORIGINALS, "ShardedTensor"),
        (Setup(wrap="leaves", ranks="mesh"), "DTensor"),
    ],
    ids=["flat", "originals", "mesh"],
)
@pytest.mark.world_sizes(fewest=2)
def test_parts_of_another_shape(
    subject: Library, ranks: Ranks, world_size: int, setup: Setup, kind: str
) -> None:
    asks, form = state_dict_cases.failed, Form("SHARDED")
    seen = values_of(
        probed(ranks(world_size), subject, asks, setup, form=form, fault="misshaped part", on=[1])
    )
    reported = (
        f"body.parts.0.inner.weight: rank 1 of {world_size} was given a {kind} of shape (2, 7) "
        "but the parameter has the shape"
    )
    for one in seen:
        assert reported in one["error"]
        assert not one["changed"]


@clause("distributed.fsdp.fsdp_state_dict.misfits")
@pytest.mark.parametrize("setup", [LEAVES, ORIGINALS], ids=["flat", "originals"])
@pytest.mark.world_sizes(fewest=2)
def test_what_has_no_values_is_not_assigned(
    subject: Library, ranks: Ranks, world_size: int, setup: Setup
) -> None:
    asks, fault = state_dict_cases.failed, "without values"
    seen = values_of(
        probed(ranks(world_size), subject, asks, setup, form=Form(), fault=fault, on=[1], assign=True)
    )
    for one in seen:
        assert "rank 1 was given a meta tensor of shape" in one["error"]
        assert not one["changed"]


@clause("distributed.fsdp.fsdp_state_dict.built_on_meta")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.parametrize("originals", [False, True])
def test_modules_built_on_meta(
    subject: Library, ranks: Ranks, world_size: int, kind: str, originals: bool
) -> None:
    setup = Setup(arguments={"use_orig_params": originals})
    asks = state_dict_cases.built_on_meta
    for one in values_of(probed(ranks(world_size), subject, asks, setup, form=Form(kind), assign=False)):
        assert one == {"ignored": False, "managed": True, "warned": True}


@clause("distributed.fsdp.fsdp_state_dict.assigned")
@pytest.mark.deviation("fsdp.assigned_parameters")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_modules_built_on_meta_are_assigned_to(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, kind: str
) -> None:
    def probe(library: Library) -> Any:
        asks, form = state_dict_cases.built_on_meta, Form(kind)
        return values_of(probed(ranks(world_size), library, asks, ORIGINALS, form=form, assign=True))

    deviation.judge(
        probe,
        torch_does=lambda seen: all(one["ignored"] and not one["managed"] for one in seen),
        we_do=lambda seen: all(one["ignored"] and one["managed"] and not one["warned"] for one in seen),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_state_dict.another_world")
@pytest.mark.parametrize("kind", ["LOCAL", "SHARDED"])
def test_what_half_the_ranks_saved_is_refused(subject: Library, ranks: Ranks, kind: str) -> None:
    seen = values_of(probed(ranks(4), subject, state_dict_cases.of_another_world, LEAVES, kind=kind))
    for rank, one in enumerate(seen):
        assert f"rank {rank} of 4 was given" in one["error"]
        assert not one["changed"]


@clause("distributed.fsdp.fsdp_state_dict.local_with_original_parameters")
@pytest.mark.deviation("fsdp.local_state_dict_of_originals")
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_shards_of_original_parameters(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    def probe(library: Library) -> Any:
        asks = state_dict_cases.loads_its_own
        return values_of(probed(ranks(world_size), library, asks, ORIGINALS, form=Form("LOCAL")))

    deviation.judge(
        probe,
        torch_does=lambda seen: all(
            "head.weight" in one["keys"] and "Unexpected" in one["reported"] for one in seen
        ),
        we_do=lambda seen: all("head.weight" not in one["keys"] and one["loaded"] for one in seen),
    )


@clause("distributed.fsdp.fsdp_state_dict.local_of_originals_by_torch")
@pytest.mark.world_sizes(also=[3])
def test_torchs_shards_of_original_parameters(
    subject: Library, reference: Library, ranks: Ranks, world_size: int
) -> None:
    asks = state_dict_cases.exchanged
    seen = probed(ranks(world_size), subject, asks, ORIGINALS, source=reference.spec, form=Form("LOCAL"))
    for one in values_of(seen):
        assert one["keys"] == "<All keys matched successfully>"
        for name, expected in one["expected"].items():
            assert torch.equal(one["whole"][name].values, expected.values), name


@clause("distributed.fsdp.fsdp_state_dict.local_of_replicas")
@pytest.mark.deviation("fsdp.local_of_replicas")
def test_shards_of_every_replica(deviation: DeviationJudge, ranks: Ranks) -> None:
    setup = Setup("HYBRID_SHARD", ranks="groups", shards=2, wrap="leaves")

    def probe(library: Library) -> Any:
        return probed(ranks(4), library, state_dict_cases.loads_its_own, setup, form=Form("LOCAL"))

    deviation.judge(
        probe,
        torch_does=lambda seen: (
            [outcome.raised is not None for outcome in seen] == [False, False, True, True]
        ),
        we_do=lambda seen: all(one.raised is None and one.value["loaded"] for one in seen),
    )


@clause("distributed.fsdp.fsdp_state_dict.dtensor_without_mesh")
@pytest.mark.deviation("fsdp.dtensor_without_mesh")
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_dtensors_of_a_process_group(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    def probe(library: Library) -> Any:
        asks, form = state_dict_cases.loads_its_own, Form("SHARDED", {"_use_dtensor": True})
        return probed(ranks(world_size), library, asks, Setup(wrap="leaves", ranks="group"), form=form)

    deviation.judge(
        probe,
        torch_does=lambda seen: all(one.raised and one.raised.kind is AttributeError for one in seen),
        we_do=lambda seen: all(
            one.raised is None and one.value["loaded"] and one.value["types"] == ["DTensor", "Tensor"]
            for one in seen
        ),
    )


@clause("distributed.fsdp.fsdp_state_dict.assigned")
@pytest.mark.deviation("fsdp.assigned_parameters")
@pytest.mark.parametrize("setup", [LEAVES, ORIGINALS], ids=["flat", "originals"])
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.world_sizes(also=[3])
def test_parameters_are_assigned(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, setup: Setup, kind: str
) -> None:
    def probe(library: Library) -> Any:
        return values_of(
            probed(ranks(world_size), library, state_dict_cases.assigned, setup, form=Form(kind))
        )

    deviation.judge(
        probe,
        we_do=lambda seen: all(one["loaded"] for one in seen),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_state_dict.assigned_shards")
@pytest.mark.world_sizes(also=[3])
def test_shards_are_assigned(subject: Library, ranks: Ranks, world_size: int) -> None:
    form = Form("LOCAL")
    for one in values_of(probed(ranks(world_size), subject, state_dict_cases.assigned, LEAVES, form=form)):
        assert one["loaded"]


@clause("distributed.fsdp.fsdp_state_dict.settings_after_an_error")
@pytest.mark.deviation("fsdp.state_dict_type_after_an_error")
def test_settings_after_an_error(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    def probe(library: Library) -> Any:
        return values_of(probed(ranks(world_size), library, state_dict_cases.after_an_error_inside, LEAVES))

    deviation.judge(
        probe,
        torch_does=lambda seen: seen == ["SHARDED_STATE_DICT"] * world_size,
        we_do=lambda seen: seen == ["FULL_STATE_DICT"] * world_size,
    )


@clause("distributed.fsdp.fsdp_state_dict.settings_without_units")
@pytest.mark.deviation("fsdp.state_dict_type_without_units")
def test_settings_without_units(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    def probe(library: Library) -> Any:
        return values_of(probed(ranks(world_size), library, state_dict_cases.set_on_no_unit, LEAVES))

    deviation.judge(
        probe,
        torch_does=lambda seen: all(one.startswith("KeyError") for one in seen),
        we_do=lambda seen: seen == ["entered"] * world_size,
    )


@clause("distributed.fsdp.fsdp_state_dict.while_whole")
@pytest.mark.deviation("fsdp.rank0_only_while_whole")
def test_the_first_rank_alone_saves_what_all_see(
    deviation: DeviationJudge, ranks: Ranks, world_size: int
) -> None:
    def probe(library: Library) -> Any:
        asks, form = state_dict_cases.saved_while_whole, Form("FULL", {"rank0_only": True})
        return values_of(probed(ranks(world_size), library, asks, LEAVES, form=form))

    deviation.judge(
        probe,
        torch_does=lambda seen: (
            "head.weight" in seen[0] and all(str(one).startswith("KeyError") for one in seen[1:])
        ),
        we_do=lambda seen: "head.weight" in seen[0] and not any(seen[1:]),
    )


@clause("distributed.fsdp.fsdp_state_dict.while_whole")
@pytest.mark.deviation("fsdp.local_while_whole")
@pytest.mark.world_sizes(fewest=2)
def test_shards_are_not_saved_while_parameters_are_whole(
    deviation: DeviationJudge, ranks: Ranks, world_size: int
) -> None:
    def probe(library: Library) -> Any:
        asks, form = state_dict_cases.saved_while_whole, Form("LOCAL")
        return values_of(probed(ranks(world_size), library, asks, LEAVES, form=form))

    deviation.judge(
        probe,
        torch_does=lambda seen: all(str(one).startswith("ValueError") for one in seen),
        we_do=lambda seen: all(
            str(one).startswith("RuntimeError") and "leave the context first" in one for one in seen
        ),
    )


@clause("distributed.fsdp.fsdp_state_dict.hooks_of_parts")
@pytest.mark.deviation("fsdp.hooks_see_no_wholes")
@pytest.mark.world_sizes(fewest=2)
def test_what_hooks_see_of_parts(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    def probe(library: Library) -> Any:
        return values_of(probed(ranks(world_size), library, state_dict_hook_cases.seen_by_a_hook, LEAVES))

    deviation.judge(
        probe,
        torch_does=lambda seen: seen == [[True]] * world_size,
        we_do=lambda seen: seen == [[False]] * world_size,
    )


def share_of(world_size: int) -> int:
    """The bytes that a rank holds of the model at most: its part, and one row of each parameter."""
    plain = list(TREE.build().parameters())
    share = sum(p.numel() for p in plain) / world_size + sum(p[0].numel() for p in plain)
    return int(share * torch.float32.itemsize)


@clause("distributed.fsdp.fsdp_state_dict.bytes_moved")
@pytest.mark.deviation("fsdp.sharded_state_dict_gathers")
@pytest.mark.world_sizes(fewest=2, also=[3, 4])
@pytest.mark.parametrize("setup", [LEAVES, Setup()], ids=["leaves", "root"])
def test_sharded_state_dicts_move_what_is_held(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, setup: Setup
) -> None:
    def probe(library: Library) -> Any:
        return values_of(probed(ranks(world_size), library, state_dict_cases.traffic, setup))

    def is_bounded(one: Any) -> bool:
        return all(0 < moved <= share_of(world_size) for moved in (one["saving"], one["loading"]))

    deviation.judge(
        probe,
        torch_does=lambda seen: all(
            min(one["saving"], one["loading"]) > share_of(world_size) for one in seen
        ),
        we_do=lambda seen: all(is_bounded(one) for one in seen),
    )
