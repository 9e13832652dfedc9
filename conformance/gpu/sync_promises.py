"""The public calls of `impl` whose docstrings say that they do not synchronise with the device."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import impl

# Calls of the other packages run every operation of this package. Only its `backend` is public.
_LEFT_OUT = "kernels"
_SENTENCE = re.compile(r"\bSync(?:, [a-z, ]+)?: (.*?)\.(?: |$)")
_REFERENCE = re.compile(r"as (?:for )?`([\w.]+)`")
_ALL_METHODS = "unless the method says so"


def promises() -> dict[str, str]:
    """Return the "Sync" sentence of each public call that can avoid a synchronisation, by dotted name.

    A method without its own sentence has the sentence of its class, if that is about all methods. "As `name`"
    means the sentence of `name`.
    """
    sentences: dict[str, str] = {}
    for name, value in _public_names():
        sentences[name] = own = _sentence(value)
        is_for_all = _ALL_METHODS in _resolved(name, own, sentences)
        for method_name, method in _methods(value):
            sentences[f"{name}.{method_name}"] = _sentence(method) or (own if is_for_all else "")
    resolved = {name: _resolved(name, sentence, sentences) for name, sentence in sentences.items()}
    return {name: sentence for name, sentence in resolved.items() if re.search(r"\bnone\b", sentence)}


def _resolved(name: str, sentence: str, sentences: dict[str, str]) -> str:
    """Follow a reference, first to a name of the same module."""
    reference = _REFERENCE.match(sentence)
    if reference is None:
        return sentence
    same_module = sentences.get(f"{name.rpartition('.')[0]}.{reference[1]}")
    elsewhere = (other for path, other in sentences.items() if path.endswith(f".{reference[1]}"))
    return same_module or next(elsewhere, sentence)


def _sentence(value: Any) -> str:
    """Return what the docstring says after "Sync:", or "" if it says nothing."""
    match = _SENTENCE.search(" ".join((value.__doc__ or "").split()))
    return match[1] if match else ""


def _public_names() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes that public modules export, without duplicates."""
    yielded: set[int] = set()
    for module in map(importlib.import_module, _public_modules()):
        for name in _exports(module):
            value = getattr(module, name)
            if (inspect.isfunction(value) or inspect.isclass(value)) and id(value) not in yielded:
                yielded.add(id(value))
                yield f"{module.__name__}.{name}".removeprefix("impl."), value


def _public_modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(impl.__path__, "impl.")]
    hidden = re.compile(rf"\._|\.tests\b|\.{_LEFT_OUT}\b")
    return [name for name in names if not hidden.search(name)]


def _exports(module: ModuleType) -> list[str]:
    own = (
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    )
    return list(getattr(module, "__all__", None) or (name for name in own if not name.startswith("_")))


def _methods(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public methods of a class, and those of its direct bases in private modules."""
    bases = value.__bases__ if inspect.isclass(value) else ()
    private = (base for base in bases if re.match(r"impl\..*\._\w+$", base.__module__))
    for owner in (value, *private) if inspect.isclass(value) else ():
        for name, member in vars(owner).items():
            function = getattr(member, "__func__", member)  # function of a static or class method
            if inspect.isfunction(function) and not name.startswith("_"):
                yield name, function
