"""Preparation of a module for sharding: its compute device, materialization, and broadcast of its states."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from impl.distributed.fsdp._comm.desync.collective_order import order_checker_of
from impl.distributed.fsdp._comm.group_collectives import GroupMethod
from impl.distributed.fsdp._params.autograd import share_hooks
from impl.distributed.fsdp._params.managed import Ignored, clean_name, is_managed
from impl.distributed.fsdp._params.param_registration import ManagedParam, note_replaced

_FIRST_RANK = 0  # rank within the group
_broadcast = GroupMethod("broadcast")
# Materialized parameters by the meta parameter that they replace. Other modules that share it, also in other units,
# get the same parameter. Keyed by identity, because weak dictionaries compare tensors by values.
_materialized: Any = WeakIdKeyDictionary()


def managed_below(root: nn.Module, ignored: Ignored) -> Iterator[nn.Parameter]:
    return (p for p in root.parameters() if p not in ignored.parameters and not is_managed(p))


def _buffers_below(root: nn.Module, ignored: Ignored) -> Iterator[Tensor]:
    modules = (module for module in root.modules() if module not in ignored.modules)
    return (buffer for module in modules for buffer in _own_tensors(module._buffers))


def _own_tensors(*named: Mapping[str, Tensor | None]) -> Iterator[Tensor]:
    """Yield a module's own parameters or buffers, also repeated ones, unlike `parameters(recurse=False)`."""
    return (tensor for tensors in named for tensor in tensors.values() if tensor is not None)


def device_type_for(
    module: nn.Module, ignored: Ignored, device_id: int | torch.device | None
) -> torch.device:
    """Return the device type that the unit computes on: `device_id`, the parameters' device, or the accelerator.

    Raises:
        RuntimeError: parameters are on two types of accelerators.
    """
    if device_id is not None:
        return torch.device(device_id)
    device: torch.device | None = None
    for parameter in managed_below(module, ignored):
        if parameter.device.type in ("cpu", "meta"):
            continue
        if device is not None and device.type != parameter.device.type:
            raise RuntimeError(
                "FSDP does not support modules with different device types but got params on "
                f"{device.type} and {parameter.device.type}"
            )
        device = device or parameter.device
    return device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def materialize_and_move(  # noqa: PLR0913  arguments of torch's constructor
    module: nn.Module,
    ignored: Ignored,
    device_id: int | torch.device | None,
    device_type: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
    rank: int,
    wrapper: type[nn.Module],
) -> torch.device:
    """Materialize and move the module's parameters. Return the compute device.

    Raises:
        RuntimeError: parameters are on several devices, and `device_id` is None.
        ValueError: `param_init_fn` is not callable, or `device_id` is not the parameters' device.
    """
    params = list(managed_below(module, ignored))
    _check_on_one_device(params, device_id)
    requested = _indexed(device_id, device_type, rank)
    if any(tensor.is_meta for tensor in itertools.chain(params, _buffers_below(module, ignored))):
        _materialize(module, ignored, requested or _current(device_type), param_init_fn, wrapper)
        params = list(managed_below(module, ignored))
    if requested is not None and requested.type != "cpu":
        _move(module, ignored, requested, wrapper)
    first = params[0] if params else None
    if requested is None and first is not None and first.device.type == "cpu" != device_type.type:
        warnings.warn(
            "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization run on CPU, which may "
            "be slower than on GPU. We recommend passing in the `device_id` argument for FSDP to move `module` to GPU "
            "for the sharding initialization. `module` must also be on GPU device to work with the "
            "`sync_module_states=True` flag since that requires GPU communication.",
            stacklevel=3,
        )
    device = first.device if first is not None and first.device.type != "cpu" else _current(device_type)
    if requested is not None and device != requested:
        raise ValueError(
            f"Inconsistent compute device and `device_id` on rank {rank}: {device} vs {requested}"
        )
    return device


