"""Functions from the user's own files: a model's code is its owner's, and is only needed to find groups and to attack.

Such a file runs with all the rights of the user who names it; verification never imports one.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quorumark.errors import InputError, MissingDependencyError

__all__ = ["example_inputs", "load_function", "told_by"]


def load_function(text: str, argument: str = "--model") -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names. Files beside it can be imported from it."""
    name, _, function = text.rpartition(":")
    path = Path(name)
    if not name or not function.isidentifier():
        raise InputError(argument, "must be like FILE.py:FUNCTION", repr(text))
    if not path.is_file():
        raise InputError(argument, "must name a Python file that is there", repr(name))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(argument, "must name a Python file", repr(name))
    module = importlib.util.module_from_spec(spec)
    beside = str(path.parent.resolve())
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(argument, "must name a file that can be imported", _told(error)) from error
    finally:
        sys.path.remove(beside)
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(argument, f"must name a function that {name!r} has", repr(function))
    return told_by(found, f"{argument} {text}", "must be a function that runs")


def told_by(function: Callable[..., Any], argument: str, rule: str) -> Callable[..., Any]:
    """The function, whose own errors become an InputError of this argument."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise InputError(argument, rule, _told(error)) from error

    return call


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def example_inputs(texts: Sequence[str]) -> Any:
    """Inputs to run a model on once, from shapes: "1,3,32,32" for floats, "int:1,16" for words; a tuple if several."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("quorumark[torch]", "running a model") from None
    found = []
    for text in texts:
        kind, _, sizes = text.rpartition(":")
        parts = sizes.split(",")
        if kind not in ("", "int", "float") or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise InputError("--example", "must be a shape like 1,3,32,32 or int:1,16", repr(text))
        shape = [int(part) for part in parts]
        generator = torch.Generator().manual_seed(0)
        if kind == "int":
            found.append(torch.randint(0, 2, shape, generator=generator))  # words that every vocabulary has
        else:
            found.append(torch.randn(shape, generator=generator))
    return found[0] if len(found) == 1 else tuple(found)
