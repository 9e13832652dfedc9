"""Policies that choose the submodules that become units, and `wrap` for explicit wrapping.

A policy is called in one of two ways:
    An object with `_run_policy` (`ModuleWrapPolicy`, `CustomPolicy`, torch's own too) gets the whole tree once.
    A callable is called twice for each module: on the way down to decide whether to look inside (`recurse=True`), on
    the way up whether to wrap (`recurse=False`), with the number of elements below it that no unit has yet.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from impl.distributed.fsdp._params.full_precision import FullPrecision
from impl.distributed.fsdp._params.param_assignment import ParamAssignment, parents_of

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

_Chosen = dict[nn.Module, dict[str, Any]]  # the arguments of each chosen module's wrapper


# Policies that get the tree


class _Policy(ABC):
    """Base of policies that get the whole tree. The name is torch's, because user-defined policies derive from it."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> _Chosen:
        """Return the modules to wrap, each with the arguments of its wrapper."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        """Return whether the class has `_run_policy`, so that torch's policies count too."""
        return hasattr(subclass, "_run_policy") if cls is _Policy else NotImplemented


class ModuleWrapPolicy(_Policy):
    """Policy that wraps each instance of the given classes, with the root's arguments.

    Args:
        module_classes: subclasses count, as for `isinstance`.

    Raises:
        TypeError: `module_classes` is not an iterable of classes. The constructor or a call of the policy raises it.
    Source: torch.distributed.fsdp.wrap.ModuleWrapPolicy 2.13; differences: none.

    >>> policy = ModuleWrapPolicy({nn.Linear})
    >>> policy(nn.Linear(2, 2), recurse=False), policy(nn.ReLU(), recurse=False)
    (True, False)
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(module_classes)
        self._module_classes_str = str(self._module_classes)

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> _Chosen:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: object, **kwargs: object) -> bool:
        """Answer like a callable policy. Further arguments, such as the number of elements, are ignored."""
        return bool(recurse) or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"{super().__repr__()}({self._module_classes_str})"


class CustomPolicy(_Policy):
    """Policy that wraps modules chosen by a function, with the root's arguments or some of them changed.

    Args:
        lambda_fn: called once with each module that is not ignored. Returns whether to wrap it: False or an empty dict
            for no, True for yes, a dict for yes with these arguments instead of the root's.

    Raises:
        ValueError: `lambda_fn` returned something else. Raised when the policy is called.
    Source: torch.distributed.fsdp.wrap.CustomPolicy 2.13; differences: none.

    >>> policy = CustomPolicy(lambda module: isinstance(module, nn.Linear) and {"forward_prefetch": True})
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> _Chosen:
        chosen: _Chosen = {}
        for module in root_module.modules():
            if module not in ignored_modules and (answer := self._answer(module)):
                chosen[module] = {**root_kwargs, **answer} if isinstance(answer, dict) else dict(root_kwargs)
        return chosen

    def _answer(self, module: nn.Module) -> bool | dict[str, Any]:
        answer: Any = self._lambda_fn(module)
        if not isinstance(answer, (bool, dict)):
            raise ValueError(
                "The lambda_fn passed to CustomPolicy should return "
                f"False/True or a kwarg dict, but it returned {answer}"
            )
        return cast("bool | dict[str, Any]", answer)


