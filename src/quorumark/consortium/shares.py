"""A member's share as a sealed file, dense or compressed, read and written piece by piece (docs/format.md)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any, Self

import numpy as np

from quorumark import field
from quorumark.consortium.keystore import SealedReader, SealedWriter, Unlock
from quorumark.consortium.merkle import SALT_ELEMENTS, Tree, salt_seed
from quorumark.consortium.records import Manifest, Terms
from quorumark.errors import KeystoreError
from quorumark.field import Vector
from quorumark.shamir import generated_block, is_generated

__all__ = ["ShareFile", "ShareInfo", "ShareWriter", "share_root"]

KIND = "share"
_ROOTS: dict[tuple[str | int, ...], bytes] = {}
_MOST_ROOTS = 1 << 12


@dataclass(frozen=True)
class ShareInfo:
    """What a share file says of itself in the open."""

    consortium: str
    session: str
    epoch: int
    point: int
    threshold: int
    members: int
    length: int
    leaf: int
    block: int  # coordinates per block of a compressed share; 0: every value is stored

    @classmethod
    def first(cls, terms: Terms, session: str, point: int, block: int = 0) -> ShareInfo:
        """A share as setup makes it."""
        numbers = terms.threshold, terms.members, terms.coordinates, terms.leaf
        return cls(terms.digest().hex(), session, 0, point, *numbers, block)

    @classmethod
    def under(cls, manifest: Manifest, point: int, block: int = 0) -> ShareInfo:
        """A share as a manifest describes it. The consortium's name for ever is the digest of its first terms."""
        terms, genesis = manifest.terms, manifest.genesis
        numbers = terms.threshold, terms.members, manifest.share_length, terms.leaf
        return cls(genesis.terms, genesis.session, manifest.epoch, point, *numbers, block)

    @classmethod
    def from_about(cls, about: Mapping[str, Any], path: str) -> ShareInfo:
        if about.keys() != {f.name for f in fields(cls)}:
            raise KeystoreError(f"{path!r} is a share of another release: its description has other fields")
        info = cls(**about)
        numbers = [info.epoch, info.point, info.threshold, info.members, info.length, info.leaf, info.block]
        texts = [info.consortium, info.session]
        sound = all(isinstance(n, int) and n >= 0 for n in numbers) and all(isinstance(t, str) for t in texts)
        if not sound or not (1 <= info.point <= info.members and 2 <= info.threshold <= info.members):
            raise KeystoreError(f"{path!r} describes an impossible share")
        if info.length < 1 or info.leaf < 1:
            raise KeystoreError(f"{path!r} describes an impossible share")
        return info

    def parts(self) -> Iterator[tuple[int, slice, bool]]:
        """(index, place, whether it is generated) of each block; a dense share is read in pieces of 65,536."""
        for index, part in enumerate(field.chunks(self.length, self.block or 1 << 16)):
            yield index, part, bool(self.block) and is_generated(self.point, index, self.threshold, self.members)


_TOGETHER = 1 << 16  # elements that are read at once


