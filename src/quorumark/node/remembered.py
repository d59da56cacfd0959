"""Histories that this process has read or made, so that they are not computed again from the same files.

A history is a function of the manifests and of what a member noted, which names the model and the anchor by their
digests. Flower's simulation serves many members in one process, all with one history; a signer serves one member for
days. What is kept is public. A file counts as read if it is the one that was read: a file that was replaced since, or
that this process never saw, is compared with what it should hold.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quorumark.field import Vector
from quorumark.round.history import History

__all__ = ["find", "keep", "match"]

Name = tuple[object, ...]
_MOST, _LARGEST = 2, 1 << 23  # histories, and weights of a model that is kept: 128 MiB with its anchor
_KNOWN: dict[Name, tuple[History, set[tuple[object, ...]]]] = {}


def find(name: Name, files: Sequence[Path] | None) -> History | None:
    """The history of this name, if this process knows what is in these files; None: whatever is in them, as in a
    simulation, in which nobody looks for damaged files. The name says which history it is in any case."""
    history, seen = _KNOWN.get(name, (None, set()))
    known = history is not None and (files is None or _seen(files) in seen)
    return history.copy() if history is not None and known else None


def match(name: Name, files: Sequence[Path], anchor: Vector, model: Vector) -> History | None:
    """The same, if these are its anchor and model, just read from the files."""
    history, seen = _KNOWN.get(name, (None, set()))
    if history is None or not np.array_equal(history.mark.anchor, anchor):
        return None
    if not np.array_equal(history.mark.model, model):
        return None
    seen.add(_seen(files))
    return history.copy()


def keep(name: Name, files: Sequence[Path], history: History) -> None:
    """Remembers a history whose anchor and model are in these files."""
    if history.mark.model.size > _LARGEST:
        return
    if name not in _KNOWN:
        while len(_KNOWN) >= _MOST:
            _KNOWN.pop(next(iter(_KNOWN)))
        _KNOWN[name] = history.copy(), set()
    _KNOWN[name][1].add(_seen(files))


def _seen(files: Sequence[Path]) -> tuple[object, ...]:
    """What a file is known by: files are replaced, never written to."""
    found: list[object] = []
    for path in files:
        try:
            about = os.stat(path)
        except OSError:
            return ("missing", object())  # equal to nothing
        found += [str(path), about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]
    return tuple(found)
