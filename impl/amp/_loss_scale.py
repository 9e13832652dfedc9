"""The numbers behind a `GradScaler`: what it may hold, what a saved one must hold, and when its scale is stuck."""

import math
import struct
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from impl.kernels import HostCopy, has_host_copies, placed

# The reciprocal of a smaller scale may overflow float32, and a GPU may take the scale itself for zero.
SMALLEST_SCALE: float = torch.finfo(torch.float32).smallest_normal
_HALVES = frozenset((torch.float16, torch.bfloat16))


class PerDevice(dict[torch.device, Tensor]):
    """Copies of one tensor, each made when its device is first asked for; the tensor itself is not among them."""

    def __init__(self, source: Callable[[torch.device], Tensor]) -> None:
        super().__init__()
        self._source = source

    def __missing__(self, device: torch.device) -> Tensor:
        copy = placed(self._source(device), device, copy=True)
        self[device] = copy
        return copy


def times(outputs: Tensor, scale: Tensor) -> Tensor:
    """`outputs` times the 0-dim f32 `scale`, in float32 where float16 or bfloat16 could not hold it."""
    if outputs.dtype in _HALVES:
        outputs = outputs.float()
    return outputs * scale


def scaled(outputs: Any, scales: PerDevice) -> Any:
    """Tensors nested in iterables, times the scale on their device: lists and tuples, or else lazy iterators."""
    if isinstance(outputs, Tensor):
        return times(outputs, scales[outputs.device])
    if isinstance(outputs, (list, tuple)):
        return type(outputs)([scaled(each, scales) for each in outputs])
    if not isinstance(outputs, Iterable) or isinstance(outputs, str | bytes):
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    return (scaled(each, scales) for each in cast("Iterable[Any]", outputs))


def checked_settings(
    growth_factor: float, backoff_factor: float, init_scale: object, min_scale: float
) -> float:
    """`min_scale` as float32 holds it, so that it compares with a scale; or what is wrong with one of the four."""
    if growth_factor <= 1.0 or math.isnan(growth_factor):
        raise AssertionError("The growth factor must be > 1.0.")
    if backoff_factor >= 1.0 or math.isnan(backoff_factor):
        raise AssertionError("The backoff factor must be < 1.0.")
    check_backoff_factor(backoff_factor)
    largest = torch.finfo(torch.float32).max
    if not SMALLEST_SCALE <= min_scale <= largest:
        raise ValueError(
            f"min_scale is {min_scale}; it must lie between {SMALLEST_SCALE} (float32's smallest normal number, "
            "the default) and float32's largest"
        )
    min_scale = struct.unpack("f", struct.pack("f", min_scale))[0]
    # What is no number at all is refused by torch, at the first scale().
    if isinstance(init_scale, int | float) and not min_scale <= init_scale <= largest:
        raise ValueError(
            f"init_scale is {init_scale}; it must lie between min_scale, {min_scale:g}, and float32's largest"
        )
    return min_scale


def check_growth_factor(factor: float) -> None:
    if not factor >= 1.0:
        raise ValueError(
            f"growth_factor is {factor}; it must not be below 1.0, at which the scale does not grow"
        )


def check_backoff_factor(factor: float) -> None:
    if not 0.0 < factor <= 1.0:
        raise ValueError(
            f"backoff_factor is {factor}; it must be above 0.0 and not above 1.0, at which the scale does not fall"
        )


def set_scale_(scale: Tensor, new_scale: Any, device_type: str, min_scale: float) -> None:
    """Take `new_scale`, a float or a tensor of one element on that device type, but `min_scale` where it is less."""
    if isinstance(new_scale, float):
        _check_new_scale(new_scale)
        scale.fill_(max(new_scale, min_scale))
        return
    if new_scale.device.type != device_type or new_scale.numel() != 1 or new_scale.requires_grad:
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
            "requires_grad=False."
        )
    there = torch.empty_like(scale).copy_(new_scale)
    if there.device.type == "cpu":
        _check_new_scale(there.item())
    torch.where(there.isfinite(), there, scale, out=scale)
    scale.clamp_(min=min_scale)


