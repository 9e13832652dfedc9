"""Names in messages."""

from collections.abc import Sequence

from torch.optim import Optimizer


def describe_names(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def optimizer_name(cls: type[Optimizer]) -> str:
    """Return the class name, with its module unless the class is torch's."""
    is_torchs = f"{cls.__module__}.".startswith("torch.optim.")
    return cls.__name__ if is_torchs else f"{cls.__module__}.{cls.__qualname__}"
