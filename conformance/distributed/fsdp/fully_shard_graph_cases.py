"""Cases of fully_shard: changes between a forward and its backward, forwards without a backward, and gradient hooks."""

from __future__ import annotations

import contextlib
import gc
import warnings
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fully_shard_beside_cases import ResidualBlock, batch_of, blocks
from conformance.distributed.fsdp.fully_shard_cases import held, layout_of, registered
from conformance.distributed.fsdp.fully_shard_construct_cases import Site
from conformance.distributed.fsdp.lab import tried


def cast_between(site: Site, stays_unsharded: bool) -> dict[str, Any]:
    """Return the error of a backward after a cast, and the dtype or the error of the next forward."""
    model = blocks()
    site.shard_children(model, reshard_after_forward=not stays_unsharded)
    batch = batch_of(site, 0)
    loss = model(batch).sum()
    model.float()
    return {
        "backward": str(tried(loss.backward)),
        "next forward": tried(lambda: str(model(batch.float()).dtype)),
    }


def plain_in_its_place(site: Site, trained: bool) -> Any:
    """Return the output or the error of a forward after a plain parameter replaced a sharded one."""
    model = site.shard(ResidualBlock().double())
    if trained:
        model(batch_of(site, 0)).sum().backward()
    model.inner.bias = nn.Parameter(torch.ones(6, dtype=torch.float64, device=site.rank.device))
    return tried(lambda: model(batch_of(site, 1)))


def whole_assigned(site: Site) -> dict[str, Any]:
    """Return the error of a load that assigns full tensors, and whether the model computes the same after it."""
    model = blocks()
    whole = {name: value + 1 for name, value in model.state_dict().items()}
    site.shard_children(model)
    before = model(batch_of(site, 0)).detach()
    raised = tried(lambda: model.load_state_dict(whole, assign=True))
    after = tried(lambda: model(batch_of(site, 0)).detach())
    return {"raised": raised, "is as before": isinstance(after, torch.Tensor) and torch.equal(before, after)}


def no_sync(site: Site) -> list[bool]:
    """Return, for each backward, whether `no_sync` leaves the same gradients as `set_requires_gradient_sync`."""
    by_context, by_settings = (_gradients_unsynchronised(site, by_context) for by_context in (True, False))
    return [
        before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        for before, after in zip(by_settings, by_context, strict=True)
    ]


def _gradients_unsynchronised(site: Site, by_context: bool) -> list[dict[str, torch.Tensor]]:
    """Return gradients after each backward. The first two do not synchronise, and the last unit never does."""
    model = blocks()
    site.shard_children(model)
    model[-1].set_requires_gradient_sync(False)
    gradients: list[dict[str, torch.Tensor]] = []
    for number in range(4):
        is_apart = number < 2
        for unit in () if by_context else (*model[:-1], model):
            unit.set_requires_gradient_sync(not is_apart, recurse=False)
        with model.no_sync() if by_context and is_apart else contextlib.nullcontext():
            model(batch_of(site, number)).sum().backward()
        named = model.named_parameters()
        gradients.append({name: param.grad.full_tensor() for name, param in named if param.grad is not None})
    return gradients


def data_assigned(site: Site, how: str, only: str = "") -> dict[str, Any]:
    """Return the warnings and the outputs of forwards after parameters were written or cast.

    Args:
        only: name of the one parameter that is written. By default all are.
    """
    model = blocks()
    site.shard_children(model)
    model(batch_of(site, 0)).sum().backward()
    if how == "cast":
        model.float().double()
    for name, param in model.named_parameters():
        if how == "cast" or only not in ("", name):
            continue
        if how == "assigned":
            param.data = torch.zeros_like(param)
        else:
            param.data.copy_(torch.zeros_like(param))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [_trained_output(model, batch_of(site, 0)) for _ in range(4)]
    return {"warned": [str(warning.message) for warning in caught], "outputs": outputs}


def _trained_output(model: Any, batch: torch.Tensor) -> torch.Tensor:
    output = model(batch)
    output.sum().backward()
    return output.detach()


