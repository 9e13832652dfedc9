"""Cases of each argument of the optimizer-state methods, and of arguments that they refuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType

from conformance.distributed.fsdp.fsdp_cases import gathered_parameters, mesh_of
from conformance.distributed.fsdp.lab import Lab, filled, tried
from conformance.distributed.fsdp.optim_state_cases import (
    Optimized,
    StateDictMethod,
    by_name,
    copied,
    plain,
    step,
    there_and_back,
)

_OLDER_FULL, _FULL = StateDictMethod("full"), StateDictMethod("FULL", offloads=False)


def unwrapped(lab: Lab, optimized: Optimized) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = lab.tree.build()
    return model, optimized.stepped(model)


def of_named_optimizer(lab: Lab) -> Any:
    """Save and load an optimizer whose own state dict has names as keys."""
    optimizer = Optimized().stepped(lab.model)
    with _FULL.set_on(lab):
        saved = lab.fsdp.optim_state_dict(lab.model, optimizer, by_name(lab.model, optimizer))
        saved_copy = copied(plain(saved))
        loaded = lab.fsdp.optim_state_dict_to_load(lab.model, optimizer, saved, is_named_optimizer=True)
    return {"saved": saved_copy, "found": plain(loaded)}


def while_unsharded(lab: Lab) -> Any:
    """Save and load after a forward without a backward, when units may have kept their parameters unsharded."""
    optimizer = Optimized().stepped(lab.model)
    with torch.no_grad():
        lab.forward()
    saved = _FULL.save(lab, optimizer)
    return {"saved": copied(plain(saved)), "found": plain(_FULL.load(lab, optimizer, saved))}


def of_some_ranks(lab: Lab) -> Any:
    """Save and load an optimizer in a group of all ranks but the last. The last rank takes no part."""
    last = lab.rank.world_size - 1
    group = dist.new_group(range(last))
    if lab.rank.rank == last:
        return None
    model = lab.model = lab.wrap(lab.plain, process_group=group, use_orig_params=lab.setup.uses_orig_params)
    optimizer = Optimized("momentum").stepped(model)
    whole = lab.fsdp.full_optim_state_dict(model, optimizer, group=group)
    rows = lab.fsdp.sharded_optim_state_dict(model, optimizer, group=group)
    again = lab.fsdp.optim_state_dict(model, optimizer, group=group)
    with StateDictMethod("FULL", rank0_only=True, offloads=False).set_on(lab):
        from_the_first = lab.fsdp.optim_state_dict_to_load(model, optimizer, again, group=group)
    return {
        "from the first": plain(from_the_first),
        "whole": plain(whole),
        "rows": plain(rows),
        "again": plain(again),
        "scattered": plain(
            lab.fsdp.scatter_full_optim_state_dict(whole, model, optim=optimizer, group=group)
        ),
        "loaded": plain(lab.fsdp.optim_state_dict_to_load(model, optimizer, again, group=group)),
    }


def of_the_first_rank(lab: Lab) -> Any:
    """Load with `rank0_only` while the other ranks pass an unrelated state."""
    way = StateDictMethod("FULL", rank0_only=True, offloads=False)
    optimizer = Optimized("momentum").stepped(lab.model)
    saved = way.save(lab, optimizer)
    others = {"state": {"nobody's": {}}, "param_groups": []}
    return plain(way.load(lab, optimizer, others if lab.rank.rank else saved))


def of_each_pair(lab: Lab) -> Any:
    """Save in pairs of ranks that each have their own model.

    Return the states and the model after it was loaded again.
    """
    pairs = [[first, first + 1] for first in range(0, lab.rank.world_size, 2)]
    group, _ = dist.new_subgroups_by_enumeration(pairs)
    model = lab.model = lab.wrap(lab.plain, process_group=group, use_orig_params=True)
    optimizer = Optimized("momentum").stepped(model)
    saved = []
    for way in (_FULL, StateDictMethod("FULL", rank0_only=True, offloads=False), StateDictMethod("SHARDED")):
        with way.set_on(lab):
            saved.append(plain(lab.fsdp.optim_state_dict(model, optimizer, group=group)))
    with StateDictMethod("SHARDED").set_on(lab):
        state_dict = model.state_dict()
        step(model, optimizer)
        model.load_state_dict(state_dict)
    return {"saved": saved, "loaded": gathered_parameters(lab.library, model)}


def of_one_replica(lab: Lab) -> Any:
    """Save the optimizer of a hybrid model in its first replica only, while all ranks train."""
    mesh = mesh_of(lab.rank, 2)
    optimizer = Optimized("momentum").stepped(lab.model)
    lab.backward()
    optimizer.step()
    saved: Any = None
    if mesh.get_local_rank(0) == 0:
        with StateDictMethod("SHARDED").set_on(lab):
            saved = plain(lab.fsdp.optim_state_dict(lab.model, optimizer, group=mesh.get_group(1)))
    optimizer.zero_grad()
    return {"saved": saved, "loss": lab.backward(1), "gradients": lab.gradients()}


def of_users_own(lab: Lab) -> Any:
    """Save and load a state that belongs to no parameter. Load a state dict without parameter groups."""
    optimizer = Optimized().stepped(lab.model)
    state_dict = optimizer.state_dict()
    state_dict["state"]["mine"] = {"numbers": torch.tensor([1.0, 2.0]), "name": "mine"}
    with _FULL.set_on(lab):
        saved = lab.fsdp.optim_state_dict(lab.model, optimizer, state_dict)
        saved_copy = copied(plain(saved))
        without = {"state": saved["state"]}
        loaded = lab.fsdp.optim_state_dict_to_load(lab.model, optimizer, without)
    return {"saved": saved_copy, "found": plain(loaded)}


def of_a_part_called_module(lab: Lab) -> Any:
    """Use a module called `module`, the name that wrappers give to their module and remove from other names."""
    parts = {"module": nn.Linear(3, 4), "head": nn.Linear(4, 2)}
    plain_model = filled(nn.Sequential(OrderedDict(parts)))
    lab.model = lab.wrap(plain_model, use_orig_params=lab.setup.uses_orig_params)
    return there_and_back(lab, Optimized("momentum"), _FULL)


def loaded_directly(lab: Lab, directly: bool) -> Any:
    optimizer = Optimized().stepped(lab.model)
    saved = _FULL.save(lab, optimizer)
    fresh = Optimized().optimizer(lab.model)
    _FULL.load(lab, fresh, saved, load_directly=directly)
    return plain(fresh.state_dict())


def by_input(lab: Lab) -> Any:
    """Pass the optimizer's input, in every form, instead of the optimizer."""
    fsdp, model = lab.fsdp, lab.model
    parameters = list(model.parameters())
    backwards = [{"params": parameters[1:]}, {"params": parameters[:1]}]
    optimizer = torch.optim.SGD([dict(group) for group in backwards], lr=0.05, momentum=0.5)
    step(model, optimizer)
    saved = fsdp.full_optim_state_dict(model, optimizer, backwards, False)
    return {
        "saved": copied(plain(saved)),
        "saved by a number": tried(lambda: fsdp.full_optim_state_dict(model, optimizer, 3)),
        "saved by nothing": tried(lambda: fsdp.full_optim_state_dict(model, optimizer, [])),
        "as the optimizer's": plain(fsdp.shard_full_optim_state_dict(saved, model, optim=optimizer)),
        "by its order": plain(fsdp.shard_full_optim_state_dict(saved, model)),
        "as groups": plain(fsdp.shard_full_optim_state_dict(saved, model, backwards)),
        "scattered": plain(fsdp.scatter_full_optim_state_dict(saved, model, backwards)),
        "scattered as the optimizer's": plain(
            fsdp.scatter_full_optim_state_dict(saved, model, optim=optimizer)
        ),
        "scattered by its order": plain(fsdp.scatter_full_optim_state_dict(saved, model)),
        "as tensors": plain(fsdp.shard_full_optim_state_dict(saved, model, parameters[::-1])),
        "number": tried(lambda: fsdp.shard_full_optim_state_dict(saved, model, 3)),
        "nothing": tried(lambda: fsdp.shard_full_optim_state_dict(saved, model, [])),
        "mixed": tried(lambda: fsdp.shard_full_optim_state_dict(saved, model, [parameters[0], {}])),
        "no params": tried(lambda: fsdp.shard_full_optim_state_dict(saved, model, [{"lr": 1.0}])),
    }


