"""Tensor subclasses that take part in the all-gather of fully_shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.distributed.fsdp.scenes.fully_shard_training import registered
from conformance.distributed.fsdp.scenes.module_trees import call, loss_of
from conformance.distributed.fsdp.scenes.scene import FOUR_UNITS, Scene, tried
from conformance.distributed.fsdp.scenes.twins import PlainTwins, TwinsOf, each, values_of
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.surface import is_torch_in


class Halved(torch.Tensor):
    """Tensor that is all-gathered as half its values in float32, together with a factor of two."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, torch.Tensor], *_: Any) -> Halved:
        return Halved(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.inner if isinstance(value, Halved) else value

        result = func(
            *torch.utils._pytree.tree_map(bare, args), **torch.utils._pytree.tree_map(bare, kwargs or {})
        )
        if func in _KEEPING:
            result = torch.utils._pytree.tree_map_only(torch.Tensor, cls, result)
            return args[0] if func is torch.ops.aten.copy_.default else result
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        return ((self.inner / 2).float(), torch.full_like(self.inner, 2.0)), tuple(outer_size)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[torch.Tensor, ...],
        metadata: Any,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        return _unsharded(self.dequantised(gathered, metadata, dtype), out)

    @staticmethod
    def dequantised(gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype) -> torch.Tensor:
        halves, factors = gathered
        rows = metadata[0]
        return (halves.to(dtype) * factors.to(dtype))[:rows]


def _unsharded(values: torch.Tensor, out: torch.Tensor | None) -> Any:
    """Return new values and the memory that they use, or write the values into `out` if it exists."""
    if out is None:
        return values, (values,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(values)
    return None


class Quantised(Halved):
    """Tensor that is all-gathered in 8 bits, with one scale for each rank's rows. Its hook only takes the mesh."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:  # type: ignore[override]
        scale = self.inner.abs().amax().clamp(min=1e-6) / 127
        return ((self.inner / scale).round().to(torch.int8), scale.reshape(1)), mesh.size()

    @staticmethod
    def dequantised(gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype) -> torch.Tensor:
        bits, scales = gathered
        values = bits.view(metadata, -1).to(dtype) * scales.to(dtype)[:, None]
        return values.view(bits.shape)


_ATEN = torch.ops.aten
_KEEPING = {
    _ATEN.detach.default,
    _ATEN.clone.default,
    _ATEN.copy_.default,
    _ATEN.view.default,
    _ATEN.as_strided.default,
    _ATEN.slice.Tensor,
    _ATEN.split.Tensor,
    _ATEN.new_zeros.default,
    _ATEN._to_copy.default,
    _ATEN.empty_like.default,
}


def extended(
    scene: Scene, kind: Any, policy: Mapping[str, Any] | None = None, steps: int = 2
) -> dict[str, Any]:
    """Train with the first layer as tensors of type `kind`. Return losses, gradients and layouts."""
    inner = scene.model.body.parts[0].inner
    for name in ("weight", "bias"):
        setattr(inner, name, nn.Parameter(kind(getattr(inner, name).detach())))
    scene.leaf_by_leaf(mp_policy=scene.api.MixedPrecisionPolicy(**(policy or {})))
    optimizer = torch.optim.SGD(scene.model.parameters(), 0.1)
    losses, gradients = [], []
    for number in range(steps):
        loss = scene.loss(number)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(
            {
                name: parameter.grad.to_local().clone()
                for name, parameter in scene.model.named_parameters()
                if parameter.grad is not None
            }
        )
        optimizer.step()
    dist.barrier()
    return {"losses": losses, "gradients": gradients, "registered": registered(scene.model)}


@clause("distributed.fsdp.fully_shard.extensions")
@pytest.mark.parametrize(
    ("kind", "policy"), [(Halved, {}), (Halved, {"param_dtype": torch.float32}), (Quantised, {})]
)
@pytest.mark.world_sizes(fewest=2)
def test_extension_hooks_control_gathering(
    plain_twins: PlainTwins, kind: type[torch.Tensor], policy: dict[str, Any]
) -> None:
    plain_twins.agree(extended, kind=kind, policy=policy)


class Product(torch.Tensor):
    """Unsharded parameter that consists of the gathered halves and a factor."""

    @staticmethod
    def __new__(cls, halves: torch.Tensor, factor: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, halves.shape, halves.stride(), dtype=halves.dtype, device=halves.device
        )

    def __init__(self, halves: torch.Tensor, factor: torch.Tensor) -> None:
        self.halves, self.factor = halves, factor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["halves", "factor"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, torch.Tensor], *_: Any) -> Product:
        return Product(tensors["halves"], tensors["factor"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in (_ATEN.detach.default, _ATEN.as_strided.default), func
        return cls(args[0].halves, args[0].factor)


class Factored(Halved):
    """Tensor whose unsharded parameter is a `Product`."""

    def fsdp_post_all_gather(  # type: ignore[override]
        self, gathered: tuple[torch.Tensor, ...], *_: Any, out: Any = None
    ) -> Any:
        halves, factors = gathered
        factor = factors.amax()
        if out is None:
            return Product(halves, factor), (halves,)
        out.factor = factor
        return None


class _Multiply(torch.autograd.Function):
    """Linear layer whose graph contains the tensors inside a `Product`, as compiled graphs do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Product) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight.halves, weight.factor)
        return x @ weight.halves.t() * weight.factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, halves, factor = ctx.saved_tensors
        return grad @ halves * factor, grad.t() @ x


