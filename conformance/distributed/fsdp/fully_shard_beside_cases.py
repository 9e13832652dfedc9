"""Cases of fully_shard with other features: compiled blocks, transforms, replicas, chunked losses, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.distributed.tensor import Shard

from conformance import simulator
from conformance.distributed.fsdp.fully_shard_calls import ReportingAllGather, ReportingReduceScatter
from conformance.distributed.fsdp.fully_shard_cases import described, held, registered
from conformance.distributed.fsdp.fully_shard_construct_cases import Site
from conformance.distributed.fsdp.lab import tried

_HELPERS = "distributed.checkpoint.state_dict"


class ResidualBlock(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x)).tanh()


def blocks(number: int = 3) -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(4)
        return nn.Sequential(*(ResidualBlock() for _ in range(number))).double()


def batch_of(site: Site, number: int) -> torch.Tensor:
    batch = torch.linspace(-1, 1, 24, dtype=torch.float64, device=site.rank.device)
    return batch.view(4, 6) * (1 + site.rank.rank + number)


def hooked(site: Site, dtype: torch.dtype, sums_alone: bool, own: bool) -> dict[str, Any]:
    """Return what a hook on reduced gradients gets, and the gradient after the hook clamped it.

    If `own`, a user-defined reduce-scatter also records its inputs.
    """
    model = nn.Linear(3, 2, bias=False).to(site.rank.device, dtype)
    nn.init.ones_(model.weight)
    sharded = site.shard(model)
    inputs: list[Any] = []

    def cut(reduced: torch.Tensor) -> None:
        inputs.append(reduced.cpu())
        reduced.clamp_(max=2.0)

    sharded.set_all_reduce_hook(cut)
    if own:
        sharded.set_custom_reduce_scatter(ReportingReduceScatter(inputs.append))
    if sums_alone:
        sharded.set_force_sum_reduction_for_comms(True)
    batch = torch.arange(1.0, 4.0, device=site.rank.device, dtype=dtype) + site.rank.rank
    sharded(batch).sum().backward()
    return {"given": inputs, "gradient": sharded.weight.grad.full_tensor().cpu()}


def without_accelerator(site: Site, feature: str) -> torch.Tensor:
    """Use features on the CPU that torch has only on accelerators: pinned offloading, or a divide factor of three."""
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    policy = {"offload_policy": site.fsdp.CPUOffloadPolicy()} if feature == "pinned" else {}
    sharded = site.shard(model, **policy)
    if feature == "divided":
        sharded.set_gradient_divide_factor(3.0)
    sharded(torch.arange(1.0, 4.0)).sum().backward()
    return sharded.weight.grad.full_tensor()


def _offloaded(site: Site, **policy: Any) -> Any:
    model = blocks()
    site.shard_children(model, offload_policy=site.fsdp.CPUOffloadPolicy(**policy))
    return model


def pinned(site: Site, pins: bool) -> dict[str, Any]:
    """Return whether shards and gradients are pinned, and how often the host waits during a forward and a backward."""
    model = _offloaded(site, pin_memory=pins)
    is_pinned = {"sharded": _are_pinned(model.parameters())}
    loaded = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(loaded, assign=True)
    batch, waits = batch_of(site, 0).requires_grad_(), []

    def note_waits(*_: Any) -> None:
        if site.rank.device.type == simulator.NAME:
            waits.append(sum(wait.count for wait in simulator.take_host_waits()))

    model[-1].register_forward_hook(note_waits)
    batch.register_hook(note_waits)
    for _ in range(2):
        loss = model(batch).square().sum()
        note_waits()
        loss.backward()
        is_pinned["gradients"] = _are_pinned(parameter.grad for parameter in model.parameters())
        model.zero_grad()
        note_waits()
    is_pinned["loaded"] = _are_pinned(model.parameters())
    model.float()
    is_pinned["cast"] = _are_pinned(model.parameters())
    return is_pinned | ({"waits": [waits[at] for at in (-4, -2)]} if pins and waits else {})


def _are_pinned(tensors: Iterable[Any]) -> list[bool]:
    return [tensor.to_local().is_pinned() for tensor in tensors]


def changed_behind(site: Site) -> bool:
    """Return whether a forward's output is unaffected by zeroing the offloaded parameters right after it."""
    model, batch = _offloaded(site), batch_of(site, 0)
    with torch.no_grad():
        expected = model(batch).cpu()
        torch.accelerator.synchronize()
        output = model(batch)
        for parameter in model.parameters():
            parameter.to_local().zero_()
    return torch.equal(output.cpu(), expected)


class _Partly(nn.Module):
    """Module with a parameter that has no elements, and a weight if `has_weight`."""

    def __init__(self, shape: tuple[int, ...], has_weight: bool) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(shape))
        self.weight = nn.Parameter(torch.ones(4, 4)) if has_weight else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.weight is None else x @ self.weight) + self.empty.sum()


