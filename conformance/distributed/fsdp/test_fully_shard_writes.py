"""Writes to parameters of fully_shard, and optimizers made before it: what works, warns or raises."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.distributed.fsdp.scenes.fully_shard_training import (
    full_gradients,
    full_value,
    values_and_gradients,
)
from conformance.distributed.fsdp.scenes.residual_blocks import batch_of, blocks
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.twins import PlainTwins, each, raises
from conformance.judge.clauses import clause


def stepped_before_backward(
    scene: Scene, stays_unsharded: bool, how: dict[str, bool], only: str = "", cleared: bool = False
) -> list[torch.Tensor]:
    """Step between a forward and its backward. Return the gradients.

    The optimizer only has the parameters whose names end in `only`.
    """
    model = blocks()
    scene.shard_children(model, reshard_after_forward=not stays_unsharded)
    stepped = [parameter for name, parameter in model.named_parameters() if name.endswith(only)]
    optimizer = torch.optim.AdamW(stepped, 0.1, **how)
    model(batch_of(scene, 0)).sum().backward()
    loss = model(batch_of(scene, 1)).sum()
    if cleared:  # a step without gradients writes nothing
        optimizer.zero_grad()
    optimizer.step()
    loss.backward()
    return [parameter.grad.to_local() for parameter in model.parameters()]


@clause("distributed.fsdp.fully_shard.stepped_before_backward")
@pytest.mark.deviation("fsdp.graphs_of_former_weights")
@pytest.mark.parametrize(
    ("stays_unsharded", "how"),
    [(False, {"fused": True}), (True, {"foreach": True}), (True, {"foreach": False})],
)
def test_backward_after_step_raises(
    plain_twins: PlainTwins, stays_unsharded: bool, how: dict[str, bool]
) -> None:
    """torch silently computes gradients with the new weights in units that are gathered again."""
    plain_twins.deviate(
        stepped_before_backward,
        stays_unsharded=stays_unsharded,
        how=how,
        we_do=raises(RuntimeError, "has been modified by an inplace operation"),
    )


@clause("distributed.fsdp.fully_shard.stepped_before_backward")
@pytest.mark.parametrize("options", [{"only": "inner.bias"}, {"cleared": True}], ids=["unread", "nothing"])
@pytest.mark.parametrize("stays_unsharded", [False, True])
def test_step_of_parameters_unread_by_backward_is_allowed(
    plain_twins: PlainTwins, stays_unsharded: bool, options: dict[str, Any]
) -> None:
    plain_twins.agree(
        stepped_before_backward, stays_unsharded=stays_unsharded, how={"foreach": True}, **options
    )


def cleared_in_step(scene: Scene, how: dict[str, bool], cleared: str) -> torch.Tensor:
    """Train units that stay unsharded over three steps. Return the output.

    At the end of each step, a hook clears the gradients of the parameters whose names begin with `cleared`.
    """
    model = blocks().to(scene.rank.device)
    scene.shard_children(model)
    model.set_reshard_after_backward(False)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), 0.01, **how)

    def clear(*_: Any) -> None:
        for name, param in named.items():
            if name.startswith(cleared):
                param.grad = None

    optimizer.register_step_post_hook(clear)
    for number in range(3):
        scene.mean(
            lambda rank, number=number: model(batch_of(scene, number, rank)).square().mean()
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(batch_of(scene, 0)).detach()


@clause("distributed.fsdp.fully_shard.unsharded_over_a_step")
@pytest.mark.deviation("fully_shard.unsharded_over_a_step")
@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("cleared", ["", "1."], ids=["all", "one unit"])
@pytest.mark.world_sizes(fewest=2)
def test_step_that_clears_gradients_is_seen(
    plain_twins: PlainTwins, how: dict[str, bool], cleared: str
) -> None:
    """torch's units that stay unsharded compute with the weights from before the step."""
    plain_twins.deviate_to_unsharded(cleared_in_step, how=how, cleared=cleared)