def gradients_by_inputs(site: Site, by: str, is_flat: bool) -> dict[str, Any]:
    """Compute gradients by `by`, step, and run a forward. Return the warnings and the number of gradients."""
    model = blocks()
    if is_flat:
        wrap = site.library.distributed.fsdp.FullyShardedDataParallel
        model = wrap(model, device_id=site.rank.device, use_orig_params=True)
    else:
        site.shard_children(model)
    params = [param for param in model.parameters() if param.requires_grad and param.numel()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(batch_of(site, 0)).sum()
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
        model(batch_of(site, 1))
    return {
        "warned": [str(warning.message) for warning in caught],
        "grads": sum(param.grad is not None for param in params),
    }


def optimizer_made_before(site: Site, is_replaced: bool) -> Any:
    """Create an optimizer before sharding. Return the result or error of its first step."""
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    site.shard_children(model)
    if is_replaced:
        optimizer.param_groups[0]["params"] = list(model.parameters())
    model(batch_of(site, 0)).sum().backward()
    return {"step": tried(optimizer.step), "held": held(model)}


def stepped_with_unsharded_states(site: Site) -> dict[str, Any]:
    """Step with the states of an optimizer of the unsharded model. Return the error, and whether anything changed."""
    model = blocks()
    earlier = torch.optim.AdamW(model.parameters(), 0.1)
    model(batch_of(site, 0).cpu()).sum().backward()
    earlier.step()
    site.shard_children(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    optimizer.load_state_dict(earlier.state_dict())
    model(batch_of(site, 0)).sum().backward()
    before = [param.to_local().clone() for param in model.parameters()]
    step = tried(optimizer.step)
    pairs = zip(before, model.parameters(), strict=True)
    are_same = all(torch.equal(shard, param.to_local()) for shard, param in pairs)
    counts = {float(state["step"]) for state in optimizer.state.values()}
    return {"step": step, "is changed": counts != {1.0} or not are_same}


def stepped_in_backward(site: Site, syncs_first: bool) -> dict[str, Any]:
    """Step each parameter in its own hook after accumulation. Return the order of the hooks and the final parameters.

    Each event also has the number of gradients that existed at that time.
    """
    model = blocks()
    site.shard_children(model)
    events: list[Any] = []
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.AdamW([parameter], 0.1)

        def step(
            tensor: torch.Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer
        ) -> None:
            events.append((name, sum(param.grad is not None for param in model.parameters())))
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        model.set_requires_gradient_sync(number > 0 or syncs_first)
        model(batch_of(site, number)).sum().backward()
    return {"events": events, **held(model)}


def hooks_on_gradients(site: Site, before: bool) -> dict[str, Any]:
    """Return which hooks ran, and whether hooks that triple gradients make them three times as large."""
    plain = _accumulated(site, blocks())
    model = blocks()
    events: list[str] = []
    if before:
        _register_hooks(model, events)
    hooked = _accumulated(site, model, None if before else events)
    pairs = zip(plain, hooked, strict=True)
    return {
        "events": events,
        "layouts": registered(model),
        "are tripled": all(torch.allclose(3 * grad, tripled) for grad, tripled in pairs),
    }


def _accumulated(site: Site, model: Any, events: list[str] | None = None) -> list[torch.Tensor]:
    site.shard_children(model)
    if events is not None:
        _register_hooks(model, events)
    for number in range(3):
        model.set_requires_gradient_sync(number > 0)
        model(batch_of(site, number)).sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def _register_hooks(model: nn.Module, events: list[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: events.append(f"{name} {layout_of(grad)}"))
        parameter.register_hook(lambda grad: grad * 3)
        parameter.register_hook(lambda grad: grad * 5).remove()
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))


class _WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.auxiliary, self.head = blocks()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.head(hidden), self.auxiliary(hidden)


class _TrainsInside(ResidualBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(x.detach()).sum().backward()
        raise ValueError("the user's own")


def raised_behind_an_inner_backward(site: Site) -> list[str]:
    """Return the errors of two forwards that run a backward of an inner unit and then raise.

    The inputs need gradients.
    """
    model = _TrainsInside().double()
    for module in (model.norm, model):
        site.shard(module)
    batch = batch_of(site, 0).requires_grad_()
    return [tried(lambda: model(batch)) for _ in range(2)]


def kept_by_one_rank(site: Site) -> dict[str, Any]:
    """Train while one rank keeps an output that is in no loss, for example to log it. The other ranks drop it."""
    model = _WithAuxiliary()
    site.shard_children(model)
    logged = []
    for number in range(3):
        output, auxiliary = model(batch_of(site, number))
        if site.rank.rank == 0:
            logged.append(auxiliary)
        del auxiliary
        output.sum().backward()
    return held(model)


def without_a_backward(site: Site) -> dict[str, bool]:
    """Return whether forwards with a graph but without a backward leave hooks on the input, or objects in memory."""
    model = blocks()
    site.shard_children(model)
    batch = batch_of(site, 0).requires_grad_()

    def left(forwards: int) -> tuple[int, int]:
        for _ in range(forwards):
            model(batch)
        gc.collect()
        return len(batch._backward_hooks or ()), len(gc.get_objects())

    hooks, objects = left(80)  # enough forwards to fill any history of recent steps
    more_hooks, more_objects = left(50)
    return {"hooks": more_hooks > hooks, "objects": more_objects >= objects + 50}


def stepped_before_backward(
    site: Site, stays_unsharded: bool, how: dict[str, bool], only: str = "", cleared: bool = False
) -> list[torch.Tensor]:
    """Step between a forward and its backward. Return the gradients.

    The optimizer only has the parameters whose names end in `only`.
    """
    model = blocks()
    site.shard_children(model, reshard_after_forward=not stays_unsharded)
    stepped = [parameter for name, parameter in model.named_parameters() if name.endswith(only)]
    optimizer = torch.optim.AdamW(stepped, 0.1, **how)
    model(batch_of(site, 0)).sum().backward()
    loss = model(batch_of(site, 1)).sum()
    if cleared:  # a step without gradients writes nothing
        optimizer.zero_grad()
    optimizer.step()
    loss.backward()
    return [parameter.grad.to_local() for parameter in model.parameters()]
