"""`fully_shard` units with parameters of different dtypes, or with masters in a wider dtype."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from conformance.distributed.fsdp.scenes.fsdp_training import mesh_of
from conformance.distributed.fsdp.scenes.fully_shard_training import (
    full_gradients,
    full_parameters,
    values_and_gradients,
)
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.scenes.scene import Scene, filled, tried
from conformance.distributed.fsdp.scenes.twins import PlainTwins, values_of
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.surface import is_torch_in

LOW, HIGH = torch.bfloat16, torch.float32
# Dtypes in which a parameter computes, is reduced and is stepped.
Dtypes = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]
_HIGH_PRECISION: Dtypes = (HIGH, None, HIGH)
_COMPLEX: Mapping[str, Any] = {"dtype": torch.complex64, "has_scale": False, "replicates": False}
_LEARNING_RATE, _STEPS, _BACKWARDS = 0.25, 2, 5


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


def train_complex(
    scene: Scene, dtype: torch.dtype, has_scale: bool, replicates: bool, policy: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """Run two steps with complex parameters, which may be in one group with a real parameter.

    If `replicates`, every rank holds a full replica. `policy` has the arguments of MixedPrecisionPolicy.
    """
    model: Any = _Waves(dtype, has_scale).to(scene.rank.device)
    arguments = {"mesh": mesh_of(scene.rank, 1)} if replicates else {}
    scene.shard(model, mp_policy=scene.api.MixedPrecisionPolicy(**policy), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE)
    steps = []
    for number in range(_STEPS):
        batch = torch.linspace(-1 - scene.rank.rank, 1 + number, 15, device=scene.rank.device).view(3, 5)
        loss = model(batch).square().mean()
        loss.backward()
        steps.append((loss.detach(), values_and_gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return {"steps": steps, "after": values_and_gradients(model)}


@clause("distributed.fsdp.fully_shard.complex_parameters")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("has_scale", [False, True], ids=["alone", "beside real ones"])
@pytest.mark.parametrize("replicates", [False, True], ids=["sharded", "replicated"])
def test_complex_parameters_train_like_torch(
    plain_twins: PlainTwins, dtype: torch.dtype, has_scale: bool, replicates: bool
) -> None:
    plain_twins.agree(train_complex, dtype=dtype, has_scale=has_scale, replicates=replicates, policy={})


@clause("distributed.fsdp.fully_shard.complex_parameters")
@pytest.mark.parametrize(
    "policy",
    [{"param_dtype": LOW}, {"reduce_dtype": torch.complex128}],
    ids=["computed in low precision", "reduced in full"],
)
def test_complex_parameters_keep_their_dtype(
    plain_twins: PlainTwins, policy: Mapping[str, torch.dtype]
) -> None:
    plain_twins.agree(train_complex, policy=policy, **_COMPLEX)


@clause("distributed.fsdp.fully_shard.complex_parameters")
@pytest.mark.deviation("fully_shard.complex_gradients")
@pytest.mark.parametrize(("param_dtype", "reduce_dtype"), [(None, LOW), (LOW, HIGH), (LOW, LOW)], ids=str)
def test_real_reduce_dtype_keeps_imaginary_parts(
    plain_twins: PlainTwins, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype
) -> None:
    """torch 2.15 loses the imaginary parts with a warning. Older versions raise TypeError if the dtypes differ."""
    expected = plain_twins.of(
        plain_twins.reference, train_complex, policy={"param_dtype": param_dtype}, **_COMPLEX
    )
    plain_twins.deviate(
        train_complex,
        policy={"param_dtype": param_dtype, "reduce_dtype": reduce_dtype},
        we_do=functools.partial(does_as, expected),
        may_agree=param_dtype == reduce_dtype and not is_torch_in(">=2.15"),
        **_COMPLEX,
    )


def gradients_in_eval(scene: Scene, policy: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Return the gradients of a backward in eval, with the setting of FullyShardedDataParallel for full precision."""
    model = nn.Linear(16, 16).to(scene.rank.device)
    nn.init.constant_(model.weight, 0.01)
    with mock.patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1"):
        scene.shard(model, mp_policy=scene.api.MixedPrecisionPolicy(**policy)).eval()
        batch = torch.linspace(-1 - scene.rank.rank, 1, 64, device=scene.rank.device).view(4, 16) / 3
        model(batch).abs().pow(3).sum().backward()
    return values_and_gradients(model)


