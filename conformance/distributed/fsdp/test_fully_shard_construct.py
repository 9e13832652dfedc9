"""Construction with fully_shard: errors, the sharded modules, and features that their parameters support."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from conformance.distributed.fsdp.scenes.fully_shard_training import (
    described,
    registered,
    values_and_gradients,
)
from conformance.distributed.fsdp.scenes.module_trees import loss_of
from conformance.distributed.fsdp.scenes.scene import FOUR_UNITS, Scene, filled, tried
from conformance.distributed.fsdp.scenes.twins import PlainTwins, each, raises
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import assert_same_outcome, observe
from conformance.judge.surface import is_torch_in


def shard(scene: Scene, way: str) -> Any:
    result = (WAYS | LATER_WAYS)[way](scene)
    return {"made": type(result).__name__, "registered": registered(scene.model)}


def _parameter(scene: Scene, parameter: nn.Parameter, **arguments: Any) -> Any:
    """Shard the model with one more parameter, which belongs to the root's own group."""
    scene.model.another = parameter
    return scene.leaf_by_leaf(**arguments)


def _placed(scene: Scene, where: Any, module: Any = None) -> Any:
    return scene.shard(module or scene.model.head, shard_placement_fn=lambda parameter: where)


def _within_first(scene: Scene) -> Any:
    scene.leaf_by_leaf()
    first = scene.model.body.parts[0]
    batch = FOUR_UNITS.batch(0, scene.rank.rank)
    first(batch.x, ids=batch.ids)
    return scene.loss()


WAYS: dict[str, Callable[[Scene], Any]] = {
    "a list of modules": lambda scene: scene.shard(nn.ModuleList([nn.Linear(2, 2)])),
    "a dict of modules": lambda scene: scene.shard(nn.ModuleDict({"one": nn.Linear(2, 2)})),
    "no module": lambda scene: scene.shard("a word"),
    "no parameters": lambda scene: scene.shard(nn.Tanh()),
    "sharded twice": lambda scene: scene.shard(scene.shard()),
    "a mesh of three dimensions": lambda scene: scene.shard(mesh=scene.mesh(1, 1)),
    "two dimensions without names": lambda scene: scene.shard(mesh=scene.mesh(1)),
    "no factor of the ranks": lambda scene: scene.shard(reshard_after_forward=3),
    "no ranks": lambda scene: scene.shard(reshard_after_forward=0),
    "one rank": lambda scene: scene.shard(reshard_after_forward=1),
    "ranks as a word": lambda scene: scene.shard(reshard_after_forward="all"),
    "a scalar parameter": lambda scene: _parameter(scene, nn.Parameter(torch.tensor(1.0))),
    "a strided parameter": lambda scene: _parameter(scene, nn.Parameter(torch.ones(2, 3).t())),
    "a dimension that is not there": lambda scene: _placed(scene, Shard(3)),
    "a unit before its root": _within_first,
    "a group as the root": lambda scene: (scene.shard([scene.model, scene.model.head]), scene.loss())[1],
    "two modules as the root": lambda scene: scene.shard(list(scene.model.body.parts))[0](
        FOUR_UNITS.batch(0, 0).x, ids=FOUR_UNITS.batch(0, 0).ids
    ),
}
_ACCEPTED = ("no parameters", "one rank", "a group as the root")  # members of WAYS
# Cases that need torch 2.12 or later.
LATER_WAYS: dict[str, Callable[[Scene], Any]] = {
    "a placement that is none": lambda scene: _placed(scene, "a word"),
    "a copy as a placement": lambda scene: _placed(scene, Replicate()),
    "dimensions without names": lambda scene: scene.shard(
        mesh=scene.mesh(), dp_mesh_dims=scene.api.DataParallelMeshDims(shard="data")
    ),
    "a dimension of another name": lambda scene: scene.shard(
        mesh=scene.mesh(names=("data",)), dp_mesh_dims=scene.api.DataParallelMeshDims(shard="other")
    ),
    "dimensions without DTensors": lambda scene: scene.shard(
        mesh=scene.mesh(names=("data",)), dp_mesh_dims=scene.api.DataParallelMeshDims(shard="data")
    ),
    "resharded to an int on a whole mesh": lambda scene: scene.shard(
        mesh=scene.mesh(names=("data",)),
        dp_mesh_dims=scene.api.DataParallelMeshDims(shard="data"),
        reshard_after_forward=2,
    ),
}