def cast_between(scene: Scene, stays_unsharded: bool) -> None:
    """Run a backward and a forward after the model was cast between forward and backward."""
    model = blocks()
    scene.shard_children(model, reshard_after_forward=not stays_unsharded)
    batch = batch_of(scene, 0)
    loss = model(batch).sum()
    model.float()
    loss.backward()
    model(batch.float())


@clause("distributed.fsdp.fully_shard.cast_between")
@pytest.mark.parametrize("stays_unsharded", [False, True])
def test_cast_between_forward_and_backward_is_an_error(
    plain_twins: PlainTwins, stays_unsharded: bool
) -> None:
    plain_twins.check_both(raises(RuntimeError), cast_between, stays_unsharded=stays_unsharded)


def cast_while_accumulating(scene: Scene, before: torch.dtype, after: torch.dtype) -> list[torch.Tensor]:
    """Cast the model between two backwards, of which only the second one synchronises.

    Return the full gradients in float32, in which half of each is computed.
    """
    model = blocks().to(before)
    scene.shard_children(model)
    for number, dtype in enumerate((before, after)):
        model.to(dtype)
        model.set_requires_gradient_sync(number > 0)
        batch = torch.linspace(-1, 1, 24, dtype=dtype, device=scene.rank.device).view(4, 6)
        scene.mean(lambda rank, batch=batch: model(batch * (1 + rank)).square().sum()).backward()
    return [full_value(parameter.grad).float().cpu() for parameter in model.parameters()]


@clause("distributed.fsdp.fully_shard.cast_while_accumulating")
@pytest.mark.deviation("fully_shard.cast_while_accumulating")
@pytest.mark.parametrize(
    ("before", "after"), [(torch.float64, torch.float32), (torch.float32, torch.float64)]
)
def test_cast_keeps_unreduced_gradients(
    plain_twins: PlainTwins, before: torch.dtype, after: torch.dtype
) -> None:
    plain_twins.deviate_to_unsharded(
        cast_while_accumulating, torch_does=raises(RuntimeError), before=before, after=after
    )


def moved_nowhere(scene: Scene, move: str, stays_unsharded: bool) -> dict[str, torch.Tensor | None]:
    """Return the gradients of two steps with a move or cast between forward and backward that changes nothing."""
    model = blocks().to(scene.rank.device)
    scene.shard_children(model, reshard_after_forward=not stays_unsharded)
    for number in range(2):
        loss = scene.mean(lambda rank, number=number: model(batch_of(scene, number, rank)).square().sum())
        if move == "unit":
            model[1].to(scene.rank.device)
        else:
            model.to(scene.rank.device if move == "model" else torch.float64)
        loss.backward()
    return full_gradients(model)


@clause("distributed.fsdp.fully_shard.moved_nowhere")
@pytest.mark.parametrize("move", ["model", "unit", "cast"])
@pytest.mark.parametrize("stays_unsharded", [False, True])
def test_move_to_same_place_keeps_gradients(
    plain_twins: PlainTwins, move: str, stays_unsharded: bool
) -> None:
    plain_twins.agree(moved_nowhere, move=move, stays_unsharded=stays_unsharded)
    plain_twins.agree_with_unsharded(moved_nowhere, move=move, stays_unsharded=stays_unsharded)


def replaced(scene: Scene, by: str, trained: bool) -> Any:
    """Return the output or the error of a forward after another parameter replaced a sharded one.

    Args:
        by: `plain` parameter, or a DTensor that is sharded in `columns` or has one row `fewer`.
    """
    model = scene.shard(nn.Linear(4, 4, dtype=torch.float64))
    x = torch.eye(4, dtype=torch.float64, device=scene.rank.device)
    if trained:
        model(x).sum().backward()
    value = torch.ones(3 if by == "fewer" else 4, 4, dtype=torch.float64, device=scene.rank.device)
    if by != "plain":
        placements = [Shard(1 if by == "columns" else 0)]
        value = distribute_tensor(value, model._parameters["weight"].device_mesh, placements)
    model.weight = nn.Parameter(value)
    return tried(lambda: model(x))


