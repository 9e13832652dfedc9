"""Parameters that modules in different `fully_shard` units share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from conformance.distributed.fsdp.scenes.fully_shard_calls import ReportingAllGather
from conformance.distributed.fsdp.scenes.fully_shard_training import (
    full_gradients,
    full_parameters,
    full_value,
)
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import PlainTwins, each, raises
from conformance.judge.clauses import clause

_ROWS, _WIDTH = 7, 3
_STEPS = ("plain", "accumulated", "checkpointed", "reentrant")


class Tied(nn.Module):
    """Model whose embedding table is also the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_ROWS, _WIDTH)
        self.body = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _ROWS))
        self.body[2].weight = self.embed.weight

    def forward(self, ids: torch.Tensor, step: str = "plain") -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        if step in ("checkpointed", "reentrant"):
            return checkpoint(self.body, x, use_reentrant=step == "reentrant")
        return self.body(x)


def _model() -> Any:
    return filled(Tied().double())


def tied(scene: Scene, units: Sequence[str], not_unsharded: str = "") -> dict[str, Any]:
    """Train with `units` sharded in this order, and the model last.

    Unit `not_unsharded` is not unsharded for its backward.
    """
    model = _model()
    for name in units:
        scene.shard(model.get_submodule(name))
    scene.shard(model)
    if not_unsharded:
        model.get_submodule(not_unsharded).set_unshard_in_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, foreach=False)
    gradients: list[Any] = []
    for number, step in enumerate(_STEPS):
        for part in range(2 if step == "accumulated" else 1):
            model.set_requires_gradient_sync(step != "accumulated" or part == 1)
            _loss(scene, model, 2 * number + part, step).backward()
        gradients.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    after = full_parameters(model)
    loss = _loss(scene, model, 0)
    is_freed = not scene.shards or isinstance(model.embed.weight, DTensor)
    loss.backward()
    return {
        "gradients": gradients,
        "after": after,
        "keys": list(model.state_dict()),
        "is freed": is_freed,
        "assigned": not scene.shards or _assigned(model),
    }


def _assigned(model: Any) -> bool:
    """Return whether a load that assigns a parameter at each of its two places keeps it one, with the new value."""
    value = model.embed.weight.detach() * 2
    model.load_state_dict({"embed.weight": value, "body.2.weight": value}, strict=False, assign=True)
    model(torch.arange(2), "plain").sum().backward()
    return model.body[2].weight is model.embed.weight and bool((model.body[2].weight == value).all())


def _loss(scene: Scene, model: Any, number: int, step: str = "plain") -> torch.Tensor:
    def loss(rank: int) -> torch.Tensor:
        return model((torch.arange(4) * (rank + 2) + number) % _ROWS, step).square().mean()

    return scene.mean(loss)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize(
    "units",
    [
        ("embed", "body.2"),
        ("body.2", "embed"),
        ("embed",),
        pytest.param(("body",), marks=pytest.mark.profile("full")),
        pytest.param(("embed", "body"), marks=pytest.mark.profile("full")),
        ("body.2", "body"),
    ],
    ids=" ".join,
)
def test_tied_weights_stay_tied(plain_twins: PlainTwins, units: tuple[str, ...]) -> None:
    """The unit that is sharded first owns the shared weight.

    torch raises ValueError, because another group has the weight.
    """
    plain_twins.deviate_to_unsharded(tied, units=units)


_IN_BLOCKS = {
    "two units": ((0, 1), (2, 0)),
    "unit and root": ((0, 1), (0,)),
    "one unit, tied": ((0, 3), (0, 3)),
}