@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(way, marks=clause("distributed.fsdp.fully_shard.refusals")) for way in WAYS),
        *(
            pytest.param(way, marks=clause("distributed.fsdp.fully_shard.later_refusals"))
            for way in LATER_WAYS
        ),
    ],
)
def test_arguments_are_refused_or_accepted_like_torch(plain_twins: PlainTwins, way: str) -> None:
    for outcome in plain_twins.agree(shard, may_raise=True, way=way):
        assert (outcome.raised is None) is (way in _ACCEPTED)


def uneven(scene: Scene) -> str:
    """Shard three columns over two ranks."""
    return type(_placed(scene, Shard(1), nn.Linear(3, 2, bias=False))).__name__


@clause("distributed.fsdp.fully_shard.refusals")
@pytest.mark.world_sizes(fewest=2)
def test_uneven_columns_are_refused(plain_twins: PlainTwins) -> None:
    assert raises(NotImplementedError, "uneven sharding")(plain_twins.agree(uneven, may_raise=True))


def attributes(scene: Scene) -> dict[str, Any]:
    """Return what sharding changes about modules: their classes, names and state, and what stays."""
    model = scene.model
    chain = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    own_attributes = {name: f"the module's {name}" for name in ("_state", "_groups", "_unit", "_root")}
    vars(chain).update(own_attributes)
    scene.shard(chain).set_requires_gradient_sync(True)
    returned = scene.leaf_by_leaf()
    first = model.body.parts[0]
    pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
    grouped = scene.shard(pair)
    return {
        "is the module": returned is model,
        "is the list": grouped is pair,
        "classes": [[base.__name__ for base in type(unit).__mro__] for unit in (model, first, *pair, chain)],
        "are sharded modules": [
            isinstance(module, scene.api.FSDPModule) for module in (model, first, first.inner)
        ],
        "managed": [
            getattr(module, "_is_fsdp_managed_module", None) for module in (model, first, first.inner)
        ],
        "own attributes": {name: getattr(chain, name) for name in own_attributes},
        "sliced": [type(module).__name__ for module in (chain[1:], chain[0])],
        "a class for each class": type(pair[0]) is type(pair[1]) is not type(chain[0]),
        "names": [name for name, _ in model.named_parameters()],
        "copied": tried(lambda: copy.deepcopy(model)),
        "held": values_and_gradients(model),
    }


@clause("distributed.fsdp.fully_shard.module_class")
def test_sharded_modules_get_new_class(plain_twins: PlainTwins) -> None:
    plain_twins.agree(attributes)


def loaded_from_copy(scene: Scene, trains_before: bool) -> list[torch.Tensor]:
    """Copy a plain module inside a unit, train, and load the state of the copy again.

    Return this rank's part of the module's weight at the copy, after training and after loading.
    """
    inner = scene.leaf_by_leaf().body.parts[0].inner
    if trains_before:
        scene.train()
        scene.model.zero_grad()  # DTensors with gradients cannot be copied
    backup = copy.deepcopy(inner)
    weights = [inner.weight.to_local().detach().clone()]
    scene.train()
    weights.append(inner.weight.to_local().detach().clone())
    inner.load_state_dict(backup.state_dict())
    return [*weights, inner.weight.to_local().detach()]


@clause("distributed.fsdp.fully_shard.module_class")
@pytest.mark.parametrize("trains_before", [False, True])
def test_plain_module_inside_unit_can_be_copied(plain_twins: PlainTwins, trains_before: bool) -> None:
    before, trained, loaded = plain_twins.agree(loaded_from_copy, trains_before=trains_before)[0].value
    assert not torch.equal(trained.values, before.values)
    assert torch.equal(loaded.values, before.values)


