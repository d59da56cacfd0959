"""The vectors x of answered queries, as a member keeps them (docs/format.md, "Ledger, rules and kept queries")."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import InputError, KeystoreError
from quorumark.files import replacing

__all__ = ["Numbers", "StoredVector"]

_VECTOR = "quorumark-vector/v1"
_PIECE = 1 << 16  # bytes of a stored vector that read at a time

Numbers = NDArray[np.signedinteger[Any]]


def _plain(x: Numbers) -> Numbers:
    """A flat vector of signed integers, little-endian."""
    if not isinstance(x, np.ndarray) or x.ndim != 1 or x.dtype.kind != "i":
        raise InputError("x", "must be a flat vector of signed integers", getattr(x, "dtype", type(x).__name__))
    return np.ascontiguousarray(x, x.dtype.newbyteorder("<"))


class StoredVector:
    """A vector in a file: a line "quorumark-vector/v1 TYPE LENGTH", then its little-endian numbers under zlib.

    It is read piece by piece, and no file stays open meanwhile: there may be many of them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():  # a pipe would be waited for
            raise self._damaged()
        try:
            with path.open("rb") as file:
                line = file.readline(100)
                self._offset = file.tell()
        except OSError as error:
            raise KeystoreError(f"cannot read {str(path)!r}: {error.strerror}") from None
        found = re.fullmatch(rb"quorumark-vector/v1 (int8|int16|int32|int64) ([0-9]{1,18})\n", line)
        if not found:
            raise self._damaged()
        self._type = np.dtype(found[1].decode()).newbyteorder("<")
        self.size = int(found[2])
        self._left = self.size
        self._zlib = zlib.decompressobj()
        self._buffer = b""

    def _damaged(self) -> KeystoreError:
        remedy = "put it back from a backup, or answer the query of that model again after removing the file"
        return KeystoreError(f"{str(self._path)!r} is not a whole vector of an answered query: {remedy}")

    @staticmethod
    def write(path: Path, x: Numbers) -> None:
        plain = _plain(x)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        packer = zlib.compressobj(level=1)
        view = plain.data.cast("B")
        with replacing(path) as file:
            file.write(f"{_VECTOR} {plain.dtype.name} {plain.size}\n".encode())
            for start in range(0, len(view), 1 << 22):
                file.write(packer.compress(view[start : start + (1 << 22)]))
            file.write(packer.flush())

    def take(self, count: int) -> Numbers:
        """The next numbers; with the last ones the checksum must hold."""
        wanted = count * self._type.itemsize
        pieces, have = [self._buffer], len(self._buffer)
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while have < wanted or (count == self._left and not self._zlib.eof):
                    packed = self._zlib.unconsumed_tail or file.read(_PIECE)
                    piece = self._zlib.decompress(packed, 1 << 20)
                    if not piece and not packed:
                        raise self._damaged()
                    pieces.append(piece)
                    have += len(piece)
                    if count == self._left and have > wanted:  # it inflates to more than it says it holds
                        raise self._damaged()
                self._offset = file.tell()
        except OSError as error:
            raise KeystoreError(f"cannot read {str(self._path)!r}: {error.strerror}") from None
        except zlib.error:
            raise self._damaged() from None
        whole = b"".join(pieces)
        self._buffer, self._left = whole[wanted:], self._left - count
        if self._left == 0 and self._buffer:
            raise self._damaged()
        return np.frombuffer(whole[:wanted], self._type)
