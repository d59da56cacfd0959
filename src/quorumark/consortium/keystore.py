"""Secrets at rest: sealed files that show a flipped bit, a cut or a wrong key, and are never half-written.

A sealed file is a header in the open (JSON), then chunks, each encrypted and authenticated by AES-256-GCM. Its key
comes from a passphrase by scrypt, or from a key file. Chunk i's nonce holds i and whether it is the last one, and the
header is authenticated with every chunk: nothing can be dropped, swapped, added or carried over from another file (the
STREAM construction; Hoang, Reyhanitabar, Rogaway, Vizár 2015). Reading and writing need the memory of a chunk or two.

Files have mode 0600 and are written as `files.replacing` does it: a crash leaves the old file or the new one.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from quorumark.canonical import canonical, parse
from quorumark.consortium.identity import Identity, exchange
from quorumark.errors import InputError, KeystoreError, MessageError, RecordError
from quorumark.field import KEY_BYTES, derive_key
from quorumark.files import replacing, write_private

__all__ = ["SealedReader", "SealedWriter", "Unlock", "read_sealed", "write_sealed"]


FORMAT = "quorumark-sealed/v1"
CHUNK = 1 << 18  # bytes of content per chunk
_TAG = 16
_LARGEST_HEADER = 1 << 16
SCRYPT_COST = 1 << 17  # N; with r = 8 that is 128 MiB and some tenths of a second
_MOST_SCRYPT = 4 * 8 * SCRYPT_COST  # N·r·p that a header may ask for: 512 MiB, and four times as long


class Unlock:
    """What opens a sealed file: a passphrase or the content of a key file. Never shown."""

    __slots__ = ("_ephemeral", "_identity", "_kind", "_secret")

    def __init__(self, kind: str, secret: bytes) -> None:
        self._kind = kind
        self._secret = secret
        self._identity: Identity | None = None
        self._ephemeral: X25519PrivateKey | None = None

    @classmethod
    def passphrase(cls, text: str) -> Unlock:
        if not isinstance(text, str) or len(text) < 8:
            raise InputError("passphrase", "must have at least 8 characters")
        try:
            return cls("scrypt", text.encode())
        except UnicodeEncodeError:
            raise InputError("passphrase", "must be text that has bytes") from None

    @classmethod
    def key_file(cls, path: str | os.PathLike[str]) -> Unlock:
        """The content of a file that nobody else may read; 32 random bytes or more."""
        content = _read_private(path, "key file")
        if len(content) < KEY_BYTES:
            raise KeystoreError(f"the key file {os.fspath(path)!r} must hold at least {KEY_BYTES} random bytes")
        return cls("file", content)

    @classmethod
    def passphrase_file(cls, path: str | os.PathLike[str]) -> Unlock:
        """A passphrase from the first line of a file that nobody else may read."""
        try:
            text = _read_private(path, "passphrase file").decode()
        except UnicodeDecodeError:
            raise KeystoreError(f"the passphrase file {os.fspath(path)!r} is not UTF-8 text") from None
        return cls.passphrase(text.partition("\n")[0].removesuffix("\r"))

    @staticmethod
    def new_key_file(path: str | os.PathLike[str]) -> None:
        """Writes 32 bytes of the operating system's randomness; refuses to overwrite."""
        if Path(path).exists():
            raise KeystoreError(f"{os.fspath(path)!r} exists already")
        write_private(path, os.urandom(KEY_BYTES))

    @classmethod
    def to_member(cls, x25519: str) -> Unlock:
        """Seals a file that only the holder of this public key can open (write only)."""
        return cls("x25519", bytes.fromhex(x25519))

    @classmethod
    def by_identity(cls, identity: Identity) -> Unlock:
        """Opens a file that was sealed to this member (read only)."""
        unlock = cls("x25519", b"")
        unlock._identity = identity
        return unlock

    def __repr__(self) -> str:
        return f"Unlock({self._kind}, secret hidden)"

    def __reduce__(self) -> str:
        raise TypeError("an Unlock holds a secret and is not pickled")

    def settings(self) -> dict[str, Any]:
        """How a new file's key is made from it, for the header."""
        settings: dict[str, Any] = {"kind": self._kind, "salt": os.urandom(32).hex()}
        if self._kind == "scrypt":
            settings |= {"n": SCRYPT_COST, "r": 8, "p": 1}
        if self._kind == "x25519":
            self._ephemeral = X25519PrivateKey.generate()
            settings |= {"ephemeral": self._ephemeral.public_key().public_bytes_raw().hex()}
        return settings

    def key(self, settings: Mapping[str, Any], path: str) -> bytes:
        if settings.get("kind") != self._kind:
            wanted = {"scrypt": "a passphrase", "file": "a key file", "x25519": "a member's key"}.get(
                str(settings.get("kind")), "something unknown"
            )
            raise KeystoreError(f"{path!r} is sealed under {wanted}")
        try:
            salt = bytes.fromhex(settings["salt"])
            if self._kind == "file":
                secret = hashlib.sha256(self._secret).digest()
            elif self._identity is not None:
                secret = self._identity.exchange(settings["ephemeral"])
            elif self._ephemeral is not None:
                secret = exchange(self._ephemeral, self._secret.hex())
            else:
                n, r, p = settings["n"], settings["r"], settings["p"]
                # somebody else's header must not exhaust this machine
                sound = all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in (n, r, p))
                if not sound or n * r > _MOST_SCRYPT or n * r * p > _MOST_SCRYPT:
                    raise KeystoreError(f"{path!r} asks for more scrypt work than is allowed")
                secret = Scrypt(salt=salt, length=32, n=n, r=r, p=p).derive(self._secret)
        except (KeyError, TypeError, ValueError, OverflowError, MessageError):
            raise KeystoreError(f"{path!r} has a damaged header") from None
        return derive_key(secret, "sealed file", salt)


