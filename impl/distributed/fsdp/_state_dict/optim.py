"""Optimizer-state methods of FullyShardedDataParallel: their arguments and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from impl.distributed.fsdp._state_dict.methods import StateDicts, wrappers_in
from impl.distributed.fsdp._state_dict.optim_flat_save import OptimSaveOptions
from impl.distributed.fsdp._state_dict.optim_keys import OptimStateKeyType, ParamSource, StateDict, rekey
from impl.distributed.fsdp._state_dict.optim_load import OptimStateLoading, load_on_all_ranks
from impl.distributed.fsdp._state_dict.optim_save import collect_state_dict
from impl.distributed.fsdp.api import StateDictType

_OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None
_Group = dist.ProcessGroup | None


class OptimStateDicts:
    """The state of an optimizer of a sharded model, saved like that of an unwrapped model, and loaded again.

    In a saved dict, `state` and `param_groups` use the parameters' names before wrapping. The tensors are unsharded,
    or each rank has its rows. So the dict can be loaded into a model with another wrapping, or on another number of
    ranks. All methods are static and take any module with FullyShardedDataParallel at or below it. Unless a method
    says otherwise, call it on all ranks with the same arguments.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict | None = None,
        group: _Group = None,
    ) -> StateDict:
        """Return the optimizer's state in the form of the state dict type that is set on the model.

        FULL_STATE_DICT contains unsharded tensors. With `rank0_only`, ranks other than the group's first get an empty
        dict. SHARDED_STATE_DICT contains each rank's rows, as ShardedTensor, or as DTensor if a device mesh was passed.
        LOCAL_STATE_DICT is the same. Values that are not sharded may share memory with the optimizer.

        Args:
            model: the model whose parameters the optimizer steps.
            optim: any optimizer. States of another shape than the parameters', except numbers, need NO_SHARD.
            optim_state_dict: the dict to convert, by default `optim.state_dict()`. For torch's `_NamedOptimizer` pass
                its own dict: it is the rank's part, which torch.distributed.checkpoint would take for the full state.
            group: the ranks that take part, by default all.

        Raises:
            RuntimeError: a rank lacks states that others have, or some parameters of a unit have none.
            ValueError: a tensor has another shape than its stepped parameter.
        Collectives: one of objects over `group`; for each flat parameter a gather of each tensor (FULL), or one
            all-to-all.
        Source: torch's 2.13; differences: no two parameters share a number; sharded dicts only move each rank's rows.
        """
        wrappers = _wrappers_of(model)
        settings: Any = wrappers[0].get_state_dict_type(model)
        config = settings.optim_state_dict_config
        options = OptimSaveOptions(
            is_full=settings.state_dict_type == StateDictType.FULL_STATE_DICT,
            rank0_only=getattr(config, "rank0_only", False),
            offloads=getattr(config, "offload_to_cpu", True),
            uses_dtensor=getattr(config, "_use_dtensor", False),
        )
        state = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return collect_state_dict(model, wrappers, ParamSource(optim), state, options, group)

    @staticmethod
    def optim_state_dict_to_load(  # noqa: PLR0913  torch's six arguments
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: _Group = None,
    ) -> StateDict:
        """Return this rank's part of an `optim_state_dict`, in the form that `optim.load_state_dict` takes.

        Args:
            model: the model whose parameters the optimizer steps.
            optim: the optimizer that will load the result.
            optim_state_dict: unsharded tensors, or the rank's rows. With FULL_STATE_DICT and `rank0_only`, only the
                dict of the group's first rank counts.
            is_named_optimizer: the optimizer's own state dict has parameters' names as keys. torch's `_NamedOptimizer`
                calls this only if `impl.drop_in` is installed, and skips names that it does not know.
            load_directly: also load the result: on all ranks, or on none if one rank cannot.
            group: the ranks that take part, by default all.

        Raises:
            ValueError: the dict has no state, or a tensor does not fit its parameter.
            KeyError: a parameter group names a parameter that the optimizer does not step.
            RuntimeError: another rank has raised. Nothing was changed on any rank.
        Collectives: one of objects over `group`; with `rank0_only` another one, and a scatter of each tensor of a flat
            parameter; for rows one all-to-all for each flat parameter.
        Source: torch's 2.13; differences: an error is raised on all ranks, before anything is changed; shapes are
            compared with `use_orig_params` too; the result shares no memory with the argument.
        """
        wrappers = _wrappers_of(model)
        settings: Any = wrappers[0].get_state_dict_type(model)
        loaded = OptimStateLoading(
            model,
            wrappers,
            ParamSource(optim),
            optim_state_dict,
            rank0_only=getattr(settings.optim_state_dict_config, "rank0_only", False),
            named_optimizer=optim if is_named_optimizer else None,
            group=group,
        ).run()
        if load_directly:
            load_on_all_ranks(optim, loaded, group)
        return loaded

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: _OptimInput = None,
        rank0_only: bool = True,
        group: _Group = None,
    ) -> StateDict:
        """Return unsharded states on the CPU, by default on the group's first rank only.

        Deprecated: use `optim_state_dict`.

        Args:
            model: the model whose parameters the optimizer steps.
            optim: the optimizer.
            optim_input: deprecated; the argument that the optimizer was created with.
            rank0_only: the other ranks get an empty dict.
            group: the ranks that take part, by default all.
        """
        _warn_of_legacy("full_optim_state_dict", "optim_state_dict")
        _warn_of_input(optim_input)
        options = OptimSaveOptions(is_full=True, rank0_only=rank0_only, offloads=True, uses_dtensor=False)
        return collect_state_dict(
            model, _wrappers_of(model), ParamSource(optim, optim_input), optim.state_dict(), options, group
        )

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: _Group = None) -> StateDict:
        """Return each rank's rows of the states, on the CPU. Deprecated: use `optim_state_dict`."""
        _warn_of_legacy("sharded_optim_state_dict", "optim_state_dict")
        wrappers = _wrappers_of(model)
        uses_dtensor = getattr(
            wrappers[0]._state_dict_settings.optim_state_dict_config, "_use_dtensor", False
        )
        options = OptimSaveOptions(is_full=False, rank0_only=False, offloads=True, uses_dtensor=uses_dtensor)
        return collect_state_dict(model, wrappers, ParamSource(optim), optim.state_dict(), options, group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: _OptimInput = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """Return a rank's part of unsharded states without collectives. Deprecated: use `optim_state_dict_to_load`.

        Args:
            full_optim_state_dict: states by parameter name.
            model: the model whose parameters the optimizer steps.
            optim_input: deprecated; the argument that the optimizer was created with. Without `optim`, the default is
                `model.parameters()`.
            optim: the optimizer that will load the result.
        """
        _warn_of_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_of_input(optim_input)
        return OptimStateLoading(
            model,
            _wrappers_of(model),
            ParamSource(optim, optim_input),
            full_optim_state_dict,
            reports_problems=False,
        ).run()

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
    ) -> StateDict:
        """Return the part of each rank's rows that the optimizer loads. Deprecated: use `optim_state_dict_to_load`."""
        _warn_of_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return OptimStateLoading(
            model, _wrappers_of(model), ParamSource(optim), sharded_optim_state_dict
        ).run()

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: _OptimInput = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> StateDict:
        """Return each rank's part of unsharded states of the first rank. Deprecated: use `optim_state_dict_to_load`.

        Args:
            full_optim_state_dict: states by parameter name. Only the first rank's argument counts.
            model: the model whose parameters the optimizer steps.
            optim_input: deprecated; the argument that the optimizer was created with. Without `optim`, the default is
                `model.parameters()`.
            optim: the optimizer that will load the result.
            group: the ranks that take part, by default all.
        """
        _warn_of_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_of_input(optim_input)
        return OptimStateLoading(
            model,
            _wrappers_of(model),
            ParamSource(optim, optim_input),
            full_optim_state_dict,
            rank0_only=True,
            group=group,
        ).run()

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: _OptimInput = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """Return an optimizer's state dict with names instead of numbers, or numbers instead of names.

        A dict that has the requested keys is returned unchanged. Use this to move unsharded states to or from an
        unwrapped model.

        Args:
            optim_state_dict: states by parameter name or number.
            optim_state_key_type: type of the keys to return.
            model: an unwrapped model, or one with `use_orig_params`.
            optim_input: deprecated; the argument that the optimizer was created with. Without `optim`, the default is
                `model.parameters()`.
            optim: the optimizer that the numbers belong to.

        Raises:
            AssertionError: the type of keys is unknown.
            ValueError: the dict has keys of both types.
            RuntimeError: the model has flat parameters.
        """
        _warn_of_input(optim_input)
        source = ParamSource(optim, optim_input)
        return rekey(optim_state_dict, optim_state_key_type, model, wrappers_in(model), source)


