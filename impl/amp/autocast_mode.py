"""Regions of mixed precision: `autocast`, and the decorators that apply one to a custom autograd Function.

The dispatcher does the casting. A region only sets and restores four pieces of its thread's state: enabled, dtype,
weight cache and nesting depth.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, ParamSpec, Self, TypeAlias, TypeVar, overload

import torch

# Imported by name, because entering a region is little more than these calls, and attribute look-ups are measurable.
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    clear_autocast_cache,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from torch._C import _is_torch_function_mode_enabled

from impl.amp._availability import amp_definitely_not_available
from impl.amp._tracing import introduce_to_dynamo, record_enter, record_exit, uncompiled
from impl.optim._step_checks import register_after_step

__all__ = ["autocast", "autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@uncompiled
def is_autocast_available(device_type: str) -> bool:
    """Return whether `autocast(device_type)` can be constructed. The hardware need not be present.

    Args:
        device_type: a `Tensor.device.type`, such as "cpu" or "cuda".
    Raises:
        RuntimeError: torch does not know the device type.
        TypeError: `device_type` is not a string.
    Sync: none.
    Source: torch.amp.is_autocast_available 2.13; differences: none.

    >>> is_autocast_available("cpu"), is_autocast_available("meta")
    (True, False)
    """
    return torch._C._is_autocast_available(device_type)


# An open region: the instance that was entered, its device type, and the state to restore (enabled, dtype, cache
# enabled). It is a plain tuple, because a named one makes entering a region a fifth slower.
_Region: TypeAlias = "tuple[autocast, str, bool, torch.dtype, bool]"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open_regions: list[_Region] = []  # innermost last
        # The dtype of cached casts for each device type, which is that of the last enabled region.
        self.cached_dtypes: dict[str, torch.dtype] = {}


_thread = _Thread()


class autocast:
    """Context manager and decorator that runs eligible operators on `device_type` in a lower precision.

    A region belongs to the thread that enters it. Regions nest, for one device type and for several. An instance may be
    entered many times, also inside itself and by several threads at once. Leaving a region restores the state from
    before, also after an exception.

    A float32 leaf that requires grad is cast once: its cast is cached until the outermost region ends. An eager `step`
    of a `torch.optim.Optimizer` on the same thread clears the cache, and so does a region of another dtype. Other
    in-place changes of a weight (`weight.data.copy_`, `add_` under `no_grad`, a compiled `step`) do not clear it. After
    these, call `torch.clear_autocast_cache()`.

    `torch.compile`, `torch.export` and `make_fx` trace a region like torch's. `torch.jit.trace` needs
    `cache_enabled=False`, also like torch's. `torch.jit.script` only accepts torch's class, by its name.

    Args:
        device_type: a `Tensor.device.type`, such as "cpu" or "cuda".
        dtype: dtype of eligible operators, by default `torch.get_autocast_dtype(device_type)`. A dtype that the device
            does not support disables the region, with a warning.
        enabled: if False, nothing is cast in the region.
        cache_enabled: whether casts of weights are cached. None keeps the setting at the time of construction.
    Raises:
        ValueError: `device_type` is not a string.
        RuntimeError: the device type has no autocast, or the CUDA device does not support bfloat16.
        AssertionError: a custom backend has no `get_amp_supported_dtype`.
    Sync: none.
    Source: torch.amp.autocast_mode.autocast 2.13; differences: an instance may be nested in itself and shared by
        threads; optimizer steps and regions of another dtype clear the cache; an `__enter__` that raises changes
        nothing; `__exit__` without `__enter__` on this thread changes nothing and always raises.

    >>> x = torch.ones(2, 2)
    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     print((x @ x).dtype)
    torch.bfloat16
    >>> autocast("cpu")(torch.mm)(x, x).dtype
    torch.bfloat16
    """

    # TorchScript reads a class's qualified name from this attribute and quotes the sentence as an invalid name.
    # Without it, the error would be about some line of this class that TorchScript cannot compile.
    _jit_override_qualname = (
        "torch.jit.script knows torch's own autocast class and no other; "
        "use torch.jit.trace with cache_enabled=False."
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        introduce_to_dynamo(cls)

    @uncompiled
    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        _check_device_type(device_type)
        self.device = device_type
        self.fast_dtype = get_autocast_dtype(device_type) if dtype is None else dtype
        if not is_autocast_available(device_type):
            raise RuntimeError(f"User specified an unsupported autocast device_type '{device_type}'")
        supported = _supported_dtypes(device_type)
        if enabled and (reason := _reason_to_disable(device_type, self.fast_dtype, supported)):
            warnings.warn(reason, stacklevel=2)
            enabled = False
        self._enabled = enabled
        self._cache_enabled = is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        _track_optimizer_steps()

    @uncompiled
    def __enter__(self) -> Self:
        device = self.device
        enabled, dtype = is_autocast_enabled(device), get_autocast_dtype(device)
        cache_enabled = is_autocast_cache_enabled()
        try:
            set_autocast_enabled(device, self._enabled)
            set_autocast_dtype(device, self.fast_dtype)
            set_autocast_cache_enabled(self._cache_enabled)
        except BaseException:
            set_autocast_enabled(device, enabled)
            set_autocast_dtype(device, dtype)
            set_autocast_cache_enabled(cache_enabled)
            raise
        if self._enabled:
            cached_dtypes, fast_dtype = _thread.cached_dtypes, self.fast_dtype
            # The dispatcher looks a cached cast up by its tensor only, so drop casts to another dtype. An outer region
            # or the user may have set that dtype.
            if cached_dtypes.get(device, fast_dtype) is not fast_dtype or dtype is not fast_dtype:
                clear_autocast_cache()
            cached_dtypes[device] = fast_dtype
        autocast_increment_nesting()
        _thread.open_regions.append((self, device, enabled, dtype, cache_enabled))
        if _is_torch_function_mode_enabled():
            record_enter(device, self.fast_dtype, self._enabled, self._cache_enabled)
        return self

    @uncompiled
    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> Literal[False]:
        regions = _thread.open_regions
        if not regions or regions[-1][0] is not self:
            _move_to_end(regions, self)
        _, device, enabled, dtype, cache_enabled = regions.pop()
        cached_dtypes = _thread.cached_dtypes
        if autocast_decrement_nesting() == 0:
            clear_autocast_cache()
            cached_dtypes.clear()
        elif enabled and cached_dtypes.get(device, dtype) is not dtype:
            clear_autocast_cache()
            cached_dtypes[device] = dtype
        set_autocast_enabled(device, enabled)
        set_autocast_dtype(device, dtype)
        set_autocast_cache_enabled(cache_enabled)
        if _is_torch_function_mode_enabled():
            record_exit()
        return False

    def __call__(self, func: Callable[_P, _R]) -> Callable[_P, _R]:
        if not callable(func):
            raise TypeError(
                f"autocast()(func) requires a callable, but got {type(func).__name__}. "
                "Did you mean to use autocast as a context manager? For example:\n"
                "    with torch.autocast(device_type=...):\n"
                "        output = model(input)"
            )
        return autocast_decorator(self, func)


def autocast_decorator(autocast_instance: autocast, func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that calls `func` inside `autocast_instance`. Calling the instance does the same.

    Source: torch.amp.autocast_mode.autocast_decorator 2.13; differences: none.

    >>> mm = autocast_decorator(autocast("cpu"), torch.mm)
    >>> mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.bfloat16
    """

    @functools.wraps(func)
    def call_in_region(*args: Any, **kwargs: Any) -> _R:
        with autocast_instance:
            return func(*args, **kwargs)

    # `torch.jit.script` reads this attribute and raises with its text.
    call_in_region.__script_unsupported = "@autocast() decorator is not supported in script mode"  # pyright: ignore[reportAttributeAccessIssue]
    return call_in_region


