"""Gradient clipping of DTensors on a mesh of real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome
from conformance.judge.sandbox import seeding
from conformance.judge.tolerances import EXACT, Tolerance, norm_of
from conformance.ranks import RankFault, RankPool, RanksDiverged
from conformance.strategies import dtensor_gradients
from conformance.strategies.dtensor_gradients import PlacedGradient

NORM_TYPES = [2.0, 1.0, 3.0, math.inf]
max_norms = st.sampled_from([1e-3, 0.5, 10.0, 1e6, 0.0])


@st.composite
def placed_gradients(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> list[PlacedGradient]:
    """Draw gradients whose sharded dimensions are short and odd, so that some ranks hold fewer elements or none."""
    gradients: list[PlacedGradient] = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=2))
        generator = seeding.generator(draw(st.integers(0, 2**16)))
        scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
        value = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        shard_dim = draw(st.sampled_from([None, *range(len(shape))]))
        gradients.append(PlacedGradient(value.to(draw(st.sampled_from(dtypes))), shard_dim))
    return gradients


@dataclass(frozen=True)
class Clipping:
    """The fixture `clipping`: both libraries clip on the ranks of one world."""

    reference: Library
    subject: Library
    pool: RankPool

    def clip_with(
        self, library: Library, function: str, gradients: Sequence[PlacedGradient], **arguments: Any
    ) -> list[Outcome]:
        """Clip on every rank of a library. Return the outcomes.

        `mesh_shape` may be among the arguments, for a mesh of several dimensions.
        """
        mesh_shape = arguments.pop("mesh_shape", ())
        # A missing function is detected here, so that it is reported as not provided.
        library.find(f"nn.utils.{function}")
        return self.pool.run(
            dtensor_gradients.clip,
            library=library.spec,
            function=function,
            gradients=gradients,
            arguments=arguments,
            mesh_shape=mesh_shape,
        )

    def agrees(self, function: str, gradients: Sequence[PlacedGradient], **arguments: Any) -> list[Outcome]:
        """Compare both libraries rank by rank. Return the subject's outcomes."""
        expected, actual = (
            self.clip_with(library, function, gradients, **arguments)
            for library in (self.reference, self.subject)
        )
        assert_ranks_agree_with(expected, actual, tolerance_of(gradients, arguments.get("norm_type", 2.0)))
        return actual


@pytest.fixture
def clipping(reference: Library, subject: Library, rank_pool: RankPool) -> Clipping:
    return Clipping(reference, subject, rank_pool)


def assert_ranks_agree_with(
    reference: Sequence[Outcome], subject: Sequence[Outcome], tolerance: Tolerance
) -> None:
    for expected, actual in zip(reference, subject, strict=True):
        assert_same_outcome(expected, actual, tolerance)


def tolerance_of(gradients: Sequence[PlacedGradient], order: float = 2.0) -> Tolerance:
    return norm_of(sum(gradient.value.numel() for gradient in gradients), len(gradients), order)


def norm_of_the_unsharded(outcome: Outcome) -> torch.Tensor:
    assert outcome.raised is None, outcome.raised
    assert isinstance(outcome.value, dict), f"the norm of DTensors is no DTensor: {outcome.value!r}"
    return outcome.value["full"].values


def unsharded_gradient(index: int, gradient: PlacedGradient, outcomes: Sequence[Outcome]) -> torch.Tensor:
    """Return the gradient after the call, concatenated from the ranks' shards."""
    parts = [outcome.watched[index].values for outcome in outcomes]
    if gradient.shard_dim is not None:
        return torch.cat(parts, gradient.shard_dim)
    for part in parts:
        assert (excess := EXACT.excess(parts[0], part)) is None, (
            f"copies of a replicated gradient differ: {excess}"
        )
    return parts[0]


def are_unchanged(gradients: Sequence[PlacedGradient], outcomes: Sequence[Outcome]) -> bool:
    wholes = [unsharded_gradient(index, gradient, outcomes) for index, gradient in enumerate(gradients)]
    return all(
        EXACT.excess(gradient.value, whole) is None for gradient, whole in zip(gradients, wholes, strict=True)
    )


