"""Faults in torch.distributed.fsdp.wrap: the policies, and wrapping by hand."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from conformance.faults.fault import Substitute, in_function, in_method, in_methods, register_fault

_HERE = "distributed.fsdp.wrap"


def _in_function(name: str, fault_id: str, says: str) -> Callable[[Substitute], Substitute]:
    def enter(fault: Substitute) -> Substitute:
        register_fault(f"wrap.{fault_id}", f"{_HERE}.{name}", says=says)(in_function(fault))
        return fault

    return enter


def _in_method(owner: str, method: str, fault_id: str, says: str) -> Callable[[Substitute], Substitute]:
    def enter(fault: Substitute) -> Substitute:
        register_fault(f"wrap.{fault_id}", f"{_HERE}.{owner}", says=says)(in_method(method, fault))
        return fault

    return enter


# Functions that are asked about one module


@_in_function(
    "lambda_auto_wrap_policy", "lambda_asked_on_the_way_down", "The function also decides where to look."
)
def lambda_asked_on_the_way_down(
    original: Any, module: Any, recurse: Any, nonwrapped_numel: Any, lambda_fn: Any
) -> Any:
    return original(module, False, nonwrapped_numel, lambda_fn)


@_in_function("lambda_auto_wrap_policy", "lambda_answer_is_cast", "The function's answer is made a bool.")
def lambda_answer_is_cast(original: Any, *args: Any, **kwargs: Any) -> Any:
    return bool(original(*args, **kwargs))


def _exact(module: Any, classes: Any) -> bool:
    return type(module) in tuple(classes)


@_in_function("transformer_auto_wrap_policy", "transformer_misses_derived", "Derived classes do not count.")
def transformer_misses_derived(
    original: Any, module: Any, recurse: Any, nonwrapped_numel: Any, transformer_layer_cls: Any
) -> Any:
    found = original(module, recurse, nonwrapped_numel, transformer_layer_cls)
    return found if recurse else found and _exact(module, transformer_layer_cls)


@_in_function(
    "transformer_auto_wrap_policy",
    "transformer_stops_at_a_block",
    "What lies inside a block is not looked at.",
)
def transformer_stops_at_a_block(
    original: Any, module: Any, recurse: Any, nonwrapped_numel: Any, transformer_layer_cls: Any
) -> Any:
    is_block = original(module, False, nonwrapped_numel, transformer_layer_cls)
    return not is_block if recurse else is_block


def _in_size(fault_id: str, says: str) -> Callable[[Substitute], Substitute]:
    """`fault(original, arguments)`, with all arguments by name."""

    def enter(fault: Substitute) -> Substitute:
        def framed(original: Any, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(original).bind(*args, **kwargs)
            bound.apply_defaults()
            return fault(original, dict(bound.arguments))

        _in_function("size_based_auto_wrap_policy", f"size_{fault_id}", says)(framed)
        return fault

    return enter


@_in_size("off_by_one", "A module of exactly min_num_params is too small.")
def size_off_by_one(original: Any, asked: dict[str, Any]) -> Any:
    return original(**asked) and asked["nonwrapped_numel"] != asked["min_num_params"]


@_in_size("smaller_default", "min_num_params is a million by default.")
def size_smaller_default(original: Any, asked: dict[str, Any]) -> Any:
    default = inspect.signature(original).parameters["min_num_params"].default
    least = asked["min_num_params"]
    return original(**asked | {"min_num_params": 10**6 if least == default else least})


@_in_size("looks_into_the_small", "It looks inside modules however small.")
def size_looks_into_the_small(original: Any, asked: dict[str, Any]) -> Any:
    return original(**asked | ({"min_num_params": asked["nonwrapped_numel"]} if asked["recurse"] else {}))


@_in_size("wraps_the_excluded", "exclude_wrap_modules is not heeded, nor its default.")
def size_wraps_the_excluded(original: Any, asked: dict[str, Any]) -> Any:
    return original(**asked | {"exclude_wrap_modules": ()})


@_in_size("looks_into_leaves", "force_leaf_modules is not heeded, nor its default.")
def size_looks_into_leaves(original: Any, asked: dict[str, Any]) -> Any:
    return original(**asked | {"force_leaf_modules": ()})


@_in_size("adds_to_default_leaves", "Classes given as leaves are added to the default ones.")
def size_adds_to_default_leaves(original: Any, asked: dict[str, Any]) -> Any:
    leaves = asked["force_leaf_modules"]
    joined = None if leaves is None else {*leaves, *original.FORCE_LEAF_MODULES}
    return original(**asked | {"force_leaf_modules": joined})


@_in_size("adds_to_default_excluded", "Classes given as never wrapped are added to the default ones.")
def size_adds_to_default_excluded(original: Any, asked: dict[str, Any]) -> Any:
    excluded = asked["exclude_wrap_modules"]
    joined = None if excluded is None else {*excluded, *original.EXCLUDE_WRAP_MODULES}
    return original(**asked | {"exclude_wrap_modules": joined})


@_in_size("never_looks_into_the_excluded", "What is never wrapped itself is not looked into either.")
def size_never_looks_into_the_excluded(original: Any, asked: dict[str, Any]) -> Any:
    return original(**asked) and original(**asked | {"recurse": False})


@_in_size("never_wraps_leaves", "What is never looked into is not wrapped either.")
def size_never_wraps_leaves(original: Any, asked: dict[str, Any]) -> Any:
    return original(**asked) and original(**asked | {"recurse": True})


@_in_size("fixed_defaults", "What is added to the function's attributes does not count.")
def size_fixed_defaults(original: Any, asked: dict[str, Any]) -> Any:
    fixed = {
        "force_leaf_modules": {nn.MultiheadAttention},
        "exclude_wrap_modules": {nn.ModuleList, nn.ModuleDict},
    }
    return original(**asked | {name: given for name, given in fixed.items() if asked[name] is None})


# Classes that are handed the tree


@_in_method("ModuleWrapPolicy", "_run_policy", "classes_last_missed", "The last instance is left out.")
def classes_last_missed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return dict(list(original(self, *args, **kwargs).items())[:-1])


@_in_method("ModuleWrapPolicy", "_run_policy", "classes_ignored_chosen", "Ignored modules are chosen too.")
def classes_ignored_chosen(
    original: Any, self: Any, root_module: Any, ignored_modules: Any, root_kwargs: Any
) -> Any:
    return original(self, root_module, set(), root_kwargs)


@_in_method(
    "ModuleWrapPolicy", "_run_policy", "classes_share_arguments", "All modules get the root's own dict."
)
def classes_share_arguments(
    original: Any, self: Any, root_module: Any, ignored_modules: Any, root_kwargs: Any
) -> Any:
    return dict.fromkeys(original(self, root_module, ignored_modules, root_kwargs), root_kwargs)


@_in_method(
    "ModuleWrapPolicy", "_run_policy", "classes_stop_at_an_instance", "Instances inside others are left out."
)
def classes_stop_at_an_instance(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    chosen = original(self, *args, **kwargs)
    inner = {child for module in chosen for child in list(module.modules())[1:]}
    return {module: found for module, found in chosen.items() if module not in inner}


@_in_method("ModuleWrapPolicy", "_run_policy", "classes_without_the_root", "The root is never chosen.")
def classes_without_the_root(
    original: Any, self: Any, root_module: Any, ignored_modules: Any, root_kwargs: Any
) -> Any:
    chosen = original(self, root_module, ignored_modules, root_kwargs)
    chosen.pop(root_module, None)
    return chosen


@_in_method(
    "ModuleWrapPolicy", "__call__", "classes_called_stop_at_an_instance", "Called, it does not look inside."
)
def classes_called_stop_at_an_instance(
    original: Any, self: Any, module: Any, recurse: Any, *args: Any, **kwargs: Any
) -> Any:
    found = original(self, module, False)
    return not found if recurse else found


@_in_method("ModuleWrapPolicy", "__repr__", "classes_not_shown", "Its repr does not name the classes.")
def classes_not_shown(original: Any, self: Any) -> str:
    return object.__repr__(self)


@_in_method(
    "ModuleWrapPolicy", "_run_policy", "classes_part_places", "Each place of a module gets a copy of its own."
)
def classes_part_places(original: Any, self: Any, root_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    met: set[nn.Module] = set()
    for parent in list(root_module.modules()):
        for name, child in list(parent._modules.items()):
            if child in met:
                setattr(parent, name, copy.deepcopy(child))
            elif child is not None:
                met.add(child)
    return original(self, root_module, *args, **kwargs)


@_in_method(
    "ModuleWrapPolicy", "_run_policy", "classes_untie", "Modules that share a parameter get one each."
)
def classes_untie(original: Any, self: Any, root_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    met: set[nn.Parameter] = set()
    for module in root_module.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in met:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
            met.add(parameter)
    return original(self, root_module, *args, **kwargs)


def _remember(original: Any, self: Any, module_classes: Any) -> None:
    original(self, module_classes)
    self._given_classes = module_classes


def _made_anew(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(type(self)(self._given_classes), *args, **kwargs)


register_fault(
    "wrap.classes_change_later",
    f"{_HERE}.ModuleWrapPolicy",
    says="A class added to the collection later is wrapped as well.",
)(in_methods({"__init__": _remember, "_run_policy": _made_anew, "__call__": _made_anew}))


def _derived_from_nothing(original: type) -> type:
    return type(original.__name__, (), {"__module__": original.__module__, **_members(original)})


def _members(made: type) -> dict[str, Any]:
    return {
        name: value for name, value in vars(made).items() if inspect.isfunction(value) and name != "__repr__"
    }


register_fault(
    "wrap.custom_is_no_policy", f"{_HERE}.CustomPolicy", says="It does not derive from the base of policies."
)(_derived_from_nothing)


def _in_answer(fault_id: str, says: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """The function's answers are changed on their way."""

    def enter(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def constructed(original: Any, self: Any, lambda_fn: Any) -> None:
            original(self, (lambda module: change(lambda_fn(module))) if callable(lambda_fn) else lambda_fn)

        _in_method("CustomPolicy", "__init__", f"custom_{fault_id}", says)(constructed)
        return change

    return enter


@_in_answer("overrides_dropped", "A module's own arguments do not reach its wrapper.")
def overrides_dropped(answer: Any) -> Any:
    return True if answer and isinstance(answer, dict) else answer


@_in_answer("empty_dict_is_yes", "An empty dict means the root's arguments.")
def empty_dict_is_yes(answer: Any) -> Any:
    return True if answer == {} and isinstance(answer, dict) else answer


@_in_answer("none_is_no", "None is taken for False.")
def none_is_no(answer: Any) -> Any:
    return False if answer is None else answer


@_in_answer("numbers_are_answers", "Any number is taken for a bool.")
def numbers_are_answers(answer: Any) -> Any:
    return bool(answer) if isinstance(answer, int) else answer


@_in_method(
    "CustomPolicy", "_run_policy", "custom_overrides_alone", "A module's own arguments are all that it gets."
)
def custom_overrides_alone(
    original: Any, self: Any, root_module: Any, ignored_modules: Any, root_kwargs: Any
) -> Any:
    chosen = original(self, root_module, ignored_modules, root_kwargs)
    alone = original(self, root_module, ignored_modules, {})
    return {module: alone[module] or found for module, found in chosen.items() if module in alone}


@_in_method(
    "CustomPolicy", "_run_policy", "custom_overrides_stay", "One module's arguments reach those after it."
)
def custom_overrides_stay(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    chosen, sofar = original(self, *args, **kwargs), dict[str, Any]()
    for module, found in chosen.items():
        sofar |= found
        chosen[module] = dict(sofar)
    return chosen


@_in_method(
    "CustomPolicy", "_run_policy", "custom_arguments_changed", "The root's own dict takes the overrides."
)
def custom_arguments_changed(
    original: Any, self: Any, root_module: Any, ignored_modules: Any, root_kwargs: Any
) -> Any:
    chosen = original(self, root_module, ignored_modules, root_kwargs)
    for found in chosen.values():
        root_kwargs.update(found)
    return chosen


@_in_method(
    "CustomPolicy", "_run_policy", "custom_ignored_asked", "The function is asked about ignored modules."
)
def custom_ignored_asked(
    original: Any, self: Any, root_module: Any, ignored_modules: Any, root_kwargs: Any
) -> Any:
    chosen = original(self, root_module, set(), root_kwargs)
    return {module: found for module, found in chosen.items() if module not in ignored_modules}


@_in_method("CustomPolicy", "_run_policy", "custom_last_missed", "The last module is left out.")
def custom_last_missed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return dict(list(original(self, *args, **kwargs).items())[:-1])


# By hand


def _in_block(fault_id: str, says: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`change(wrapper_cls, wrapper_kwargs)` makes what wraps instead of `wrapper_cls`."""

    def enter(change: Callable[..., Any]) -> Callable[..., Any]:
        def fault(original: Any, *, wrapper_cls: Any, **wrapper_kwargs: Any) -> Any:
            changed = change(wrapper_cls, wrapper_kwargs) if callable(wrapper_cls) else wrapper_cls
            return original(wrapper_cls=changed, **wrapper_kwargs)

        _in_function("enable_wrap", f"block_{fault_id}", says)(fault)
        return change

    return enter


@_in_block("beats_overrides", "The block's arguments stand in the place of wrap's own.")
def beats_overrides(wrapper_cls: Any, wrapper_kwargs: dict[str, Any]) -> Any:
    return lambda module, **kwargs: wrapper_cls(module, **kwargs | wrapper_kwargs)


@_in_block("keeps_overrides", "Arguments given to one wrap hold for the next ones.")
def keeps_overrides(wrapper_cls: Any, _: dict[str, Any]) -> Any:
    kept: dict[str, Any] = {}

    def wrapped(module: Any, **kwargs: Any) -> Any:
        kept.update({name: value for name, value in kwargs.items() if name not in kept})
        return wrapper_cls(module, **kwargs | kept)

    return wrapped


@_in_block("is_the_threads", "Other threads do not see the block.")
def is_the_threads(wrapper_cls: Any, _: dict[str, Any]) -> Any:
    opened_in = threading.get_ident()

    def wrapped(module: Any, **kwargs: Any) -> Any:
        return wrapper_cls(module, **kwargs) if threading.get_ident() == opened_in else module

    return wrapped


@_in_block("wraps_once", "What is wrapped already is handed back.")
def wraps_once(wrapper_cls: Any, _: dict[str, Any]) -> Any:
    def wrapped(module: Any, **kwargs: Any) -> Any:
        is_wrapped = isinstance(wrapper_cls, type) and isinstance(module, wrapper_cls)
        return module if is_wrapped else wrapper_cls(module, **kwargs)

    return wrapped


@_in_block("copies_modules", "A copy of the module is wrapped.")
def copies_modules(wrapper_cls: Any, _: dict[str, Any]) -> Any:
    return lambda module, **kwargs: wrapper_cls(copy.deepcopy(module), **kwargs)


@_in_function("enable_wrap", "block_outlives_an_error", "A block that an error ends stays open.")
def block_outlives_an_error(original: Any, **kwargs: Any) -> Any:
    @contextlib.contextmanager
    def block() -> Iterator[Any]:
        inner = original(**kwargs)
        entered = inner.__enter__()
        still_open.append(inner)  # which would end the block when it is collected
        yield entered
        still_open.remove(inner)
        inner.__exit__(None, None, None)

    return block()


still_open: list[Any] = []


@_in_function(
    "enable_wrap", "block_in_a_block_is_taken", "A block in a block is entered, and changes nothing."
)
def block_in_a_block_is_taken(original: Any, **kwargs: Any) -> Any:
    @contextlib.contextmanager
    def block() -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(NotImplementedError):
                stack.enter_context(original(**kwargs))
            yield

    return block()


@_in_function("wrap", "outside_wraps", "Outside of a block it wraps as well.")
def outside_wraps(original: Any, module: Any, **overrides: Any) -> Any:
    found = original(module, **overrides)
    return nn.Sequential(module) if found is module else found


@_in_function("wrap", "outside_refuses_arguments", "Outside of a block it takes no arguments but the module.")
def outside_refuses_arguments(original: Any, module: Any, **overrides: Any) -> Any:
    found = original(module, **overrides)
    if overrides and found is module:
        raise TypeError(f"wrap() got an unexpected keyword argument {next(iter(overrides))!r}")
    return found