def train_module_of_two_groups(scene: Scene, blocks: str) -> dict[str, Any]:
    """Train a model of two blocks that contain the same module, of which the last one may not be a unit itself."""
    first, second = _IN_BLOCKS[blocks]
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(4)]
    layers[3].weight = layers[0].weight
    model: Any = nn.Sequential(
        nn.Sequential(*(layers[index] for index in first)), nn.Tanh(), *(layers[index] for index in second)
    )
    if blocks == "two units":
        model = nn.Sequential(model[0], nn.Tanh(), model[2:])
    model = filled(model.double())
    for unit in (model[0], *([model[2]] if blocks == "two units" else []), model):
        scene.shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, foreach=False)
    batch = torch.linspace(-1, 1, 2 * _WIDTH, dtype=torch.float64, device=model[0][0].weight.device)
    gradients: list[Any] = []
    for _ in range(2):
        scene.mean(lambda rank: model(batch.view(2, _WIDTH) * (rank + 1)).square().mean()).backward()
        gradients.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    return {"gradients": gradients, "after": full_parameters(model), "keys": list(model.state_dict())}


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize("blocks", _IN_BLOCKS)
def test_module_of_two_groups_trains_as_one(plain_twins: PlainTwins, blocks: str) -> None:
    """torch raises TypeError about an invariant in the second `fully_shard` call."""
    plain_twins.deviate_to_unsharded(train_module_of_two_groups, blocks=blocks)


def tied_in_two_models(scene: Scene) -> bool:
    """Return whether two models that share a weight still do after the first model was stepped."""
    models = [_model(), _model()]
    models[1].embed.weight = models[0].embed.weight
    for model in models:
        model.body[2].weight = nn.Parameter(model.embed.weight.detach().clone())
    for model in models:
        scene.shard(model)
    for model in models:
        _loss(scene, model, 0).backward()
    torch.optim.SGD(models[0].parameters(), 0.1, foreach=False).step()
    weights = [full_value(model.embed.weight) for model in models]
    return torch.equal(weights[0], weights[1])


@clause("distributed.fsdp.fully_shard.tied_in_two_models")
@pytest.mark.deviation("fsdp.tied_in_two_units")
def test_tying_across_models_is_refused(plain_twins: PlainTwins) -> None:
    plain_twins.deviate(
        tied_in_two_models,
        torch_does=each(lambda is_tied: not is_tied),
        we_do=raises(ValueError, "which is part of another model"),
    )


class Around(nn.Module):
    """Module that also uses the weight of its inner module. In backward, the inner module comes first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.own = nn.Linear(3, 3), inner, nn.Linear(3, 3)
        self.own.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self.inner(x[:, :2])
        except RuntimeError:  # input too narrow for the inner module
            x = self.own(x)
        return self.inner(self.own(self.before(x)).sin())


def around(scene: Scene, trained: bool, zeros: bool) -> dict[str, torch.Tensor | None]:
    """Return the gradients of a model in which the owner's backward ends before that of a sharer around it."""
    model: Any = filled(Around(nn.Linear(3, 3)).double())
    model.inner.weight.requires_grad_(trained)
    scene.shard(model.inner)
    scene.shard(model)
    if zeros:
        model.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        model(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)).square().sum().backward()
    return full_gradients(model)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize(
    ("trained", "zeros"), [(True, False), (False, False), (True, True)], ids=["trained", "frozen", "zeros"]
)
def test_owner_unit_waits_for_unit_around_it(plain_twins: PlainTwins, trained: bool, zeros: bool) -> None:
    """The unit around an owner uses its weight after the owner's backward, and after a failed forward of the owner.

    torch raises ValueError, because two groups share the weight.
    """
    plain_twins.deviate_to_unsharded(around, trained=trained, zeros=zeros)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
def test_owner_unit_is_unsharded_for_backward_of_sharer(plain_twins: PlainTwins) -> None:
    """The owner is an embedding, which is not unsharded for its backward. The last layer needs the weight there.

    torch raises ValueError, because two groups share the weight.
    """
    plain_twins.deviate_to_unsharded(tied, units=("embed", "body.2"), not_unsharded="embed")


