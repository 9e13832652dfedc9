"""Regions of mixed precision: `autocast`, and the decorators that carry one through a custom Function.

The dispatcher does the casting. A region only sets four pieces of its thread's state (enabled, dtype, weight
cache, nesting depth) and puts them back.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, ParamSpec, Self, TypeAlias, TypeVar, overload

import torch

# By name: entering and leaving a region is little else than these calls, and an attribute look-up for each shows.
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
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from impl.amp._availability import amp_definitely_not_available
from impl.amp._tracing import introduce_to_dynamo, record_enter, record_exit, uncompiled

__all__ = ["autocast", "autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@uncompiled
def is_autocast_available(device_type: str) -> bool:
    """Whether `autocast(device_type)` can be built; says nothing about hardware being present.

    Args:
        device_type: what `Tensor.device.type` gives, such as "cpu" or "cuda".
    Raises:
        RuntimeError: torch knows no such device type.
        TypeError: `device_type` is no string.
    Sync: none.
    Source: torch.amp.is_autocast_available 2.13; differences: none.

    >>> is_autocast_available("cpu"), is_autocast_available("meta")
    (True, False)
    """
    return torch._C._is_autocast_available(device_type)


# An open region: the instance that was entered, its device, and what that device's state was and will be again
# (enabled, dtype, cache enabled). A bare tuple, because naming its fields would cost a fifth of entering.
_Region: TypeAlias = "tuple[autocast, str, bool, torch.dtype, bool]"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open_regions: list[_Region] = []  # innermost last
        # By device: the dtype that kept casts may have, which is that of the last enabled region.
        self.kept_dtypes: dict[str, torch.dtype] = {}


_thread = _Thread()


class autocast:
    """Context manager and decorator: eligible operators on `device_type` run in a lower precision inside.

    A region belongs to the thread that enters it. Regions nest, for one device type and across several; one
    instance may be entered again: afterwards, inside itself, and in many threads at once. Leaving restores what
    entering found, also after an exception, which is never swallowed.

    The cast of a float32 leaf that requires grad is kept until the outermost region is left, so that a weight
    used twice is cast once. An eager `step` of any `torch.optim.Optimizer`, on the same thread, drops the kept casts.
    Other changes in place (`weight.data.copy_`, `add_` under `no_grad`, a compiled `step`) are not seen until the
    outermost region is left or `torch.clear_autocast_cache()` is called: the dispatcher finds a cast by its tensor,
    not by the tensor's version. Casts to another dtype than that of an enabled region are dropped when it is entered,
    or entered again by leaving one inside of it.

    `torch.compile`, `torch.export` and `make_fx` trace a region as they trace torch's. `torch.jit.trace` needs
    `cache_enabled=False`, as with torch's; `torch.jit.script` knows torch's class by name and refuses this one.

    Args:
        device_type: what `Tensor.device.type` gives, such as "cpu" or "cuda".
        dtype: what eligible operators run in; None takes `torch.get_autocast_dtype(device_type)`. One that the
            device does not support disables the region, with a warning.
        enabled: False makes a region in which nothing is cast.
        cache_enabled: whether casts of weights are kept; None keeps the setting found at construction.
    Raises:
        ValueError: `device_type` is no string.
        RuntimeError: no autocast for this device type, or bfloat16 on a CUDA device that cannot do it.
        AssertionError: a custom backend without `get_amp_supported_dtype`.
    Sync: none.
    Source: torch.amp.autocast_mode.autocast 2.13; differences: one instance may be nested in itself and shared
        by threads; optimizer steps and regions of another dtype drop kept casts; an `__enter__` that fails changes
        nothing; `__exit__` without `__enter__` on this thread changes nothing and always raises.

    >>> x = torch.ones(2, 2)
    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     print((x @ x).dtype)
    torch.bfloat16
    >>> autocast("cpu")(torch.mm)(x, x).dtype
    torch.bfloat16
    """

    # TorchScript asks a class for its qualified name here, and quotes this sentence as an invalid one. Without it
    # the user would read about whichever line of this class TorchScript cannot compile.
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
            kept_dtypes, fast_dtype = _thread.kept_dtypes, self.fast_dtype
            # Kept by a region of ours, or under a dtype that somebody else has set.
            if kept_dtypes.get(device, fast_dtype) is not fast_dtype or dtype is not fast_dtype:
                clear_autocast_cache()  # the dispatcher finds a cast by its tensor, whatever dtype it has
            kept_dtypes[device] = fast_dtype
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
        kept_dtypes = _thread.kept_dtypes
        if autocast_decrement_nesting() == 0:
            clear_autocast_cache()
            kept_dtypes.clear()
        elif enabled and kept_dtypes.get(device, dtype) is not dtype:
            clear_autocast_cache()
            kept_dtypes[device] = dtype
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
    """`func`, with every call of it inside `autocast_instance`; what calling the instance does.

    Source: torch.amp.autocast_mode.autocast_decorator 2.13; differences: none.

    >>> mm = autocast_decorator(autocast("cpu"), torch.mm)
    >>> mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.bfloat16
    """

    @functools.wraps(func)
    def inside(*args: Any, **kwargs: Any) -> _R:
        with autocast_instance:
            return func(*args, **kwargs)

    # `torch.jit.script` reads this attribute and refuses with its text.
    inside.__script_unsupported = "@autocast() decorator is not supported in script mode"  # pyright: ignore[reportAttributeAccessIssue]
    return inside


def _move_to_end(regions: list[_Region], owner: autocast) -> None:
    """Make the innermost region of `owner` the next to close: regions are being left out of order."""
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
    """What a region on this device may run in; a backend that registered itself under a name is asked."""
    name = torch._C._get_privateuse1_backend_name()
    if device_type != name:
        return [torch.bfloat16, torch.float16]
    lacks = "the module misses" if torch.__version__ >= "2.14" else " the module miss"
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
    """The warning with which a region of this device and dtype must start disabled; None if it need not."""
    if device_type == "cuda":
        # CUDA takes any dtype, float32 included.
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


# Once and for good, with the first region that is built. To register and remove a hook with every region would
# cost as much as the region, change a dictionary that another thread's `step` may be iterating over, and make a
# compiled `step` recompile whenever it runs on the other side of a region's border.
@functools.cache
def _track_optimizer_steps() -> None:
    register_optimizer_step_post_hook(_drop_kept_casts)


@uncompiled
def _drop_kept_casts(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """After `optimizer.step` in a region of ours: the weights have changed, so they must be cast again."""
    # A traced step must not carry the call into its graph; compiled regions keep no casts.
    if not is_compiling() and _thread.open_regions:
        clear_autocast_cache()


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor on `device_type` in it cast to `dtype`; float64 stays.

    Lists, tuples and named tuples keep their type, a mapping becomes a dict, any other iterable a generator.
    Strings and NumPy arrays are left alone.
    """
    if isinstance(value, torch.Tensor):
        eligible = (
            value.is_floating_point() and value.device.type == device_type and value.dtype != torch.float64
        )
        return value.to(dtype) if eligible else value
    # NumPy is recognised by its protocol, so that it need not be installed.
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
    """Decorator for `forward` of a `torch.autograd.Function`: notes on `ctx` what `custom_bwd` restores.

    A Function with `setup_context` has no `ctx` in `forward`; decorate its `setup_context` as well, with the
    same arguments, and the note is made there. Nothing is ever written on a tensor.

    Args:
        device_type: whose autocast state counts; tensors elsewhere are not cast.
        cast_inputs: None leaves inputs and autocast state as they are. A dtype has effect inside an enabled
            region only: floating-point inputs, also inside containers, are cast to it (float64 never is), and
            `forward` runs with autocast disabled.
    Raises:
        ValueError: `device_type` is no string.
    Sync: none.
    Source: torch.amp.custom_fwd 2.13; differences: named tuples of inputs are cast; a first argument that is a
        tensor, or holds no attributes, gets none.

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
    def noting(*args: Any, **kwargs: Any) -> Any:
        dtype, is_enabled = get_autocast_dtype(device_type), is_autocast_enabled(device_type)
        _note_state(args[0], dtype, is_enabled and cast_inputs is None)
        if not is_enabled or cast_inputs is None:
            return fwd(*args, **kwargs)
        with autocast(device_type, enabled=False):
            return fwd(*_cast(args, device_type, cast_inputs), **_cast(kwargs, device_type, cast_inputs))

    return noting


@overload
def custom_bwd(bwd: Callable[_P, _R], *, device_type: str) -> Callable[_P, _R]: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str) -> Any:
    """Decorator for `backward` of a `torch.autograd.Function`: runs it in the state `forward` ran in.

    Args:
        device_type: the one given to `custom_fwd`.
    Raises:
        ValueError: `device_type` is no string.
        AttributeError: from the decorated function, when `custom_fwd` left no note on its `ctx`.
    Sync: none.
    Source: torch.amp.custom_bwd 2.13; differences: none. Example: see `custom_fwd`.
    """
    _check_device_type(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def restoring(*args: Any, **kwargs: Any) -> Any:
        try:
            enabled, dtype = args[0]._fwd_used_autocast, args[0]._dtype
        except AttributeError as error:
            error.add_note("Decorate forward with custom_fwd and, if the Function has it, setup_context too.")
            raise
        with autocast(device_type, dtype=dtype, enabled=enabled):
            return bwd(*args, **kwargs)

    return restoring


def _note_state(ctx: Any, dtype: torch.dtype, enabled: bool) -> None:
    """Write on `ctx` what `backward` must restore, unless the Function's style puts an input in its place."""
    if isinstance(ctx, torch.Tensor):
        return
    try:
        ctx._dtype = dtype
        ctx._fwd_used_autocast = enabled
    except AttributeError:  # a number, a string, a list: an input too
        return


introduce_to_dynamo(autocast)