def without_elements(site: Site, shape: tuple[int, ...], dim: int, has_weight: bool) -> list[Any]:
    """Train a unit with an empty parameter and its root for two steps.

    Return the shapes of its gradients and the parameters.
    """
    model: Any = nn.Sequential(_Partly(shape, has_weight), nn.Linear(4, 1, bias=False)).to(site.rank.device)
    nn.init.ones_(model[1].weight)
    site.shard(model[0], shard_placement_fn=lambda parameter: Shard(dim))
    site.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    shapes = []
    for _ in range(2):
        model(torch.ones(1, 4, device=site.rank.device)).sum().backward()
        shapes.append(tuple(model[0].empty.grad.full_tensor().shape))
        optimizer.step()
        optimizer.zero_grad()
    return [shapes, *(parameter.detach().full_tensor().cpu() for parameter in model.parameters())]


def without_elements_by_hand(shape: tuple[int, ...], has_weight: bool) -> list[Any]:
    model = nn.Sequential(_Partly(shape, has_weight), nn.Linear(4, 1, bias=False))
    nn.init.ones_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return [[shape] * 2, *(parameter.detach() for parameter in model.parameters())]


def gathered_for_no_backward(site: Site) -> torch.Tensor:
    """Zero the first weights after a backward that ended just before their unit.

    Return the output of the next forward.
    """
    model, between = blocks(), []
    site.shard_children(model)
    first = list(model[0].parameters())
    model.set_reshard_after_backward(False)
    model[2].register_forward_pre_hook(lambda module, args: between.append(*args))
    torch.autograd.grad(model(batch_of(site, 0)).sum(), between)
    with torch.no_grad():
        for parameter in first:
            parameter.zero_()
        return model(batch_of(site, 0))


def kept_for_backward(site: Site, rows: int) -> dict[str, Any]:
    """Return descriptions of a parameter with `rows` rows after forwards that reshard it to groups of two ranks."""
    layer: Any = nn.Linear(64, rows, bias=False).to(site.rank.device)
    with torch.no_grad():
        layer.weight.copy_(1 + torch.arange(float(rows))[:, None].expand(rows, 64))
    model: Any = nn.Sequential(layer, nn.Linear(rows, 1).to(site.rank.device))
    nn.init.ones_(model[1].weight)
    site.shard(layer, reshard_after_forward=2)
    site.shard(model)
    shown = []
    for _ in range(4):
        _spoil_memory(4 * -(-rows // 4) * 64, site.rank.device)
        loss = model(torch.ones(2, 64, device=site.rank.device)).sum()
        shown.append(described(layer.weight))
        loss.backward()
    return {"shown": shown, "gradient": described(layer.weight.grad)}


def _spoil_memory(numel: int, device: torch.device) -> None:
    """Fill memory with a large value and free it, so that new tensors of `numel` elements contain that value."""
    used = [torch.full((numel,), 1e30, device=device) for _ in range(64)]
    del used


class _KeepingAllGather(ReportingAllGather):
    """All-gather that reports a copy of its input."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(size, 1e30, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self._report([input_tensor.clone()])
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def gathered_by_own(site: Site) -> list[Any]:
    """Return the output, and the inputs of a user-defined all-gather.

    The last rank has fewer rows of the parameters.
    """
    layer: Any = nn.Linear(4, 5).to(site.rank.device)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    inputs: list[Any] = []
    site.shard(layer).set_custom_all_gather(_KeepingAllGather(inputs.extend))
    return [layer(torch.ones(1, 4, device=site.rank.device)).detach(), *inputs]


def compiled(site: Site, how: str) -> dict[str, Any]:
    """Train with blocks that are compiled before they are sharded, in place or by a compiled wrapper."""
    torch._dynamo.reset()
    model = blocks()
    for name, block in list(model.named_children()):
        if how == "in place":
            block.compile(backend="aot_eager")
        else:
            block = torch.compile(block, backend="aot_eager", fullgraph=True)  # noqa: PLW2901
            model.register_module(name, block)
        site.shard(block)
    site.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number in range(3):
        loss = model(batch_of(site, number)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "held": held(model)}


def transformed(site: Site, how: str) -> dict[str, Any]:
    """Return the result of a torch.func transform of a model that was never called before, and of a later backward."""
    model = blocks(2)
    site.shard_children(model)
    batch = batch_of(site, 0)
    with warnings.catch_warnings(action="ignore"):  # torch's own warning at the first use in a process
        torch.func.jvp(torch.sin, (batch,), (batch,))
    if how == "vjp":
        result = torch.func.vjp(model, batch)[1](torch.ones_like(batch))[0]
    elif how == "jvp":
        result = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))[1]
    else:
        result = torch.func.grad(lambda inputs: model(inputs).square().sum())(batch)
    model(batch).sum().backward()
    return {"made": result.detach(), "held": held(model)}


class _Headed(nn.Module):
    """Model whose forward leaves the head to the loss function."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = blocks(2), nn.LayerNorm(6).double(), nn.Linear(6, 6).double()
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6))
            self.head.bias.fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def _headed(site: Site) -> Any:
    model = _Headed()
    for block in model.body:
        site.shard(block)
    site.shard([model.norm, model.head])
    return site.shard(model)