class Shifted(nn.Module):
    """Model whose tail adds the sum of the body's weight. In backward the tail comes first and reads no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.tail = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3))
        self.tail.weight = self.body.weight
        self.tail.forward = lambda x: x + self.tail.weight.sum(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.body(self.first(x)).tanh())


def shifted(scene: Scene) -> dict[str, torch.Tensor | None]:
    """Return the gradients of a model in which the sharer of a weight is not unsharded for backward."""
    model: Any = filled(Shifted())
    for module in (model.body, model.tail, model.first, model):
        scene.shard(module)
    model.tail.set_unshard_in_backward(False)
    device = model.first.weight.device
    model(torch.linspace(-1, 1, 2 * _WIDTH, device=device).view(2, _WIDTH)).square().sum().backward()
    return full_gradients(model)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
def test_owner_unit_is_unsharded_after_sharer_without_unshard(plain_twins: PlainTwins) -> None:
    """The sharer whose backward runs first is not unsharded for it.

    torch raises ValueError, because two groups share the weight.
    """
    plain_twins.deviate_to_unsharded(shifted)


def unsharded(scene: Scene, has_run: bool, waits: bool) -> dict[str, Any]:
    """Return how a unit shows a parameter that another unit owns, while it is unsharded explicitly and afterwards."""
    model = _model()
    scene.shard(model.embed)
    scene.shard(model.body[2])
    scene.shard(model)
    if has_run:
        model(torch.arange(2)).sum().backward()
    handle = model.body[2].unshard(async_op=waits)
    if waits:
        handle.wait()
    shown = model.body[2].weight
    result = {"shown": shown.detach().clone().cpu(), "sharded": isinstance(shown, DTensor)}
    model.body[2].reshard()
    result["resharded"] = not scene.shards or isinstance(model.body[2].weight, DTensor)
    model(torch.arange(2)).sum().backward()
    return result | {"gradient": full_value(model.embed.weight.grad).cpu()}


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize("has_run", [False, True], ids=["before the first forward", "behind a step"])
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "by its handle"])
def test_sharer_unshards_parameter_of_owner(plain_twins: PlainTwins, has_run: bool, waits: bool) -> None:
    """torch raises ValueError, because two groups share the weight."""
    plain_twins.deviate_to_unsharded(unsharded, has_run=has_run, waits=waits)


def prefetched(scene: Scene) -> list[Any]:
    """Return the order of forwards and of the owner's all-gathers.

    Other units prefetch the unit that shares the owner's weight.
    """
    events: list[Any] = []
    tied = _model()
    model: Any = nn.Sequential(tied, nn.Tanh())
    for module in (tied.embed, tied.body[0], tied.body[2], model):
        scene.shard(module)
        module.register_forward_pre_hook(lambda unit, _: events.append(type(unit).__name__))
    tied.embed.set_custom_all_gather(ReportingAllGather(lambda request: events.append(request[0])))
    tied.body[0].set_modules_to_forward_prefetch([tied.body[2]])
    model.set_modules_to_backward_prefetch([tied.body[2]])
    out = model(torch.arange(4))
    out.register_hook(lambda _: events.append("backward"))
    out.sum().backward()
    return [event for event in events if event != "allocate"]


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.world_sizes(fewest=2)
def test_prefetch_of_sharer_gathers_parameter_of_owner(plain_twins: PlainTwins) -> None:
    """torch raises ValueError, because two groups share the weight."""
    forward = ["FSDPSequential", "gather", "FSDPEmbedding", "gather", "FSDPLinear", "FSDPLinear"]
    plain_twins.deviate(prefetched, we_do=each(lambda events: events == [*forward, "gather", "backward"]))


def shard_sharer_with_dtypes(scene: Scene, **dtypes: torch.dtype) -> None:
    """Shard a unit that shares a parameter but has other dtypes than the owner, and run a forward."""
    model, policy = _model(), scene.api.MixedPrecisionPolicy(**dtypes)
    scene.shard(model.embed)
    scene.shard(model.body[2], mp_policy=policy)
    scene.shard(model)
    _loss(scene, model, 0)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize("differs", ["param_dtype", "reduce_dtype"])
def test_tied_parameter_with_two_precisions_is_refused(plain_twins: PlainTwins, differs: str) -> None:
    """torch raises ValueError for any parameter that two groups share."""
    text = "weight was sharded by an earlier call, as weight: to compute in torch.float64"
    plain_twins.deviate(shard_sharer_with_dtypes, **{differs: torch.float32}, we_do=raises(ValueError, text))
