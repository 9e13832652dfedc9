"""Cases of fully_shard itself: refused arguments, the class of a sharded module, and use with other features."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from conformance.distributed.fsdp.fully_shard_calls import TREE
from conformance.distributed.fsdp.fully_shard_cases import FULLY_SHARD, described, held, registered
from conformance.distributed.fsdp.lab import tried
from conformance.distributed.fsdp.module_trees import call, loss_of
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.judge.surface import is_torch_in
from conformance.ranks import Rank


@dataclass
class Site:
    """Plain model on a rank, which a case is going to shard."""

    rank: Rank
    library: Library
    model: Any

    @property
    def fsdp(self) -> Any:
        return self.library.distributed.fsdp

    def shard(self, module: Any = None, **arguments: Any) -> Any:
        return self.library.find(FULLY_SHARD)(self.model if module is None else module, **arguments)

    def shard_children(self, model: Any, **arguments: Any) -> Any:
        """Shard each child as a unit, and the model as the root."""
        for child in model.children():
            self.shard(child, **arguments)
        return self.shard(model, **arguments)

    def leaf_by_leaf(self, **arguments: Any) -> Any:
        for part in self.model.body.parts:
            self.shard(part, **arguments)
        return self.shard(**arguments)

    def forward(self, number: int = 0) -> torch.Tensor:
        return loss_of(call(self.model, TREE, TREE.batch(number, self.rank.rank)))

    def train(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Run a step of SGD. Return the loss, the gradients before the step and the parameters after it."""
        model = self.model if model is None else model
        # Without foreach, which does not mix plain tensors with DTensors.
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        loss = self.forward()
        loss.backward()
        gradients = held(model)
        optimizer.step()
        return {"loss": loss.detach(), "gradients": gradients, "after": held(model)}


def probe(rank: Rank, *, library: str, asks: Callable[..., Any], **arguments: Any) -> Outcome:
    """Return the outcome of `asks(site, **arguments)`. `asks` must be defined at module level."""
    site = Site(rank, load_library(library), TREE.build())
    return observe(lambda: asks(site, **arguments))


# -- refused arguments


def refused(site: Site, way: str) -> Any:
    result = (WAYS | LATER_WAYS)[way](site)
    return {"made": type(result).__name__, "registered": registered(site.model)}


def _parameter(site: Site, parameter: nn.Parameter, **arguments: Any) -> Any:
    """Shard the model with one more parameter, which belongs to the root's own group."""
    site.model.another = parameter
    return site.leaf_by_leaf(**arguments)


def _placed(site: Site, where: Any) -> Any:
    return site.shard(site.model.head, shard_placement_fn=lambda parameter: where)


def _within_first(site: Site) -> Any:
    site.leaf_by_leaf()
    first = site.model.body.parts[0]
    batch = TREE.batch(0, site.rank.rank)
    first(batch.x, ids=batch.ids)
    return site.forward()


def _mesh(site: Site, *sizes: int, names: tuple[str, ...] | None = None) -> Any:
    return site.rank.mesh(*sizes, site.rank.world_size, names=names)