class _Adapted(nn.Module):
    """Module whose `named_parameters` only yields trained parameters, or unregistered copies of them."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives, self.base, self.adapter = gives, nn.Linear(2, 2), nn.Linear(2, 2)
        self.frozen, self.scale = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        for _, parameter in nn.Module.named_parameters(self):
            nn.init.constant_(parameter, 0.5)
        self.base.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x) + self.adapter(x)) * self.frozen * self.scale

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in super().named_parameters(*args, **kwargs):
            if parameter.requires_grad:
                yield name, nn.Parameter(parameter.detach()) if self.gives == "others" else parameter


def adapted(scene: Scene, gives: str, around: bool) -> dict[str, Any]:
    """Run a step of a module that overrides `named_parameters`, sharded itself or inside an outer module."""
    model = _Adapted(gives).to(scene.rank.device)
    outer: Any = nn.Sequential(model)
    scene.shard(outer if around else model)
    (loss := outer(torch.ones(1, 2, device=scene.rank.device)).sum()).backward()
    every = list(nn.Module.named_parameters(model))
    return {
        "loss": loss.detach(),
        "held": {name: [described(parameter), described(parameter.grad)] for name, parameter in every},
        "after": values_and_gradients(model),
    }


@clause("distributed.fsdp.fully_shard.named_by_modules")
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("gives", ["fewer", "others"])
def test_named_parameters_override_selects_parameters(
    plain_twins: PlainTwins, gives: str, around: bool
) -> None:
    outcomes = plain_twins.agree(adapted, gives=gives, around=around, may_raise=gives == "others")
    if gives == "others":
        assert raises(AssertionError, "not in the module tree")(outcomes), outcomes


def states(scene: Scene) -> dict[str, Any]:
    """Return what `fully_shard.state` returns for modules, before and after they are sharded."""
    state = scene.api.fully_shard.state
    pair: Any = [nn.Linear(2, 2), nn.Linear(2, 2)]
    before = [state(module) for module in (scene.model, *pair)]
    model = scene.leaf_by_leaf()
    scene.shard(pair)
    after = [state(module) for module in (model, model.body.parts[0], *pair)]
    return {
        "before": before,
        "exists": [module_state is not None for module_state in after],
        "is the module's own": [
            module_state is module._get_fsdp_state()
            for module_state, module in zip(after, (model, model.body.parts[0], *pair), strict=True)
        ],
        "is one for all of a call": after[2] is after[3],
        "are different": len({id(module_state) for module_state in after[:3]}),
        "inner module": state(model.body.parts[0].inner),
        "None": tried(lambda: state(None)),
    }


@clause("distributed.fsdp.fully_shard.state")
def test_state_function_returns_module_state(plain_twins: PlainTwins) -> None:
    plain_twins.agree(states)


def policies(library: Library) -> list[Any]:
    """Create policies with default and other arguments, compare them and try to change one. No ranks are needed."""
    fsdp = library.distributed.fsdp
    mixed, offload = fsdp.MixedPrecisionPolicy, fsdp.CPUOffloadPolicy

    def frozen() -> None:
        mixed().param_dtype = torch.float16

    return [
        _plain(mixed),
        _plain(lambda: mixed(torch.bfloat16, torch.float32, torch.float16, False)),
        tried(frozen),
        mixed() == mixed(None),
        hash(mixed()) == hash(mixed(None)),
        _plain(fsdp.OffloadPolicy),
        _plain(offload),
        _plain(lambda: offload(pin_memory=False)),
        offload() == offload(True),
        isinstance(offload(), fsdp.OffloadPolicy),
        fsdp.UnshardHandle().wait(),
    ]


def named_dimensions(library: Library) -> list[Any]:
    dims = library.distributed.fsdp.DataParallelMeshDims
    instances = (dims("data", ("a", "b")), dims((), "b"))
    return [
        _plain(dims),
        _plain(lambda: dims(shard="data")),
        _plain(lambda: dims(replicate=("a", "b"))),
        *(getattr(instance, name) for instance in instances for name in ("shard_names", "replicate_names")),
    ]


def _plain(make: Callable[[], Any]) -> Any:
    """Return the fields of a policy and how it is printed, without fields that the installed torch does not have."""
    policy = tried(make)
    if isinstance(policy, str):
        return policy
    fields, text = dict(vars(policy)), repr(policy).rpartition(".")[2]
    if not is_torch_in(">=2.15") and fields.get("param_dtype_override_fn", ...) is None:
        del fields["param_dtype_override_fn"]
        text = text.replace(", param_dtype_override_fn=None", "")
    return {"is": text, **fields}


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(policies, marks=clause("distributed.fsdp.fully_shard.policies")),
        pytest.param(named_dimensions, marks=clause("distributed.fsdp.fully_shard.named_dimensions")),
    ],
    ids=["policies", "dimensions"],
)
def test_policies_are_plain_objects(
    subject: Library, reference: Library, program: Callable[[Library], Any]
) -> None:
    expected, actual = (observe(program, library) for library in (reference, subject))
    assert_same_outcome(expected, actual)
    assert actual.raised is None, actual.raised


def from_meta(scene: Scene, materialises: str) -> dict[str, Any]:
    """Shard a model on the meta device, materialise it and train. Without a method, train on the meta device."""
    with torch.device("meta"):
        meta = replace(FOUR_UNITS, dtype=torch.float64)
        scene.model = type(scene.model)(meta).to(torch.float64)
    scene.leaf_by_leaf()
    on_meta = registered(scene.model)
    if materialises:
        scene.model.to_empty(device=scene.rank.device)
        for parameter in scene.model.parameters():
            nn.init.constant_(parameter, 0.125)
    if materialises == "loaded":
        plain = FOUR_UNITS.build().state_dict()
        spread = {
            name: distribute_tensor(plain[name], value.device_mesh, value.placements, src_data_rank=None)
            for name, value in scene.model.state_dict().items()
        }
        scene.model.load_state_dict(spread, assign=True)
    return {"on meta": on_meta, "trained": scene.train()}


@clause("distributed.fsdp.fully_shard.meta_device")
@pytest.mark.parametrize("materialises", ["", "filled", "loaded"])
def test_model_materialised_from_meta_trains(plain_twins: PlainTwins, materialises: str) -> None:
    outcomes = plain_twins.agree(from_meta, may_raise=not materialises, materialises=materialises)
    if not materialises:
        assert raises(RuntimeError, "materialized from meta device")(outcomes), outcomes


def materialised_late(scene: Scene) -> dict[str, Any]:
    """Materialise the parameters after a forward that was refused because they were on the meta device."""
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    scene.shard_children(model)
    x = torch.ones(1, 2, device=scene.rank.device)
    refused = tried(lambda: model(x)) is not None
    model.to_empty(device=scene.rank.device)
    for layer in model:
        nn.init.ones_(layer.weight)
    return {"refused": refused, "output": model(x).detach().cpu()}


@clause("distributed.fsdp.fully_shard.meta_device")
@pytest.mark.deviation("fully_shard.refused_first_forward")
def test_forward_works_after_refused_forward_on_meta(plain_twins: PlainTwins) -> None:
    """torch raises AttributeError in the second forward."""

    def computes(value: Any) -> bool:
        return value["refused"] and torch.equal(value["output"].values, torch.full((1, 2), 4.0))

    plain_twins.deviate(materialised_late, we_do=each(computes))


def clipped(scene: Scene, by: str) -> dict[str, Any]:
    """Clip with torch's functions, by value or by a norm of order `by`. Return the norm, and whether it clipped."""
    scene.leaf_by_leaf()
    scene.loss().backward()
    before = values_and_gradients(scene.model)
    parameters = list(scene.model.parameters())
    norm: Any = None
    if by == "value":
        torch.nn.utils.clip_grad_value_(parameters, 0.05)
    else:
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1, float(by))
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {
        "norm": norm,
        "held": values_and_gradients(scene.model),
        "clips": str(values_and_gradients(scene.model)) != str(before),
    }


