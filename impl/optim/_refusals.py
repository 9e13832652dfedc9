"""What is no optimizer is refused: by its type, or, where others than torch's will do, by what it has.

And what an optimizer is called where something is said of it.
"""

from torch.optim import Optimizer


def refuse_other_types(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected an instance of torch.optim.Optimizer, got {_kind(optimizer)}; pass the optimizer that it makes "
            "or holds"
        )


def refuse_what_has_no_groups(optimizer: object) -> None:
    """Raise a TypeError that says what was expected, in the place of an AttributeError for `param_groups`."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"expected an optimizer, which has param_groups, got {_kind(optimizer)}; pass the one to be stepped"
        )


def name_of(kind: type[Optimizer]) -> str:
    """Of torch's as torch calls it; others, which may be called the same, with their module."""
    is_torchs = f"{kind.__module__}.".startswith("torch.optim.")
    return kind.__name__ if is_torchs else f"{kind.__module__}.{kind.__qualname__}"


def _kind(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