WAYS: dict[str, Callable[[Site], Any]] = {
    "a list of modules": lambda site: site.shard(nn.ModuleList([nn.Linear(2, 2)])),
    "a dict of modules": lambda site: site.shard(nn.ModuleDict({"one": nn.Linear(2, 2)})),
    "no module": lambda site: site.shard("a word"),
    "no parameters": lambda site: site.shard(nn.Tanh()),
    "sharded twice": lambda site: site.shard(site.shard()),
    "a mesh of three dimensions": lambda site: site.shard(mesh=_mesh(site, 1, 1)),
    "two dimensions without names": lambda site: site.shard(mesh=_mesh(site, 1)),
    "no factor of the ranks": lambda site: site.shard(reshard_after_forward=3),
    "no ranks": lambda site: site.shard(reshard_after_forward=0),
    "one rank": lambda site: site.shard(reshard_after_forward=1),
    "ranks as a word": lambda site: site.shard(reshard_after_forward="all"),
    "a scalar parameter": lambda site: _parameter(site, nn.Parameter(torch.tensor(1.0))),
    "a strided parameter": lambda site: _parameter(site, nn.Parameter(torch.ones(2, 3).t())),
    "a dimension that is not there": lambda site: _placed(site, Shard(3)),
    "a unit before its root": _within_first,
    "a group as the root": lambda site: (site.shard([site.model, site.model.head]), site.forward())[1],
    "two modules as the root": lambda site: site.shard(list(site.model.body.parts))[0](
        TREE.batch(0, 0).x, ids=TREE.batch(0, 0).ids
    ),
}
# Cases that need torch 2.12 or later.
LATER_WAYS: dict[str, Callable[[Site], Any]] = {
    "a placement that is none": lambda site: _placed(site, "a word"),
    "a copy as a placement": lambda site: _placed(site, Replicate()),
    "dimensions without names": lambda site: site.shard(
        mesh=_mesh(site), dp_mesh_dims=site.fsdp.DataParallelMeshDims(shard="data")
    ),
    "a dimension of another name": lambda site: site.shard(
        mesh=_mesh(site, names=("data",)), dp_mesh_dims=site.fsdp.DataParallelMeshDims(shard="other")
    ),
    "dimensions without DTensors": lambda site: site.shard(
        mesh=_mesh(site, names=("data",)), dp_mesh_dims=site.fsdp.DataParallelMeshDims(shard="data")
    ),
    "resharded to an int on a whole mesh": lambda site: site.shard(
        mesh=_mesh(site, names=("data",)),
        dp_mesh_dims=site.fsdp.DataParallelMeshDims(shard="data"),
        reshard_after_forward=2,
    ),
}


def uneven(site: Site) -> Any:
    """Shard three columns over two ranks."""
    return refused_placement(site, nn.Linear(3, 2), Shard(1))


def refused_placement(site: Site, module: nn.Module, where: Any) -> Any:
    return type(site.shard(module, shard_placement_fn=lambda parameter: where)).__name__


# -- the interface of a sharded module


def attributes(site: Site) -> dict[str, Any]:
    model = site.model
    chain = site.shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    returned = site.leaf_by_leaf()
    first = model.body.parts[0]
    pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
    grouped = site.shard(pair)
    return {
        "is the module": returned is model,
        "is the list": grouped is pair,
        "classes": [[base.__name__ for base in type(unit).__mro__] for unit in (model, first, *pair, chain)],
        "are sharded modules": [
            isinstance(module, site.fsdp.FSDPModule) for module in (model, first, first.inner)
        ],
        "managed": [
            getattr(module, "_is_fsdp_managed_module", None) for module in (model, first, first.inner)
        ],
        "sliced": [type(module).__name__ for module in (chain[1:], chain[0])],
        "a class for each class": type(pair[0]) is type(pair[1]) is not type(chain[0]),
        "names": [name for name, _ in model.named_parameters()],
        "copied": tried(lambda: copy.deepcopy(model)),
        "held": held(model),
    }


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


def adapted(site: Site, gives: str, around: bool) -> dict[str, Any]:
    """Run a step of a module that overrides `named_parameters`, sharded itself or inside an outer module."""
    model = _Adapted(gives).to(site.rank.device)
    outer: Any = nn.Sequential(model)
    site.shard(outer if around else model)
    (loss := outer(torch.ones(1, 2, device=site.rank.device)).sum()).backward()
    every = list(nn.Module.named_parameters(model))
    return {
        "loss": loss.detach(),
        "held": {name: [described(parameter), described(parameter.grad)] for name, parameter in every},
        "after": held(model),
    }


