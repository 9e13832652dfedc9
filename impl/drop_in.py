"""Replacement of torch's classes and functions by ours, for code that cannot be edited.

    python -m impl.drop_in train.py --epochs 3     # runs train.py with our classes
    python -m impl.drop_in -m package.train        # the same for a module
    torchrun -m impl.drop_in train.py              # on every rank

    from impl import drop_in
    drop_in.install()                              # until uninstall()
    with drop_in.installed(): ...                  # for one block

A name is replaced in every loaded module of torch that holds it: `torch.autocast`, `torch.amp.autocast` and
`torch.amp.autocast_mode.autocast` are the same object before and after.

Limitations
    Names bound in other modules are not replaced. After `from torch.amp import GradScaler` at the top of your module,
    that name stays torch's class. So install before you import, as `python -m impl.drop_in` does.
    Existing scalers and autocast regions stay torch's, and are not instances of the replacements. Install between two
    steps, not between `unscale_` and `step`.
    Existing subclasses of torch's classes are not changed.
    New processes, for example of multiprocessing's "spawn", start with torch's names. Forked ones inherit ours.
    `torch.jit.script` recognises torch's autocast by its name in the source.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

import torch

from impl._patching import PatchSet

__all__ = ["install", "installed", "uninstall"]

# Paths below torch and below impl. A name that impl does not have stays torch's.
_NAMES = (
    "amp.autocast_mode.autocast",
    "amp.autocast_mode.autocast_decorator",
    "amp.autocast_mode.custom_bwd",
    "amp.autocast_mode.custom_fwd",
    "amp.autocast_mode.is_autocast_available",
    "amp.grad_scaler.GradScaler",
    "amp.grad_scaler.OptState",
    "cpu.amp.autocast_mode.autocast",
    "cpu.amp.grad_scaler.GradScaler",
    "cuda.amp.autocast_mode.autocast",
    "cuda.amp.autocast_mode.custom_bwd",
    "cuda.amp.autocast_mode.custom_fwd",
    "cuda.amp.grad_scaler.GradScaler",
    "distributed.checkpoint.state_dict.get_model_state_dict",
    "distributed.checkpoint.state_dict.get_optimizer_state_dict",
    "distributed.checkpoint.state_dict.get_state_dict",
    "distributed.fsdp.CPUOffloadPolicy",
    "distributed.fsdp.DataParallelMeshDims",
    "distributed.fsdp.FSDPModule",
    "distributed.fsdp.GradientReductionHandle",
    "distributed.fsdp.MixedPrecisionPolicy",
    "distributed.fsdp.OffloadPolicy",
    "distributed.fsdp.UnshardHandle",
    "distributed.fsdp._common_utils._get_module_fsdp_state_if_fully_sharded_module",
    "distributed.fsdp._flat_param.FlatParameter",
    "distributed.fsdp.fully_shard",
    "distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "distributed.fsdp.fully_sharded_data_parallel.OptimStateKeyType",
    "distributed.fsdp.register_fsdp_forward_method",
    "distributed.fsdp.share_comm_ctx",
    "distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    "distributed.fsdp.wrap._Policy",
    "distributed.fsdp.wrap.CustomPolicy",
    "distributed.fsdp.wrap.ModuleWrapPolicy",
    "distributed.fsdp.wrap.always_wrap_policy",
    "distributed.fsdp.wrap.enable_wrap",
    "distributed.fsdp.wrap.lambda_auto_wrap_policy",
    "distributed.fsdp.wrap.size_based_auto_wrap_policy",
    "distributed.fsdp.wrap.transformer_auto_wrap_policy",
    "distributed.fsdp.wrap.wrap",
    "nn.utils.clip_grad.clip_grad_norm",
    "nn.utils.clip_grad.clip_grad_norm_",
    "nn.utils.clip_grad.clip_grad_value_",
    "nn.utils.clip_grads_with_norm_",
    "nn.utils.get_total_norm",
)

# torch's fully_shard, and its replicate, which uses it, need torch's own classes.
_SPARING = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.replicate_with_fsdp")

# This module copies torch's objects into tables at its import, and torch expects the originals there. So it is imported
# before any replacement.
_COPYING_MODULE = "torch._dynamo.variables.torch"


def install() -> None:
    """Replace torch's objects by ours in the whole process. A second call changes nothing.

    Sync: none. Collectives: none. Imports Dynamo and `torch.distributed.fsdp`, which takes a second or two.
    """
    _patches.install()


def uninstall() -> None:
    """Undo `install()` and restore torch's objects, once no `installed()` block is open.

    A name that other code has rebound since is left as it is. A call without `install()` changes nothing.
    """
    _patches.uninstall()


def installed() -> contextlib.AbstractContextManager[None]:
    """Context manager that replaces torch's objects by ours.

    Blocks nest and may overlap across threads. All threads see the replacement, until the last block ends.

    >>> with installed():
    ...     torch.nn.utils.clip_grad_norm_.__module__
    'impl.nn.utils.clip_grad'
    >>> torch.nn.utils.clip_grad_norm_.__module__
    'torch.nn.utils.clip_grad'
    """
    return _patches.installed()


def _pairs() -> list[tuple[Any, Any]]:
    """Return each of torch's objects that is replaced, with ours."""
    importlib.import_module(_COPYING_MODULE)
    has_distributed = torch.distributed.is_available()
    names = [name for name in _NAMES if has_distributed or not name.startswith("distributed.")]
    pairs = [(_find("torch", name), _find("impl", name)) for name in names]
    return [(original, new) for original, new in pairs if original is not None and new is not None]


