"""Cases of modules that customise their state dicts, and of state dict hooks that users register."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import gathered_parameters
from conformance.distributed.fsdp.lab import Lab, tried
from conformance.distributed.fsdp.state_dict_cases import (
    Form,
    described,
    moved,
    set_form,
    state_dict_of,
    tried_to_load,
)


class Remembering(nn.Module):
    """Module with an extra state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = ["old"]

    def get_extra_state(self) -> list[str]:
        return self.memory

    def set_extra_state(self, state: list[str]) -> None:
        self.memory = [*state]


def remembered(lab: Lab) -> list[str]:
    """Return the extra state of a module after a load that failed."""
    module = lab.model.body.remembering = Remembering()
    state_dict = lab.model.state_dict()
    del state_dict["head.bias"]
    module.memory = ["new"]
    tried(lambda: lab.model.load_state_dict(state_dict))
    return module.memory


def raised_by_a_hook(lab: Lab) -> dict[str, Any]:
    """Load with a user's hook that raises on the last rank."""

    def raises(*args: Any) -> None:
        if lab.rank.rank == lab.rank.world_size - 1:
            raise KeyError("injected")

    lab.model.head.register_load_state_dict_pre_hook(raises)
    return tried_to_load(lab, moved(state_dict_of(lab, Form())))


def hooked(lab: Lab) -> dict[str, Any]:
    """Return the arguments of hooks on a module inside a unit and on the root. The hooks change names and values."""
    calls: list[Any] = []
    head, root = lab.model.head, lab.model

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        calls.append(["before saving", type(module).__name__, prefix, keep_vars])

    def after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        calls.append(["after saving", prefix, sorted(state_dict), metadata])
        state_dict[f"{prefix}bias"] = state_dict[f"{prefix}bias"].half()
        state_dict[f"{prefix}extra"] = torch.ones(1)

    def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        calls.append(["before loading", prefix, sorted(state_dict)])
        state_dict.pop(f"{prefix}extra", None)
        state_dict[f"{prefix}bias"] = state_dict[f"{prefix}bias"].float() * 2

    def after_load(module: nn.Module, keys: Any) -> None:
        calls.append(["after loading", repr(keys)])

    head.register_state_dict_pre_hook(before_save)
    head._register_state_dict_hook(after_save)
    head.register_load_state_dict_pre_hook(before_load)
    root.register_load_state_dict_post_hook(after_load)
    state_dict = root.state_dict()
    calls.append([(key, described(value)) for key, value in state_dict.items()])
    root.load_state_dict(state_dict)
    return {"seen": calls, "whole": gathered_parameters(lab.library, root)}


def seen_by_a_hook(lab: Lab) -> Any:
    """Return whether a module's own hook sees the full parameter and its values in SHARDED_STATE_DICT."""
    whole = gathered_parameters(lab.library, lab.model)["head.weight"]
    set_form(lab.library, lab.model, Form("SHARDED"))
    sees_values: list[bool] = []

    def after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        value = state_dict[f"{prefix}weight"]
        sees_values.append(tried(lambda: torch.equal(value, whole)) is True)

    lab.model.head._register_state_dict_hook(after_save)
    lab.model.state_dict()
    return sees_values


class OwnWay(nn.Linear):
    """Linear layer that loads by itself: twice its weight, or a weight that does not fit."""

    fits = True

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        with torch.no_grad():
            self.bias.copy_(state_dict.pop(f"{prefix}bias"))
            weight = state_dict.pop(f"{prefix}weight")
            if self.fits:
                self.weight.data.copy_(2 * weight)
            else:
                self.weight.data = weight[:1]


def loaded_in_its_own_way(lab: Lab, *, fits: bool) -> dict[str, Any]:
    """Load into a unit's inner module that loads by itself. Return the error and the full parameters."""
    state_dict = moved(state_dict_of(lab, Form()))
    lab.model.head.__class__ = type("OwnWay", (OwnWay,), {"fits": fits})
    return tried_to_load(lab, state_dict) | {"whole": gathered_parameters(lab.library, lab.model)}