def rekeyed(lab: Lab) -> Any:
    """Rekey from numbers to names, from names to numbers, and to the same keys."""
    types = lab.api.OptimStateKeyType
    rekey = lab.fsdp.rekey_optim_state_dict
    plain_model, optimizer = unwrapped(lab, Optimized(groups=2))
    numbered, named = copied(optimizer.state_dict()), copied(by_name(plain_model, optimizer))
    mixed = [
        {"state": {key: {}, other: {}}, "param_groups": []}
        for key, other in [(0, "a"), ("a", None), (None, 0)]
    ]
    in_order = list(plain_model.parameters())
    alone = Optimized().stepped(plain_model).state_dict()
    empty = {"state": {}, "param_groups": numbered["param_groups"]}
    return {
        "numbers as they are": rekey(numbered, types.PARAM_ID, plain_model, optim=optimizer) is numbered,
        "no state": [rekey(empty, kind, plain_model, optim=optimizer) is empty for kind in types],
        "to names": plain(rekey(numbered, types.PARAM_NAME, plain_model, optim=optimizer)),
        "to numbers": plain(rekey(named, types.PARAM_ID, plain_model, optim=optimizer)),
        "as it is": rekey(named, types.PARAM_NAME, plain_model, optim=optimizer) is named,
        "by the model's order": plain(rekey(alone, types.PARAM_NAME, plain_model)),
        "by what it was made of": plain(rekey(alone, types.PARAM_NAME, plain_model, in_order[::-1])),
        "no such type": tried(lambda: rekey(named, "names", plain_model)),
        "mixed": [tried(partial(rekey, state, types.PARAM_NAME, plain_model)) for state in mixed],
        "wrapped": tried(
            lambda: plain(
                rekey(numbered, types.PARAM_NAME, lab.model, optim=Optimized().optimizer(lab.model))
            )
        ),
    }


