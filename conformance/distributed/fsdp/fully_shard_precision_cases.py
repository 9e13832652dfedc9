"""Cases of fully_shard units whose parameters differ in dtype, by themselves or by a policy per parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn

from conformance.distributed.fsdp.fsdp_cases import mesh_of
from conformance.distributed.fsdp.fully_shard_cases import full_value, held
from conformance.distributed.fsdp.fully_shard_construct_cases import Site
from conformance.distributed.fsdp.lab import tried
from conformance.judge.surface import is_torch_in

_LEARNING_RATE = 0.25
_STEPS = 2
_BACKWARDS = 5
LOW, FULL = torch.bfloat16, torch.float32
# Dtypes in which a parameter computes, is reduced and is stepped.
Dtypes = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]


class Mixed(nn.Module):
    """Module in which each layer casts its input to the dtype of its weight, and records that dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.router = nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(5, 3)
        self.shown: list[str] = []
        for number, parameter in enumerate(self.parameters()):
            parameter.data = torch.linspace(0.3, 1 - number / 3, parameter.numel()).view(parameter.shape)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.norm, self.inner, self.router):
            x = layer(x.to(layer.weight.dtype)).sin()
            self.shown.append(str(layer.weight.dtype))
        return x.float()


def _model(cast: Callable[[Mixed], Any]) -> Mixed:
    with torch.random.fork_rng([]):
        model = Mixed()
    cast(model)
    return model


def _batch(rank: int, number: int) -> Tensor:
    return torch.linspace(-1 - rank, 1 + number, 12).view(3, 4)


# -- complex parameters


class _Waves(nn.Module):
    def __init__(self, dtype: torch.dtype, has_scale: bool) -> None:
        super().__init__()
        turns = torch.linspace(-3, 3, 35, dtype=torch.float64).view(5, 7)
        self.weight = nn.Parameter(torch.polar(turns + 4, turns).to(dtype))
        self.bias = nn.Parameter(torch.polar(turns[0].abs(), turns[0]).to(dtype))
        scale = torch.linspace(1, 2, 7).to(dtype.to_real())
        self.scale = nn.Parameter(scale, requires_grad=False) if has_scale else None

    def forward(self, x: Tensor) -> Tensor:
        output = (x.to(self.weight.dtype) @ self.weight + self.bias).abs()
        return output if self.scale is None else output * self.scale