@clause("distributed.fsdp.fully_shard.mixed_precision")
@pytest.mark.parametrize("policy", [{"reduce_dtype": LOW}, {"param_dtype": LOW}], ids=str)
def test_environment_variable_of_fsdp1_changes_no_gradients(
    plain_twins: PlainTwins, policy: Mapping[str, torch.dtype]
) -> None:
    plain_twins.agree(gradients_in_eval, policy=policy)


def accumulated(scene: Scene, policy: Mapping[str, torch.dtype], dtype: torch.dtype) -> dict[str, Any]:
    """Return the gradients after each of several backwards on equal data. Only the last one synchronises."""
    model: Any = nn.Linear(16, 16, bias=False, dtype=dtype).to(scene.rank.device)
    nn.init.constant_(model.weight, 0.01)
    scene.shard(model, mp_policy=scene.api.MixedPrecisionPolicy(**policy))
    shown = []
    for number in range(_BACKWARDS):
        model.set_requires_gradient_sync(number == _BACKWARDS - 1)
        # The factor 1 / 3 is inexact in every dtype.
        batch = torch.linspace(-1, 2 + number, 64, device=scene.rank.device).view(4, 16) / 3
        model(batch.to(dtype)).abs().pow(3).sum().backward()
        shown.append(values_and_gradients(model))
    return {"shown": shown}


@clause("distributed.fsdp.fully_shard.complex_parameters")
@pytest.mark.deviation("fully_shard.complex_gradients")
def test_real_reduce_dtype_accumulates_complex_gradients(plain_twins: PlainTwins) -> None:
    """torch 2.15 loses the imaginary parts of the gradients, with a warning."""
    expected = plain_twins.of(plain_twins.reference, accumulated, policy={}, dtype=torch.complex64)
    plain_twins.deviate(
        accumulated,
        policy={"param_dtype": LOW, "reduce_dtype": LOW},
        dtype=torch.complex64,
        we_do=functools.partial(does_as, expected),
        may_agree=not is_torch_in(">=2.15"),
    )


@clause("distributed.fsdp.fully_shard.accumulation_in_low_precision")
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ({"reduce_dtype": LOW}, HIGH),
        ({"reduce_dtype": HIGH}, torch.float64),
        ({"param_dtype": LOW, "reduce_dtype": HIGH}, HIGH),
        ({"param_dtype": LOW, "reduce_dtype": LOW}, HIGH),
    ],
    ids=["lower", "lower than double", "higher", "as low"],
)
def test_accumulated_gradients_are_rounded_like_torch(
    plain_twins: PlainTwins, policy: Mapping[str, torch.dtype], dtype: torch.dtype
) -> None:
    plain_twins.agree(accumulated, policy=policy, dtype=dtype)


