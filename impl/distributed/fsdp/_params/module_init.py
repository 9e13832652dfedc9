"""Getting a module ready to be sharded: on which device it computes, what is still to be made there, and by whom."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from impl.distributed.fsdp._comm.desync.collective_order import order_checker_of
from impl.distributed.fsdp._comm.group_collectives import GroupMethod
from impl.distributed.fsdp._params.managed import Ignored, clean_name, is_managed
from impl.distributed.fsdp._params.param_registration import ManagedParam

_FIRST_RANK = 0  # of a group
_broadcast = GroupMethod("broadcast")
# What was made of a parameter on the meta device: its other places, which may lie in other units, get the same.
_made: Any = WeakIdKeyDictionary()  # by identity, as weak dictionaries compare tensors by their values


def managed_below(root: nn.Module, ignored: Ignored) -> Iterator[nn.Parameter]:
    return (p for p in root.parameters() if p not in ignored.parameters and not is_managed(p))


def device_type_for(
    module: nn.Module, ignored: Ignored, device_id: int | torch.device | None
) -> torch.device:
    """The kind of device the unit computes on: what it was told, where it is, or the accelerator if there is one.

    Raises:
        RuntimeError: parameters lie on two kinds of accelerators.
    """
    if device_id is not None:
        return torch.device(device_id)
    found: torch.device | None = None
    for parameter in managed_below(module, ignored):
        if parameter.device.type in ("cpu", "meta"):
            continue
        if found is not None and found.type != parameter.device.type:
            raise RuntimeError(
                "FSDP does not support modules with different device types but got params on "
                f"{found.type} and {parameter.device.type}"
            )
        found = found or parameter.device
    return found or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def materialize_and_move(  # noqa: PLR0913  what torch's constructor is told
    module: nn.Module,
    ignored: Ignored,
    device_id: int | torch.device | None,
    device_type: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
    rank: int,
    wrapper: type[nn.Module],
) -> torch.device:
    """Make and move what is not there yet; where the unit computes.

    Raises:
        RuntimeError: parameters lie on several devices, and `device_id` does not say which is meant.
        ValueError: `param_init_fn` cannot be called, or `device_id` is not where the parameters lie.
    """
    _check_on_one_device(module, ignored, device_id)
    requested = _indexed(device_id, device_type, rank)
    _materialize(module, ignored, requested or _current(device_type), param_init_fn, wrapper)
    if requested is not None:
        _move(module, ignored, requested, wrapper)
    first = next(managed_below(module, ignored), None)
    if requested is None and first is not None and first.device.type == "cpu" != device_type.type:
        warnings.warn(
            "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization run on CPU, which may "
            "be slower than on GPU. We recommend passing in the `device_id` argument for FSDP to move `module` to GPU "
            "for the sharding initialization. `module` must also be on GPU device to work with the "
            "`sync_module_states=True` flag since that requires GPU communication.",
            stacklevel=3,
        )
    found = first.device if first is not None and first.device.type != "cpu" else _current(device_type)
    if requested is not None and found != requested:
        raise ValueError(
            f"Inconsistent compute device and `device_id` on rank {rank}: {found} vs {requested}"
        )
    return found


def _check_on_one_device(module: nn.Module, ignored: Ignored, device_id: int | torch.device | None) -> None:
    devices = {p.device for p in managed_below(module, ignored)}
    if len(devices) == 2 and torch.device("cpu") in devices:
        if device_id is None:
            raise RuntimeError(
                "To support a module with both CPU and GPU params, please pass in device_id argument."
            )
    elif len(devices) > 1:
        raise RuntimeError(f"FSDP only supports single device modules but got params on {devices}")


def _indexed(
    device_id: int | torch.device | None, device_type: torch.device, rank: int
) -> torch.device | None:
    if device_id is None:
        return None
    device = torch.device(device_id)
    if device.type == "cpu" or str(device) != device.type:
        return device
    current = _current(device_type)
    warnings.warn(
        f"FSDP got the argument `device_id` {device_id} on rank {rank}, which does not have an explicit index. FSDP "
        f"will use the current device {current.index}. If this is incorrect, please explicitly call "
        f"`torch.{device.type}.set_device()` before FSDP initialization or pass in the explicit device index as the "
        "`device_id` argument.",
        stacklevel=4,
    )
    return current


def _current(device_type: torch.device) -> torch.device:
    if device_type.type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type.type, torch.accelerator.current_device_index())


def _materialize(
    module: nn.Module,
    ignored: Ignored,
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
    wrapper: type[nn.Module],
) -> None:
    """Give memory and values to a module that was made on the meta device."""
    own = list(_modules_of_unit(module, ignored, wrapper))
    buffers = (
        b for one in module.modules() if one not in ignored.modules for b in one.buffers(recurse=False)
    )
    if not any(t.is_meta for t in itertools.chain(managed_below(module, ignored), buffers)):
        return
    if param_init_fn is not None:
        if not callable(param_init_fn):
            raise ValueError(f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}")
        for one in own:
            with _kept_tied(one):
                param_init_fn(one)
        return
    for one in own:
        if not any(True for _ in itertools.chain(one.parameters(recurse=False), one.buffers(recurse=False))):
            continue
        try:
            with torch.no_grad():
                with _kept_tied(one):
                    one.to_empty(device=device, recurse=False)
                reset: Any = one.reset_parameters
                reset()
        except BaseException as error:
            warnings.warn(
                f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure that "
                f"your module oftype {type(one)} implements a `reset_parameters()` method.",
                stacklevel=4,
            )
            raise


@contextlib.contextmanager
def _kept_tied(module: nn.Module) -> Generator[None]:
    """What the block makes of a parameter in this module is what was made of it at another place, if anything was."""
    before = [
        (one, name, parameter)
        for one in module.modules()
        for name, parameter in one._parameters.items()
        if parameter is not None and not is_managed(parameter) and parameter.is_meta
    ]
    yield
    for one, name, old in before:
        new = one._parameters.get(name)
        if new is not None and new is not old:
            one._parameters[name] = _made.setdefault(old, new)


def made_of(parameters: Iterable[nn.Parameter]) -> frozenset[nn.Parameter]:
    """The same parameters, as they are once they are made."""
    return frozenset(_made.get(parameter, parameter) for parameter in parameters)


def _modules_of_unit(module: nn.Module, ignored: Ignored, wrapper: type[nn.Module]) -> Iterator[nn.Module]:
    """Breadth first, without what inner wrappers hold and what is ignored."""
    queue, seen = deque([module]), {module}
    while queue:
        one = queue.popleft()
        yield one
        for child in one.children():
            if child not in seen and not isinstance(child, wrapper) and child not in ignored.modules:
                seen.add(child)
                queue.append(child)


@torch.no_grad()
def _move(module: nn.Module, ignored: Ignored, device: torch.device, wrapper: type[nn.Module]) -> None:
    """Move what lies on the CPU; parameters that lie on another accelerator are left to be complained about."""
    ignored_buffers = {b for one in ignored.modules for b in one.buffers()}
    cpu = torch.device("cpu")
    for one in _modules_of_unit(module, Ignored(frozenset(), frozenset(), frozenset()), wrapper):
        for parameter in one.parameters(recurse=False):
            if parameter.device == cpu and parameter not in ignored.parameters:
                parameter.data = parameter.to(device)
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.to(device)
        for buffer in one.buffers(recurse=False):
            if buffer.device == cpu and buffer not in ignored_buffers:
                buffer.data = buffer.to(device)


# Set on a buffer that an inner wrapper has broadcast. torch's name.
_SYNCED = "_fsdp_synced"


def broadcast_states(
    module: nn.Module, managed: Sequence[ManagedParam], groups: Iterable[dist.ProcessGroup]
) -> None:
    """Have every rank hold what the first rank of the groups holds.

    Args:
        groups: one after the other; what the first leaves on its ranks the next one spreads further.

    Raises:
        RuntimeError: the ranks wrap other modules, or in another order.
    Collectives: broadcasts over each group, one for each tensor; all ranks must call it.
    """
    states: list[tuple[str, Tensor]] = [(one.info.name, one.parameter.detach()) for one in managed]
    for name, buffer in module.named_buffers():
        if not getattr(buffer, _SYNCED, False):
            setattr(buffer, _SYNCED, True)
            states.append((clean_name(name), buffer.detach()))
    kind = type(module).__name__
    for group in groups:
        for name, state in states if group.size() > 1 else ():
            sent = state.contiguous()
            entry = f"broadcast '{kind}.{name}' of shape {tuple(state.shape)}"
            order_checker_of(group).run(entry, _broadcast, group, sent, _FIRST_RANK)
            if sent is not state:
                state.copy_(sent)
