"""Tensors and facts of an optimizer's update that later steps use again, with the guards that make this valid."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from impl.kernels import KnownPlaces, ListLayout, Parameters, list_layout, match_layout, tensor_guards
from impl.optim._list_cache import Bucket, same
from impl.optim._shards import local_parts

_placements = attrgetter("_spec.placements")


@dataclass(frozen=True)
class Prepared:
    """Cached tensors of a bucket's update, valid while all guards hold and no address changes."""

    parameters: Parameters
    layout: ListLayout | None  # layout of the gradients, if it matches the parameters'
    low_precision_params: TensorGuards

    @classmethod
    def of(cls, parameters: Parameters, grads: list[Tensor]) -> Prepared:
        parameters.refresh_addresses()  # starts tracking their addresses
        copies = tensor_guards([*parameters.low_precision_params])
        return cls(parameters, _matching_layout(parameters, grads), copies)

    def current(self, bucket: Bucket, copies: list[Tensor]) -> tuple[Parameters, list[Tensor]] | None:
        """Return parameters and gradients, or None if they changed. Call it after the list cache's guards have held."""
        is_valid = (
            len(copies) == len(self.parameters.low_precision_params)
            and same(copies, self.parameters.low_precision_params)
            and self.low_precision_params.check(*copies)
            and not self.parameters.refresh_addresses()
        )
        return (self.parameters, bucket.grads) if is_valid else None

    def release(self) -> None:
        """Keep the tensors, which are the optimizer's own."""


@dataclass
class PreparedShards:
    """Cached facts about a bucket of DTensors, without their local tensors, which are looked up in each step.

    They are valid while the placements of parameters and gradients stay equal, and the local tensors keep type, dtype,
    device, shape and strides. If only an address changes, the places of the memory are looked up again.
    """

    placements: list[tuple[Any, ...]]  # placements of the parameters, then of the gradients
    local_tensors: TensorGuards  # guards of parameters, states and gradients
    layout: ListLayout | None  # layout of the local gradients, if it matches the parameters'
    states: list[str]  # names of the states
    parameters: Parameters | None  # local tensors, only during a step
    places: KnownPlaces | None = None

    @classmethod
    def of(
        cls, bucket: Bucket, states: list[str], parameters: Parameters, grads: list[Tensor]
    ) -> PreparedShards:
        local_tensors = [*parameters.params, *chain.from_iterable(parameters.states), *grads]
        return cls(
            _placements_of(bucket),
            tensor_guards(local_tensors),
            _matching_layout(parameters, grads),
            states,
            parameters,
        )

    def current(self, bucket: Bucket, copies: list[Tensor]) -> tuple[Parameters, list[Tensor]] | None:
        """Return local parameters and gradients, or None if they changed. Call it after the list cache's guards."""
        if copies or _placements_of(bucket) != self.placements:
            return None
        params, grads, *states = map(
            local_parts, (bucket.params, bucket.grads, *(bucket[name] for name in self.states))
        )
        if not self.local_tensors.check(*params, *chain.from_iterable(states), *grads):
            return None
        self.parameters = Parameters(params, states, bucket.counters.steps)
        if self.places is not None:
            self.parameters.memory.reuse(self.places)
        return self.parameters, grads

    def release(self) -> None:
        """Drop the local tensors, because their owner may replace them to free memory."""
        if self.parameters is not None:
            self.places = self.parameters.memory.known_places()
            self.parameters = None


def _matching_layout(parameters: Parameters, grads: list[Tensor]) -> ListLayout | None:
    """Return the layout of gradients that have the memory order of their parameters, else None."""
    in_order = all(map(is_, map(match_layout, parameters.params, grads), grads))
    return list_layout(grads) if in_order else None


def _placements_of(bucket: Bucket) -> list[tuple[Any, ...]]:
    return list(map(_placements, chain(bucket.params, bucket.grads)))