def refused_to_load(lab: Lab) -> dict[str, Any]:
    """Return the errors for faulty state dicts that are complete on every rank."""
    optimized = Optimized("adam")
    optimizer = optimized.optimizer(lab.model)

    def load(change: Callable[[Any], None]) -> Any:
        state_dict = copied(by_name(*unwrapped(lab, optimized)))
        change(state_dict)
        return tried(lambda: plain(_OLDER_FULL.load(lab, optimizer, state_dict)))

    return {
        "no state": load(lambda state_dict: state_dict.pop("state")),
        "names": load(lambda state_dict: _second(state_dict).pop("exp_avg")),
        "types": load(lambda state_dict: _second(state_dict).update(exp_avg=1.0)),
        "dtypes": load(
            lambda state_dict: _second(state_dict).update(exp_avg=_second(state_dict)["exp_avg"].double())
        ),
        "numbers": load(lambda state_dict: _second(state_dict).update(step=torch.tensor(7.0))),
        "no numbers": load(lambda state_dict: state_dict["state"].pop("body.parts.0.inner.bias")),
        "own values": load(lambda state_dict: _add_own(state_dict, ["same", "same"])),
        "other values": load(lambda state_dict: _add_own(state_dict, ["one", "other"])),
        "an unknown name": load(lambda state_dict: state_dict["param_groups"][0]["params"].append("unknown")),
        "nothing": load(lambda state_dict: [state.clear() for state in state_dict["state"].values()]),
    }


def _second(state_dict: Any) -> Any:
    return state_dict["state"]["body.parts.0.inner.bias"]


def _add_own(state_dict: Any, values: Iterable[str]) -> None:
    names = ("body.parts.0.inner.weight", "body.parts.0.inner.bias")
    for name, value in zip(names, values, strict=True):
        state_dict["state"][name]["own"] = value


def refused_to_save(lab: Lab) -> dict[str, Any]:
    """Return the errors of saving an incomplete optimizer, a step on rank 0 only, and units of both parameter types."""
    parameters = list(lab.model.parameters())
    incomplete = torch.optim.SGD(parameters[1:], lr=0.05, momentum=0.5)
    step(lab.model, incomplete)
    uneven = torch.optim.SGD(parameters, lr=0.05, momentum=0.5)
    if lab.rank.rank == 0:
        step(lab.model, uneven)
    of_both_kinds = lab.tree.build()
    of_both_kinds.head = lab.wrap(of_both_kinds.head, use_orig_params=not lab.setup.uses_orig_params)
    of_both_kinds = lab.wrap(of_both_kinds, use_orig_params=lab.setup.uses_orig_params)
    optimizer = Optimized().optimizer(of_both_kinds)
    empty = {"state": {}, "param_groups": []}
    return {
        "some": tried(lambda: plain(_OLDER_FULL.save(lab, incomplete))),
        "uneven": tried(lambda: plain(_OLDER_FULL.save(lab, uneven))),
        "both kinds": tried(lambda: lab.fsdp.optim_state_dict(of_both_kinds, optimizer)),
        "both kinds to load": tried(
            lambda: lab.fsdp.optim_state_dict_to_load(of_both_kinds, optimizer, empty)
        ),
    }


def rekeyed_by_torchs_types(lab: Lab) -> Any:
    model, optimizer = unwrapped(lab, Optimized())
    rekey, own = lab.fsdp.rekey_optim_state_dict, lab.api.OptimStateKeyType
    state_dict = optimizer.state_dict()
    return {
        "by torch's": [*rekey(state_dict, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)["state"]],
        "by its own": [*rekey(state_dict, own.PARAM_NAME, model, optim=optimizer)["state"]],
    }