@clause("distributed.fsdp.fully_shard.plain_in_its_place")
@pytest.mark.deviation("fully_shard.plain_in_its_place")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("by", ["plain", "columns", "fewer"])
def test_parameter_in_place_of_sharded_one_is_refused(
    plain_twins: PlainTwins, by: str, trained: bool
) -> None:
    def is_named(error: Any) -> bool:
        return all(word in str(error) for word in ("TypeError", "weight", "assign a DTensor"))

    # torch raises an internal error, or computes with the old parameter or with wrong elements.
    computes = trained or by == "fewer"
    plain_twins.deviate(
        replaced,
        torch_does=each(lambda result: ("tensor(" in str(result)) is computes),
        we_do=each(is_named),
        by=by,
        trained=trained,
    )


def removed_or_untied(scene: Scene, how: str, when: str) -> list[Any]:
    """Return the result or error of a forward after a change to the places of a parameter, and after it was undone.

    Args:
        how: `untied` replaces a tied weight at one of its places. The bias is `deleted` or set to `none`.
        when: `before` or `after` the first step, or while the model is `unsharded`.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[1].weight = model[0].weight
    scene.shard(model)
    x = torch.eye(4, dtype=torch.float64, device=scene.rank.device)
    if when == "after":
        model(x).sum().backward()
    elif when == "unsharded":
        model.unshard()  # pyright: ignore[reportCallIssue]
    name = "weight" if how == "untied" else "bias"
    param = getattr(model[1], name)
    if how == "deleted":
        del model[1].bias
    else:
        setattr(model[1], name, nn.Parameter(param.detach() * 2) if how == "untied" else None)
    results = [tried(lambda: model(x).detach())]
    model[1].register_parameter(name, param)
    return [*results, tried(lambda: model(x).detach())]


@clause("distributed.fsdp.fully_shard.removed_or_untied")
@pytest.mark.deviation("fully_shard.removed_or_untied")
@pytest.mark.parametrize("when", ["before", "after", "unsharded"])
@pytest.mark.parametrize("how", ["untied", "deleted", "none"])
def test_removed_or_untied_parameter_is_refused_until_restored(
    plain_twins: PlainTwins, how: str, when: str
) -> None:
    words = ("as 1.weight but not as 0.weight", "replace it at all places")
    if how != "untied":
        words = ("1.bias was removed", "remove or parametrize it before fully_shard")

    def is_refused(results: Any) -> bool:
        error, later = results
        return all(word in str(error) for word in ("TypeError", *words)) and not isinstance(later, str)

    # torch computes with the old parameter, or fails internally.
    plain_twins.deviate(
        removed_or_untied,
        torch_does=each(lambda results: "TypeError" not in str(results[0])),
        we_do=each(is_refused),
        how=how,
        when=when,
    )


def whole_assigned(scene: Scene) -> dict[str, Any]:
    """Return the error of a load that assigns full tensors, and whether the model computes the same after it."""
    model = blocks()
    whole = {name: value + 1 for name, value in model.state_dict().items()}
    scene.shard_children(model)
    before = model(batch_of(scene, 0)).detach()
    raised = tried(lambda: model.load_state_dict(whole, assign=True))
    after = tried(lambda: model(batch_of(scene, 0)).detach())
    return {"raised": raised, "is as before": isinstance(after, torch.Tensor) and torch.equal(before, after)}


@clause("distributed.fsdp.fully_shard.whole_assigned")
@pytest.mark.deviation("fully_shard.whole_assigned")
def test_assignment_of_full_tensors_raises_with_their_names(plain_twins: PlainTwins) -> None:
    def names(value: Any) -> bool:
        raised = str(value["raised"])
        return raised.startswith("RuntimeError") and "0.inner.weight" in raised and value["is as before"]

    plain_twins.deviate(
        whole_assigned,
        torch_does=each(lambda value: str(value["raised"]).startswith("AttributeError")),
        we_do=each(names),
    )


def written(scene: Scene, how: str, only: str = "") -> dict[str, Any]:
    """Return the warnings and the outputs of forwards after parameters were written or cast.

    Args:
        how: `assigned` assigns to `.data`, `copied` copies into `.data`, and `cast` casts the model and back.
        only: name of the one parameter that is assigned. By default all are.
    """
    model = blocks()
    scene.shard_children(model)
    model(batch_of(scene, 0)).sum().backward()
    if how == "cast":
        model.float().double()
    for name, param in model.named_parameters():
        if how == "assigned" and only in ("", name):
            param.data = torch.zeros_like(param)
        elif how == "copied":
            param.data.copy_(torch.zeros_like(param))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [_trained_output(model, batch_of(scene, 0)) for _ in range(4)]
    return {"warned": [str(warning.message) for warning in caught], "outputs": outputs}


def _trained_output(model: Any, batch: torch.Tensor) -> torch.Tensor:
    output = model(batch)
    output.sum().backward()
    return output.detach()


@clause("distributed.fsdp.fully_shard.data_assigned")
@pytest.mark.deviation("fully_shard.data_assigned")
@pytest.mark.parametrize("only", ["", "1.norm.weight", "1.norm.bias", "1.inner.weight", "1.inner.bias"])
def test_assignment_to_data_warns(plain_twins: PlainTwins, only: str) -> None:
    """Each unit warns once."""
    names = [only] if only else ["0.inner.weight", "1.inner.weight", "2.inner.weight"]

    def is_warned(value: Any) -> bool:
        warned = value["warned"]
        return len(warned) == len(names) and all(map(str.__contains__, warned, names))

    plain_twins.deviate(
        written,
        how="assigned",
        only=only,
        torch_does=each(lambda value: not value["warned"]),
        we_do=each(is_warned),
    )


@clause("distributed.fsdp.fully_shard.data_assigned")
@pytest.mark.parametrize("how", ["copied", "cast"])
def test_other_writes_do_not_warn(plain_twins: PlainTwins, how: str) -> None:
    assert not any(outcome.value["warned"] for outcome in plain_twins.agree(written, how=how))


def gradients_by_inputs(scene: Scene, by: str, is_flat: bool, frozen: int = 0) -> dict[str, Any]:
    """Compute gradients by `by`, step, and run a forward. Return the warnings and the number of gradients.

    The first `frozen` blocks are frozen after sharding.
    """
    model = unsharded = blocks()
    if is_flat:
        model = scene.wrap(model, use_orig_params=True)
    else:
        scene.shard_children(model)
    unsharded[:frozen].requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad and param.numel()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(batch_of(scene, 0)).sum()
    if by == "inputs":
        loss.backward(inputs=params)
    elif by == "grad":
        for param, grad in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
            param.grad = grad
    else:
        loss.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        model(batch_of(scene, 1))
    return {
        "warned": [str(warning.message) for warning in caught],
        "grads": sum(param.grad is not None for param in params),
    }


@clause("distributed.fsdp.fully_shard.gradients_by_inputs")
@pytest.mark.deviation("fsdp.gradients_by_inputs")
@pytest.mark.parametrize("by", ["inputs", "grad"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_forward_after_gradients_by_inputs_warns(plain_twins: PlainTwins, by: str, is_flat: bool) -> None:
    def is_warned(value: Any) -> bool:
        return len(value["warned"]) == 1 and "call loss.backward()" in value["warned"][0]

    plain_twins.deviate(
        gradients_by_inputs,
        by=by,
        is_flat=is_flat,
        torch_does=each(lambda value: value == {"warned": [], "grads": 0}),
        we_do=each(is_warned),
    )


@clause("distributed.fsdp.fully_shard.gradients_by_inputs")
@pytest.mark.parametrize("is_flat", [False, True])
def test_forward_after_backward_does_not_warn(plain_twins: PlainTwins, is_flat: bool) -> None:
    for outcome in plain_twins.agree(gradients_by_inputs, by="backward", is_flat=is_flat):
        assert outcome.value["warned"] == []
        assert outcome.value["grads"] > 0


@clause("distributed.fsdp.fully_shard.gradients_by_inputs")
@pytest.mark.world_sizes(fewest=2)
def test_forward_does_not_warn_on_rank_with_frozen_elements_only(plain_twins: PlainTwins) -> None:
    """Rank 0 holds elements of the frozen blocks, so that its parts of the other parameters are empty."""
    outcomes = plain_twins.agree(gradients_by_inputs, by="backward", is_flat=True, frozen=2)
    assert outcomes[0].value == {"warned": [], "grads": 0}
    assert all(outcome.value["warned"] == [] for outcome in outcomes)


def optimizer_made_before_backward(scene: Scene) -> Any:
    """Create an optimizer between a forward and its backward. Return the result or error of its first step."""
    model = scene.shard(blocks())
    loss = model(batch_of(scene, 0)).sum()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss.backward()
    before = values_and_gradients(model)
    return {"step": tried(optimizer.step), "trained": str(values_and_gradients(model)) != str(before)}


@clause("distributed.fsdp.fully_shard.optimizer_made_before")
@pytest.mark.deviation("fsdp.optimizer_made_before")
def test_step_of_unsharded_parameters_is_an_error(plain_twins: PlainTwins) -> None:
    plain_twins.deviate(
        optimizer_made_before_backward,
        torch_does=each(lambda outcome: outcome == {"step": None, "trained": False}),
        we_do=each(lambda outcome: str(outcome["step"]).startswith("RuntimeError: ")),
    )


def optimizer_made_before(scene: Scene, is_replaced: bool) -> Any:
    """Create an optimizer before sharding. Return the result or error of its first step."""
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scene.shard_children(model)
    if is_replaced:
        optimizer.param_groups[0]["params"] = list(model.parameters())
    model(batch_of(scene, 0)).sum().backward()
    return {"step": tried(optimizer.step), "held": values_and_gradients(model)}


@clause("distributed.fsdp.fully_shard.optimizer_made_before")
@pytest.mark.deviation("fsdp.optimizer_made_before")
def test_step_of_optimizer_made_before_sharding_is_an_error(plain_twins: PlainTwins) -> None:
    plain_twins.deviate(
        optimizer_made_before,
        is_replaced=False,
        torch_does=each(lambda outcome: outcome["step"] is None),
        we_do=each(lambda outcome: str(outcome["step"]).startswith("RuntimeError: ")),
    )


@clause("distributed.fsdp.fully_shard.optimizer_made_before")
def test_optimizer_made_before_sharding_steps_parameters_put_into_it(plain_twins: PlainTwins) -> None:
    plain_twins.agree(optimizer_made_before, is_replaced=True)


def stepped_with_unsharded_states(scene: Scene) -> None:
    """Step with the states of an optimizer of the unsharded model."""
    model = blocks()
    earlier = torch.optim.AdamW(model.parameters(), 0.1)
    model(batch_of(scene, 0).cpu()).sum().backward()
    earlier.step()
    scene.shard_children(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    optimizer.load_state_dict(earlier.state_dict())
    model(batch_of(scene, 0)).sum().backward()
    optimizer.step()


@clause("distributed.fsdp.fully_shard.unsharded_optimizer_states")
def test_step_with_unsharded_states_is_an_error(plain_twins: PlainTwins) -> None:
    plain_twins.check_both(raises(RuntimeError), stepped_with_unsharded_states)