class ShareWriter:
    """Seals a share piece by piece: `with ShareWriter(…) as file: file.write(values)`, only what is not generated.

    It holds the member's salt, its shares of all members' salts (K×5) and its seed, then the values. If the block ends
    with an error, or too few values came, nothing is left behind.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        unlock: Unlock,
        info: ShareInfo,
        salt: Vector,
        others_salts: Vector,
        seed: bytes = bytes(32),
    ) -> None:
        if salt.shape != (SALT_ELEMENTS,) or others_salts.shape != (info.members, SALT_ELEMENTS) or len(seed) != 32:
            raise KeystoreError("a share needs its salt, its shares of all salts and a seed")
        self._expected = sum(part.stop - part.start for _, part, generated in info.parts() if not generated)
        self._written = 0
        self._head = salt.astype("<u8").tobytes() + others_salts.astype("<u8").tobytes() + seed
        self._file = SealedWriter(path, unlock, KIND, asdict(info))

    def __enter__(self) -> Self:
        self._file.__enter__()
        self._file.write(self._head)
        return self

    def write(self, values: Vector) -> None:
        field.check(values, "share")
        self._file.write(values.astype("<u8", copy=False).tobytes())
        self._written += values.size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._written != self._expected:
            error = KeystoreError(f"this share must store {self._expected} values, but got {self._written}")
            self._file.__exit__(type(error), error, None)
            raise error
        self._file.__exit__(kind, error, trace)


class ShareFile:
    """A sealed share, opened. Its values are decrypted while they are read."""

    def __init__(self, path: str | os.PathLike[str], unlock: Unlock) -> None:
        self._reader = SealedReader(path, unlock, KIND)
        self._path = os.fspath(path)
        self.info = ShareInfo.from_about(self._reader.about, self._path)
        content = self._reader.chunks()
        head = b""
        while len(head) < self._head_size():
            piece = next(content, b"")
            if not piece:
                raise KeystoreError(f"{self._path!r} ends too early")
            head += piece
        words = np.frombuffer(head[: self._head_size() - 32], "<u8").astype(np.uint64)
        field.check(words, "salts")
        self.salt = words[:SALT_ELEMENTS]
        self.others_salts = words[SALT_ELEMENTS:].reshape(self.info.members, SALT_ELEMENTS)
        self._seed = head[self._head_size() - 32 : self._head_size()]
        self._held: Vector | None = None

    def __repr__(self) -> str:
        return f"ShareFile({self._path!r}, point {self.info.point}, values hidden)"

    def _head_size(self) -> int:
        return 8 * SALT_ELEMENTS * (1 + self.info.members) + 32

    def pieces(self) -> Iterator[Vector]:
        """The share's elements in order, in pieces of any size up to some 65,536."""
        if self._held is not None:
            return iter([self._held])
        return (values for _, values in self._pieces())

    def hold(self) -> None:
        """Keeps them in memory, for a simulation, which reads them again and again."""
        if self._held is None:
            self._held = self.vector()

    def _pieces(self) -> Iterator[tuple[bool, Vector]]:
        """The same, and whether a piece is generated: blocks that are stored are read together, not one by one, and as
        they come from the file, without another copy."""
        content, held = self._reader.chunks(), memoryview(b"")

        def some(most: int) -> memoryview:
            """Up to so many bytes, and whole elements, as long as there are any."""
            nonlocal held
            while len(held) < 8:
                piece = next(content, b"")
                if not piece:
                    raise KeystoreError(f"{self._path!r} ends too early")
                held = memoryview(bytes(held) + piece if held else piece)
            size = min(most, len(held) - len(held) % 8)
            found, held = held[:size], held[size:]
            return found

        def stored(count: int) -> Iterator[Vector]:
            while count:
                values = np.frombuffer(some(8 * count), "<u8").astype(np.uint64, copy=False)
                field.check(values, "share")
                yield values
                count -= values.size

        left = self._head_size()
        while left:
            left -= len(some(left))
        waiting = 0
        for index, part, generated in self.info.parts():
            size = part.stop - part.start
            if waiting and (generated or waiting + size > _TOGETHER):
                yield from ((False, values) for values in stored(waiting))
                waiting = 0
            if generated:
                yield True, generated_block(self._seed, self.info.point, index, size)
            else:
                waiting += size
        yield from ((False, values) for values in stored(waiting))
        if held or any(content):
            raise KeystoreError(f"{self._path!r} holds more than a share")

    def copy_to(self, path: str | os.PathLike[str], unlock: Unlock) -> None:
        """The same share, sealed anew under another secret."""
        with ShareWriter(path, unlock, self.info, self.salt, self.others_salts, self._seed) as file:
            for generated, piece in self._pieces():
                if not generated:
                    file.write(piece)

    def vector(self) -> Vector:
        """The whole share in memory."""
        return np.concatenate(list(self.pieces()))

    def root(self) -> bytes:
        """The Merkle root of what the file holds. Of a file that has not changed since this process computed it, it is
        known: sealed files are replaced, never written to, and what is in them is authenticated when it is read."""
        about = os.stat(self._path)
        known = self._path, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
        if known not in _ROOTS:
            root = share_root(self.pieces(), self.salt, self.info.leaf, self.info.length)
            if len(_ROOTS) >= _MOST_ROOTS:
                _ROOTS.clear()
            _ROOTS[known] = root
        return _ROOTS[known]


def share_root(pieces: Iterable[Vector], salt: Vector, leaf: int, length: int) -> bytes:
    tree = Tree(salt_seed(salt), leaf, length)
    for piece in pieces:
        tree.update(piece)
    return tree.root()