def without_empty_parts(
    gradients: Sequence[PlacedGradient], world_size: int, norm_type: float
) -> list[PlacedGradient]:
    """Replicate gradients of which some rank would hold nothing, if the norm is torch's infinity norm.

    With an empty shard, torch raises on that rank only and its peers wait, so there is no outcome to compare with. The
    test `test_torch_leaves_its_peers_waiting_for_an_empty_part` asserts that torch still does.
    """
    return [
        PlacedGradient(gradient.value, None)
        if norm_type == math.inf and has_empty_part(gradient, world_size)
        else gradient
        for gradient in gradients
    ]


def has_empty_part(gradient: PlacedGradient, world_size: int) -> bool:
    if gradient.shard_dim is None:
        return False
    length = gradient.value.shape[gradient.shard_dim]
    return -(-length // world_size) * (world_size - 1) >= length


@clause("nn.utils.clip_grad.clip_grad_norm_.dtensor")
@pytest.mark.parametrize("foreach", [None, False, True], ids=str)
@given(gradients=placed_gradients(), max_norm=max_norms, norm_type=st.sampled_from(NORM_TYPES))
def test_clips_as_torch_does_on_every_rank(
    clipping: Clipping,
    foreach: bool | None,
    gradients: list[PlacedGradient],
    max_norm: float,
    norm_type: float,
) -> None:
    gradients = without_empty_parts(gradients, clipping.pool.world_size, norm_type)
    clipping.agrees("clip_grad_norm_", gradients, max_norm=max_norm, norm_type=norm_type, foreach=foreach)


@clause("nn.utils.clip_grad.clip_grad_norm_.dtensor")
@given(gradients=placed_gradients(), max_norm=max_norms)
def test_shards_form_clipped_gradient(
    clipping: Clipping, gradients: list[PlacedGradient], max_norm: float
) -> None:
    outcomes = clipping.clip_with(clipping.subject, "clip_grad_norm_", gradients, max_norm=max_norm)
    tolerance = tolerance_of(gradients)
    flat = torch.cat([gradient.value.double().reshape(-1) for gradient in gradients])
    norm = torch.linalg.vector_norm(flat)
    for outcome in outcomes:
        actual = norm_of_the_unsharded(outcome)
        assert (excess := tolerance.excess(norm.to(actual.dtype), actual)) is None, excess
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    for index, gradient in enumerate(gradients):
        expected = (gradient.value.double() * factor).to(gradient.value.dtype)
        actual = unsharded_gradient(index, gradient, outcomes)
        assert (excess := tolerance.excess(expected, actual)) is None, excess


_STRIDED = _StridedShard(0, split_factor=2)
LAYOUTS: dict[str, list[tuple[Placement, ...]]] = {
    "sharded over both": [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0))],
    "sharded over one of them": [(Replicate(), Shard(0)), (Shard(1), Replicate()), (Replicate(), Shard(1))],
    "each in another way": [
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
    ],
    "as data and tensor parallelism leave them": [(_STRIDED, Shard(0)), (Shard(1), Shard(0))],
    "with sums to take": [(Partial(), Replicate()), (Shard(0), Shard(1))],
}


@clause("nn.utils.clip_grad.clip_grad_norm_.dtensor")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", ["clip_grad_norm_", "get_total_norm"])
def test_meshes_of_two_dimensions(
    subject: Library,
    reference: Library,
    ranks: Callable[..., RankPool],
    device: str,
    layout: str,
    function: str,
) -> None:
    """Include norm orders of 0 and below, which count gradients or depend on the smallest elements."""
    generator = seeding.generator(3)
    gradients = [
        PlacedGradient(torch.randn(8, 5, generator=generator), None, placements=placements)
        for placements in LAYOUTS[layout]
    ]
    arguments: dict[str, Any] = {"max_norm": 1.0} if function == "clip_grad_norm_" else {}
    clipping = Clipping(reference, subject, ranks(4, device))
    for norm_type in (2.0, 1.0, 3.0, math.inf, 0.0, -1.0):
        how = {"mesh_shape": (2, 2), "foreach": False if norm_type == 1.0 else None}
        outcomes = clipping.agrees(function, gradients, norm_type=norm_type, **how, **arguments)
        assert all(outcome.raised is None for outcome in outcomes)


