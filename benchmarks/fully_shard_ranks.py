"""Cases for the ranks of bench_fully_shard.py. Each rank keeps its sharded models between calls."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from benchmarks.common import member
from benchmarks.fsdp_ranks import fully_sharded, peak_of, stepping

_HELPER = "distributed.checkpoint.state_dict.get_model_state_dict"


@dataclass(frozen=True)
class Trained:
    model: nn.Module
    step: Callable[[], None]
    logits: Tensor  # logits after the first step


@functools.lru_cache(maxsize=2)
def trained(subject: str) -> Trained:
    torch.manual_seed(0)
    model = fully_sharded(subject)
    return Trained(model, *stepping(model))


def step(rank: Any, *, subject: str) -> None:
    trained(subject).step()


def logits_after_a_step(rank: Any, *, subject: str) -> list[Tensor]:
    return [trained(subject).logits]


def clip(rank: Any, *, subject: str) -> list[Tensor]:
    """Clip the gradients to a norm far above theirs, so that they stay the same. Return their norm."""
    model: Any = trained(subject).model
    model.reshard()  # reshards the root, which stays unsharded after forward
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.ones_like(parameter)
    norm: Any = member(subject, "nn.utils.clip_grad_norm_")(model.parameters(), 1e9)
    return [norm.full_tensor() if hasattr(norm, "full_tensor") else norm]


def peak_bytes(rank: Any, *, subject: str) -> int:
    return peak_of(functools.partial(step, rank, subject=subject))


def saved(rank: Any, *, subject: str) -> list[Tensor]:
    """Return a few values of this rank's rows of the state dict."""
    state = trained(subject).model.state_dict()
    return [state["words.weight"].to_local()[:2, :4].clone()]


@functools.lru_cache(maxsize=2)
def _to_load(subject: str) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trained(subject).model.state_dict().items()}


def loaded(rank: Any, *, subject: str) -> list[Tensor]:
    model: Any = trained(subject).model
    model.load_state_dict(_to_load(subject))
    return [model.words.weight.to_local()[:2, :4].clone()]


def save_full_state(rank: Any, *, subject: str) -> list[Tensor]:
    """Save the full state dict. Return a few of its values."""
    try:
        helper = member(subject, _HELPER)
    except NotImplementedError:  # earlier commits used torch's function
        helper = member("torch", _HELPER)
    state = helper(trained(subject).model, options=StateDictOptions(full_state_dict=True))
    return [state["words.weight"][:2, :4].clone()]
