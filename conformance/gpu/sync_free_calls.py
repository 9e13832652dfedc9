"""The calls that the phase `waits` makes, each with the public names whose promise it tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import TrainingTensors, scaler_of
from conformance.ranks.fake_group import WORLD_SIZE
from impl import amp, drop_in, dynamo, kernels
from impl.cpu import amp as cpu_amp
from impl.cuda import amp as cuda_amp
from impl.distributed import fsdp
from impl.nn import utils
from impl.optim import capture, explain

Call = Callable[[], object]
# A list for the kernels, and a list so short that torch's operators may take it.
_KERNELS, _OPERATORS = "100x1k", "1x1k"
_SCALER = "amp.GradScaler"
_SHARDED = "distributed.fsdp.ShardedGradScaler"


@dataclass(frozen=True)
class WaitCase:
    name: str
    covers: tuple[str, ...]  # names in `sync_promises.promises`
    make: Callable[[str], Call]  # takes a device type
    needs_group: bool = False  # a process group; its collectives move nothing


def _fused_step_of(optimizer_type: type[torch.optim.Optimizer], **settings: Any) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        optimizer, scaler = optimizer_type(_data(device).parameters, **settings), scaler_of("impl", device)
        return lambda: scaler.fused_step(optimizer, max_norm=1.0)

    return make


def _data(device: str, shapes: str = _KERNELS) -> TrainingTensors:
    return TrainingTensors(shapes, "float32", device)


def _fused_step_of_short_list(device: str) -> Call:
    data, scaler = _data(device, _OPERATORS), scaler_of("impl", device)
    return lambda: scaler.fused_step(data.optimizer, max_norm=1.0)


def _fused_step_with_changed_lr(device: str) -> Call:
    data, scaler = _data(device), scaler_of("impl", device)

    def call() -> None:
        data.optimizer.param_groups[0]["lr"] *= 0.99
        scaler.fused_step(data.optimizer, max_norm=1.0)

    return call


def _fused_step_with_new_grads(device: str) -> Call:
    data, scaler = _data(device), scaler_of("impl", device)

    def call() -> None:
        for param in data.parameters:
            param.grad = torch.randn_like(param)
        scaler.fused_step(data.optimizer, max_norm=1.0)

    return call


def _fused_step_of_two_optimizers(device: str) -> Call:
    data, scaler = _data(device), scaler_of("impl", device)
    half = len(data.parameters) // 2
    optimizers = [
        torch.optim.SGD(data.parameters[:half], lr=1e-3, momentum=0.9),
        torch.optim.AdamW(data.parameters[half:]),
    ]
    return lambda: scaler.fused_step(optimizers, max_norm=1.0)


def _fused_step_with_copies(device: str) -> Call:
    data, scaler = _data(device), scaler_of("impl", device)
    copies = [param.detach().bfloat16().requires_grad_() for param in data.parameters]
    for param, copy in zip(data.parameters, copies, strict=True):
        param.grad, copy.grad = None, torch.randn_like(copy)

    def call() -> None:
        scaler.fused_step(data.optimizer, max_norm=1.0, low_precision_params=copies, update=False)
        scaler.update()

    return call


def _four_calls(shapes: str, norm_type: float = 2.0) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        data, scaler = _data(device, shapes), scaler_of("impl", device)
        return _unscaled_clipped_and_stepped(scaler, data, norm_type)

    return make


def _unscaled_clipped_and_stepped(scaler: Any, data: TrainingTensors, norm_type: float = 2.0) -> Call:
    loss = torch.ones((), device=data.device)

    def call() -> None:
        scaler.scale([loss, loss.bfloat16()])
        scaler.unscale_(data.optimizer)
        utils.clip_grad_norm_(data.parameters, 1.0, norm_type)
        scaler.step(data.optimizer)
        scaler.found_inf(data.optimizer)
        scaler.update()

    return call


def _step_was_taken(device: str) -> Call:
    """Return a question after a step that has already waited for its check."""
    data, scaler = _data(device), scaler_of("impl", device)
    optimizer = torch.optim.AdamW(data.parameters, foreach=True)
    scaler.step(optimizer)
    return lambda: scaler.step_was_taken(optimizer)


def _explain(device: str) -> Call:
    data, scaler = _data(device), scaler_of("impl", device)
    scaler.fused_step(data.optimizer)
    return lambda: str(scaler.explain(data.optimizer))


def _microbatches(device: str) -> Call:
    data, scaler = _data(device), scaler_of("impl", device)

    def call() -> None:
        for skips in (False, True, False):
            with scaler.microbatch(data.optimizer) as microbatch:
                if skips:
                    microbatch.skip()
                else:
                    for param in data.parameters:
                        param.grad = torch.ones_like(param)
        scaler.fused_step(data.optimizer)

    return call


def _norms_by_parameter(device: str) -> Call:
    data, scaler = _data(device), scaler_of("impl", device)

    def call() -> None:
        scaler.fused_step(data.optimizer, max_norm=1.0, keep_norms=True, keep_update_norms=True)
        scaler.gradient_norms(data.optimizer)
        scaler.update_ratios(data.optimizer)

    return call


def _settings_of_scaler(device: str) -> Call:
    state = scaler_of("impl", device).state_dict()

    def call() -> None:
        scaler = scaler_of("impl", device)
        scaler.set_growth_factor(scaler.get_growth_factor())
        scaler.set_backoff_factor(scaler.get_backoff_factor())
        scaler.set_growth_interval(scaler.get_growth_interval())
        scaler.is_enabled()
        scaler.load_state_dict(state)

    return call


def _norm_then_clip(device: str) -> Call:
    params = _data(device).parameters
    grads = [param.grad for param in params if param.grad is not None]
    return lambda: utils.clip_grads_with_norm_(params, 1.0, utils.get_total_norm(grads))


def _clip_by(clip: Callable[..., Any]) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        params = _data(device).parameters

        def call() -> None:
            with warnings.catch_warnings(action="ignore"):  # warning about the deprecated spelling
                clip(params, 0.01)

        return call

    return make


def _captured(graph: bool) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        optimizer = capture(_data(device).optimizer, graph=graph)

        def call() -> str:
            optimizer.step()
            return str(explain(optimizer))

        return call

    return make


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def _autocast(device: str) -> Call:
    layer, x = nn.Linear(8, 8, device=device), torch.randn(8, 8, device=device)
    regions: list[Callable[[], Any]] = [lambda: amp.autocast(device), cpu_amp.autocast, cuda_amp.autocast]

    def call() -> None:
        assert amp.is_autocast_available(device)
        cuda_amp.amp_definitely_not_available()
        for region in regions:
            with warnings.catch_warnings(action="ignore"), region():  # the older spellings are deprecated
                layer(x).sum().backward()

    return call


def _custom_functions(device: str) -> Call:
    x = torch.randn(8, device=device, requires_grad=True)
    with warnings.catch_warnings(action="ignore"):
        older = cuda_amp.custom_fwd(_Double.forward), cuda_amp.custom_bwd(_Double.backward)
    newer = (
        amp.custom_fwd(_Double.forward, device_type=device, cast_inputs=torch.float32),
        amp.custom_bwd(_Double.backward, device_type=device),
    )
    functions = [
        type("Decorated", (_Double,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
        for forward, backward in (older, newer)
    ]

    def call() -> None:
        for function in functions:
            with amp.autocast(device):
                function.apply(x).sum().backward()

    return call


def _installed_and_taken_back(device: str) -> Call:
    def call() -> None:
        for module in (drop_in, dynamo):
            module.install()
            module.uninstall()

    return call


def _sharded_scaler(device: str) -> tuple[fsdp.ShardedGradScaler, TrainingTensors]:
    scaler = fsdp.ShardedGradScaler(device, init_scale=1.0, growth_interval=2**30)
    scaler.scale(torch.ones((), device=device))
    return scaler, _data(device)


def _sharded_four_calls(device: str) -> Call:
    return _unscaled_clipped_and_stepped(*_sharded_scaler(device))


def _sharded_fused_step(device: str) -> Call:
    scaler, data = _sharded_scaler(device)
    return lambda: scaler.fused_step(data.optimizer, max_norm=1.0)


def _fully_shard(device: str) -> Call:
    mesh = init_device_mesh(device, (WORLD_SIZE,))

    def call() -> None:
        fsdp.set_detect_unsynchronized_step(True)
        module = fsdp.fully_shard(nn.Linear(64, 64, device=device), mesh=mesh)
        fsdp.param_precisions(module)

    return call


def _finalized_backward(device: str) -> Call:
    module = fsdp.fully_shard(nn.Linear(64, 64, device=device), mesh=init_device_mesh(device, (WORLD_SIZE,)))
    module.set_manual_backward_finalization(True)
    x = torch.randn(8, 64, device=device)

    def call() -> None:
        module(x).sum().backward()
        module.finalize_backward(async_op=True).wait()

    return call


def _clip_of_fsdp(device: str) -> Call:
    at = torch.device(device, 0) if device == "cuda" else torch.device(device)
    model = fsdp.FullyShardedDataParallel(nn.Linear(64, 64), device_id=at)
    model(torch.randn(8, 64, device=device)).sum().backward()
    return lambda: model.clip_grad_norm_(1.0)


def _methods(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names)


_OF_SETTINGS = (
    "get_growth_factor", "set_growth_factor", "get_backoff_factor", "set_backoff_factor", "get_growth_interval",
    "set_growth_interval", "is_enabled", "load_state_dict",
)  # fmt: skip
_OF_FOUR_CALLS = ("scale", "unscale_", "step", "found_inf", "update")
_FUSED_STEP = _methods(_SCALER, "fused_step")
_CLIP = ("nn.utils.clip_grad_norm_",)

CASES = [
    *(
        WaitCase(f"fused_step {optimizer.__name__}", _FUSED_STEP, _fused_step_of(optimizer, lr=1e-3))
        for rule in kernels.RULES
        for optimizer in rule.OPTIMIZERS
    ),
    WaitCase(
        "fused_step SGD momentum",
        _FUSED_STEP,
        _fused_step_of(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
    ),
    WaitCase("fused_step AdamW amsgrad", _FUSED_STEP, _fused_step_of(torch.optim.AdamW, amsgrad=True)),
    WaitCase("fused_step AdamW foreach", _FUSED_STEP, _fused_step_of(torch.optim.AdamW, foreach=True)),
    WaitCase("fused_step, one tensor", _FUSED_STEP, _fused_step_of_short_list),
    WaitCase("fused_step, learning rate changes", _FUSED_STEP, _fused_step_with_changed_lr),
    WaitCase("fused_step, new gradients", _FUSED_STEP, _fused_step_with_new_grads),
    WaitCase("fused_step, two optimizers", _FUSED_STEP, _fused_step_of_two_optimizers),
    WaitCase(
        "fused_step, bfloat16 copies", (*_FUSED_STEP, *_methods(_SCALER, "update")), _fused_step_with_copies
    ),
    WaitCase("four calls", (*_methods(_SCALER, *_OF_FOUR_CALLS), *_CLIP), _four_calls(_KERNELS)),
    WaitCase("four calls, one tensor", (*_methods(_SCALER, *_OF_FOUR_CALLS), *_CLIP), _four_calls(_OPERATORS)),
    WaitCase("four calls, infinity norm", _CLIP, _four_calls(_KERNELS, torch.inf)),
    WaitCase("step_was_taken", _methods(_SCALER, "step_was_taken"), _step_was_taken),
    WaitCase("explain", _methods(_SCALER, "explain"), _explain),
    WaitCase("microbatch", (*_methods(_SCALER, "microbatch"), "amp.Microbatch.skip"), _microbatches),
    WaitCase(
        "norms by parameter",
        _methods(_SCALER, "fused_step", "gradient_norms", "update_ratios"),
        _norms_by_parameter,
    ),
    WaitCase("GradScaler's settings", (_SCALER, *_methods(_SCALER, *_OF_SETTINGS)), _settings_of_scaler),
    WaitCase(
        "norm, then clip", ("nn.utils.get_total_norm", "nn.utils.clip_grads_with_norm_"), _norm_then_clip
    ),
    WaitCase("clip_grad_value_", ("nn.utils.clip_grad_value_",), _clip_by(utils.clip_grad_value_)),
    WaitCase("clip_grad_norm", ("nn.utils.clip_grad_norm",), _clip_by(utils.clip_grad_norm)),
    WaitCase("captured step", ("optim.capture",), _captured(graph=False)),
    WaitCase("captured step, graph", ("optim.capture",), _captured(graph=True)),
    WaitCase(
        "autocast",
        (
            "amp.autocast", "amp.is_autocast_available", "cpu.amp.autocast", "cuda.amp.autocast",
            "cuda.amp.amp_definitely_not_available",
        ),
        _autocast,
    ),
    WaitCase(
        "custom_fwd and custom_bwd",
        ("amp.custom_fwd", "amp.custom_bwd", "cuda.amp.custom_fwd", "cuda.amp.custom_bwd"),
        _custom_functions,
    ),
    WaitCase("drop_in and dynamo", ("drop_in.install", "dynamo.install"), _installed_and_taken_back),
    WaitCase(
        "ShardedGradScaler, four calls",
        (_SHARDED, *_methods(_SHARDED, "unscale_", "step")),
        _sharded_four_calls,
        needs_group=True,
    ),
    WaitCase(
        "ShardedGradScaler.fused_step", _methods(_SHARDED, "fused_step"), _sharded_fused_step, needs_group=True
    ),
    WaitCase(
        "fully_shard",
        _methods("distributed.fsdp", "fully_shard", "param_precisions", "set_detect_unsynchronized_step"),
        _fully_shard,
        needs_group=True,
    ),
    WaitCase(
        "finalize_backward",
        ("distributed.fsdp.FSDPModule.finalize_backward", "distributed.fsdp.GradientReductionHandle.wait"),
        _finalized_backward,
        needs_group=True,
    ),
    WaitCase(
        "FullyShardedDataParallel.clip_grad_norm_",
        ("distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",),
        _clip_of_fsdp,
        needs_group=True,
    ),
]  # fmt: skip