@clause("nn.utils.clip_grad.clip_grad_norm_.dtensor_collectives")
@given(gradients=placed_gradients(), norm_type=st.sampled_from(NORM_TYPES))
def test_issues_no_more_collectives_than_torch(
    clipping: Clipping, gradients: list[PlacedGradient], norm_type: float
) -> None:
    pool = clipping.pool
    gradients = without_empty_parts(gradients, pool.world_size, norm_type)
    arguments = {"max_norm": 1.0, "norm_type": norm_type}
    clipping.clip_with(clipping.reference, "clip_grad_norm_", gradients, **arguments)
    allowed = [len(trace) for trace in pool.traces]
    clipping.clip_with(clipping.subject, "clip_grad_norm_", gradients, **arguments)
    assert len(pool.traces) == pool.world_size
    for rank, trace in enumerate(pool.traces):
        assert len(trace) <= allowed[rank], f"rank {rank} issued {[str(call) for call in trace]}"
        assert list(trace) == list(pool.traces[0])


@clause("nn.utils.clip_grad.clip_grad_norm_.dtensor_nonfinite")
@pytest.mark.parametrize("error_if_nonfinite", [False, True])
@given(
    gradients=placed_gradients(),
    bad=st.sampled_from([math.inf, -math.inf, math.nan]),
    shard_dim=st.sampled_from([None, 0]),
)
def test_nonfinite_on_one_rank_is_seen_by_all(
    clipping: Clipping,
    error_if_nonfinite: bool,
    gradients: list[PlacedGradient],
    bad: float,
    shard_dim: int | None,
) -> None:
    gradients = [*gradients, PlacedGradient(torch.tensor([1.0, 2.0, 3.0, bad]), shard_dim)]
    arguments = {"max_norm": 1.0, "error_if_nonfinite": error_if_nonfinite}
    outcomes = clipping.agrees("clip_grad_norm_", gradients, **arguments)
    if not error_if_nonfinite:
        assert not any(norm_of_the_unsharded(outcome).isfinite() for outcome in outcomes)
        return
    assert all("non-finite" in str(outcome.raised) for outcome in outcomes)
    assert are_unchanged(gradients, outcomes)