def _check_new_scale(value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(
            f"new_scale is {value}; it must be finite and not negative (below min_scale, min_scale is taken)"
        )


class SavedState(NamedTuple):
    """The five entries of a `state_dict`, in torch's order."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int


def read_state(state_dict: Mapping[str, Any]) -> SavedState:
    """The entries of `state_dict`, all of them looked at before any is used.

    Raises:
        RuntimeError: it is empty, or a number fits no tensor of the scaler's. KeyError: an entry is missing.
        TypeError, ValueError: an entry is no number, or none that a scaler can hold.
    """
    if len(state_dict) == 0:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler."
        )
    state = SavedState(
        state_dict["scale"],
        state_dict["growth_factor"],
        state_dict["backoff_factor"],
        state_dict["growth_interval"],
        state_dict["_growth_tracker"],
    )
    # Scratch tensors refuse what the scaler's own would refuse, in torch's words.
    scale = torch.ones((), dtype=torch.float32, device="cpu")
    tracker = torch.zeros((), dtype=torch.int32, device="cpu")
    torch._amp_update_scale_(scale, tracker, torch.zeros_like(scale), *state[1:4])
    scale.fill_(state.scale)
    tracker.fill_(state.growth_tracker)
    float(state.scale)  # fill_ takes the real part of a complex number
    if not 0.0 < scale.item() < math.inf:
        raise _corrupted("scale", state.scale, "a finite number above 0")
    check_growth_factor(state.growth_factor)
    check_backoff_factor(state.backoff_factor)
    if tracker.item() != state.growth_tracker or tracker.item() < 0:
        raise _corrupted("_growth_tracker", state.growth_tracker, "a whole number not below 0")
    return state


def _corrupted(name: str, actual: object, expected: str) -> ValueError:
    return ValueError(
        f"{name} in the state dict is {actual}, expected {expected}; load what state_dict() of a sound run returned"
    )


class FloorWatch:
    """Notices steps that are skipped one after the other while the scale lies on its floor, and never waits.

    An update's scale and check result are copied to the host and read at a later update, when they have arrived.
    Far above the floor nothing is copied: n updates can lower the scale n times and not more. Devices without events
    are not watched, nor on a device updates that a graph records or a compiler traces.
    """

    PATIENCE = 3  # skipped steps on the floor before it says so: one or two may be a single bad batch

    def __init__(self) -> None:
        self.skipped = 0  # in a row, on the floor, as far as read
        self._has_warned = False
        self._updates = 0
        self._next_look = 0  # counted in updates
        self._under_way: deque[tuple[int, HostCopy]] = deque()

    def look(self, scale: Tensor, found_inf: Tensor) -> None:
        """Send home what an update did, when the scale could be on its floor by now. Sync: none."""
        self._updates += 1
        if self._updates <= self._next_look or len(self._under_way) > self.PATIENCE:
            return
        if has_host_copies(scale.device):
            sent = HostCopy(torch.stack((scale, found_inf.view_as(scale))))
            self._under_way.append((self._updates, sent))

    def tell(self, backoff_factor: float, min_scale: float, raises: bool, stacklevel: int) -> None:
        """Warn once when steps are skipped on the floor, or raise each time. Sync: none."""
        skipped = self._read(backoff_factor, min_scale)
        is_stuck = skipped >= self.PATIENCE
        if is_stuck and raises:
            raise RuntimeError(_stuck(skipped, min_scale))
        if is_stuck > self._has_warned:  # of a device that lags behind several steps may be heard at once
            warnings.warn(_stuck(skipped, min_scale), RuntimeWarning, stacklevel=stacklevel + 1)
        self._has_warned = is_stuck

    def _read(self, backoff_factor: float, min_scale: float) -> int:
        """Skipped steps in a row on the floor, counting what has arrived. Sync: none."""
        while self._under_way:
            update, sent = self._under_way[0]
            numbers = sent.numbers()
            if numbers is None:
                break
            self._under_way.popleft()
            scale, found_inf = numbers
            self.skipped = self.skipped + 1 if found_inf and not scale > min_scale else 0
            self._next_look = update + _falls_left(scale, backoff_factor, min_scale) - 1
        return self.skipped


def _stuck(skipped: int, min_scale: float) -> str:
    return (
        f"the loss scale is down at min_scale ({min_scale:g}) and the last {skipped} steps were skipped all the same: "
        "the gradients hold inf or nan that come from no scale, and training stands still. Ask "
        "nonfinite_parameters(optimizer) after step(optimizer) which ones; common causes are nan in the inputs or the "
        "weights, and activations beyond 65504 in float16, for which bfloat16 has room; update(new_scale) starts anew"
    )


def _falls_left(scale: float, backoff_factor: float, min_scale: float) -> int:
    """How often `scale` must fall before it lies on its floor; rounded down, and 0 where that cannot be said."""
    if not min_scale < scale < math.inf or not backoff_factor < 1.0:
        return 0
    return int(math.log(min_scale / scale) / math.log(backoff_factor))