def _read_private(path: str | os.PathLike[str], what: str) -> bytes:
    """A file that only its owner can read."""
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        content = Path(path).read_bytes()
    except OSError as error:
        raise KeystoreError(f"cannot read the {what} {os.fspath(path)!r}: {error.strerror}") from None
    if mode & 0o077:
        raise KeystoreError(f"the {what} {os.fspath(path)!r} is open to others: chmod 600 {os.fspath(path)}")
    return content


class SealedWriter:
    """Writes a sealed file: `with SealedWriter(path, unlock, kind, about) as file: file.write(data)`.

    `about` is shown to everybody who sees the file. If the block ends with an error, nothing is left behind.
    """

    def __init__(
        self, path: str | os.PathLike[str], unlock: Unlock, kind: str, about: Mapping[str, Any] | None = None
    ) -> None:
        self._path = Path(path)
        settings = unlock.settings()
        header = {"format": FORMAT, "kind": kind, "chunk": CHUNK, "key": settings, "about": dict(about or {})}
        self._header = canonical(header)
        if len(self._header) > _LARGEST_HEADER:
            raise InputError("about", f"must fit into {_LARGEST_HEADER} bytes", f"{len(self._header)}")
        self._cipher = AESGCM(unlock.key(settings, str(path)))
        self._buffer = bytearray()
        self._index = 0
        self._context = replacing(self._path)

    def __enter__(self) -> Self:
        self._file = self._context.__enter__()
        self._file.write(len(self._header).to_bytes(4, "big") + self._header)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Appends content; full chunks go out at once."""
        view, start = memoryview(data).cast("B"), 0
        while len(self._buffer) + len(view) - start > CHUNK:  # the last chunk stays until it is known to be the last
            stop = start + CHUNK - len(self._buffer)
            self._emit(bytes(self._buffer) + view[start:stop] if self._buffer else view[start:stop], last=False)
            self._buffer.clear()
            start = stop
        self._buffer += view[start:]

    def _emit(self, content: bytes | memoryview, *, last: bool) -> None:
        self._file.write(self._cipher.encrypt(_nonce(self._index, last), content, self._header))
        self._index += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._emit(bytes(self._buffer), last=True)
        self._context.__exit__(kind, error, trace)


class SealedReader:
    """Reads a sealed file chunk by chunk. Every chunk is authentic before it is handed out; `chunks` ends with an error
    if the file was cut or anything was added."""

    def __init__(self, path: str | os.PathLike[str], unlock: Unlock | None, kind: str | None = None) -> None:
        self._path = str(path)
        try:
            if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
                raise KeystoreError(f"cannot read {self._path!r}: it is no regular file")
            with Path(path).open("rb") as file:
                length = int.from_bytes(file.read(4), "big")
                self._header = file.read(length) if 0 < length <= _LARGEST_HEADER else b""
                self._start = file.tell()
        except OSError as error:
            raise KeystoreError(f"cannot read {self._path!r}: {error.strerror}") from None
        try:
            body = parse(self._header, FORMAT, "a sealed file")
            self.kind, self.about, self._chunk = str(body["kind"]), dict(body["about"]), int(body["chunk"])
            settings = dict(body["key"])
        except (RecordError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise KeystoreError(f"{self._path!r} is not a sealed file of quorumark: {error}") from None
        if kind is not None and self.kind != kind:
            raise KeystoreError(f"{self._path!r} holds {self.kind!r}, not {kind!r}")
        if not 0 < self._chunk <= 1 << 24:
            raise KeystoreError(f"{self._path!r} has a damaged header")
        self._cipher = None if unlock is None else AESGCM(unlock.key(settings, self._path))

    def chunks(self) -> Iterator[bytes]:
        """The content, piece by piece."""
        if self._cipher is None:
            raise KeystoreError(f"{self._path!r} was opened to look at its header only")
        with Path(self._path).open("rb") as file:
            file.seek(self._start)
            sealed, index = file.read(self._chunk + _TAG), 0
            while True:
                following = file.read(self._chunk + _TAG)
                last = not following
                try:
                    content = self._cipher.decrypt(_nonce(index, last), sealed, self._header)
                except (InvalidTag, ValueError):
                    what = (
                        "the passphrase or key file is wrong, or the file is damaged"
                        if index == 0
                        else "it is damaged or cut"
                    )
                    raise KeystoreError(f"{self._path!r} cannot be opened at chunk {index}: {what}") from None
                yield content
                if last:
                    return
                sealed, index = following, index + 1

    def read(self) -> bytes:
        """All of it: for small files."""
        return b"".join(self.chunks())


def _nonce(index: int, last: bool) -> bytes:
    return index.to_bytes(11, "big") + bytes([last])


def write_sealed(
    path: str | os.PathLike[str], unlock: Unlock, kind: str, content: bytes, about: Mapping[str, Any] | None = None
) -> None:
    """A small sealed file in one call."""
    with SealedWriter(path, unlock, kind, about) as file:
        file.write(content)


def read_sealed(path: str | os.PathLike[str], unlock: Unlock, kind: str) -> bytes:
    """A small sealed file in one call."""
    return SealedReader(path, unlock, kind).read()