def states(site: Site) -> dict[str, Any]:
    """Return what `fully_shard.state` returns for modules, before and after they are sharded."""
    state = site.fsdp.fully_shard.state
    pair: Any = [nn.Linear(2, 2), nn.Linear(2, 2)]
    before = [state(module) for module in (site.model, *pair)]
    model = site.leaf_by_leaf()
    site.shard(pair)
    after = [state(module) for module in (model, model.body.parts[0], *pair)]
    return {
        "before": before,
        "is there": [module_state is not None for module_state in after],
        "is the module's own": [
            module_state is module._get_fsdp_state()
            for module_state, module in zip(after, (model, model.body.parts[0], *pair), strict=True)
        ],
        "is one for all of a call": after[2] is after[3],
        "are different": len({id(module_state) for module_state in after[:3]}),
        "of what lies inside": state(model.body.parts[0].inner),
        "of no module": tried(lambda: state(None)),
    }


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


# -- deferred initialisation


def materialised_late(site: Site) -> dict[str, Any]:
    """Materialise the parameters after a forward that was refused because they were on the meta device."""
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    site.shard_children(model)
    x = torch.ones(1, 2, device=site.rank.device)
    refused = tried(lambda: model(x)) is not None
    model.to_empty(device=site.rank.device)
    for layer in model:
        nn.init.ones_(layer.weight)
    return {"refused": refused, "output": model(x).detach().cpu()}


def from_meta(site: Site, materialises: str) -> dict[str, Any]:
    with torch.device("meta"):
        meta = replace(TREE, dtype=torch.float64)
        site.model = type(site.model)(meta).to(torch.float64)
    site.leaf_by_leaf()
    on_meta = registered(site.model)
    if materialises:
        site.model.to_empty(device=site.rank.device)
        for parameter in site.model.parameters():
            nn.init.constant_(parameter, 0.125)
    if materialises == "loaded":
        plain = TREE.build().state_dict()
        spread = {
            name: distribute_tensor(plain[name], value.device_mesh, value.placements, src_data_rank=None)
            for name, value in site.model.state_dict().items()
        }
        site.model.load_state_dict(spread, assign=True)
    return {"on meta": on_meta, "trained": site.train()}


# -- use with other features


def clipped(site: Site, by: str) -> dict[str, Any]:
    site.leaf_by_leaf()
    site.forward().backward()
    parameters = list(site.model.parameters())
    norm: Any = None
    if by == "value":
        torch.nn.utils.clip_grad_value_(parameters, 0.05)
    else:
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1, float(by))
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {"norm": norm, "held": held(site.model)}