@clause("distributed.fsdp.fully_shard.training_tools")
@pytest.mark.parametrize("by", ["2", "inf", "value"])
def test_functions_of_torch_clip_sharded_gradients(plain_twins: PlainTwins, by: str) -> None:
    assert any(outcome.value["clips"] for outcome in plain_twins.agree(clipped, by=by))


def scaled(scene: Scene, overflows: bool) -> dict[str, Any]:
    """Run two steps of AdamW with a GradScaler.

    With `overflows`, an infinite loss on one rank skips a step on all ranks.
    """
    scene.model.float()
    scene.leaf_by_leaf()
    optimizer = torch.optim.AdamW(scene.model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales = []
    for number in range(2):
        batch = FOUR_UNITS.batch(number, scene.rank.rank)
        loss = loss_of(scene.model(batch.x.detach().float(), ids=batch.ids))
        factor = float("inf") if overflows and number == 0 and scene.rank.rank == 0 else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    state = {
        str(number): {name: described(value) for name, value in parameter_state.items()}
        for number, parameter_state in enumerate(optimizer.state.values())
    }
    return {"scales": scales, "held": values_and_gradients(scene.model), "state": state}


@clause("distributed.fsdp.fully_shard.training_tools")
@pytest.mark.parametrize("overflows", [False, True])
def test_grad_scaler_of_torch_skips_step_on_all_ranks(plain_twins: PlainTwins, overflows: bool) -> None:
    for outcome in plain_twins.agree(scaled, overflows=overflows):
        assert outcome.value["scales"] == ([4.0, 8.0] if overflows else [16.0, 32.0])


class _Encoder(nn.Module):
    """Module with a second method that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def encode(self, x: torch.Tensor, *, times: float = 1.0) -> torch.Tensor:
        return self.inner(x).tanh() * times


def forward_method(scene: Scene, registers: bool) -> dict[str, Any]:
    """Call a method other than forward, which `registers` makes gather like forward."""
    encoder: Any = filled(_Encoder())
    register = scene.api.register_fsdp_forward_method
    register(encoder, "no method of one that is not sharded")
    scene.shard(encoder, reshard_after_forward=True)
    if registers:
        register(encoder, "encode")
    x = FOUR_UNITS.batch(0, scene.rank.rank).x
    output = encoder.encode(x, times=2.0)
    between = registered(encoder)
    output.sum().backward()
    return {
        "made": output.detach(),
        "between": between,
        "held": values_and_gradients(encoder),
        "input": x.grad,
        "name": encoder.encode.__name__,
        # A library may place the class of a sharded module in any Python module.
        "lacking": tried(lambda: register(encoder, "decode")).replace(str(type(encoder)), "its class"),
    }


@clause("distributed.fsdp.fully_shard.register_fsdp_forward_method")
@pytest.mark.parametrize("registers", [True, False])
def test_registered_method_gathers_like_forward(plain_twins: PlainTwins, registers: bool) -> None:
    outcomes = plain_twins.agree(forward_method, may_raise=not registers, registers=registers)
    if not registers:
        assert raises(RuntimeError, "mixed torch.Tensor and DTensor")(outcomes), outcomes


def shared_context(scene: Scene) -> dict[str, Any]:
    """Train two roots that share streams, first together and then one after the other."""
    first, second = (
        Scene(scene.rank, scene.library, None, FOUR_UNITS, FOUR_UNITS.build(shift)) for shift in (0, 1)
    )
    for member in (first, second):
        member.leaf_by_leaf()
    share: Any = scene.api.share_comm_ctx
    share([])
    share([first.model, second.model])
    losses = [first.forward(), second.forward()]
    torch.stack(losses).sum().backward()
    return {
        "trained": [first.train(), second.train()],
        "refused": tried(lambda: share([first.model, nn.Tanh()])),
    }


@clause("distributed.fsdp.fully_shard.share_comm_ctx")
def test_roots_with_shared_streams_train(plain_twins: PlainTwins) -> None:
    plain_twins.agree(shared_context)
