"""Probes of mixed precision."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import clean, gathered_gradients, state_of, wrapped
from conformance.distributed.fsdp.method_cases import Lab, tried
from conformance.distributed.fsdp.module_trees import call, out_of_form


def gradients(lab: Lab) -> dict[str, Any]:
    lab.backward()
    shards = {name: state_of(parameter) for name, parameter in lab.model.named_parameters()}
    return {"shards": shards, "whole": gathered_gradients(lab.library, lab.model)}


def inside(lab: Lab, *, training: bool) -> dict[str, Any]:
    """The dtypes that each plain module meets in its forward, the output's, and the input gradient's."""
    seen: dict[str, Any] = {}
    for name, module in lab.model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.register_forward_pre_hook(_noting(seen, clean(name)))
    lab.model.train(training)
    batch = lab.tree.batch(0, lab.rank.rank)
    output = out_of_form(call(lab.model, lab.tree, batch))
    output.sum().backward()
    return {"inside": seen, "output": output.dtype, "input gradient": batch.x.grad.dtype}


def _noting(seen: dict[str, Any], name: str) -> Any:
    def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen[name] = [args[0].dtype, module.weight.dtype, tuple(module.weight.shape)]

    return note


def buffers(lab: Lab) -> dict[str, torch.dtype]:
    """After a forward, which the statistics of a batch may refuse in such a dtype."""
    tried(lab.forward)
    return {clean(name): buffer.dtype for name, buffer in lab.model.named_buffers()}


def in_sequence(lab: Lab, *, calls: str) -> list[Any]:
    seen: list[Any] = []
    for number, name in enumerate(calls.split()):
        if name == "summon":
            with lab.fsdp.summon_full_params(lab.model):
                pass
        elif name == "backward":
            seen[-1].sum().backward()
            seen[-1] = seen[-1].detach()
            seen.append(lab.gradients())
            lab.model.zero_grad()
        else:
            lab.model.train(name != "eval")
            with torch.set_grad_enabled(name != "eval"):
                seen.append(out_of_form(lab.forward(number)))
    return seen


def full_precision_in_eval(lab: Lab) -> dict[str, str]:
    """The dtype in which the weights of the head are in an eval forward, by what the environment says at wrapping."""
    found: dict[str, str] = {}
    for setting in ("", "1", "0"):
        with _environment("FSDP_USE_FULL_PREC_IN_EVAL", setting):
            model = wrapped(lab.rank, lab.library, lab.tree.build(), lab.setup)
            model.head.register_forward_pre_hook(_noting_dtype(found, setting))
            call(model.eval(), lab.tree, lab.tree.batch(0, lab.rank.rank))
    return found


def _noting_dtype(found: dict[str, str], key: str) -> Any:
    def note(module: nn.Module, _: Any) -> None:
        found[key] = str(module.weight.dtype).removeprefix("torch.")

    return note


@contextlib.contextmanager
def _environment(name: str, value: str) -> Generator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
