"""Gradients of sharded parameters that a scaler sets aside while a microbatch runs, or gets during a backward.

A unit of sharded parameters holds `.grad`, and gradients of backwards without synchronisation. The units register here,
so that a scaler finds those of an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakSet

from torch import Tensor


class HeldGradient(NamedTuple):
    """A tensor with gradients of one or several parameters."""

    tensor: Tensor
    parts: Sequence[tuple[Tensor, Tensor]]  # parameters, and views of their elements


HeldGradients = dict[Hashable, HeldGradient]


class GradientReceiver(Protocol):
    """Object that gets gradients while the backward still runs."""

    def receive(
        self,
        holder: ShardedHolder,
        part: Hashable,
        grads: Sequence[tuple[Tensor, Tensor]],
        wait: Callable[[], None],
    ) -> None:
        """Take gradients that become the `.grad` of their parameters, unless the same part reduces others later.

        Args:
            holder: it has reduced gradients.
            part: the part of its parameters that it has reduced.
            grads: parameters, and local gradients on the host. Empty if `.grad` will be something else.
            wait: blocks the host until the gradients have their values.
        """

    def before_gather(self, holder: ShardedHolder) -> None:
        """Restore the parameters' values from before the backward, because a gather is about to read them."""


class GradientHolder(Protocol):
    """Unit of sharded parameters."""

    @property
    def stepped(self) -> Sequence[Tensor]:
        """Parameters that the optimizer steps."""
        ...

    def begin_microbatch(self) -> HeldGradients:
        """Take all gradients. The next reduction includes unreduced ones nevertheless.

        Raises:
            NotImplementedError: gradients are reduced in a way that cannot be undone.
        """
        ...

    def skip_microbatch(self) -> None:
        """Replace this rank's gradients by zeros until the end of the microbatch."""

    def end_microbatch(self) -> tuple[HeldGradients, list[Hashable]]:
        """Take the gradients of the microbatch. Return also the keys of earlier ones that were reduced with them."""
        ...

    def put_gradients(self, tensors: Mapping[Hashable, Tensor]) -> None:
        """Hold these gradients instead of any others."""

    def reduce_held(self) -> None:
        """Reduce the unreduced gradients of all units of the model, unless they are.

        Collectives: those of a backward that ends with synchronisation.
        """


class ShardedHolder(GradientHolder, Protocol):
    """Unit of sharded parameters that may have a receiver of their gradients."""

    receiver: GradientReceiver | None

    def cast_shards(self, params: Collection[int]) -> Mapping[int, Tensor]:
        """Return memory on the host for shards in the dtype that they are gathered in, by `id` of the parameter.

        Shards on a device, and those that are gathered in their own dtype, have none.

        Args:
            params: ids of the parameters that are updated.
        """
        ...

    def record_cast_shards(self, params: Collection[int]) -> None:
        """Record that this memory has the current values of the parameters with these ids, for the next gathers."""


_holders: WeakSet[ShardedHolder] = WeakSet()


def register_holder(holder: ShardedHolder) -> None:
    _holders.add(holder)


def holders_of_any(params: Sequence[Tensor]) -> list[ShardedHolder]:
    """Return the units that have any of these parameters, in the order of the parameters."""
    by_param = {id(param): holder for holder in list(_holders) for param in holder.stepped}
    return list(dict.fromkeys(by_param[id(param)] for param in params if id(param) in by_param))


def holders_of(params: Sequence[Tensor]) -> list[GradientHolder]:
    """Return the units of these parameters, in the order of the parameters.

    Raises:
        NotImplementedError: a unit has trained parameters besides.
    """
    holders: list[GradientHolder] = [*holders_of_any(params)]
    stepped = set(map(id, params))
    for holder in holders:
        if any(param.requires_grad and id(param) not in stepped for param in holder.stepped):
            raise NotImplementedError(
                "microbatch() needs an optimizer that has all trained parameters of each sharded module; shard the "
                "parameters of different optimizers in different modules"
            )
    return holders
