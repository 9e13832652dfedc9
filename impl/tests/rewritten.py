"""The modules of torch that `impl` writes afresh, and so must neither import nor call."""

from __future__ import annotations

REWRITTEN = (
    "torch.amp",
    "torch.cuda.amp",
    "torch.cpu.amp",
    "torch.nn.utils.clip_grad",
    "torch.distributed.fsdp",
    "torch._dynamo.variables.optimizer",
    "torch.distributed.utils",
)
# Plain vocabulary.
ALLOWED = ("torch.distributed.fsdp.api",)


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def is_product(module: str) -> bool:
    """Whether a module is one of `impl` that users get: its tests may call what they compare it with."""
    return is_within(module, ("impl",)) and "tests" not in module.split(".")
