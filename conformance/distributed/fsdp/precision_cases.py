"""Cases of mixed precision in FullyShardedDataParallel."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import clean, gathered_gradients, gathered_parameters, state_of
from conformance.distributed.fsdp.lab import Lab, filled, tried
from conformance.distributed.fsdp.module_trees import call, out_of_form


def gradients(lab: Lab) -> dict[str, Any]:
    lab.backward()
    shards = {name: state_of(parameter) for name, parameter in lab.model.named_parameters()}
    return {"shards": shards, "whole": gathered_gradients(lab.library, lab.model)}


def inside(lab: Lab, *, training: bool) -> dict[str, Any]:
    """Return the dtypes in the forward of each plain module, of the output, and of the input's gradient."""
    dtypes: dict[str, Any] = {}
    for name, module in lab.model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.register_forward_pre_hook(_noting(dtypes, clean(name)))
    lab.model.train(training)
    batch = lab.tree.batch(0, lab.rank.rank)
    if lab.tree.takes == "dataclass":  # no root moves the tensors in a dataclass
        batch = batch.on(lab.rank.device)
    output = out_of_form(call(lab.model, lab.tree, batch))
    output.sum().backward()
    return {"inside": dtypes, "output": output.dtype, "input gradient": batch.x.grad.dtype}


def _noting(dtypes: dict[str, Any], name: str) -> Any:
    def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        dtypes[name] = [args[0].dtype, module.weight.dtype, tuple(module.weight.shape)]

    return note


def buffers(lab: Lab) -> dict[str, torch.dtype]:
    """Return the dtypes of buffers after a forward, which fails if batch statistics do not take the dtype."""
    tried(lab.forward)
    return {clean(name): buffer.dtype for name, buffer in lab.model.named_buffers()}


def in_sequence(lab: Lab, *, calls: str) -> list[Any]:
    results: list[Any] = []
    for number, name in enumerate(calls.split()):
        if name == "summon":
            with lab.fsdp.summon_full_params(lab.model):
                pass
        elif name == "backward":
            results[-1].sum().backward()
            results[-1] = results[-1].detach()
            results.append(lab.gradients())
            lab.model.zero_grad()
        else:
            lab.model.train(name != "eval")
            with torch.set_grad_enabled(name != "eval"):
                results.append(out_of_form(lab.forward(number)))
    return results


def full_precision_in_eval(lab: Lab) -> dict[str, str]:
    """Return the dtype of the head's weight in an eval forward, for each environment setting at wrapping."""
    dtypes: dict[str, str] = {}
    for setting in ("", "1", "0"):
        with _environment("FSDP_USE_FULL_PREC_IN_EVAL", setting):
            model = lab.wrapped(lab.tree.build())
            model.head.register_forward_pre_hook(_noting_dtype(dtypes, setting))
            call(model.eval(), lab.tree, lab.tree.batch(0, lab.rank.rank))
    return dtypes


def buffers_in_eval(lab: Lab) -> list[dict[str, torch.dtype]]:
    """Return the dtypes of buffers after forwards in which none, all or some of the modules evaluate.

    One buffer has low precision itself. A forward may fail, because batch statistics do not take every dtype.
    """
    dtypes = []
    lab.plain.register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16))
    with _environment("FSDP_USE_FULL_PREC_IN_EVAL", "1"):
        model = lab.model
    for evaluates in ("nothing", "all", "the body", "all", "a part of it", "nothing"):
        model.train(evaluates != "all")
        model.body.train(evaluates in ("nothing", "a part of it"))
        model.body.parts[0].train(evaluates == "nothing")
        tried(functools.partial(call, model, lab.tree, lab.tree.batch(0, lab.rank.rank)))
        dtypes.append({clean(name): buffer.dtype for name, buffer in model.named_buffers()})
    return dtypes


def _noting_dtype(dtypes: dict[str, str], key: str) -> Any:
    def note(module: nn.Module, _: Any) -> None:
        dtypes[key] = str(module.weight.dtype).removeprefix("torch.")

    return note


@contextlib.contextmanager
def _environment(name: str, value: str) -> Generator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(torch.tanh(self.norm(self.first(x))))


def without_some_classes(lab: Lab, *, kind: str, use_orig_params: bool) -> dict[str, Any]:
    """Run two steps in bfloat16 except for modules of one class.

    Return the dtypes in each forward and the parameters.
    """
    ignored = (getattr(nn, kind),)
    model = lab.wrap(
        filled(Normalised()),
        units=[nn.Sequential],
        mixed_precision=lab.api.MixedPrecision(torch.bfloat16, _module_classes_to_ignore=ignored),
        use_orig_params=use_orig_params,
    )
    dtypes: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_hook(_noting_dtypes(dtypes, clean(name)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for number in range(2):
        x = torch.linspace(0, 1 + number, 6).view(2, 3) - lab.rank.rank * 0.25
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [clean(name) for name, _ in model.named_modules()]
    return {"dtypes": dtypes, "modules": names, "whole": gathered_parameters(lab.library, model)}


def _noting_dtypes(events: list[Any], name: str) -> Any:
    return lambda module, args, output: events.append(
        [name, args[0].dtype, module.weight.dtype, output.dtype]
    )