# Policies that get one module at a time


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Wrap every module.

    Source: torch.distributed.fsdp.wrap.always_wrap_policy 2.13; differences: none.

    >>> always_wrap_policy(module=nn.ReLU(), recurse=False, nonwrapped_numel=0)
    True
    """
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules that a function chooses. Look inside all modules.

    Args:
        module: the module to decide about.
        recurse: whether the question is to look inside, or to wrap.
        nonwrapped_numel: elements below `module` that no unit has yet; does not matter here.
        lambda_fn: returns whether to wrap a module. Its result is returned unchanged.

    Source: torch.distributed.fsdp.wrap.lambda_auto_wrap_policy 2.13; differences: none.

    >>> policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: hasattr(module, "weight"))
    >>> policy(nn.ReLU(), True, 0), policy(nn.ReLU(), False, 0), policy(nn.Linear(2, 2), False, 6)
    (True, False, True)
    """
    return bool(recurse) or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Wrap each instance of the given classes, for example the blocks of a transformer. Look inside all modules.

    Args:
        module: the module to decide about.
        recurse: whether the question is to look inside, or to wrap.
        nonwrapped_numel: elements below `module` that no unit has yet; does not matter here.
        transformer_layer_cls: subclasses count, as for `isinstance`.

    Source: torch.distributed.fsdp.wrap.transformer_auto_wrap_policy 2.13; differences: none.

    >>> policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    >>> policy(nn.TransformerEncoderLayer(4, 2), recurse=False, nonwrapped_numel=100)
    True
    """
    return bool(recurse) or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(  # noqa: PLR0913 torch's signature
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wrap a module if at least `min_num_params` elements below it have no unit. Look inside modules that large.

    Args:
        module: the module to decide about.
        recurse: whether the question is to look inside, or to wrap.
        nonwrapped_numel: elements below `module` that no unit has yet.
        min_num_params: least number of elements (not parameters) to wrap a module.
        force_leaf_modules: classes never looked into; by default those in the function's own attribute
            `FORCE_LEAF_MODULES`, which contains `nn.MultiheadAttention`.
        exclude_wrap_modules: classes never wrapped themselves; by default those in `EXCLUDE_WRAP_MODULES`, which
            contains `nn.ModuleList` and `nn.ModuleDict`, whose forward is never called.

    Source: torch.distributed.fsdp.wrap.size_based_auto_wrap_policy 2.13; differences: none.

    >>> policy = functools.partial(size_based_auto_wrap_policy, min_num_params=6)
    >>> policy(nn.Linear(2, 2), False, 6), policy(nn.Linear(2, 2), False, 5), policy(nn.ModuleList(), False, 6)
    (True, False, False)
    """
    defaults = cast(Any, size_based_auto_wrap_policy)
    if recurse:
        excluded = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        excluded = defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(excluded))


cast(Any, size_based_auto_wrap_policy).FORCE_LEAF_MODULES = {nn.MultiheadAttention}
cast(Any, size_based_auto_wrap_policy).EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """Return whether any policy matches. Policies after the first match are not called."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies
    )


# Explicit wrapping


@dataclass(frozen=True)
class _Wrapping:
    """Wrapper and arguments of an `enable_wrap` block."""

    wrapper_cls: Callable[..., nn.Module] | None
    wrapper_kwargs: Mapping[str, Any]


_wrapping: _Wrapping | None = None  # set inside a block


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Generator[None]:
    """Context manager in which `wrap` wraps modules. Like in torch, this affects all threads.

    Args:
        wrapper_cls: called with a module as first argument. Returns the module that replaces it.
        **wrapper_kwargs: passed to each call of `wrapper_cls`.

    Raises:
        NotImplementedError: another block is active. It stays active.
    Source: torch.distributed.fsdp.wrap.enable_wrap 2.13; differences: none.

    >>> with enable_wrap(wrapper_cls=nn.Sequential):
    ...     wrap(nn.ReLU())
    Sequential(
      (0): ReLU()
    )
    """
    global _wrapping  # noqa: PLW0603 the block is the process's, as in torch
    if _wrapping is not None:
        raise NotImplementedError(
            "You are already within an autowrap context and we currently do not supported nested autowrap."
        )
    _wrapping = _Wrapping(wrapper_cls, wrapper_kwargs)
    try:
        yield
    finally:
        _wrapping = None


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return a wrapper around `module` inside an `enable_wrap` block, or `module` itself outside of one.

    Args:
        module: the module to wrap.
        **wrap_overrides: arguments for this wrapper instead of the block's.

    Raises:
        AssertionError: the block was opened with `wrapper_cls=None`.
    Source: torch.distributed.fsdp.wrap.wrap 2.13; differences: none.

    >>> wrap(nn.ReLU())
    ReLU()
    """
    if _wrapping is None:
        return module
    if _wrapping.wrapper_cls is None:
        raise AssertionError("Expected _ConfigAutoWrap.wrapper_cls to be set")
    return _wrapping.wrapper_cls(module, **{**_wrapping.wrapper_kwargs, **wrap_overrides})


# Wrapping by the constructor