def of_complex(
    site: Site, dtype: torch.dtype, has_scale: bool, replicates: bool, policy: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """Run two steps with complex parameters, which may be in one group with a real parameter.

    Args:
        replicates: whether every rank holds a full replica.
        policy: arguments of MixedPrecisionPolicy.
    """
    model: Any = _Waves(dtype, has_scale).to(site.rank.device)
    arguments = {"mesh": mesh_of(site.rank, 1)} if replicates else {}
    site.shard(model, mp_policy=site.fsdp.MixedPrecisionPolicy(**policy), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE)
    steps = []
    for number in range(_STEPS):
        batch = torch.linspace(-1 - site.rank.rank, 1 + number, 15, device=site.rank.device).view(3, 5)
        loss = model(batch).square().mean()
        loss.backward()
        steps.append((loss.detach(), held(model)))
        optimizer.step()
        optimizer.zero_grad()
    return {"seen": steps, "after": held(model)}


# -- gradients that are not synchronised yet


def accumulated(site: Site, policy: Mapping[str, torch.dtype], dtype: torch.dtype) -> dict[str, Any]:
    """Return the gradients after each of several backwards, of which only the last one synchronises.

    All ranks have the same data.
    """
    model: Any = nn.Linear(16, 16, bias=False, dtype=dtype).to(site.rank.device)
    nn.init.constant_(model.weight, 0.01)
    site.shard(model, mp_policy=site.fsdp.MixedPrecisionPolicy(**policy))
    shown = []
    for number in range(_BACKWARDS):
        model.set_requires_gradient_sync(number == _BACKWARDS - 1)
        # The factor 1 / 3 is inexact in every dtype.
        batch = torch.linspace(-1, 2 + number, 64, device=site.rank.device).view(4, 16) / 3
        model(batch.to(dtype)).abs().pow(3).sum().backward()
        shown.append(held(model))
    return {"shown": shown}


# -- parameters of several dtypes


def _of_two(model: Mixed) -> None:
    model.inner.double()


def of_two_dtypes(site: Site, thaws: str) -> dict[str, Any]:
    """Train layers of two dtypes, one of which is frozen until the first step is done."""
    model = _frozen(thaws)
    site.shard(model)
    return _trained(model, lambda number: model(_batch(site.rank.rank, number)).square().mean(), thaws)


def _frozen(name: str) -> Mixed:
    model = _model(_of_two)
    if name:
        model.get_submodule(name).requires_grad_(False)
    return model


def of_two_dtypes_by_hand(site: Site, thaws: str) -> dict[str, Any]:
    # On the same device, because its float32 operators round their results before float64 operators use them.
    device, ranks = site.rank.device, range(site.rank.world_size)
    model = _frozen(thaws).to(device)

    def loss(number: int) -> Tensor:
        return torch.stack([model(_batch(rank, number).to(device)).square().mean() for rank in ranks]).mean()

    return _trained(model, loss, thaws)


def _trained(model: Mixed, loss_of: Callable[[int], Tensor], thaws: str = "") -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE)
    gradients: list[Any] = []
    for number in range(_STEPS):
        loss_of(number).backward()
        gradients.append(
            {
                name: full_value(parameter.grad).cpu()
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
        )
        optimizer.step()
        optimizer.zero_grad()
        model.get_submodule(thaws).requires_grad_(True)
    after = {name: full_value(parameter).cpu() for name, parameter in model.named_parameters()}
    return {"gradients": gradients, "after": after}


# -- a policy per parameter


def _policy(site: Site, everywhere: Dtypes, apart: Mapping[str, Dtypes]) -> Any:
    def own(name: str, parameter: Tensor) -> Any:
        dtypes = apart.get(name.partition(".")[0])
        return None if dtypes is None else site.fsdp.ParamPrecision(*dtypes)

    compute, reduce, master = everywhere
    return site.fsdp.PerParamPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, master_dtype=master, precision_of=own
    )


def by_policy(site: Site, everywhere: Dtypes, apart: Mapping[str, Dtypes]) -> dict[str, Any]:
    """Train a model that was created in low precision, with a policy per parameter."""
    model = _model(lambda module: module.to(LOW))
    site.shard(model, mp_policy=_policy(site, everywhere, apart))
    trained = _trained(model, lambda number: model(_batch(site.rank.rank, number)).square().mean())
    has = {name: astuple(precisions) for name, precisions in site.fsdp.param_precisions(model).items()}
    return trained | {"shown": model.shown, "has": {name: str(has[name]) for name in sorted(has)}}


def by_policy_by_hand(site: Site, everywhere: Dtypes, apart: Mapping[str, Dtypes]) -> dict[str, Any]:
    """Train without sharding: copies of masters compute, and the gradients of all ranks are averaged."""
    model = _model(lambda module: module.to(site.rank.device, LOW))
    dtypes = {
        name: _in_full(apart.get(name.partition(".")[0], everywhere)) for name, _ in model.named_parameters()
    }
    masters = {name: parameter.detach().to(dtypes[name][2]) for name, parameter in model.named_parameters()}
    gradients: list[dict[str, Tensor]] = []
    for number in range(_STEPS):
        batches = [
            _batch(rank, number).to(site.rank.device, everywhere[0]) for rank in range(site.rank.world_size)
        ]
        ranks = [_gradients(model, masters, dtypes, batch) for batch in batches]
        gradients.append(
            {
                name: _average([rank_gradients[name].to(reduce) for rank_gradients in ranks]).to(master)
                for name, (_, reduce, master) in dtypes.items()
            }
        )
        masters = {name: master - _LEARNING_RATE * gradients[-1][name] for name, master in masters.items()}
    return {
        "gradients": [
            {name: gradient.cpu() for name, gradient in step_gradients.items()}
            for step_gradients in gradients
        ],
        "after": {name: master.cpu() for name, master in masters.items()},
        "shown": [str(dtypes[f"{layer}.weight"][0]) for layer in ("norm", "inner", "router")] * _STEPS,
        "has": {name: str(dtypes[name]) for name in sorted(dtypes)},
    }


