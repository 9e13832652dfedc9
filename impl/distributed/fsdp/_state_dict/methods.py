"""Methods of FullyShardedDataParallel about state dicts of the model."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from impl.distributed.fsdp._params.managed import clean_name
from impl.distributed.fsdp._state_dict.loading import StateDictLoading, StateDictWrapper
from impl.distributed.fsdp._state_dict.saving import StateDictSaving
from impl.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
_DEPRECATED = (
    "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated. Please use APIs, get_state_dict() and "
    "set_state_dict(), which can support different parallelisms, FSDP1, FSDP2, DDP. API doc: "
    "https://pytorch.org/docs/stable/distributed.checkpoint.html#torch.distributed.checkpoint.state_dict."
    "get_state_dict .Tutorial: https://pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html ."
)


_INSTEAD_OF_SAVING = "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned."
# torch's text, in which a blank is missing.
_INSTEAD_OF_LOADING = "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict willbe returned."


class StateDicts(StateDictWrapper):
    """Saving and loading of the parameters that a unit manages, by hooks around nn.Module's own walk.

    So `state_dict` of a module around a FullyShardedDataParallel works too.
    """

    def _begin_state_dicts(self) -> None:
        """Initialize the mixin. Call once in the constructor."""
        self._state_dict_settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
        self.register_state_dict_pre_hook(_before_saving)
        self._register_state_dict_hook(_after_saving)
        self._register_load_state_dict_pre_hook(_before_loading, with_module=True)
        self.register_load_state_dict_post_hook(_after_loading)

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Return the module's state in the form of `state_dict_type`. The arguments are those of nn.Module.

        FULL_STATE_DICT, the default, contains copies of the unsharded parameters under the names before wrapping.
        SHARDED_STATE_DICT contains each rank's rows, as ShardedTensor, or as DTensor if a device mesh was passed.
        LOCAL_STATE_DICT contains the rank's shards. It can only be loaded by as many ranks with the same wrapping.
        NO_SHARD always uses FULL_STATE_DICT. Inside `summon_full_params(rank0_only=True)` the first rank may call this
        alone for FULL_STATE_DICT, if all units are summoned. The others get no parameters of sharded units.

        Raises:
            AssertionError: called during a forward or backward.
            RuntimeError: LOCAL_STATE_DICT with a device mesh, or inside `summon_full_params`.
        Collectives: for each unit an all-gather, or for SHARDED_STATE_DICT an all-to-all of each rank's rows; for
            FULL_STATE_DICT none inside `summon_full_params`.
        Source: torch's 2.13; differences: LOCAL_STATE_DICT contains flat parameters only, also with `use_orig_params`.
            With SHARDED_STATE_DICT, hooks of inner modules see no unsharded parameters.
        """
        try:
            return super().state_dict(*args, **kwargs)
        except BaseException:
            for wrapper in wrappers_in(self):
                if wrapper._saving is not None:
                    wrapper._saving.abandon()
                    wrapper._saving = None
            raise

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of the same `state_dict_type`: all of it on every rank, or nothing on any rank.

        Inside `summon_full_params(rank0_only=True)` the first rank may load a FULL_STATE_DICT alone, if all units are
        summoned and none has DTensors. Then each rank that loads decides for itself.

        Args:
            state_dict: for FULL_STATE_DICT the unsharded dict on each rank.
            strict: require the same keys as `state_dict` returns.
            assign: use the dict's own tensors for buffers and parameters that no unit manages. The others are copied.

        Returns:
            The missing and the unexpected keys.

        Raises:
            RuntimeError: a key is missing, unexpected or misshaped, on this rank or on another one.
            AssertionError: a key has a value of another type than the state dict's type requires.
        Collectives: all-reduces of a number for each parameter, then for SHARDED_STATE_DICT an all-to-all per unit;
            none where the first rank may load alone.
        Source: torch's 2.13; differences: a failed load leaves everything unchanged; `assign` loads parameters of
            units too; LOCAL_STATE_DICT can be loaded with `use_orig_params` too. Modules with their own load function
            may copy into unsharded parameters, and cannot read them. If an outer module is loaded, missing and
            unexpected keys are reported after the rest was loaded.
        """
        loading = StateDictLoading(wrappers_in(self))
        loading.begin()
        try:
            keys = super().load_state_dict(state_dict, strict, assign)
        except Exception as error:
            loading.finish(str(error) or type(error).__name__)
            raise
        except BaseException:
            loading.abandon()
            raise
        verdict = loading.finish("")
        if verdict:
            raise RuntimeError(verdict)
        return keys

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the form that `state_dict` and `load_state_dict` use for every unit at and below `module`.

        Args:
            module: any module.
            state_dict_type: see `state_dict`.
            state_dict_config: config of that type; None: its defaults. `offload_to_cpu` puts tensors on the CPU.
                `rank0_only` of FULL_STATE_DICT returns them on the group's first rank only.
            optim_state_dict_config: the same for optimizers.

        Returns:
            The previous settings.

        Raises:
            RuntimeError: a configuration has another type.
            AssertionError: the units have different settings.
        """
        warnings.warn(_DEPRECATED, FutureWarning, stacklevel=2)
        return _set(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Return the settings of `set_state_dict_type`, or None if there is no unit.

        Raises:
            AssertionError: the units have different settings.
            RuntimeError: LOCAL_STATE_DICT was set, and a device mesh was passed.
        """
        common: StateDictSettings | None = None
        for wrapper in wrappers_in(module):
            settings = wrapper._state_dict_settings
            if common is not None and settings != common:
                raise AssertionError(
                    f"All FSDP modules must have the same state dict settings.Got {settings} and {common}."
                )
            if wrapper._device_mesh is not None:
                _use_dtensor(settings.state_dict_type, settings.optim_state_dict_config)
            common = common or settings
        return None if common is None else replace(common)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None]:
        """Context manager that sets the state dict type as `set_state_dict_type` does, and restores it at exit.

        Source: torch's 2.13; differences: torch does not restore the settings after an error.
        """
        warnings.warn(_DEPRECATED, FutureWarning, stacklevel=3)
        before = _set(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for wrapper in wrappers_in(module):
                wrapper._state_dict_settings = before

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the names that torch.distributed.checkpoint.state_dict must change: none.

        Raises:
            RuntimeError: this class does not replace torch's, so each rank's part would be written as the full tensor.
        """
        if isinstance(self, sys.modules["torch.distributed.checkpoint.state_dict"].FSDP):
            return {}
        raise RuntimeError(
            "torch.distributed.checkpoint.state_dict takes impl's FullyShardedDataParallel for an unsharded module; "
            "call impl.drop_in.install() before, or use impl.distributed.fsdp.checkpoint"
        )

    def _kind_and_config(self, instead: str) -> tuple[StateDictType, StateDictConfig]:
        """Return the current type and config. Warn with `instead` if they replace those that were set.

        Raises:
            RuntimeError: LOCAL_STATE_DICT was set, and a device mesh was passed.
        """
        settings = self._effective_settings
        if settings is not self._state_dict_settings:
            warnings.warn(instead, stacklevel=3)
        elif self._device_mesh is not None:
            _use_dtensor(settings.state_dict_type, settings.state_dict_config)
        return settings.state_dict_type, settings.state_dict_config


def wrappers_in(module: nn.Module) -> list[StateDicts]:
    """Return every FullyShardedDataParallel at and below a module, the outermost first."""
    return [child for child in module.modules() if isinstance(child, StateDicts)]


def _set(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    expected, optim_expected = _CONFIGS[kind]
    config = expected() if config is None else config
    optim_config = optim_expected() if optim_config is None else optim_config
    if type(config) is not expected:
        raise RuntimeError(f"Expected state_dict_config of type {expected} but got {type(config)}")
    if type(optim_config) is not optim_expected:
        raise RuntimeError(
            f"Expected optim_state_dict_config of type {optim_expected} but got {type(optim_config)}"
        )
    wrappers = wrappers_in(module)
    settings = [wrapper._state_dict_settings for wrapper in wrappers]
    if len({previous.state_dict_type for previous in settings}) > 1:
        raise AssertionError("All FSDP modules should have the same state_dict_type.")
    if len({type(previous.state_dict_config) for previous in settings}) > 1:
        raise AssertionError("All FSDP modules must have the same type of state_dict_config.")
    if len({type(previous.optim_state_dict_config) for previous in settings}) > 1:
        raise AssertionError("All FSDP modules must have the same type of optim_state_dict_config.")
    for wrapper in wrappers:
        wrapper._state_dict_settings = StateDictSettings(kind, config, optim_config)
    nothing: Any = None
    return settings[0] if settings else StateDictSettings(nothing, nothing, nothing)


def _use_dtensor(kind: StateDictType, config: Any) -> None:
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise RuntimeError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT. Please set "
            "state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict."
        )
    config._use_dtensor = True


# Hooks, in the order in which nn.Module calls them.


def _before_saving(wrapper: nn.Module, prefix: str, keep_vars: bool) -> None:
    del prefix, keep_vars
    assert isinstance(wrapper, StateDicts)
    if wrapper._saving is not None:  # a walk from an outer module has raised
        wrapper._saving.abandon()
    kind, config = wrapper._kind_and_config(_INSTEAD_OF_SAVING)
    wrapper._find_root().handle_failed_backward()
    wrapper._saving = StateDictSaving(wrapper, kind, config)
    try:
        wrapper._saving.begin()
    except BaseException:
        wrapper._saving.abandon()
        wrapper._saving = None
        raise


def _after_saving(
    wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    del local_metadata
    assert isinstance(wrapper, StateDicts)
    saving, wrapper._saving = wrapper._saving, None
    assert saving is not None
    saving.end(state_dict, prefix)


def _before_loading(  # noqa: PLR0913  nn.Module's eight
    wrapper: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    del local_metadata, strict, missing_keys, unexpected_keys
    assert isinstance(wrapper, StateDicts)
    wrapper._find_root().handle_failed_backward()
    loading = wrapper._loading
    if loading is None or loading.is_walked_from(wrapper):
        if loading is not None:  # the previous walk has raised
            loading.abandon()
        loading = StateDictLoading(wrappers_in(wrapper), error_msgs)
        loading.begin()
    kind, config = wrapper._kind_and_config(_INSTEAD_OF_LOADING)
    try:
        error_msgs += loading.enter(wrapper, kind, config, state_dict, prefix)
    except AssertionError as error:
        if loading.errors is None:
            raise
        error_msgs.append(str(error))


def _after_loading(wrapper: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(wrapper, StateDicts)
    loading = wrapper._loading
    assert loading is not None
    loading.leave(wrapper)
    for keys in incompatible_keys:
        keys[:] = [clean_name(key) for key in keys]
    if loading.is_walked_from(wrapper):
        loading.finish_for_outer_module()
