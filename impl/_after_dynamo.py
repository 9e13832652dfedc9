"""Registrations with Dynamo, deferred until Dynamo is imported, because importing it takes two seconds.

While it traces, Dynamo reads nothing that could trigger an import of ours. So a finder on `sys.meta_path` waits for the
import of Dynamo.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_waiting: dict[str, None] = {}  # names of our modules that register something


def import_after_dynamo(name: str) -> None:
    """Import a module of ours now if Dynamo is loaded, else as soon as it is."""
    # Add the name first, so that a thread that imports Dynamo at the same time sees it.
    _waiting[name] = None
    if sys.modules.get("torch._dynamo") is not None:
        importlib.import_module("torch._dynamo")  # waits for an import by another thread
        importlib.import_module(name)
    elif _dynamo_import not in sys.meta_path:
        sys.meta_path.insert(0, _dynamo_import)


class _DynamoImport(MetaPathFinder):
    """Finder that imports the waiting modules once `torch._dynamo` was executed. Other finders do the finding."""

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

        def exec_and_notify(module: ModuleType) -> None:
            loader.exec_module = execute  # restores a loader that other modules may share
            execute(module)
            for name in list(_waiting):
                importlib.import_module(name)

        loader.exec_module = exec_and_notify
        return spec


# The finder is never removed, because a failed import of Dynamo may be tried again. It costs other imports one
# comparison.
_dynamo_import = _DynamoImport()