def evaluated_again(site: Site) -> torch.Tensor:
    """Evaluate with inputs on the CPU, after an evaluation that called the head separately."""
    model = _headed(site)
    with torch.no_grad():
        model.head(model(batch_of(site, 0)))
        return model(batch_of(site, 1).cpu()).cpu()


def in_chunks(site: Site, keeps: bool) -> dict[str, Any]:
    """Train with a chunked loss: after a forward, the head runs forward and backward for two rows at a time.

    An evaluation of model and head comes first.

    Args:
        keeps: whether the head is unsharded once for all chunks and reduces its gradients with the last chunk.
    """
    model = _headed(site)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result: dict[str, Any] = {"losses": [], "held": []}
    with torch.no_grad():
        result["evaluated"] = model.head(model(batch_of(site, 9)))
    for number in range(2):
        hidden = model(batch_of(site, number))
        chunks = [chunk.requires_grad_() for chunk in hidden.detach().split(2)]
        if keeps:
            model.head.set_reshard_after_forward(False)
            model.head.set_reshard_after_backward(False)
            model.head.unshard()
        for index, chunk in enumerate(chunks):
            if keeps:
                model.head.set_requires_gradient_sync(index == len(chunks) - 1, recurse=False)
            loss = model.head(chunk).square().sum()
            loss.backward()
            result["losses"].append(loss.detach())
        if keeps:
            model.head.set_reshard_after_forward(True)
            model.head.set_reshard_after_backward(True)
            model.head.reshard()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))
        result["held"].append(held(model))
        optimizer.step()
        optimizer.zero_grad()
    return result


def replicated(site: Site) -> dict[str, Any]:
    """Train with one part sharded and the model around it replicated.

    Also return the error of replicating that part.
    """
    first = site.shard(site.model.body.parts[0], reshard_after_forward=True)
    refused = tried(lambda: replicate(first))
    replicate(site.model.to(site.rank.device))
    return {"refused": refused.partition(" but ")[0], **site.train(), "registered": registered(site.model)}


def full_states(site: Site, offloads: bool, flat: bool) -> dict[str, Any]:
    """Return full state dicts by the library's own helpers, or by torch's if it has none.

    Some parameters are sharded by rows, unevenly, and others by columns.

    Args:
        offloads: whether only the first rank keeps the states, on the CPU.
        flat: whether the optimizer's state is one flat dictionary.
    """
    from_library = site.library.provides(f"{_HELPERS}.get_state_dict")
    helpers: Any = site.library.find(_HELPERS) if from_library else checkpoints
    model = blocks(2)
    model.append(nn.Linear(6, 5).double())
    model[-1].register_buffer("seen", torch.arange(3))
    site.shard(model[0], shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    site.shard(model[1], mesh=site.rank.mesh(1, site.rank.world_size, names=("copies", "parts")))
    site.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(batch_of(site, 0)).square().mean().backward()
    optimizer.step()
    options = checkpoints.StateDictOptions(
        full_state_dict=True, cpu_offload=offloads, flatten_optimizer_state_dict=flat
    )
    both = helpers.get_state_dict(model, optimizer, options=options)
    return {
        "model": _described(helpers.get_model_state_dict(model, options=options)),
        "optimizer": _described(helpers.get_optimizer_state_dict(model, optimizer, options=options)),
        "both": [_described(state) for state in both],
        "held": held(model),
    }


def _described(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _described(value) for name, value in state.items()}
    return [_described(value) for value in state] if isinstance(state, list) else described(state)


def checkpointed(site: Site, whole: bool) -> dict[str, Any]:
    """Save with torch's helpers, train one step, and load into the same model and optimizer again."""
    model = blocks()
    for block in model:
        site.shard(block)
    site.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    options = checkpoints.StateDictOptions(full_state_dict=whole)

    def step(number: int) -> torch.Tensor:
        loss = model(batch_of(site, number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(0)
    model_state = checkpoints.get_model_state_dict(model, options=options)
    optimizer_state = checkpoints.get_optimizer_state_dict(model, optimizer, options=options)
    saved = {name: described(value) for name, value in model_state.items()}
    states = {
        f"{name}.{key}": described(value)
        for name, state in optimizer_state["state"].items()
        for key, value in state.items()
    }
    model_state = {name: value.clone() for name, value in model_state.items()}
    losses = [step(1)]
    checkpoints.set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    missing = checkpoints.set_model_state_dict(model, model_state, options=options)
    losses.append(step(1))
    dist.barrier()
    return {
        "saved": saved,
        "states": states,
        "losses": losses,
        "missing": str(missing),
        "held": held(model),
    }
