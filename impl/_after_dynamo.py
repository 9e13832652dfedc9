"""What Dynamo is to be told, told once somebody imports it: to import it ourselves would cost a program two seconds.

Dynamo reads nothing while it traces that leads it to us, so what it must know waits on `sys.meta_path`.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_waiting: dict[str, None] = {}  # modules of ours that tell it


def import_after_dynamo(name: str) -> None:
    """Import a module of ours: now if Dynamo is loaded, else as soon as it is."""
    # Noted first: whoever has just imported Dynamo in another thread finds it there.
    _waiting[name] = None
    if sys.modules.get("torch._dynamo") is not None:
        importlib.import_module("torch._dynamo")  # waits where another thread is still importing it
        importlib.import_module(name)
    elif _dynamo_import not in sys.meta_path:
        sys.meta_path.insert(0, _dynamo_import)


class _DynamoImport(MetaPathFinder):
    """Finds `torch._dynamo` as it would be found without it, and imports what waits once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch._dynamo":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            loader.exec_module = execute  # it may serve other modules too
            execute(module)
            for name in list(_waiting):
                importlib.import_module(name)

        loader.exec_module = execute_and_tell
        return spec


# It stays for good: an import of Dynamo that fails is tried again, and any other costs one comparison.
_dynamo_import = _DynamoImport()