def _move_to_end(regions: list[_Region], owner: autocast) -> None:
    """Move the innermost region of `owner` to the end of `regions`, because regions are left out of order."""
    for position in range(len(regions) - 1, -1, -1):
        if regions[position][0] is owner:
            regions.append(regions.pop(position))
            return
    error = AttributeError(f"'{type(owner).__name__}' object has no attribute 'prev'")
    error.add_note("It has no open region on this thread: call __enter__ first, on the same thread.")
    raise error


def _check_device_type(device_type: object) -> None:
    if not isinstance(device_type, str):
        error = ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
        if isinstance(device_type, torch.device):
            error.add_note(f"Pass its type: {device_type.type!r}.")
        raise error


def _supported_dtypes(device_type: str) -> list[torch.dtype]:
    """Return the dtypes that a region on this device type may have. A custom backend is asked for its own."""
    name = torch._C._get_privateuse1_backend_name()
    if device_type != name:
        return [torch.bfloat16, torch.float16]
    lacks = "the module misses" if torch.__version__ >= "2.14.dev0" else " the module miss"
    message = (
        f"Tried to use AMP with the `{name}` backend, but the backend has not registered a module or {lacks} "
        "some necessary funcs. The backend should register a module by `torch._register_device_module`, "
        "and the module must have these funcs: \n`get_amp_supported_dtype() -> List[torch.dtype]`. \n"
    )
    if not hasattr(torch, name):
        raise AssertionError(message)
    module = getattr(torch, name)
    if not hasattr(module, "get_amp_supported_dtype"):
        raise AssertionError(message + "But the func `get_amp_supported_dtype` is missing. \n")
    return module.get_amp_supported_dtype()


def _reason_to_disable(device_type: str, dtype: torch.dtype, supported: list[torch.dtype]) -> str | None:
    """Return the warning for a region that must be disabled, or None if device and dtype are supported."""
    if device_type == "cuda":
        # CUDA supports any dtype, including float32.
        if amp_definitely_not_available():
            return "CUDA is not available or torch_xla is imported. Disabling autocast."
        if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise RuntimeError(
                "Current CUDA Device does not support bfloat16. Please switch dtype to float16."
            )
        return None
    if dtype in supported:
        return None
    is_custom = device_type == torch._C._get_privateuse1_backend_name()
    name = device_type if is_custom else device_type.upper()
    return (
        f"In {name} autocast, but the target dtype is not supported. Disabling autocast.\n"
        f"{name} Autocast only supports dtypes of {', '.join(map(str, supported))} currently."
    )