def _tracing() -> contextlib.AbstractContextManager[None]:
    """Return the replacement of objects without a public name: Dynamo's tracing of optimizers."""
    return importlib.import_module("impl.dynamo").installed()


_patches = PatchSet(_pairs, along=_tracing, sparing=_SPARING)


def _find(package: str, name: str) -> Any:
    """Import and return the object at `package.name`, or None if there is none."""
    module_name, _, attribute = f"{package}.{name}".rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the module itself may be absent. One that fails to import another module is broken.
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            return None
        raise
    return getattr(module, attribute, None)


_USAGE = """usage: python -m impl.drop_in [-m] TARGET [ARGUMENT ...]

Run a program like `python`, with impl's classes instead of torch's.
  TARGET     script to run, or with -m a module or package
  ARGUMENT   arguments of the program
"""


def main(arguments: list[str]) -> None:
    """Run a script or a module like `python`, with torch's objects replaced by ours.

    It runs in the process's module `__main__`, which outlives it, so that its threads and exit handlers find their
    names and pickles of its classes can be read.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return
    is_module = arguments[:1] == ["-m"]
    rest = arguments[is_module:]
    if not rest or (rest[0].startswith("-") and not is_module):
        _stop(f"TARGET is missing, or comes after an unknown option\n{_USAGE}")
    target, *own = rest
    code, names = _module_code(target) if is_module else _script_code(target)
    install()
    # Python has put the current directory first, which is right for -m.
    if not is_module:
        sys.path[0] = str(Path(target).resolve().parent)
    sys.argv = [names["__file__"] if is_module else target, *own]
    scope = vars(sys.modules["__main__"])
    scope.clear()
    scope.update({"__name__": "__main__", "__builtins__": builtins, "__doc__": None} | names)
    exec(code, scope)


def _stop(reason: str) -> NoReturn:
    sys.stderr.write(f"python -m impl.drop_in: {reason.rstrip()}\n")
    sys.exit(2)


def _script_code(target: str) -> tuple[types.CodeType, dict[str, Any]]:
    path = Path(target)
    if path.is_dir():
        path /= "__main__.py"
    if not path.is_file():
        _stop(f"there is no file {path}")
    path = path.absolute()
    names = {
        "__file__": str(path),
        "__cached__": None,
        "__loader__": None,
        "__package__": None,
        "__spec__": None,
    }
    return compile(path.read_bytes(), path, "exec"), names


def _module_code(target: str) -> tuple[types.CodeType, dict[str, Any]]:
    try:
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{target}.__main__")
    except ModuleNotFoundError as error:
        _stop(str(error))
    loader = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if spec and isinstance(loader, importlib.abc.InspectLoader) else None
    if spec is None or code is None:
        _stop(f"there is no module {target} that can be run")
    names = {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": loader}
    return code, names | {"__package__": spec.parent, "__spec__": spec}


if __name__ == "__main__":
    # The program replaces this module in `__main__`. It may import impl.drop_in, which must be the module that did the
    # replacement.
    importlib.import_module("impl.drop_in").main(sys.argv[1:])