def _in_full(dtypes: Dtypes) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes with defaults filled in, for a parameter that was created in low precision."""
    compute, reduce, master = dtypes
    compute, master = compute or LOW, master or LOW
    return compute, reduce or (master if is_torch_in(">=2.15") else compute), master


def _gradients(
    model: Mixed, masters: Mapping[str, Tensor], dtypes: Mapping[str, Any], x: Tensor
) -> dict[str, Tensor]:
    shown = {name: master.to(dtypes[name][0], copy=True).requires_grad_() for name, master in masters.items()}
    loss: Tensor = torch.func.functional_call(model, shown, (x,)).square().mean()
    return dict(zip(shown, torch.autograd.grad(loss, list(shown.values())), strict=True))


def _average(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(grads)).sum(0) / len(grads)


# -- dtypes chosen by parameter


def overridden(site: Site, layers: Sequence[str]) -> dict[str, Any]:
    """Train in low precision, except for `layers`, which compute in the dtype of their parameters."""
    model = _model(lambda model: model.to(LOW).to(FULL))
    own = {id(parameter) for layer in layers for parameter in model.get_submodule(layer).parameters()}
    calls: list[int] = []

    def override(parameter: Tensor) -> torch.dtype | None:
        calls.append(id(parameter))
        return parameter.dtype if id(parameter) in own else (LOW, None)[len(calls) % 2]

    policy = site.fsdp.MixedPrecisionPolicy(LOW, FULL, param_dtype_override_fn=override)
    site.shard(model, mp_policy=policy)
    outcome = _trained(model, lambda number: model(_batch(site.rank.rank, number)).square().mean())
    return outcome | {"shown": model.shown, "calls": len(calls)}


def overridden_by_hand(site: Site, layers: Sequence[str]) -> dict[str, Any]:
    outcome = by_policy_by_hand(site, (LOW, FULL, FULL), dict.fromkeys(layers, (FULL, FULL, FULL)))
    del outcome["has"]
    return outcome | {"calls": len(list(Mixed().parameters()))}


def refused_override(site: Site, returned: Any) -> str:
    policy = site.fsdp.MixedPrecisionPolicy(LOW, param_dtype_override_fn=lambda _: returned)
    return tried(lambda: site.shard(_model(lambda _: None), mp_policy=policy))


# -- masters that would be lost


def lost_masters(site: Site) -> dict[str, Any]:
    model = _model(lambda module: module.to(LOW))
    site.shard(model, mp_policy=site.fsdp.PerParamPrecisionPolicy(LOW, master_dtype=FULL))
    x = _batch(site.rank.rank, 0)
    model(x).sum().backward()
    masters = {name: value.clone() for name, value in model.state_dict().items()}
    low = {name: value.to(LOW) for name, value in masters.items()}
    model.load_state_dict(low)
    loaded = sorted({str(parameter.dtype) for parameter in model.parameters()})
    model.to(LOW)
    model.to(FULL)
    rounded = tried(lambda: model(x))
    name = "router.weight"
    model.load_state_dict({name: masters[name]}, strict=False)
    partly = tried(lambda: model(x))
    model.load_state_dict(masters)
    reloaded = tried(lambda: model(x).sum().backward())
    model.to(LOW)
    model.load_state_dict(masters)
    model.to(FULL)
    into_low = tried(lambda: model(x))
    model.router.to(LOW)
    narrow = site.fsdp.PerParamPrecisionPolicy(master_dtype=LOW)
    return {
        "loaded": loaded,
        "rounded": rounded,
        "partly": partly,
        "reloaded": reloaded,
        "into low": into_low,
        "cast": tried(lambda: model(x)),
        "narrow": tried(lambda: site.shard(_model(lambda module: None), mp_policy=narrow)),
    }


# -- the report


def report_precisions(site: Site) -> dict[str, Any]:
    """Return the precisions that are reported for FullyShardedDataParallel and for an unsharded model."""
    fsdp = site.fsdp
    mixed = fsdp.MixedPrecision(param_dtype=LOW, reduce_dtype=FULL)
    wrapped = fsdp.FullyShardedDataParallel(
        _model(_of_two), mixed_precision=mixed, device_id=torch.device("cpu"), use_orig_params=True
    )
    models = {"wrapped": wrapped, "plain": _model(_of_two)}
    return {
        kind: {name: str(astuple(precisions)) for name, precisions in fsdp.param_precisions(model).items()}
        for kind, model in models.items()
    }
