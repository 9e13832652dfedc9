"""Loss scale: validation of its settings and of saved states, and detection of a scale stuck at its minimum."""

import math
import struct
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from impl.kernels import HostCopy, flag_if_free_to_read, has_host_copies, to_device

# The reciprocal of a smaller scale may overflow float32, and a GPU may flush the scale itself to zero.
SMALLEST_SCALE: float = torch.finfo(torch.float32).smallest_normal
_HALVES = frozenset((torch.float16, torch.bfloat16))


class PerDevice(dict[torch.device, Tensor]):
    """Copies of one tensor by device, each made at its first use. The tensor itself is never returned."""

    def __init__(self, source: Callable[[torch.device], Tensor]) -> None:
        super().__init__()
        self._source = source

    def __missing__(self, device: torch.device) -> Tensor:
        copy = to_device(self._source(device), device, copy=True)
        self[device] = copy
        return copy


def scale_tensor(outputs: Tensor, scale: Tensor) -> Tensor:
    """Return `outputs` times the 0-dim f32 `scale`. Float16 and bfloat16 become float32, which can hold the result."""
    if outputs.dtype in _HALVES:
        outputs = outputs.float()
    return outputs * scale


def scale_nested(outputs: object, scales: PerDevice) -> Any:
    """Scale tensors nested in iterables. Lists and tuples keep their type, other iterables become lazy iterators."""
    if isinstance(outputs, Tensor):
        return scale_tensor(outputs, scales[outputs.device])
    if isinstance(outputs, (list, tuple)):
        return type(outputs)([scale_nested(output, scales) for output in outputs])
    if not isinstance(outputs, Iterable):
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    return (scale_nested(output, scales) for output in cast("Iterable[Any]", outputs))


def check_settings(
    growth_factor: float, backoff_factor: float, init_scale: object, min_scale: float
) -> float:
    """Raise if a setting is invalid. Return `min_scale` rounded to float32, so that it can be compared with a scale."""
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
    # torch raises at the first scale() if it is not a number at all.
    if isinstance(init_scale, int | float) and not min_scale <= init_scale <= largest:
        raise ValueError(
            f"init_scale is {init_scale}; it must lie between min_scale, {min_scale:g}, and float32's largest"
        )
    return min_scale


