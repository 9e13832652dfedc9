"""python -m conformance.simulator.coverage: the operators and runtime calls that the simulator cannot queue."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from textwrap import fill

import torch

from conformance.simulator import NAME, Unavailable, enable


class Support(Enum):
    """Ways in which the simulator runs an operator."""

    QUEUED = "queued"
    COMPOSED = "made of other operators"
    AT_ONCE = "run while the host waits: the result depends on data or random numbers, or its shape has no meta kernel"
    VIEW = "refused: a view that has no kernel of its own for the device"
    NO_KERNEL = "refused: no kernel for the CPU"


_QUIET = (Support.QUEUED, Support.COMPOSED)
_DATA_DEPENDENT = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


def operators() -> Iterator[torch._ops.OpOverload]:
    """Yield every operator of aten, in the order of the names."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace == "aten":
            yield getattr(getattr(torch.ops.aten, base), overload or "default")


def support_of(operator: torch._ops.OpOverload) -> Support:
    """Return how the simulator runs `operator`. The simulator must be enabled."""
    name = operator.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if has(name, "PrivateUse1"):
        return Support.QUEUED
    if has(name, "CompositeImplicitAutograd"):
        return Support.COMPOSED
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    if not computed(name, "CPU"):
        return Support.NO_KERNEL
    if has(name, "CompositeExplicitAutograd") or has(name, "CompositeExplicitAutogradNonFunctional"):
        return Support.COMPOSED
    returns = operator._schema.returns
    if any(value.alias_info is not None and not value.alias_info.is_write for value in returns):
        return Support.VIEW
    is_fresh = any(value.alias_info is None for value in returns)
    takes_out = any(argument.kwarg_only and argument.is_write for argument in operator._schema.arguments)
    if is_fresh and _DATA_DEPENDENT & set(operator.tags):
        return Support.AT_ONCE
    if (is_fresh or takes_out) and not has(name, "Meta"):
        return Support.AT_ONCE
    return Support.QUEUED


def missing_runtime_calls() -> list[str]:
    """Return the functions and classes of `torch.cuda` that the module of the device lacks."""
    device = getattr(torch, NAME)
    return [
        name
        for name in sorted(torch.cuda.__all__)
        if not hasattr(device, name) and callable(getattr(torch.cuda, name, None))
    ]


def report() -> str:
    """Return what the command prints."""
    names: dict[Support, list[str]] = {support: [] for support in Support}
    for operator in operators():
        names[support_of(operator)].append(operator.name().removeprefix("aten::"))
    lines = [f"torch {torch.__version__}, operators of aten: {sum(map(len, names.values()))}"]
    for support, operators_of_support in names.items():
        lines.append(f"{len(operators_of_support)} {support.value}")
        if support not in _QUIET:
            lines.append(_listed(operators_of_support))
    calls = missing_runtime_calls()
    lines += [f"{len(calls)} names of torch.cuda that torch.{NAME} lacks", _listed(calls)]
    return "\n".join(lines)


def main() -> int:
    try:
        enable()
    except (Unavailable, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(report())
    return 0


def _listed(names: list[str]) -> str:
    indent = "    "
    return fill(
        ", ".join(names), 120, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


if __name__ == "__main__":
    sys.exit(main())