def _wrappers_of(model: nn.Module) -> list[StateDicts]:
    """Return every FullyShardedDataParallel at and below the model, ready for collectives.

    Raises:
        ValueError: there is none.
        AssertionError: some of them use the original parameters, and some flat ones.
    """
    wrappers = wrappers_in(model)
    if not wrappers:
        raise ValueError(
            f"{type(model).__name__} has no FullyShardedDataParallel; for fully_shard and unsharded models use "
            "get_optimizer_state_dict and set_optimizer_state_dict of torch.distributed.checkpoint.state_dict"
        )
    if len({wrapper._use_orig_params for wrapper in wrappers}) > 1:
        raise AssertionError("Not all FSDP modules have the same _use_orig_params value")
    for wrapper in wrappers:
        wrapper._find_root()
    return wrappers


def _warn_of_legacy(current: str, new: str) -> None:
    name = "FullyShardedDataParallel"
    warnings.warn(
        f"``{name}.{current}``is being deprecated and is replaced by ``{name}.{new}``. ``{name}.{current}`` may be "
        "removed after PyTorch 2.2.",
        FutureWarning,
        stacklevel=3,
    )


def _warn_of_input(optim_input: object) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. You may remove it from "
            "your code without changing its functionality.",
            FutureWarning,
            stacklevel=3,
        )