def check_max_skipped_steps(steps: int | None) -> None:
    if steps is not None and not steps >= 1:
        raise ValueError(f"max_skipped_steps is {steps}; it must be at least 1, or None for no limit")


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
    """Set the scale to `new_scale` (a float or a one-element tensor on that device type), at least to `min_scale`.

    On other devices than the CPU, inf and nan leave the scale unchanged, because an error would synchronise.
    """
    if isinstance(new_scale, float):
        _check_new_scale(new_scale)
        scale.fill_(max(new_scale, min_scale))
        return
    if new_scale.device.type != device_type or new_scale.numel() != 1 or new_scale.requires_grad:
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
            "requires_grad=False."
        )
    copy = torch.empty_like(scale).copy_(new_scale)
    if copy.device.type == "cpu":
        _check_new_scale(copy.item())
    torch.where(copy.isfinite(), copy, scale, out=scale)
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
    """Return the entries of `state_dict`, after all of them were checked.

    Raises:
        RuntimeError: the dict is empty, or a number does not fit into the scaler's tensors.
        KeyError: an entry is missing.
        TypeError, ValueError: an entry is not a number, or not one that is valid for its purpose.
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
    # Assigning to scratch tensors raises what assigning to the scaler's own would raise, with torch's texts.
    scale = torch.ones((), dtype=torch.float32, device="cpu")
    tracker = torch.zeros((), dtype=torch.int32, device="cpu")
    torch._amp_update_scale_(scale, tracker, torch.zeros_like(scale), *state[1:4])
    scale.fill_(state.scale)
    tracker.fill_(state.growth_tracker)
    float(state.scale)  # raises for complex numbers, unlike fill_
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


class SkipMonitor:
    """Detector of consecutive skipped steps, at the minimal scale or any, which never synchronises.

    The scale and flag of an update are copied to the host, and read at a later update when they have arrived. Without
    `max_skipped_steps`, nothing is copied while the scale is far above its minimum, because n updates lower it at most
    n times. Updates are not monitored on devices without events, nor while a graph is captured or a compiler traces.

    Args:
        max_skipped_steps: number of consecutive skipped steps that is an error, at any scale. None: no number is.
    """

    # Skipped steps at the minimum before it warns. One or two may come from a single bad batch.
    PATIENCE = 3

    def __init__(self, max_skipped_steps: int | None) -> None:
        self._max_skipped_steps = max_skipped_steps
        self.skipped = 0  # consecutive skipped steps at the minimum, in the copies read
        self._skipped_scales: list[float] = []  # scales after consecutive skipped steps, in the copies read
        self._has_warned = False
        self._updates = 0
        self._last_unmonitored = 0  # number of the last update that needs no copy
        self._last_outdated: float = 0  # number of the last update before the scale changed otherwise
        # The scale, its version and the backoff factor after the last update.
        self._expected: tuple[Tensor | None, int, float] = None, 0, 0.0
        self._pending: deque[tuple[int, HostCopy]] = deque()

    def may_reach_minimum(self, scale: Tensor, backoff_factor: float) -> bool:
        """Return whether the next update may lower `scale` to its minimum. Sync: none."""
        if scale.is_inference() or not (scale.is_cpu or has_host_copies(scale.device)):
            # A captured graph may run again without being counted. An inference tensor does not count its changes.
            self._last_unmonitored, self._last_outdated = 0, math.inf
            return True
        expected_scale, version, expected_factor = self._expected
        # Other libraries assign scale and factor.
        if scale is not expected_scale or scale._version != version or backoff_factor != expected_factor:
            self._last_unmonitored, self._last_outdated = 0, self._updates
        return self._updates >= self._last_unmonitored

    def record(self, scale: Tensor, found_inf: Tensor, backoff_factor: float) -> None:
        """Start copying the result of an update to the host, if the scale may have reached its minimum. Sync: none."""
        self._updates += 1
        if self._last_outdated < math.inf:
            self._expected = scale, scale._version, backoff_factor
        is_needless = self._updates <= self._last_unmonitored or len(self._pending) > self.PATIENCE
        if is_needless and self._max_skipped_steps is None:
            return
        if has_host_copies(scale.device):
            copy = HostCopy(torch.stack((scale, found_inf.view_as(scale))))
            self._pending.append((self._updates, copy))

    def warn_if_stuck(self, backoff_factor: float, min_scale: float, raises: bool, stacklevel: int) -> None:
        """Warn once if consecutive steps at the minimum were skipped, or raise each time. Sync: none."""
        skipped = self._read(backoff_factor, min_scale)
        is_stuck = skipped >= self.PATIENCE
        if is_stuck and raises:
            raise RuntimeError(_describe_stuck(skipped, min_scale))
        if is_stuck > self._has_warned:  # not `==`: copies of several steps may arrive at once
            warnings.warn(_describe_stuck(skipped, min_scale), RuntimeWarning, stacklevel=stacklevel + 1)
        self._has_warned = is_stuck

    def check_skipped(
        self,
        found_inf: Tensor,
        backoff_factor: float,
        min_scale: float,
        describe_gradients: Callable[[], str],
    ) -> None:
        """Raise if this step, with the flag `found_inf`, and those before it make too many skipped ones.

        If reading the flag would synchronise, only the steps before count. Sync: none, unless it raises.
        """
        if self._max_skipped_steps is None:
            return
        self._read(backoff_factor, min_scale)
        is_skipped = flag_if_free_to_read(found_inf)
        skipped = len(self._skipped_scales) + bool(is_skipped)
        if is_skipped is not False and skipped >= self._max_skipped_steps:
            scales = ", ".join(f"{scale:g}" for scale in self._skipped_scales[-self._max_skipped_steps :])
            raise RuntimeError(
                f"the last {skipped} steps were skipped (max_skipped_steps={self._max_skipped_steps}). The scale has "
                f"{f'become {scales}' if scales else 'not changed yet'}. {describe_gradients()}. Look for nan in the "
                "inputs or the weights; update(new_scale) starts anew"
            )

    def _read(self, backoff_factor: float, min_scale: float) -> int:
        """Return the number of consecutive skipped steps at the minimum, in the copies that arrived. Sync: none."""
        while self._pending:
            update, copy = self._pending[0]
            numbers = copy.numbers()
            if numbers is None:
                break
            self._pending.popleft()
            scale, found_inf = numbers
            if self._max_skipped_steps is not None:
                self._skipped_scales = [*self._skipped_scales, scale] if found_inf else []
            self.skipped = self.skipped + 1 if found_inf and not scale > min_scale else 0
            if update > self._last_outdated:
                self._last_unmonitored = update + _backoffs_left(scale, backoff_factor, min_scale) - 1
        return self.skipped


def _describe_stuck(skipped: int, min_scale: float) -> str:
    return (
        f"the loss scale is down at min_scale ({min_scale:g}) and the last {skipped} steps were skipped all the same: "
        "the gradients hold inf or nan that come from no scale, and training stands still. Ask "
        "nonfinite_parameters(optimizer) after step(optimizer) which ones; common causes are nan in the inputs or the "
        "weights, and activations beyond 65504 in float16, for which bfloat16 has room; update(new_scale) starts anew"
    )


def _backoffs_left(scale: float, backoff_factor: float, min_scale: float) -> int:
    """Return how many backoffs lower `scale` to `min_scale`, rounded down, or 0 if it cannot be computed."""
    if not min_scale < scale < math.inf or not backoff_factor < 1.0:
        return 0
    # Each product is rounded to float32, which may lower it by another 2**-24 of its value.
    return int(math.log(min_scale / scale) / (math.log(backoff_factor) + math.log1p(-(2.0**-24))))
