"""State dicts of fully_shard through the helpers of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

from conformance.distributed.fsdp.scenes.fully_shard_training import described, values_and_gradients
from conformance.distributed.fsdp.scenes.residual_blocks import batch_of, blocks
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import PlainTwins, each, raises
from conformance.judge.clauses import clause
from conformance.judge.outcome import Outcome, assert_same_outcome


def save_and_load(scene: Scene, whole: bool) -> dict[str, Any]:
    """Save with torch's helpers, train one step, and load into the same model and optimizer again."""
    model = blocks()
    scene.shard_children(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    options = checkpoints.StateDictOptions(full_state_dict=whole)

    def step(number: int) -> list[Any]:
        loss = model(batch_of(scene, number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), values_and_gradients(model)]

    step(0)
    model_state = checkpoints.get_model_state_dict(model, options=options)
    optimizer_state = checkpoints.get_optimizer_state_dict(model, optimizer, options=options)
    saved = {name: described(value) for name, value in model_state.items()}
    states = {
        f"{name}.{key}": described(value)
        for name, state in optimizer_state["state"].items()
        for key, value in state.items()
    }
    # The next step changes the tensors of the model and of the optimizer in place.
    model_state, optimizer_state = tree_map_only(torch.Tensor, torch.clone, [model_state, optimizer_state])
    steps = [step(1)]
    checkpoints.set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    missing = checkpoints.set_model_state_dict(model, model_state, options=options)
    steps.append(step(1))
    dist.barrier()
    return {"saved": saved, "states": states, "steps": steps, "missing": str(missing)}


@clause("distributed.fsdp.fully_shard.checkpoint_helpers")
@pytest.mark.parametrize("whole", [False, True])
def test_loaded_states_repeat_step_like_torch(plain_twins: PlainTwins, whole: bool) -> None:
    for outcome in plain_twins.agree(save_and_load, whole=whole):
        first, repeated = outcome.value["steps"]
        assert_same_outcome(Outcome(first), Outcome(repeated))


def saved_while_accumulating(scene: Scene, optimizer_type: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Get the states of an optimizer without states between two backwards of a step. Return them and the parameters."""
    model = scene.shard_children(blocks())
    optimizer = optimizer_type(model.parameters(), lr=0.125)
    model.set_requires_gradient_sync(False)
    model(batch_of(scene, 0)).square().mean().backward()
    states = checkpoints.get_optimizer_state_dict(model, optimizer)
    model.set_requires_gradient_sync(True)
    model(batch_of(scene, 1)).square().mean().backward()
    optimizer.step()
    return {
        "states": _described(states),
        "lr": optimizer.param_groups[0]["lr"],
        "held": values_and_gradients(model),
    }


@clause("distributed.fsdp.fully_shard.checkpoint_helpers")
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.AdamW])
def test_states_are_saved_while_gradients_wait(
    plain_twins: PlainTwins, optimizer_type: type[torch.optim.Optimizer]
) -> None:
    plain_twins.agree(saved_while_accumulating, optimizer_type=optimizer_type)


_HELPERS = "distributed.checkpoint.state_dict"


def _helpers_of(scene: Scene) -> Any:
    """Return the library's own helpers, or torch's if it has none."""
    from_library = scene.library.provides(f"{_HELPERS}.get_state_dict")
    return scene.library.find(_HELPERS) if from_library else checkpoints


def full_states(scene: Scene, offloads: bool, flat: bool) -> dict[str, Any]:
    """Return full state dicts by the library's own helpers, or by torch's if it has none.

    Some parameters are sharded by rows, unevenly, and others by columns.

    Args:
        offloads: whether only the first rank keeps the states, on the CPU.
        flat: whether the optimizer's state is one flat dictionary.
    """
    helpers = _helpers_of(scene)
    model = blocks(2)
    model.append(nn.Linear(6, 5).double())
    model[-1].register_buffer("seen", torch.arange(3))
    scene.shard(model[0], shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    scene.shard(model[1], mesh=scene.rank.mesh(1, scene.rank.world_size, names=("replicas", "shards")))
    scene.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(batch_of(scene, 0)).square().mean().backward()
    optimizer.step()
    options = checkpoints.StateDictOptions(
        full_state_dict=True, cpu_offload=offloads, flatten_optimizer_state_dict=flat
    )
    both = helpers.get_state_dict(model, optimizer, options=options)
    return {
        "model": _described(helpers.get_model_state_dict(model, options=options)),
        "optimizer": _described(helpers.get_optimizer_state_dict(model, optimizer, options=options)),
        "both": [_described(state) for state in both],
        "held": values_and_gradients(model),
    }


def _described(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _described(value) for name, value in state.items()}
    return [_described(value) for value in state] if isinstance(state, list) else described(state)


@clause("distributed.fsdp.fully_shard.whole_states")
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_full_states_match_torch(plain_twins: PlainTwins, flat: bool, offloads: bool) -> None:
    plain_twins.agree(full_states, flat=flat, offloads=offloads)


def states_of_unsharded(scene: Scene, whole: bool, how: str) -> bool:
    """Return whether the helpers return the same states as of sharded units, if units are unsharded.

    They are after an `unshard` call, after a `forward` without a backward, or as a setting of each `backward`.
    """
    helpers = _helpers_of(scene)
    model: Any = blocks()
    scene.shard(model[0])
    scene.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(batch_of(scene, 0)).square().mean().backward()
    optimizer.step()
    options = checkpoints.StateDictOptions(full_state_dict=whole)

    def states(prepare: Callable[[], None]) -> list[str]:
        prepare()
        both = helpers.get_state_dict(model, optimizer, options=options)
        prepare()
        of_optimizer = helpers.get_optimizer_state_dict(model, optimizer, options=options)
        return [str(_described(state)) for state in (*both, of_optimizer)]

    def unshard() -> None:
        if how == "unshard":
            model[0].unshard()
        else:
            model.set_reshard_after_backward(how != "backward")
            loss = model(batch_of(scene, 1)).sum()
            if how == "backward":
                loss.backward()

    return states(lambda: None) == states(unshard)


@clause("distributed.fsdp.fully_shard.states_of_unsharded")
@pytest.mark.deviation("fully_shard.states_of_unsharded")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("how", ["unshard", "forward", "backward"])
def test_states_of_unsharded_units_are_those_of_sharded_ones(
    plain_twins: PlainTwins, how: str, whole: bool
) -> None:
    plain_twins.deviate(
        states_of_unsharded,
        whole=whole,
        how=how,
        torch_does=raises(KeyError),
        we_do=each(lambda is_same: is_same),
    )
