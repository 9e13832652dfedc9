"""Registration of one flat parameter in the modules of its unit.

Modules have *unsharded views* while the buffer of all elements is live, and *sharded views* otherwise: with
`use_orig_params` the user's own parameters, as views of the shard, else a `ShardedPlaceholder`, which knows its shape
and raises if it is read. The registered flat parameter changes with them: it is another tensor, with all elements in
the compute dtype, while modules have unsharded views.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from impl.distributed.fsdp._flat_param import FlatParameter
from impl.distributed.fsdp._layout.flat_buffer import UnshardedBuffer
from impl.distributed.fsdp._layout.flat_handle import FlatParamHandle
from impl.distributed.fsdp._params.param_registration import ParamRegistration, keeping_order


class FlatRegistration:
    """Tensors that modules have instead of the parameters of one flat parameter, and the flat parameter itself.

    Summoned parameters, and stand-ins of state dicts, are registered instead of both.
    """

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self._views = ParamRegistration(handle.param_infos, as_parameters=handle.use_orig_params)
        # Parameters that are registered instead of placeholders.
        self._summoned: ParamRegistration | None = None
        self._flat_param_place: tuple[dict[str, Any], str] | None = None
        self.sharded_views: Sequence[Tensor] = ()  # the original parameters, or placeholders
        self.uses_unsharded_views = False

    def set_flat_param_place(self, module: nn.Module, name: str) -> None:
        """Set the place of the flat parameter.

        With `use_orig_params` it is only registered while the user's parameters are not.
        """
        self._flat_param_place = (cast("dict[str, Any]", module._parameters), name)
        if not self._handle.use_orig_params:
            self._register_flat_param()

    def use_unsharded_views(self, unsharded: UnshardedBuffer) -> None:
        self._views.register(unsharded.views)
        if unsharded.flat_param is not None:
            self._register_flat_param(unsharded.flat_param)
        self.uses_unsharded_views = True

    def use_sharded_views(self) -> None:
        self._views.register(self.sharded_views)
        if self.uses_unsharded_views and not self._handle.use_orig_params:
            self._register_flat_param()
        self.uses_unsharded_views = False

    def registered(self) -> Iterator[tuple[int, Tensor | None]]:
        """Yield the tensors that are registered now, with the indices of their parameters."""
        registration = self._views if self._summoned is None else self._summoned
        return registration.registered()

    def take_new_parameters(self) -> bool:
        """Adopt parameters that the user registered instead of the original ones. Return whether there are any.

        Raises:
            RuntimeError: the user registered another tensor, or replaced a placeholder or the flat parameter.
        """
        if self.uses_unsharded_views:
            return False
        handle, has_new = self._handle, False
        views = handle.parameters if handle.use_orig_params else self.sharded_views
        for index, tensor in self.registered():
            if tensor is views[index] or (tensor is None and handle.use_orig_params):
                continue
            if not handle.use_orig_params or not isinstance(tensor, nn.Parameter):
                raise _replacement_error(handle.param_infos[index].name)
            handle.parameters[index] = tensor
            has_new = True
        if not handle.use_orig_params and self._flat_param_place is not None:
            registry, name = self._flat_param_place
            if registry.get(name) is not handle.flat_param:
                raise _replacement_error(name)
        return has_new

    # Summoned parameters

    def register_unsharded_params(self, views: Sequence[Tensor]) -> None:
        """Register unsharded parameters in the modules, and unregister the flat parameter.

        Original parameters stay the same objects, unless they are DTensors, which have no 1-D piece.
        """
        handle = self._handle
        pairs = [*enumerate(handle.wrap_locals(views))]
        if not handle.use_orig_params:
            self._register_instead([nn.Parameter(view, handle.wants_grad(index)) for index, view in pairs])
            return
        registered = [*handle.parameters]
        for index, view in pairs:
            if handle.param_infos[index].parallel is None:
                registered[index].data = view
            else:
                registered[index] = nn.Parameter(view, handle.wants_grad(index))
        self._views.register(registered)

    def register_again(self, parameters: Sequence[Tensor]) -> None:
        """Register unsharded parameters that were registered before."""
        if self._handle.use_orig_params:
            self._views.register(parameters)
        else:
            self._register_instead(parameters)

    def restore_flat_param(self) -> None:
        """Undo `register_unsharded_params`."""
        if self._summoned is not None:
            self._summoned.unregister()
            self._summoned = None
        self._register_flat_param()

    def _register_instead(self, parameters: Sequence[Tensor]) -> None:
        self._unregister_flat_param()
        self._summoned = ParamRegistration(self._handle.param_infos, as_parameters=True)
        self._views.unregister()
        self._summoned.register(parameters)

    # Temporary tensors

    @contextmanager
    def registering(self, parameters: Sequence[Tensor]) -> Generator[None]:
        """Context manager in which `parameters` are registered in the modules, and the flat parameter is not."""
        use_orig_params = self._handle.use_orig_params
        with keeping_order(self.registries()):
            before = None if self._summoned is None else dict(self._summoned.registered())
            if use_orig_params:
                self._views.register(parameters)
            elif self._summoned is not None:
                self._summoned.register(parameters)
            else:
                self._register_instead(parameters)
            try:
                yield
            finally:
                if self._summoned is not None and before is not None:
                    self._summoned.register([cast("Tensor", before[index]) for index in range(len(before))])
                else:
                    if not use_orig_params:
                        self.restore_flat_param()
                    self.use_sharded_views()

    @contextmanager
    def registering_flat_param(self, parameter: Tensor) -> Generator[None]:
        """Context manager in which only `parameter` is registered, as the flat parameter."""
        with keeping_order(self.registries()):
            if self._handle.use_orig_params:
                self._views.unregister()
            if self._flat_param_place is not None:
                self._flat_param_place[0][self._flat_param_place[1]] = cast("nn.Parameter", parameter)
            try:
                yield
            finally:
                if self._handle.use_orig_params:
                    self._unregister_flat_param()
                    self.use_sharded_views()
                else:
                    self._register_flat_param()

    def follow_replacement(self) -> None:
        """Use the new parameter after a move from or to the meta device, which replaces the flat parameter."""
        if self._flat_param_place is None:
            return
        handle, (registry, name) = self._handle, self._flat_param_place
        new = registry[name]
        if new is not handle.flat_param:
            names, handle.flat_param = handle.flat_param._fqns, FlatParameter(new, new.requires_grad)
            handle.flat_param._fqns = names
            registry[name] = handle.flat_param

    def registries(self) -> list[dict[str, Any]]:
        """Return the `_parameters` of each module that has the flat parameter or one of the original parameters."""
        infos = self._handle.param_infos
        places = [location.module._parameters for info in infos for location in info.locations]
        if self._flat_param_place is not None:
            places.append(self._flat_param_place[0])
        return [*{id(place): cast("dict[str, Any]", place) for place in places}.values()]

    def _register_flat_param(self, flat_param: FlatParameter | None = None) -> None:
        """Register an unsharded flat parameter, or the sharded one if it is None."""
        if self._flat_param_place is not None:
            registry, name = self._flat_param_place
            registry[name] = self._handle.flat_param if flat_param is None else flat_param

    def _unregister_flat_param(self) -> None:
        if self._flat_param_place is not None:
            self._flat_param_place[0].pop(self._flat_param_place[1], None)


def _replacement_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} was replaced by another tensor (as torch.func.functional_call does for a call), which the ranks "
        "cannot gather; write to parameters in place, unsharded ones inside summon_full_params()"
    )
