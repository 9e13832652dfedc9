"""Puts our names in torch's places, for code that cannot be edited.

    python -m impl.drop_in train.py --epochs 3     # runs train.py over our parts
    python -m impl.drop_in -m package.train        # the same for a module
    torchrun -m impl.drop_in train.py              # on every rank

    from impl import drop_in
    drop_in.install()                              # until uninstall()
    with drop_in.installed(): ...                  # for one block

A name is replaced in every loaded module of torch that holds it: `torch.autocast`, `torch.amp.autocast` and
`torch.amp.autocast_mode.autocast` are one object before and one object after.

What it does not reach
    Names already bound elsewhere: after `from torch.amp import GradScaler` at the top of your module, that name is
    torch's class whatever is installed later. Install first, import second; `python -m impl.drop_in` does.
    Objects already made: torch's scalers and autocast regions stay torch's, and are no instances of the classes
    that stand in their places now. Install between two steps, not between `unscale_` and `step`.
    Classes already derived from torch's, which stay so.
    Processes started afresh, as by multiprocessing's "spawn": they begin with torch's names. Forked ones inherit.
    `torch.jit.script`, which knows torch's autocast by its name in the source.
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

# Each is found under torch, where it is defined, and at the same path under impl; one that impl lacks stays torch's.
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

# torch's own fully_shard, and its replicate which is made of it: both go on by their own classes.
_SPARING = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.replicate_with_fsdp")

# Writes what it finds in the places into tables, when first imported. Imported before ours stand there, it deals in
# torch's own for good, as the rest of torch expects of it.
_REMEMBERING = "torch._dynamo.variables.torch"


def install() -> None:
    """Put our names in torch's places, in the whole process; a second call changes nothing.

    Sync: none. Collectives: none. Imports Dynamo and `torch.distributed.fsdp`, which takes a second or two.
    """
    _patches.install()


def uninstall() -> None:
    """Take back `install()`: every place holds torch's object again, once no `installed()` block is open.

    A place that somebody else has written to since is left as it is. A call without `install()` changes nothing.
    """
    _patches.uninstall()


def installed() -> contextlib.AbstractContextManager[None]:
    """Our names in torch's places until the block ends, however it ends.

    Blocks nest and may overlap across threads; what they change is seen by all threads, until the last one ends.

    >>> with installed():
    ...     torch.nn.utils.clip_grad_norm_.__module__
    'impl.nn.utils.clip_grad'
    >>> torch.nn.utils.clip_grad_norm_.__module__
    'torch.nn.utils.clip_grad'
    """
    return _patches.installed()


def _pairs() -> list[tuple[Any, Any]]:
    """Each of torch's objects that is to be replaced, with ours."""
    importlib.import_module(_REMEMBERING)
    there = torch.distributed.is_available()
    names = [name for name in _NAMES if there or not name.startswith("distributed.")]
    pairs = [(_found("torch", name), _found("impl", name)) for name in names]
    return [(theirs, ours) for theirs, ours in pairs if theirs is not None and ours is not None]


def _tracing() -> contextlib.AbstractContextManager[None]:
    """What has no public name: how Dynamo traces optimizers."""
    return importlib.import_module("impl.dynamo").installed()


_patches = PatchSet(_pairs, along=_tracing, sparing=_SPARING)


def _found(package: str, name: str) -> Any:
    """The object at `package.name`, importing modules on the way; None if there is none."""
    module_name, _, attribute = f"{package}.{name}".rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only what we look for may be absent: a module that fails to import something else is broken.
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            return None
        raise
    return getattr(module, attribute, None)


_USAGE = """usage: python -m impl.drop_in [-m] TARGET [ARGUMENT ...]

Run a program as `python` would, over impl's parts.
  TARGET     the script, or with -m the module or package, to run
  ARGUMENT   its own arguments, handed on as they are
"""


def main(arguments: list[str]) -> None:
    """Run a script or a module as `python` would, with our names in place.

    It runs in the process's own module `__main__`, which outlives it: what it leaves behind (threads, functions for
    the interpreter's exit) finds its names there, and pickles of its classes can be read.
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
    # Python has put the current directory first, as it does for its own -m.
    if not is_module:
        sys.path[0] = str(Path(target).resolve().parent)
    sys.argv = [names["__file__"] if is_module else target, *own]
    scope = vars(sys.modules["__main__"])
    scope.clear()
    scope.update({"__name__": "__main__", "__builtins__": builtins, "__doc__": None} | names)
    exec(code, scope)


def _stop(why: str) -> NoReturn:
    sys.stderr.write(f"python -m impl.drop_in: {why.rstrip()}\n")
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
    # This copy of the module is called __main__, and makes room for the program; the one that the program may import
    # must be the one that knows what is in place.
    importlib.import_module("impl.drop_in").main(sys.argv[1:])