def scaled(site: Site, overflows: bool) -> dict[str, Any]:
    """Run two steps of AdamW with a GradScaler.

    With `overflows`, an infinite loss on one rank skips a step on all ranks.
    """
    site.model.float()
    site.leaf_by_leaf()
    optimizer = torch.optim.AdamW(site.model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales = []
    for number in range(2):
        batch = TREE.batch(number, site.rank.rank)
        loss = loss_of(site.model(batch.x.detach().float(), ids=batch.ids))
        factor = float("inf") if overflows and number == 0 and site.rank.rank == 0 else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    state = {
        str(number): {name: registered_layout(value) for name, value in parameter_state.items()}
        for number, parameter_state in enumerate(optimizer.state.values())
    }
    return {"scales": scales, "held": held(site.model), "state": state}


def registered_layout(value: Any) -> Any:
    return str(value.placements) if hasattr(value, "placements") else str(value)


class _Encoder(nn.Module):
    """Module with a second method that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def encode(self, x: torch.Tensor, *, times: float = 1.0) -> torch.Tensor:
        return self.inner(x).tanh() * times


def forward_method(site: Site, registers: bool) -> dict[str, Any]:
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        encoder: Any = _Encoder()
    register = site.fsdp.register_fsdp_forward_method
    register(encoder, "no method of one that is not sharded")
    site.shard(encoder, reshard_after_forward=True)
    if registers:
        register(encoder, "encode")
    x = TREE.batch(0, site.rank.rank).x
    output = encoder.encode(x, times=2.0)
    between = registered(encoder)
    output.sum().backward()
    return {
        "made": output.detach(),
        "between": between,
        "held": held(encoder),
        "input": x.grad,
        "name": encoder.encode.__name__,
        # A library may place the class of a sharded module in any Python module.
        "lacking": tried(lambda: register(encoder, "decode")).replace(str(type(encoder)), "its class"),
    }


def shared_context(site: Site) -> dict[str, Any]:
    """Train two roots that share streams, first together and then one after the other."""
    first, second = (Site(site.rank, site.library, TREE.build(shift)) for shift in (0, 1))
    for member in (first, second):
        member.leaf_by_leaf()
    share: Any = site.fsdp.share_comm_ctx
    share([])
    share([first.model, second.model])
    losses = [first.forward(), second.forward()]
    torch.stack(losses).sum().backward()
    return {
        "trained": [first.train(), second.train()],
        "refused": tried(lambda: share([first.model, nn.Tanh()])),
    }


def on_whole_mesh(
    rank: Rank,
    *,
    library: str,
    dims: dict[str, Any],
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    parallel: str | None,
    policies: str = "",
) -> Outcome:
    """Run two steps of a model whose weights are sharded over the dimension `parallel` of the mesh.

    Ranks along the other dimensions have different rows of the batch.
    """
    fsdp = load_library(library).distributed.fsdp
    mesh = rank.mesh(*sizes, names=names)
    model = _spread(mesh, parallel)
    rows = [Replicate() if name == parallel else Shard(0) for name in names]
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)

    def run() -> list[Any]:
        arguments = {"mesh": mesh, "dp_mesh_dims": fsdp.DataParallelMeshDims(**dims)}
        if policies == "mixed":
            arguments["mp_policy"] = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if policies == "offloaded":
            arguments["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)
        fsdp.fully_shard(model[2], **arguments)
        fsdp.fully_shard(model, **arguments)
        snapshots: list[Any] = [registered(model)]
        batch = distribute_tensor(inputs, mesh, rows, src_data_rank=None)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            loss = model(batch).square().mean()
            loss.backward()
            snapshots += [loss.full_tensor().detach(), held(model)]
            optimizer.step()
            optimizer.zero_grad()
        return [*snapshots, registered(model), held(model)]

    return observe(run)


def placed_copies(site: Site) -> Any:
    mesh = _mesh(site, names=("data",))
    dims = site.fsdp.DataParallelMeshDims(replicate="data")
    return site.shard(
        _spread(mesh, None)[2], mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=lambda parameter: None
    )


def settings_of_copies(site: Site, method: str, argument: bool) -> list[Any]:
    """Call `method` on a sharded root around a replicated layer. Return the error and the layouts afterwards."""
    mesh = _mesh(site, names=("data",))
    model, dims = _spread(mesh, None), site.fsdp.DataParallelMeshDims
    site.shard(model[2], mesh=mesh, dp_mesh_dims=dims(replicate="data"))
    site.shard(model, mesh=mesh, dp_mesh_dims=dims(shard="data"))
    batch = distribute_tensor(torch.ones(2, 3, dtype=torch.float64), mesh)
    model(batch)
    refused = tried(lambda: getattr(model, method)(argument))
    model(batch)
    return [refused, registered(model)]


def _spread(mesh: DeviceMesh, parallel: str | None) -> Any:
    """Return a model whose first weight is sharded by rows and whose last weight is sharded by columns."""

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            weight: Any = module.weight
            cut = Shard(0 if name == "0" else 1)
            where = [cut if dimension == parallel else Replicate() for dimension in mesh.mesh_dim_names or ()]
            spread = distribute_tensor(weight.detach(), mesh, where, src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(spread))

    layers = [nn.Linear(3, 4, dtype=torch.float64), nn.Identity(), nn.Linear(4, 5, dtype=torch.float64)]
    for number, parameter in enumerate(nn.ModuleList(layers).parameters()):
        values = torch.linspace(-0.5, 0.5 + number, parameter.numel(), dtype=torch.float64)
        parameter.data = values.view(parameter.shape)
    return distribute_module(nn.Sequential(*layers), mesh, partition)