class _FactoredLinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Factored(torch.linspace(-1, 1, width * width).view(width, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return _Multiply.apply(x, weight)


def tensors_inside_in_graph(scene: Scene) -> list[torch.Tensor]:
    """Return the losses of a training whose graphs contain the tensors inside the unsharded parameters."""
    width = 4 * scene.rank.world_size
    with scene.rank.device:
        model = scene.shard_children(nn.Sequential(*(_FactoredLinear(width) for _ in range(4))))
        x = torch.linspace(-1, 1, 3 * width).view(3, width)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), list[torch.Tensor]()
    for _ in range(3):
        losses.append(model(x).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@clause("distributed.fsdp.fully_shard.extensions")
@pytest.mark.world_sizes(fewest=2)
def test_graph_may_contain_tensors_inside_unsharded_parameter(plain_twins: PlainTwins) -> None:
    plain_twins.agree(tensors_inside_in_graph)


class OneMethod(Halved):
    fsdp_post_all_gather = property()  # type: ignore[assignment]


class TwoArguments(Halved):
    def fsdp_pre_all_gather(self, mesh: Any, policy: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


@clause("distributed.fsdp.fully_shard.extensions")
@pytest.mark.parametrize("kind", [OneMethod, TwoArguments])
def test_incomplete_extension_is_refused(plain_twins: PlainTwins, kind: type[torch.Tensor]) -> None:
    outcomes = plain_twins.agree(extended, may_raise=True, kind=kind)
    assert all("fsdp_pre_all_gather" in str(outcome.raised) for outcome in outcomes), outcomes


def unpadded(scene: Scene) -> str:
    """Return the error of the last rank, which has fewer of three rows than its peers.

    The other ranks do not gather.
    """
    linear = nn.Linear(2, 3, bias=False)
    linear.weight = nn.Parameter(Halved(linear.weight.detach()))
    scene.shard(linear)
    if scene.rank.rank < scene.rank.world_size - 1:
        return "not here"
    return tried(lambda: linear(torch.ones(1, 2)))


@clause("distributed.fsdp.fully_shard.extensions")
@pytest.mark.world_sizes(fewest=2)
def test_extension_without_padding_is_refused(plain_twins: PlainTwins) -> None:
    """Check the last rank, whose shard has fewer rows than the others."""
    *_, last = plain_twins.agree(unpadded)
    assert str(last.value).startswith("AssertionError: When a parameter is unevenly sharded by FSDP")


class Released(Halved):
    """Tensor that allows the gathered tensors to be released after `fsdp_post_all_gather`."""

    gathered: ClassVar[list[torch.UntypedStorage]] = []
    answer: ClassVar[Any] = True

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return self.answer

    def fsdp_post_all_gather(self, gathered: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        Released.gathered[:] = [tensor.untyped_storage() for tensor in gathered]
        return super().fsdp_post_all_gather(gathered, *args, **kwargs)


class NotReleased(Released):
    answer = False


def released(scene: Scene, kind: Any) -> dict[str, Any]:
    """Train a weight of type `kind`. Record whether the gathered tensors have memory while the weight is unsharded."""
    linear: Any = nn.Linear(4, 4, bias=False, device=scene.rank.device)
    values = torch.linspace(-1, 1, 16, device=scene.rank.device).view(4, 4)
    linear.weight = nn.Parameter(kind(values))
    scene.shard(linear)
    are_allocated, weights, gradients = [], [], []
    for number in range(2):
        linear.unshard()
        are_allocated.append([storage.size() > 0 for storage in Released.gathered])
        weights.append(linear.weight.detach().clone())
        linear(torch.full((2, 4), 1.0 + number, device=scene.rank.device)).square().mean().backward()
        gradients.append(linear.weight.grad.to_local().clone())
        linear.zero_grad()
    dist.barrier()
    return {"allocated": are_allocated, "weights": weights, "gradients": gradients}


@clause("distributed.fsdp.fully_shard.released_gather_outputs")
@pytest.mark.world_sizes(fewest=2)
def test_gathered_tensors_are_released_on_request(plain_twins: PlainTwins) -> None:
    releasing, keeping = (plain_twins.values(released, kind=kind) for kind in (Released, NotReleased))
    for outcome, reference in zip(releasing, keeping, strict=True):
        assert outcome.pop("allocated") == [[False, False]] * 2
        assert reference.pop("allocated") == [[True, True]] * 2
        assert str(outcome) == str(reference)


class ReturnsInt(Released):
    """The hook returns 1 instead of True."""

    answer = 1


class WithoutGatherHooks(Released):
    """The tensor has the release hook only."""

    fsdp_pre_all_gather = property()  # type: ignore[assignment]
    fsdp_post_all_gather = property()  # type: ignore[assignment]


@clause("distributed.fsdp.fully_shard.released_gather_outputs")
@pytest.mark.parametrize("kind", [Released, NotReleased, ReturnsInt, WithoutGatherHooks])
@pytest.mark.world_sizes(fewest=2)
def test_release_hook_must_return_bool_and_needs_gather_hooks(
    plain_twins: PlainTwins, kind: type[torch.Tensor]
) -> None:
    outcomes = plain_twins.of_subject(released, kind=kind)
    if kind in (ReturnsInt, WithoutGatherHooks):
        hook = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
        assert all(hook in str(outcome.raised) for outcome in outcomes), outcomes
    else:
        values_of(outcomes)
    if is_torch_in(">=2.15"):
        plain_twins.agree(released, may_raise=True, kind=kind)


def extended_by_hand() -> torch.Tensor:
    """Return the first loss of rank 0, with weights rounded like halves in float32."""
    model = FOUR_UNITS.build()
    inner = model.body.parts[0].inner
    for parameter in (inner.weight, inner.bias):
        parameter.data = (parameter.data / 2).float().double() * 2
    return loss_of(call(model, FOUR_UNITS, FOUR_UNITS.batch(0, 0))).detach()


@clause("distributed.fsdp.fully_shard.extensions_of_one_rank")
@pytest.mark.deviation("fully_shard.extensions_of_one_rank")
def test_extension_hooks_run_on_single_rank(plain_twins_of: TwinsOf) -> None:
    """Train in float64, because the float32 halves of the extension lose precision.

    torch passes only the first of two gathered tensors to `fsdp_post_all_gather`, which raises ValueError.
    """
    expected = extended_by_hand()
    plain_twins_of(1).deviate(
        extended, kind=Halved, we_do=each(lambda value: does_as(expected, value["losses"][0].values))
    )