# The hook is registered once, with the first region, and never removed. A hook for every region would cost as much as
# the region, change a dictionary that another thread's `step` may be iterating over, and make a compiled `step`
# recompile for each change between inside and outside of a region.
@functools.cache
def _track_optimizer_steps() -> None:
    register_after_step(_clear_cache_after_step)  # compiled regions cache no casts


def _clear_cache_after_step(optimizer: torch.optim.Optimizer) -> None:
    """Clear the cache after an optimizer step in a region, because the weights have changed."""
    del optimizer
    if _thread.open_regions:
        clear_autocast_cache()


def _cast(value: object, device_type: str, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor on `device_type` in `value` to `dtype`, except float64.

    Lists, tuples and named tuples keep their type, a mapping becomes a dict, and any other iterable a generator.
    Strings and NumPy arrays are returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        eligible = (
            value.is_floating_point() and value.device.type == device_type and value.dtype != torch.float64
        )
        return value.to(dtype) if eligible else value
    # NumPy arrays are recognised by their protocol, so that NumPy need not be installed.
    if isinstance(value, (str, bytes)) or hasattr(value, "__array_interface__"):
        return value
    if isinstance(value, Mapping):
        return {_cast(k, device_type, dtype): _cast(v, device_type, dtype) for k, v in value.items()}
    if isinstance(value, Iterable):
        items = (_cast(item, device_type, dtype) for item in value)
        if not isinstance(value, (list, tuple)):
            return items
        return getattr(value, "_make", type(value))(items)
    return value


@overload
def custom_fwd(
    fwd: Callable[_P, _R], *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[_P, _R]: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Any:
    """Decorate `forward` of a `torch.autograd.Function` so that `custom_bwd` can restore its autocast state.

    The state is stored on `ctx`. A Function with `setup_context` has no `ctx` in `forward`: decorate its
    `setup_context` too, with the same arguments.

    Args:
        device_type: device type of the autocast state. Tensors on other devices are not cast.
        cast_inputs: None leaves inputs and autocast state unchanged. Inside an enabled region, a dtype casts
            floating-point inputs to it, also in containers but never float64, and disables autocast in `forward`.
    Raises:
        ValueError: `device_type` is not a string.
    Sync: none.
    Source: torch.amp.custom_fwd 2.13; differences: named tuples of inputs are cast; no attributes are set on a first
        argument that is a tensor or cannot hold attributes.

    >>> class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...     @staticmethod
    ...     @custom_bwd(device_type="cpu")
    ...     def backward(ctx, grad):
    ...         return 2 * grad
    >>> with autocast("cpu"):
    ...     Double.apply(torch.ones(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    _check_device_type(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def record_and_call(*args: object, **kwargs: object) -> Any:
        dtype, is_enabled = get_autocast_dtype(device_type), is_autocast_enabled(device_type)
        _record_state(args[0], dtype, is_enabled and cast_inputs is None)
        if not is_enabled or cast_inputs is None:
            return fwd(*args, **kwargs)
        with autocast(device_type, enabled=False):
            return fwd(*_cast(args, device_type, cast_inputs), **_cast(kwargs, device_type, cast_inputs))

    return record_and_call


@overload
def custom_bwd(bwd: Callable[_P, _R], *, device_type: str) -> Callable[_P, _R]: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str) -> Any:
    """Decorate `backward` of a `torch.autograd.Function` to run in the autocast state of its `forward`.

    Args:
        device_type: same as for `custom_fwd`.
    Raises:
        ValueError: `device_type` is not a string.
        AttributeError: from the decorated function, if `custom_fwd` stored no state on its `ctx`.
    Sync: none.
    Source: torch.amp.custom_bwd 2.13; differences: none. Example: see `custom_fwd`.
    """
    _check_device_type(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def restore_and_call(*args: Any, **kwargs: Any) -> Any:
        try:
            enabled, dtype = args[0]._fwd_used_autocast, args[0]._dtype
        except AttributeError as error:
            error.add_note("Decorate forward with custom_fwd and, if the Function has it, setup_context too.")
            raise
        with autocast(device_type, dtype=dtype, enabled=enabled):
            return bwd(*args, **kwargs)

    return restore_and_call


def _record_state(ctx: Any, dtype: torch.dtype, enabled: bool) -> None:
    """Store the state for `backward` on `ctx`, unless this is an input, as in Functions with `setup_context`."""
    if isinstance(ctx, torch.Tensor):
        return
    try:
        ctx._dtype = dtype
        ctx._fwd_used_autocast = enabled
    except AttributeError:  # an input: a number, a string or a list
        return


introduce_to_dynamo(autocast)