def auto_wrap(  # noqa: PLR0913 arguments of the constructor
    root: nn.Module,
    policy: Any,
    *,
    ignored_modules: Collection[nn.Module],
    ignored_params: Collection[nn.Parameter],
    wrapper_cls: type[nn.Module],
    wrapper_kwargs: Mapping[str, Any],
) -> None:
    """Wrap each submodule that `policy` chooses, at every place in the tree, inner modules first.

    A parameter that several units use belongs to the innermost unit around all of them, or to the root. Wrappers inside
    that unit get it in `_left_to_ancestor`, a frozenset. Nothing is changed before the policy has returned.

    Args:
        root: module whose submodules are wrapped. The caller wraps the root itself.
        policy: any value of the constructor's `auto_wrap_policy`.
        ignored_modules: modules that are neither passed to the policy nor wrapped.
        ignored_params: parameters that count in no size and belong to no unit.
        wrapper_cls: called with a module and its arguments.
        wrapper_kwargs: the arguments. If `mixed_precision` is set, modules of its `_module_classes_to_ignore` are
            wrapped separately without it, and compute in float32 whatever their inputs' dtype.

    Raises:
        ValueError: the tree already contains a `wrapper_cls`.
    """
    _check_not_wrapped(root, wrapper_cls)
    mixed_precision = wrapper_kwargs["mixed_precision"]
    full_precision_classes = (
        () if mixed_precision is None else tuple(mixed_precision._module_classes_to_ignore)
    )
    full_precision = [module for module in root.modules() if isinstance(module, full_precision_classes)]
    if hasattr(policy, "_run_policy"):  # a policy that gets the whole tree
        chosen: _Chosen = {
            module: dict(wrapper_kwargs) for module in full_precision if module not in ignored_modules
        }
        chosen |= policy._run_policy(root, ignored_modules, dict(wrapper_kwargs))
    else:
        if mixed_precision is not None:
            policy = functools.partial(
                _or_policy, policies=[policy, ModuleWrapPolicy(full_precision_classes)]
            )
        units = _choose_by_callable(root, policy, ignored_modules, ignored_params)
        chosen = {unit: dict(wrapper_kwargs) for unit in units}
    for module in chosen.keys() & set(full_precision):
        chosen[module] = chosen[module] | {"mixed_precision": None}

    assignment = ParamAssignment(root, chosen.keys(), ignored_params)
    _warn_of_classes(full_precision)
    for module in full_precision:
        FullPrecision(module)
    _wrap_each(root, chosen, assignment, wrapper_cls)


def _check_not_wrapped(root: nn.Module, wrapper_cls: type[nn.Module]) -> None:
    for name, module in root.named_modules():
        if isinstance(module, wrapper_cls):
            raise ValueError(
                f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in\n{root}"
            )


def _choose_by_callable(
    root: nn.Module,
    policy: Callable[..., bool],
    ignored_modules: Collection[nn.Module],
    ignored_params: Collection[nn.Parameter],
) -> list[nn.Module]:
    """Return the modules that a callable chooses below `root`, inner ones first.

    The callable decides once about a shared module.
    """
    chosen: list[nn.Module] = []

    @functools.cache
    def numel_in_units(module: nn.Module) -> int:
        numel = sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored_params)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        inner = sum(numel_in_units(child) for child in module.children() if child not in ignored_modules)
        if module is root or not policy(module=module, recurse=False, nonwrapped_numel=numel - inner):
            return inner
        chosen.append(module)
        return numel

    numel_in_units(root)
    return chosen


def _warn_of_classes(full_precision: Iterable[nn.Module]) -> None:
    if classes := {type(module) for module in full_precision}:
        instances = "instances" if torch.__version__ >= "2.14.dev0" else "instacnes"
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, "
            f"where the wrapped module has submodules of type:\n{classes}\n"
            f"These modules will be wrapped as separate FSDP {instances} with mixed precision disabled.",
            stacklevel=4,
        )


def _wrap_each(
    root: nn.Module, chosen: _Chosen, assignment: ParamAssignment, wrapper_cls: type[nn.Module]
) -> None:
    parents = parents_of(root)
    for module in assignment.order:
        if module in chosen and module is not root:
            left = assignment.left_to_ancestors(module)
            kwargs = chosen[module] | ({"_left_to_ancestor": left} if left else {})
            wrapper = wrapper_cls(module, **kwargs)
            for parent, name in parents[module]:
                setattr(parent, name, wrapper)