class Mixed(nn.Module):
    """Module in which each layer casts its input to the dtype of its weight, and records that dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.router = nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(5, 3)
        self.weight_dtypes: list[str] = []
        for number, parameter in enumerate(self.parameters()):
            parameter.data = torch.linspace(0.3, 1 - number / 3, parameter.numel()).view(parameter.shape)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.norm, self.inner, self.router):
            x = layer(x.to(layer.weight.dtype)).sin()
            self.weight_dtypes.append(str(layer.weight.dtype))
        return x.float()


def _model(cast: Callable[[Mixed], Any]) -> Mixed:
    model = Mixed()
    cast(model)
    return model


def _batch(rank: int, number: int) -> Tensor:
    return torch.linspace(-1 - rank, 1 + number, 12).view(3, 4)


def _of_two(model: Mixed) -> None:
    model.inner.double()


def train_two_dtypes(scene: Scene, thaws: str) -> dict[str, Any]:
    """Train layers of two dtypes, one of which is frozen until the first step is done."""
    model = _model(_of_two).to(scene.rank.device)
    if thaws:
        model.get_submodule(thaws).requires_grad_(False)
    scene.shard(model)
    return _trained(scene, model, thaws)


def train_two_dtypes_unsharded(scene: Scene, thaws: str) -> dict[str, Any]:
    # On the same device, because its float32 operators round their results before float64 operators use them.
    return train_two_dtypes(scene.without_sharding(), thaws)


def _trained(scene: Scene, model: Mixed, thaws: str = "") -> dict[str, Any]:
    def loss(rank: int, number: int) -> Tensor:
        return model(_batch(rank, number).to(scene.rank.device)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE)
    gradients: list[Any] = []
    for number in range(_STEPS):
        scene.mean(functools.partial(loss, number=number)).backward()
        gradients.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        model.get_submodule(thaws).requires_grad_(True)
    return {"gradients": gradients, "after": full_parameters(model)}


@clause("distributed.fsdp.fully_shard.dtypes_in_a_group")
@pytest.mark.deviation("fsdp.several_dtypes")
@pytest.mark.parametrize(
    "thaws", ["", "inner", "router"], ids=["trained", "thaws alone", "thaws with others"]
)
def test_parameters_of_two_dtypes_train_like_unsharded(plain_twins: PlainTwins, thaws: str) -> None:
    """torch raises AssertionError about dtypes in the first forward or in a backward."""
    expected, *_ = plain_twins.of_subject(train_two_dtypes_unsharded, thaws=thaws)
    plain_twins.deviate(
        train_two_dtypes,
        thaws=thaws,
        we_do=lambda outcomes: all(does_as(expected, outcome) for outcome in outcomes),
        # torch 2.15 requires one dtype only of the parameters that are trainable at first, so it trains thawed ones.
        may_agree=thaws == "inner" and is_torch_in(">=2.15"),
    )


class _Quantised(nn.Module):
    """Frozen float8 weight with a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.linspace(-1, 1, 20).view(5, 4).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.adapter = filled(nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype) + self.adapter(x)


def gradients_beside_float8(scene: Scene) -> dict[str, Tensor | None]:
    model = _Quantised().to(scene.rank.device)
    scene.shard(model)
    x = torch.linspace(-1, 1, 10, device=scene.rank.device).view(2, 5)
    scene.mean(lambda rank: model(x + rank).square().mean()).backward()
    return full_gradients(model)


@clause("distributed.fsdp.fully_shard.dtypes_in_a_group")
def test_adapter_beside_frozen_float8_weight_trains(plain_twins: PlainTwins) -> None:
    plain_twins.agree(gradients_beside_float8)
    plain_twins.agree_with_unsharded(gradients_beside_float8)


def _policy(scene: Scene, everywhere: Dtypes, apart: Mapping[str, Dtypes]) -> Any:
    def own(name: str, parameter: Tensor) -> Any:
        dtypes = apart.get(name.partition(".")[0])
        return None if dtypes is None else scene.api.ParamPrecision(*dtypes)

    compute, reduce, master = everywhere
    return scene.api.PerParamPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, master_dtype=master, precision_of=own
    )


def train_by_policy(scene: Scene, everywhere: Dtypes, apart: Mapping[str, Dtypes]) -> dict[str, Any]:
    """Train a model that was created in low precision, with a policy per parameter."""
    model = _model(lambda module: module.to(LOW))
    scene.shard(model, mp_policy=_policy(scene, everywhere, apart))
    trained = _trained(scene, model)
    has = {name: astuple(precisions) for name, precisions in scene.api.param_precisions(model).items()}
    return trained | {
        "weight dtypes": model.weight_dtypes,
        "has": {name: str(has[name]) for name in sorted(has)},
    }


