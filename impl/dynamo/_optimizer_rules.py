"""Decisions about an optimizer before its step is traced, as pure functions of device types and names."""

from collections.abc import Iterable

# Device types on which torch.optim supports step counts on the device, which avoid breaks in CUDA graphs.
_CAPTURABLE_ON = frozenset({"cuda", "xpu"})
# Scalars that torch.optim keeps on the CPU unless a group is capturable. A loaded state may contain them.
_SCALARS = frozenset({"step", "mu_product"})


def may_be_capturable(device_types: Iterable[str]) -> bool:
    """Return whether a group with parameters on these devices may keep its step counts there."""
    types = frozenset(device_types)
    return bool(types) and types <= _CAPTURABLE_ON


def belongs_with_parameter(name: str, at: str, parameter_at: str) -> bool:
    """Return whether the state tensor `name` on device type `at` must move to its parameter's device."""
    return name in _SCALARS and at == "cpu" and parameter_at != "cpu"
