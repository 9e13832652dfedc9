"""What is decided about an optimizer before its step is traced: pure functions of device types and of what is there."""

from collections.abc import Iterable

# Where a step count on the device keeps CUDA graphs from being cut, and torch.optim can compute with it.
_CAPTURABLE_ON = frozenset({"cuda", "xpu"})
# What torch.optim keeps as CPU scalars unless a group is capturable; a saved state may bring them along.
_SCALARS = frozenset({"step", "mu_product"})


def may_be_capturable(device_types: Iterable[str]) -> bool:
    """Whether a group with parameters on these devices may keep its step counts there; one without any has none."""
    found = frozenset(device_types)
    return bool(found) and found <= _CAPTURABLE_ON


def belongs_with_parameter(name: str, at: str, parameter_at: str) -> bool:
    """Whether the state's tensor `name` on device type `at` has to move to its parameter's."""
    return name in _SCALARS and at == "cpu" and parameter_at != "cpu"
