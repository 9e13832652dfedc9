"""The optimizer-state methods of FullyShardedDataParallel: what they are told, and what they warn of."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from impl.distributed.fsdp._state_dict.methods import StateDicts, wrappers_in
from impl.distributed.fsdp._state_dict.optim_flat import OptimSaveOptions
from impl.distributed.fsdp._state_dict.optim_keys import OptimStateKeyType, Source, StateDict, rekeyed
from impl.distributed.fsdp._state_dict.optim_load import OptimStateLoading, load_together
from impl.distributed.fsdp._state_dict.optim_save import saved
from impl.distributed.fsdp.api import StateDictType

_OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None
_Group = dist.ProcessGroup | None


class OptimStateDicts:
    """The state of an optimizer of a sharded model, as that of a model that was never wrapped, and back.

    In what is saved, `state` and `param_groups` name parameters as they were named before wrapping, unsharded, or each
    rank its rows; so it can be loaded into a model that is wrapped in another way, or on another number of ranks. All
    methods are static, take any module that has FullyShardedDataParallel at or below it, and are to be called on all
    ranks with the same arguments but where it says otherwise.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict | None = None,
        group: _Group = None,
    ) -> StateDict:
        """The optimizer's state as the state dict type that is set on the model says.

        FULL_STATE_DICT has unsharded tensors, with `rank0_only` on the group's first rank alone, and an empty dict on
        the others. SHARDED_STATE_DICT has each rank's rows, as ShardedTensor, or DTensor where a device mesh was given;
        LOCAL_STATE_DICT is the same. What is not sharded over the ranks may share memory with the optimizer.

        Args:
            model: whose parameters the optimizer steps.
            optim: any optimizer; one whose state is shaped neither like its parameters nor a number needs NO_SHARD.
            optim_state_dict: what to transform, by default `optim.state_dict()`. Of torch's `_NamedOptimizer` give its
                own: by itself that is the rank's part, which torch.distributed.checkpoint would take for all of it.
            group: the ranks that take part, by default all.

        Raises:
            RuntimeError: ranks do not have the states that others have, or some parameters of a unit have none.
            ValueError: a tensor is not shaped like what the optimizer steps.
        Collectives: one of objects over `group`; for each flat parameter a gather of each tensor (FULL), or one
            all-to-all.
        Source: torch's 2.13; differences: no two parameters share a number; sharded forms move each rank's rows alone.
        """
        settings: Any = wrappers_in(model)[0].get_state_dict_type(model)
        config = settings.optim_state_dict_config
        options = OptimSaveOptions(
            is_full=settings.state_dict_type == StateDictType.FULL_STATE_DICT,
            rank0_only=getattr(config, "rank0_only", False),
            offloads=getattr(config, "offload_to_cpu", True),
            uses_dtensor=getattr(config, "_use_dtensor", False),
        )
        given = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return saved(model, _rooted(model), Source(optim), given, options, group)

    @staticmethod
    def optim_state_dict_to_load(  # noqa: PLR0913  torch's six
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: _Group = None,
    ) -> StateDict:
        """What `optim_state_dict` returned, as `optim.load_state_dict` takes it: this rank's part of it.

        Args:
            model: whose parameters the optimizer steps.
            optim: the optimizer that is to load it.
            optim_state_dict: unsharded tensors, or the rank's rows. Where FULL_STATE_DICT is set with `rank0_only`,
                that of the group's first rank alone counts.
            is_named_optimizer: the optimizer's own state dict has parameters' names for keys. torch's `_NamedOptimizer`
                calls this by itself only where `impl.drop_in` is installed, and skips names that it does not know.
            load_directly: load it, too: on all ranks, or where one rank cannot, on none.
            group: the ranks that take part, by default all.

        Raises:
            ValueError: there is no state in it, or a tensor does not fit its parameter.
            KeyError: a parameter group names a parameter that the optimizer does not step.
            RuntimeError: another rank has raised; nothing was changed on any of them.
        Collectives: one of objects over `group`; with `rank0_only` another one, and a scatter of each tensor of a flat
            parameter; of rows one all-to-all for each flat parameter.
        Source: torch's 2.13; differences: what cannot be loaded raises on all ranks, before anything is changed; shapes
            are compared with `use_orig_params` too; what is loaded shares no memory with what was given.
        """
        settings: Any = wrappers_in(model)[0].get_state_dict_type(model)
        found = OptimStateLoading(
            model,
            _rooted(model),
            Source(optim),
            optim_state_dict,
            rank0_only=getattr(settings.optim_state_dict_config, "rank0_only", False),
            keeper=optim if is_named_optimizer else None,
            group=group,
        ).run()
        if load_directly:
            load_together(optim, found, group)
        return found

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: _OptimInput = None,
        rank0_only: bool = True,
        group: _Group = None,
    ) -> StateDict:
        """Unsharded states on the CPU, by default on the group's first rank alone. Deprecated: use `optim_state_dict`.

        Args:
            model: whose parameters the optimizer steps.
            optim: the optimizer.
            optim_input: deprecated; what the optimizer was made of.
            rank0_only: the other ranks get an empty dict.
            group: the ranks that take part, by default all.
        """
        _warn_of_legacy("full_optim_state_dict", "optim_state_dict")
        _warn_of_input(optim_input)
        options = OptimSaveOptions(is_full=True, rank0_only=rank0_only, offloads=True, uses_dtensor=False)
        return saved(model, _rooted(model), Source(optim, optim_input), optim.state_dict(), options, group)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: _Group = None) -> StateDict:
        """Each rank's rows of the states, on the CPU. Deprecated: use `optim_state_dict`."""
        _warn_of_legacy("sharded_optim_state_dict", "optim_state_dict")
        wrappers = _rooted(model)
        uses_dtensor = getattr(wrappers[0]._optim_state_dict_config, "_use_dtensor", False)
        options = OptimSaveOptions(is_full=False, rank0_only=False, offloads=True, uses_dtensor=uses_dtensor)
        return saved(model, wrappers, Source(optim), optim.state_dict(), options, group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: _OptimInput = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """A rank's part of unsharded states that it has, without collectives. Deprecated: use
        `optim_state_dict_to_load`.

        Args:
            full_optim_state_dict: by names.
            model: whose parameters the optimizer steps.
            optim_input: deprecated; what the optimizer was made of. By default, without `optim`, `model.parameters()`.
            optim: the optimizer that is to load it.
        """
        _warn_of_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_of_input(optim_input)
        return OptimStateLoading(
            model,
            _rooted(model),
            Source(optim, optim_input),
            full_optim_state_dict,
            agrees=False,
        ).run()

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
    ) -> StateDict:
        """The part that an optimizer loads of each rank's rows. Deprecated: use `optim_state_dict_to_load`."""
        _warn_of_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return OptimStateLoading(model, _rooted(model), Source(optim), sharded_optim_state_dict).run()

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: _OptimInput = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> StateDict:
        """Each rank's part of unsharded states that the first rank has. Deprecated: use `optim_state_dict_to_load`.

        Args:
            full_optim_state_dict: by names; what other ranks give does not count.
            model: whose parameters the optimizer steps.
            optim_input: deprecated; what the optimizer was made of. By default, without `optim`, `model.parameters()`.
            optim: the optimizer that is to load it.
            group: the ranks that take part, by default all.
        """
        _warn_of_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_of_input(optim_input)
        return OptimStateLoading(
            model,
            _rooted(model),
            Source(optim, optim_input),
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
        """An optimizer's state dict with names for numbers, or numbers for names; itself if it has them already.

        So unsharded states go to and from a model that is not wrapped.

        Args:
            optim_state_dict: by names or by numbers.
            optim_state_key_type: which of them to return it by.
            model: one that is not wrapped, or with `use_orig_params`.
            optim_input: deprecated; what the optimizer was made of. By default, without `optim`, `model.parameters()`.
            optim: the optimizer whose numbers they are.

        Raises:
            AssertionError: there is no such type of keys.
            ValueError: it has keys of both types.
            RuntimeError: the model has flat parameters.
        """
        _warn_of_input(optim_input)
        source = Source(optim, optim_input)
        return rekeyed(optim_state_dict, optim_state_key_type, model, wrappers_in(model), source)


def _rooted(model: nn.Module) -> list[StateDicts]:
    """Every FullyShardedDataParallel at and below the model, ready for collectives.

    Raises:
        AssertionError: some have parameters of their own, and some flat ones.
    """
    wrappers = wrappers_in(model)
    if len({one._use_orig_params for one in wrappers}) > 1:
        raise AssertionError("Not all FSDP modules have the same _use_orig_params value")
    for one in wrappers:
        one._find_root()
    return wrappers


def _warn_of_legacy(current: str, new: str) -> None:
    name = "FullyShardedDataParallel"
    warnings.warn(
        f"``{name}.{current}``is being deprecated and is replaced by ``{name}.{new}``. ``{name}.{current}`` may be "
        "removed after PyTorch 2.2.",
        FutureWarning,
        stacklevel=3,
    )


def _warn_of_input(optim_input: Any) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. You may remove it from "
            "your code without changing its functionality.",
            FutureWarning,
            stacklevel=3,
        )