def _check_on_one_device(params: Iterable[Tensor], device_id: int | torch.device | None) -> None:
    devices = {param.device for param in params}
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
    """Allocate and initialize a module that was created on the meta device."""
    submodules = list(_modules_of_unit(module, ignored, wrapper))
    if param_init_fn is not None:
        if not callable(param_init_fn):
            raise ValueError(f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}")
        for submodule in submodules:
            with _keep_tied(submodule):
                param_init_fn(submodule)
        return
    for submodule in submodules:
        if not any(True for _ in _own_tensors(submodule._parameters, submodule._buffers)):
            continue
        try:
            with torch.no_grad():
                with _keep_tied(submodule):
                    submodule.to_empty(device=device, recurse=False)
                reset: Any = submodule.reset_parameters
                reset()
        except BaseException as error:
            warnings.warn(
                f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure that "
                f"your module oftype {type(submodule)} implements a `reset_parameters()` method.",
                stacklevel=4,
            )
            raise


@contextlib.contextmanager
def _keep_tied(module: nn.Module) -> Generator[None]:
    """Context manager that keeps shared parameters shared while their modules are materialized one by one."""
    before = [
        (submodule, name, parameter)
        for submodule in module.modules()
        for name, parameter in submodule._parameters.items()
        if parameter is not None and not is_managed(parameter) and parameter.is_meta
    ]
    yield
    for submodule, name, old in before:
        new = submodule._parameters.get(name)
        if new is not None and new is not old:
            submodule._parameters[name] = new = _materialized.setdefault(old, new)
            share_hooks(old, new)
            note_replaced(old, name, new)


def materialized(parameters: Iterable[nn.Parameter]) -> frozenset[nn.Parameter]:
    """Return the parameters, with materialized ones instead of those on the meta device."""
    return frozenset(_materialized.get(parameter, parameter) for parameter in parameters)


def _modules_of_unit(module: nn.Module, ignored: Ignored, wrapper: type[nn.Module]) -> Iterator[nn.Module]:
    """Yield the unit's modules breadth first, without inner wrappers and ignored modules."""
    queue, visited = deque([module]), {module}
    while queue:
        submodule = queue.popleft()
        yield submodule
        for child in submodule.children():
            if child not in visited and not isinstance(child, wrapper) and child not in ignored.modules:
                visited.add(child)
                queue.append(child)


@torch.no_grad()
def _move(module: nn.Module, ignored: Ignored, device: torch.device, wrapper: type[nn.Module]) -> None:
    """Move tensors from the CPU to `device`. Parameters on another accelerator stay, and are reported later."""
    ignored_buffers = {b for ignored_module in ignored.modules for b in ignored_module.buffers()}
    cpu = torch.device("cpu")
    for submodule in _modules_of_unit(module, Ignored(frozenset(), frozenset(), frozenset()), wrapper):
        for parameter in _own_tensors(submodule._parameters):
            if parameter.device == cpu and parameter not in ignored.parameters:
                parameter.data = parameter.to(device)
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.to(device)
        for buffer in _own_tensors(submodule._buffers):
            if buffer.device == cpu and buffer not in ignored_buffers:
                buffer.data = buffer.to(device)


# Set on a buffer that an inner wrapper has broadcast. torch's name.
_SYNCED = "_fsdp_synced"


def broadcast_states(
    module: nn.Module, managed: Sequence[ManagedParam], groups: Iterable[dist.ProcessGroup]
) -> None:
    """Copy the parameters and buffers of the groups' first rank to all ranks, for `sync_module_states=True`.

    Args:
        groups: shards and replicas. Each group spreads the results of the previous one.

    Raises:
        RuntimeError: the ranks wrap different modules, or in a different order.
    Collectives: broadcasts over each group, one for each tensor; all ranks must call it.
    """
    states: list[tuple[str, Tensor]] = [(param.info.name, param.parameter.detach()) for param in managed]
    for name, buffer in module.named_buffers():
        if not getattr(buffer, _SYNCED, False):
            setattr(buffer, _SYNCED, True)
            states.append((clean_name(name), buffer.detach()))
    module_name = type(module).__name__
    for group in groups:
        for name, state in states if group.size() > 1 else ():
            sent = state.contiguous()
            entry = f"broadcast '{module_name}.{name}' of shape {tuple(state.shape)}"
            order_checker_of(group).run(entry, _broadcast, group, sent, _FIRST_RANK)
            if sent is not state:
                state.copy_(sent)
