"""What the ranks of bench_fully_shard.py do: each keeps its sharded models between calls."""

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
    logits: Tensor  # after a step


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
    """The norm of gradients that are the same in each call: they are clipped to far more than they have."""
    model: Any = trained(subject).model
    model.reshard()  # the root keeps what its last forward has unsharded
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.ones_like(parameter)
    norm: Any = member(subject, "nn.utils.clip_grad_norm_")(model.parameters(), 1e9)
    return [norm.full_tensor() if hasattr(norm, "full_tensor") else norm]


def peak_bytes(rank: Any, *, subject: str) -> int:
    return peak_of(functools.partial(step, rank, subject=subject))


def saved(rank: Any, *, subject: str) -> list[Tensor]:
    """This rank's rows of the state, a few values of them."""
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
    """A few values of it."""
    try:
        helper = member(subject, _HELPER)
    except NotImplementedError:  # an earlier commit, whose models torch's own served
        helper = member("torch", _HELPER)
    state = helper(trained(subject).model, options=StateDictOptions(full_state_dict=True))
    return [state["words.weight"][:2, :4].clone()]
