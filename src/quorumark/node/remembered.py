"""What is public and this process has read or made, so that it is not computed again from the same files.

A history is a function of the manifests and of what a member noted, which names the model and the anchor by their
digests. Flower's simulation serves many members in one process, all with one history; a signer serves one member for
days. A file counts as read if it is the one that was read: a file that was replaced since, or that this process never
saw, is compared with what it should hold.

What follows from a history and an opened sum is the same for all members, and so are the files in which they keep it:
in a simulation the second one's are the first one's under other names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.consortium.home import read_file
from quorumark.field import Vector
from quorumark.files import same_file
from quorumark.model.layout import ModelLayout
from quorumark.round.amplitudes import Amplitudes
from quorumark.round.history import History

__all__ = ["as_seen", "find", "find_next", "keep", "keep_next", "match", "read_layout", "write_once"]

Name = tuple[object, ...]
_MOST, _LARGEST = 2, 1 << 23  # histories, and weights of a model that is kept: 128 MiB with its anchor
_KNOWN: dict[Name, tuple[History, set[tuple[object, ...]]]] = {}
_NEXT: dict[Name, tuple[Vector, History, Mapping[str, Any], Amplitudes | None]] = {}
_WRITTEN: dict[str, tuple[Name, Mapping[str, NDArray[Any]], Path, tuple[object, ...]]] = {}


def find(name: Name, files: Sequence[Path] | None) -> History | None:
    """The history of this name, if this process knows what is in these files; None: whatever is in them, as in a
    simulation, in which nobody looks for damaged files. The name says which history it is in any case."""
    history, seen = _KNOWN.get(name, (None, set()))
    known = history is not None and (files is None or as_seen(files) in seen)
    return history.copy() if history is not None and known else None


def match(name: Name, files: Sequence[Path], anchor: Vector, model: Vector) -> History | None:
    """The same, if these are its anchor and model, just read from the files."""
    history, seen = _KNOWN.get(name, (None, set()))
    if history is None or not np.array_equal(history.mark.anchor, anchor):
        return None
    if not np.array_equal(history.mark.model, model):
        return None
    seen.add(as_seen(files))
    return history.copy()


def keep(name: Name, files: Sequence[Path], history: History) -> None:
    """Remembers a history whose anchor and model are in these files."""
    if history.mark.model.size > _LARGEST:
        return
    if name not in _KNOWN:
        while len(_KNOWN) >= _MOST:
            _KNOWN.pop(next(iter(_KNOWN)))
        _KNOWN[name] = history.copy(), set()
    _KNOWN[name][1].add(as_seen(files))


def find_next(name: Name, opened: Vector) -> tuple[History, Mapping[str, Any], Amplitudes | None] | None:
    """What follows from this opened sum, the model, and what was embedded in it, if this process has computed that;
    `name` is all else that it follows from."""
    found = _NEXT.get(name)
    if found is None or not np.array_equal(found[0], opened):
        return None
    return found[1].copy(), *found[2:]


def keep_next(
    name: Name, opened: Vector, history: History, model: Mapping[str, Any], embedded: Amplitudes | None
) -> None:
    if history.mark.model.size <= _LARGEST:
        while len(_NEXT) >= _MOST:
            _NEXT.pop(next(iter(_NEXT)))
        _NEXT[name] = opened.copy(), history.copy(), model, embedded


def write_once(
    name: Name, what: str, arrays: Mapping[str, NDArray[Any]], path: Path, write: Callable[[], None]
) -> None:
    """For a simulation: writes a file of this name and these arrays, or takes the one that this process wrote last for
    another member, if it is that."""
    known, held, source, about = _WRITTEN.get(what, ((), {}, path, ()))
    same = known == name and held.keys() == arrays.keys() and all(np.array_equal(held[n], arrays[n]) for n in arrays)
    if same and _without_links(source) == about and same_file(source, path):
        return
    write()
    if sum(array.size for array in arrays.values()) <= _LARGEST:
        _WRITTEN[what] = name, {n: array.copy() for n, array in arrays.items()}, path, _without_links(path)


def read_layout(path: Path) -> ModelLayout:
    return _layout(read_file(path, "a layout"))


@lru_cache(maxsize=8)
def _layout(data: bytes) -> ModelLayout:
    return ModelLayout.from_bytes(data)


def as_seen(files: Sequence[Path]) -> tuple[object, ...]:
    """What a file is known by: files are replaced, never written to."""
    found: list[object] = []
    for path in files:
        try:
            about = os.stat(path)
        except OSError:
            return ("missing", object())  # equal to nothing
        found += [str(path), about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]
    return tuple(found)


def _without_links(path: Path) -> tuple[object, ...]:
    """The same, however many names it has."""
    return as_seen([path])[:-1]