def train_by_policy_unsharded(
    scene: Scene, everywhere: Dtypes, apart: Mapping[str, Dtypes]
) -> dict[str, Any]:
    """Train without sharding: copies of masters compute, and the gradients of all ranks are averaged."""
    model = _model(lambda module: module.to(scene.rank.device, LOW))
    dtypes = {
        name: _in_full(apart.get(name.partition(".")[0], everywhere)) for name, _ in model.named_parameters()
    }
    masters = {name: parameter.detach().to(dtypes[name][2]) for name, parameter in model.named_parameters()}
    gradients: list[dict[str, Tensor]] = []
    for number in range(_STEPS):
        batches = [
            _batch(rank, number).to(scene.rank.device, everywhere[0]) for rank in range(scene.rank.world_size)
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
        **tree_map_only(Tensor, Tensor.cpu, {"gradients": gradients, "after": masters}),
        "weight dtypes": [str(dtypes[f"{layer}.weight"][0]) for layer in ("norm", "inner", "router")]
        * _STEPS,
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


@clause("distributed.fsdp.fully_shard.precision_per_parameter")
@pytest.mark.parametrize(
    ("everywhere", "apart"),
    [
        ((LOW, HIGH, HIGH), {}),
        ((None, None, HIGH), {}),
        ((LOW, HIGH, HIGH), {"norm": _HIGH_PRECISION, "router": _HIGH_PRECISION}),
        ((None, None, None), {"inner": (LOW, LOW, HIGH), "router": (HIGH, LOW, HIGH)}),
    ],
    ids=["masters", "masters alone", "in full apart", "each otherwise"],
)
def test_precision_policy_per_parameter_trains_like_unsharded(
    plain_twins: PlainTwins, everywhere: Dtypes, apart: Mapping[str, Dtypes]
) -> None:
    expected, actual = (
        plain_twins.of_subject(program, everywhere=everywhere, apart=apart)
        for program in (train_by_policy_unsharded, train_by_policy)
    )
    assert_ranks_agree(expected, actual)
    values_of(actual)


def train_with_override(scene: Scene, layers: Sequence[str]) -> dict[str, Any]:
    """Train in low precision, except for `layers`, which compute in the dtype of their parameters."""
    model = _model(lambda model: model.to(LOW).to(HIGH))
    own = {id(parameter) for layer in layers for parameter in model.get_submodule(layer).parameters()}
    calls: list[int] = []

    def override(parameter: Tensor) -> torch.dtype | None:
        calls.append(id(parameter))
        return parameter.dtype if id(parameter) in own else (LOW, None)[len(calls) % 2]

    policy = scene.api.MixedPrecisionPolicy(LOW, HIGH, param_dtype_override_fn=override)
    scene.shard(model, mp_policy=policy)
    outcome = _trained(scene, model)
    return outcome | {"weight dtypes": model.weight_dtypes, "calls": len(calls)}


def train_with_override_unsharded(scene: Scene, layers: Sequence[str]) -> dict[str, Any]:
    outcome = train_by_policy_unsharded(scene, (LOW, HIGH, HIGH), dict.fromkeys(layers, (HIGH, HIGH, HIGH)))
    del outcome["has"]
    return outcome | {"calls": len(list(Mixed().parameters()))}


@clause("distributed.fsdp.fully_shard.param_dtype_override")
@pytest.mark.parametrize("layers", [[], ["norm"], ["norm", "router"]], ids=str)
def test_dtype_override_trains_like_unsharded(plain_twins: PlainTwins, layers: Sequence[str]) -> None:
    expected, actual = (
        plain_twins.of_subject(program, layers=layers)
        for program in (train_with_override_unsharded, train_with_override)
    )
    assert_ranks_agree(expected, actual)
    values_of(actual)
    if is_torch_in(">=2.15"):
        plain_twins.agree(train_with_override, layers=layers)


def refused_override(scene: Scene, returned: Any) -> str:
    policy = scene.api.MixedPrecisionPolicy(LOW, param_dtype_override_fn=lambda _: returned)
    return tried(lambda: scene.shard(_model(lambda _: None), mp_policy=policy))


@clause("distributed.fsdp.fully_shard.param_dtype_override")
@pytest.mark.parametrize("returned", [torch.float64, "bfloat16"], ids=str)
def test_invalid_dtype_override_raises(plain_twins: PlainTwins, returned: object) -> None:
    text, *_ = plain_twins.values(refused_override, returned=returned)
    assert text.startswith("ValueError: param_dtype_override_fn must return")
    if is_torch_in(">=2.15"):
        plain_twins.agree(refused_override, returned=returned)


def lost_masters(scene: Scene) -> dict[str, Any]:
    """Return the errors of forwards after float32 masters were cast, loaded in part, loaded and cast again."""
    model = _model(lambda module: module.to(LOW))
    scene.shard(model, mp_policy=scene.api.PerParamPrecisionPolicy(LOW, master_dtype=HIGH))
    x = _batch(scene.rank.rank, 0)
    model(x).sum().backward()
    masters = {name: value.clone() for name, value in model.state_dict().items()}
    low = {name: value.to(LOW) for name, value in masters.items()}
    model.load_state_dict(low)
    loaded = sorted({str(parameter.dtype) for parameter in model.parameters()})
    model.to(LOW)
    model.to(HIGH)
    rounded = tried(lambda: model(x))
    name = "router.weight"
    model.load_state_dict({name: masters[name]}, strict=False)
    partly = tried(lambda: model(x))
    model.load_state_dict(masters)
    reloaded = tried(lambda: model(x).sum().backward())
    model.to(LOW)
    model.load_state_dict(masters)
    model.to(HIGH)
    into_low = tried(lambda: model(x))
    model.router.to(LOW)
    narrow = scene.api.PerParamPrecisionPolicy(master_dtype=LOW)
    return {
        "loaded": loaded,
        "rounded": rounded,
        "partly": partly,
        "reloaded": reloaded,
        "into low": into_low,
        "cast": tried(lambda: model(x)),
        "narrow": tried(lambda: scene.shard(_model(lambda module: None), mp_policy=narrow)),
    }


@clause("distributed.fsdp.fully_shard.masters")
def test_lost_masters_raise(plain_twins: PlainTwins) -> None:
    reported, *_ = plain_twins.values(lost_masters)
    assert reported["loaded"] == [str(HIGH)]
    assert reported["rounded"].startswith("RuntimeError: norm.weight (torch.bfloat16)")
    assert reported["partly"].startswith("RuntimeError: norm.weight (torch.bfloat16)")
    assert "router.weight" not in reported["partly"]
    assert reported["reloaded"] is None
    assert reported["into low"].startswith("RuntimeError: norm.weight (torch.bfloat16)")
    assert reported["cast"].startswith("RuntimeError")
    assert "router.weight" in reported["cast"]
    assert "inner.weight" not in reported["cast"]
    assert reported["narrow"].startswith("ValueError")
    assert "norm.weight" in reported["narrow"]


def report_precisions(scene: Scene) -> dict[str, Any]:
    """Return the precisions that are reported for FullyShardedDataParallel and for an unsharded model."""
    fsdp = scene.api
    mixed = fsdp.MixedPrecision(param_dtype=LOW, reduce_dtype=HIGH)
    wrapped = fsdp.FullyShardedDataParallel(
        _model(_of_two), mixed_precision=mixed, device_id=torch.device("cpu"), use_orig_params=True
    )
    models = {"wrapped": wrapped, "plain": _model(_of_two)}
    return {
        kind: {name: str(astuple(precisions)) for name, precisions in fsdp.param_precisions(model).items()}
        for kind, model in models.items()
    }


@clause("distributed.fsdp.fully_shard.param_precisions")
def test_param_precisions_reports_each_parameter(plain_twins: PlainTwins) -> None:
    reported, *_ = plain_twins.values(report_precisions)
    for name, has in reported["wrapped"].items():
        own = torch.float64 if name.startswith("inner") else HIGH
        assert has == str((LOW, HIGH, own)), name
        assert reported["plain"][name] == str((own, None, own)), name
    assert len(reported["plain"]) == len(reported["wrapped"]) == 6
