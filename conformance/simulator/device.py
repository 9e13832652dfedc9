"""The module `torch.sim`, with functions that torch looks up by the name of a device, as in `torch.cuda`."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

import torch
import torch.distributed as dist

NAME = "sim"
BACKEND = "simccl"
_TOTAL_BYTES = 80 << 30

_extension: types.ModuleType
default_generators: tuple[torch.Generator, ...] = ()


def register(extension: types.ModuleType) -> None:
    """Give PrivateUse1 its name, `torch.sim` and a backend of torch.distributed."""
    global _extension, default_generators  # noqa: PLW0603 - a device is registered once for the process
    _extension = extension
    default_generators = tuple(
        extension.default_generator(index) for index in range(extension.device_count())
    )
    torch.utils.rename_privateuse1_backend(NAME)
    extension.register_graphs()
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    if dist.is_available():
        dist.Backend.register_backend(BACKEND, _make_backend, extended_api=True, devices=[NAME, "cpu"])


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of a device tensor, for launched functions."""
    return _extension.cpu_alias(tensor)


def _make_backend(group: object, _options: object) -> object:
    rank, size = group.group_rank, group.group_size
    # The default group is made before torch.distributed is initialized.
    if not dist.is_initialized():
        _extension.meet_peers(group.store, rank, size)
    gloo = dist.ProcessGroupGloo(group.store, rank, size, group.timeout)
    return _extension.make_backend(gloo, group.store, group.global_ranks_in_group or list(range(size)))


def _index(device: object = None) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(NAME if device is None else device).index  # type: ignore[arg-type]
    return torch.accelerator.current_device_index() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None: ...


def _lazy_init() -> None: ...


def _is_in_bad_fork() -> bool:
    return False


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def device_count() -> int:
    return _extension.device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: object) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextlib.contextmanager
def device(device: object) -> Iterator[None]:
    former = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(former)


def get_device_name(device: object = None) -> str:
    return f"simulated accelerator {_index(device)}"


def get_device_properties(device: object = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=get_device_name(device), total_memory=_TOTAL_BYTES)


def synchronize(device: object = None) -> None:
    torch.accelerator.synchronize(_index(device))


class Stream(torch.Stream):
    def __new__(cls, device: object = None, priority: int = 0, **kwargs: object) -> Stream:
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        device: object = None,
    ) -> Event:
        flags = {"enable_timing": enable_timing, "blocking": blocking, "interprocess": interprocess}
        return super().__new__(cls, device=device or NAME, **flags)


def current_stream(device: object = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(NAME, _index(device)))


def default_stream(device: object = None) -> torch.Stream:
    of_type = int(torch._C._autograd.DeviceType.PrivateUse1)
    return Stream(stream_id=0, device_index=_index(device), device_type=of_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else stream


def manual_seed(seed: int) -> None:
    default_generators[_index()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[_index()].initial_seed()


def get_rng_state(device: object = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    default_generators[_index(device)].set_state(state)


def memory_stats(device: object = None) -> dict[str, int]:
    return dict(torch.accelerator.memory_stats(_index(device)))


def memory_allocated(device: object = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: object = None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: object = None) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: object = None) -> int:
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: object = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def mem_get_info(device: object = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))