@clause("nn.utils.clip_grad.clip_grad_norm_.extreme_gradients_survive")
@pytest.mark.deviation("clip_grad.true_norm_of_extreme_gradients")
@pytest.mark.parametrize(("value", "dtype"), [(1e20, torch.float32), (6e4, torch.float16)], ids=str)
def test_extreme_dtensors(
    deviation: DeviationJudge, clipping: Clipping, value: float, dtype: torch.dtype
) -> None:
    """The gradient has four equal elements, so its norm is twice an element."""
    gradients = [PlacedGradient(torch.full((4,), value, dtype=dtype), 0)]

    def has_true_norm(outcomes: list[Outcome]) -> bool:
        norms = [norm_of_the_unsharded(outcome) for outcome in outcomes]
        return all(norm.dtype == torch.float32 and norm.item() == pytest.approx(2 * value) for norm in norms)

    deviation.judge(
        lambda library: clipping.clip_with(library, "clip_grad_norm_", gradients, max_norm=1e30),
        torch_does=lambda outcomes: all(norm_of_the_unsharded(outcome).isinf() for outcome in outcomes),
        we_do=has_true_norm,
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.dtensor_powers")
@pytest.mark.deviation("clip_grad.norms_are_gathered")
@pytest.mark.parametrize(("value", "dtype"), [(200.0, torch.float16), (1e19, torch.float32)], ids=str)
@pytest.mark.world_sizes(fewest=2)
def test_norms_of_dtensors_whose_powers_overflow(
    deviation: DeviationJudge, clipping: Clipping, value: float, dtype: torch.dtype
) -> None:
    gradients = [PlacedGradient(torch.full((4,), value, dtype=dtype), 0)]
    norm = 2 * value

    def is_right(outcomes: list[Outcome]) -> bool:
        clipped = unsharded_gradient(0, gradients[0], outcomes)
        norms = [norm_of_the_unsharded(outcome).item() for outcome in outcomes]
        return all(rank_norm == pytest.approx(norm, rel=1e-3) for rank_norm in norms) and bool(
            torch.allclose(clipped.double(), torch.tensor(value / norm).double(), rtol=1e-3)
        )

    deviation.judge(
        lambda library: clipping.clip_with(library, "clip_grad_norm_", gradients, max_norm=1.0),
        torch_does=lambda outcomes: (
            all(norm_of_the_unsharded(outcome).isinf() for outcome in outcomes)
            and not unsharded_gradient(0, gradients[0], outcomes).any()
        ),
        we_do=is_right,
    )


PLAIN = ()
# Placements by mesh of four ranks: data parallelism, experts beside it, a mesh of two ranks, and plain tensors.
PLACEMENTS: dict[tuple[int, ...], list[tuple[Placement, ...]]] = {
    PLAIN: [()],
    (4,): [(Shard(0),), (Shard(1),), (Replicate(),), (Partial(),)],
    (2, 2): [*(placements for layout in LAYOUTS.values() for placements in layout)],
    (2,): [(Shard(0),), (Replicate(),)],
}


@st.composite
def mixed_gradients(draw: st.DrawFn) -> list[PlacedGradient]:
    """Draw gradients on two meshes or more, some of which have all ranks. Plain gradients count as a mesh."""
    all_ranks = draw(st.sampled_from([(4,), (2, 2)]))
    others = draw(
        st.lists(st.sampled_from([*PLACEMENTS]), min_size=1, max_size=4).filter(
            lambda meshes: {*meshes} != {all_ranks}
        )
    )
    meshes = draw(st.permutations([all_ranks, *others]))

    def placements_on(mesh: tuple[int, ...]) -> st.SearchStrategy[tuple[Placement, ...]]:
        # torch hangs if ranks outside one mesh raise while the others reduce a partial sum.
        allowed = [
            placements
            for placements in PLACEMENTS[mesh]
            if (2,) not in meshes or not any(placement.is_partial() for placement in placements)
        ]
        return st.sampled_from(allowed)

    return [
        PlacedGradient(
            torch.randn(8, 5, generator=seeding.generator(draw(st.integers(0, 2**16)))),
            None,
            is_dtensor=mesh != PLAIN,
            placements=draw(placements_on(mesh)),
            mesh_shape=mesh or (4,),
        )
        for mesh in meshes
    ]


WITH_NORM_FIVE = [PlacedGradient(torch.tensor([3.0, 4.0]), 0)]


def use_norm(pool: RankPool, library: Library, use: str) -> list[Outcome]:
    """Clip to norm 1.0. Then format, deepcopy, pickle, save and load the norm, or double it in a compiled function."""
    return pool.run(dtensor_gradients.use_norm, library=library.spec, gradients=WITH_NORM_FIVE, use=use)


@clause("nn.utils.clip_grad.clip_grad_norm_.dtensor_formatted")
@pytest.mark.deviation("clip_grad.dtensor_norm_formatted")
def test_norm_of_dtensors_can_be_formatted(deviation: DeviationJudge, rank_pool: RankPool) -> None:
    deviation.judge(
        lambda library: use_norm(rank_pool, library, "formatted"),
        torch_does=lambda outcomes: all(
            getattr(outcome.raised, "kind", None) is TypeError for outcome in outcomes
        ),
        we_do=lambda outcomes: [outcome.value for outcome in outcomes] == ["5.000"] * len(outcomes),
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.dtensor_kept")
@pytest.mark.parametrize("use", ["copied", "pickled", "saved", "compiled"])
def test_norm_of_dtensors_can_be_copied_saved_and_compiled(
    reference: Library, subject: Library, rank_pool: RankPool, use: str
) -> None:
    expected, actual = (use_norm(rank_pool, library, use) for library in (reference, subject))
    assert_ranks_agree_with(expected, actual, EXACT)
    assert all(outcome.raised is None for outcome in actual)


@clause("nn.utils.clip_grad.clip_grad_norm_.mixed_meshes")
@pytest.mark.deviation("clip_grad.mixed_meshes")
@pytest.mark.parametrize("foreach", [None, False], ids=str)
@given(gradients=mixed_gradients(), max_norm=max_norms, norm_type=st.sampled_from(NORM_TYPES))
def test_gradients_on_several_meshes_have_one_norm(
    deviation: DeviationJudge,
    ranks: Callable[..., RankPool],
    device: str,
    gradients: list[PlacedGradient],
    max_norm: float,
    norm_type: float,
    foreach: bool | None,
) -> None:
    arguments = {"max_norm": max_norm, "norm_type": norm_type, "foreach": foreach}
    pool, tolerance = ranks(4, device), tolerance_of(gradients, norm_type)

    def clip(library: Library) -> list[Outcome] | RankFault:
        case = {"library": library.spec, "gradients": gradients, "arguments": arguments}
        try:
            return pool.run(dtensor_gradients.clip_over_meshes, **case)
        except RankFault as fault:
            return fault

    def has_failed(result: list[Outcome] | RankFault) -> bool:
        # A rank may raise while others wait, if torch joins the norms of a list in one operator.
        return isinstance(result, RankFault) or all(outcome.raised is not None for outcome in result)

    def are_clipped(outcomes: list[Outcome] | RankFault) -> bool:
        if isinstance(outcomes, RankFault) or any(outcome.raised is not None for outcome in outcomes):
            return False
        # A value is (gradients before, norm, gradients after). Rank 0 is in all meshes.
        before, _, _ = outcomes[0].value
        parameters = [torch.nn.Parameter(torch.zeros_like(grad.values)) for grad in before]
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad.values.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        expected = [norm, *(parameter.grad for parameter in parameters)]
        return all(
            actual is None  # the rank is not in the gradient's mesh
            or tolerance.excess(value, actual.values) is None
            for _, rank_norm, grads in (outcome.value for outcome in outcomes)
            for value, actual in zip(expected, [rank_norm, *grads], strict=True)
        )

    deviation.judge(clip, torch_does=has_failed, we_do=are_clipped)


@clause("nn.utils.clip_grad.clip_grad_value_.dtensor")
@pytest.mark.parametrize("foreach", [None, False, True], ids=str)
@given(gradients=placed_gradients(), clip_value=st.sampled_from([0.0, 0.1, 1.0, 1e3]))
def test_clamps_as_torch_does_on_every_rank(
    clipping: Clipping, foreach: bool | None, gradients: list[PlacedGradient], clip_value: float
) -> None:
    clipping.agrees("clip_grad_value_", gradients, clip_value=clip_value, foreach=foreach)


@clause("nn.utils.clip_grad.get_total_norm.dtensor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@given(data=st.data(), norm_type=st.sampled_from(NORM_TYPES))
def test_total_norm_is_that_of_the_whole(
    clipping: Clipping, dtype: torch.dtype, data: st.DataObject, norm_type: float
) -> None:
    drawn = data.draw(placed_gradients(dtypes=(dtype,)))
    gradients = without_empty_parts(drawn, clipping.pool.world_size, norm_type)
    clipping.agrees("get_total_norm", gradients, norm_type=norm_type)


@clause("nn.utils.clip_grad.get_total_norm.dtensor")
@pytest.mark.world_sizes(fewest=2)
def test_infinity_norm_with_empty_shard_is_largest_element(clipping: Clipping) -> None:
    gradients = [PlacedGradient(torch.tensor([-3.0]), 0), PlacedGradient(torch.tensor([2.0, 1.0]), None)]
    for outcome in clipping.clip_with(clipping.subject, "get_total_norm", gradients, norm_type=math.inf):
        assert norm_of_the_unsharded(outcome) == 3.0


@clause("nn.utils.clip_grad.get_total_norm.dtensor")
@pytest.mark.reference_limit("dtensor.infinity_norm_of_an_empty_part")
def test_torch_leaves_its_peers_waiting_for_an_empty_part() -> None:
    """A failure of this test means that torch is fixed. `without_empty_parts` above can be removed then."""
    with RankPool(2) as pool, pytest.raises(RanksDiverged, match="allreduce"):
        pool.run(
            dtensor_gradients.clip,
            library="torch",
            function="get_total_norm",
            gradients=[PlacedGradient(torch.ones(1), shard_dim=0)],
            arguments={"norm_type": float("inf")},
        )
