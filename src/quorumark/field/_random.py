"""Uniform field elements from AES-256-CTR (docs/protocol.md, "Randomness").

Element i of a stream is the 64-bit little-endian word at byte 8i of the key stream, mod 2^61, with p counted
as 0: at distance 2^-61 from uniform, and any chunk can be computed alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import InputError, MissingDependencyError
from quorumark.field import kernels, parallel
from quorumark.field._operands import Vector, check

KEY_BYTES = 32
_CHUNK = 1 << 15  # words per call of the cipher: 256 KiB of key stream stay in the second-level cache
_SMALLEST_PART = 1 << 17  # words per thread: AES takes about 1 ns for each
_DEVICE_CHUNK = 1 << 22
_ZEROS = memoryview(bytes(8 * _CHUNK))


@functools.cache
def _cryptography() -> Any:
    try:
        from cryptography.hazmat.primitives import ciphers, hashes
        from cryptography.hazmat.primitives.kdf import hkdf
    except ImportError as error:  # the field's arithmetic works without it, its randomness does not
        raise MissingDependencyError("cryptography", "randomness from AES-256-CTR") from error
    return ciphers, hashes, hkdf


def derive_key(secret: bytes, purpose: str, *context: bytes) -> bytes:
    """HKDF-SHA256 of a secret, bound to a purpose and to everything that two sides must agree on.

    info = "quorumark/v1" ‖ length-prefixed purpose ‖ length-prefixed context values, so that no two lists of
    values give the same info. Lengths are 8 bytes, big-endian.
    """
    if not isinstance(secret, bytes) or len(secret) < KEY_BYTES:
        received = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise InputError("secret", f"must be at least {KEY_BYTES} bytes", received)
    if not isinstance(purpose, str) or not purpose:
        raise InputError("purpose", "must be a text that names what the key is for", type(purpose).__name__)
    _, hashes, hkdf = _cryptography()
    info = b"quorumark/v1"
    for index, part in enumerate([purpose.encode(), *context]):
        if not isinstance(part, bytes):
            raise InputError(f"context[{index - 1}]", "must be bytes", type(part).__name__)
        info += len(part).to_bytes(8, "big") + part
    key: bytes = hkdf.HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)
    return key


class Stream:
    """A long vector of uniform field elements, given by 32 bytes; any part of it on demand.

    The same secret, purpose and context give the same elements, everywhere; another purpose or context gives
    unrelated ones.

    >>> a = Stream(bytes(32), "example").elements(4)
    >>> b = Stream(bytes(32), "example").elements(2, start=2)
    >>> bool((a[2:] == b).all())
    True
    """

    __slots__ = ("_key",)

    def __init__(self, secret: bytes, purpose: str, *context: bytes) -> None:
        self._key = derive_key(secret, purpose, *context)

    @classmethod
    def fresh(cls, purpose: str) -> Stream:
        """A stream that nobody can repeat: its secret comes from the operating system and is not kept."""
        return cls(os.urandom(KEY_BYTES), purpose)

    def __repr__(self) -> str:
        return "Stream(<key hidden>)"

    def __reduce__(self) -> str:
        raise TypeError("a Stream holds a key and is not pickled; send the parties what they derive it from")

    def _encryptor(self, start: int) -> Any:
        """The cipher, positioned at word `start` (two words per AES block)."""
        ciphers, _, _ = _cryptography()
        counter = (start // 2).to_bytes(16, "big")
        encryptor = ciphers.Cipher(ciphers.algorithms.AES(self._key), ciphers.modes.CTR(counter)).encryptor()
        if start % 2:
            encryptor.update(bytes(8))
        return encryptor

    def words(self, out: NDArray[np.uint64], start: int = 0) -> None:
        """Raw 64-bit words `start`, `start`+1, … into a contiguous vector, in the calling thread."""
        _check_position(start, _check_target(out))
        encryptor = self._encryptor(start)
        for begin in range(0, out.size, _CHUNK):
            _fill(encryptor, out[begin : begin + _CHUNK])

    def elements(self, count: int, start: int = 0, out: Any = None) -> Any:
        """Elements `start`, …, `start`+`count`−1 of the stream, on all cores.

        `out` may be a CUDA tensor: the cipher runs on the CPU all the same, and chunks are copied over.
        """
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError("count", "must be an integer, at least 1", repr(count))
        _check_position(start, count)
        if out is None:
            out = np.empty(count, np.uint64)
        length = _check_target(out)
        if length != count:
            raise InputError("out", f"must hold exactly count = {count} elements", f"{length}")
        if not isinstance(out, np.ndarray):
            for piece, chunk in self._on_device(out, start):
                piece.copy_(chunk)
            return out
        target: Vector = out

        def part(begin: int, end: int) -> None:
            self._each_chunk(target[begin:end], start + begin, kernels.reduce_words)

        parallel.spread(part, count, smallest=_SMALLEST_PART)
        return out

    def add_to(self, vector: Any, start: int = 0, *, negate: bool = False, checked: bool = True) -> None:
        """vector ± the stream, in place and without storing the stream (a mask costs one pass)."""
        length = _check_target(vector, "vector")
        _check_position(start, length)
        if checked:
            check(vector, "vector")
        if not isinstance(vector, np.ndarray):
            from quorumark.field import _triton

            for piece, chunk in self._on_device(vector, start):
                (_triton.sub if negate else _triton.add)(piece, chunk, piece, False)
            return

        def part(begin: int, end: int) -> None:
            self._each_chunk(vector[begin:end], start + begin, lambda words, out: kernels.add_words(words, out, negate))

        parallel.spread(part, length, smallest=_SMALLEST_PART)

    def _on_device(self, tensor: Any, start: int) -> Iterator[tuple[Any, Any]]:
        """Parts of a CUDA tensor with the stream's elements for them, on its device."""
        import torch

        for begin in range(0, tensor.numel(), _DEVICE_CHUNK):
            part = tensor[begin : begin + _DEVICE_CHUNK]
            chunk = self.elements(part.numel(), start + begin)
            yield part, torch.from_numpy(chunk.view(np.int64)).to(tensor.device)

    def _each_chunk(self, vector: Vector, start: int, kernel: Any) -> None:
        encryptor = self._encryptor(start)
        words = np.empty(min(_CHUNK, vector.size), np.uint64)
        for begin in range(0, vector.size, _CHUNK):
            out = vector[begin : begin + _CHUNK]
            _fill(encryptor, words[: out.size])
            kernel(words[: out.size], out)


def _fill(encryptor: Any, words: NDArray[np.uint64]) -> None:
    """The next words of the key stream: CTR mode adds it to its input, so the input is zeros."""
    encryptor.update_into(_ZEROS[: words.nbytes], words.data.cast("B"))


def _check_position(start: int, count: int) -> None:
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise InputError("start", "must be an integer, at least 0", repr(start))
    if start + count > 1 << 64:  # far below where the 128-bit counter would come round
        raise InputError("start", "must leave the stream's end below 2^64", start)


def _check_target(out: Any, name: str = "out") -> int:
    """The length of a vector that can be written: on the CPU, or on a GPU."""
    if getattr(out, "is_cuda", False):
        from quorumark.field import _triton

        return _triton.check_vector(out, name)
    if (
        not isinstance(out, np.ndarray)
        or out.dtype != np.uint64
        or out.ndim != 1
        or out.size == 0
        or not out.flags.c_contiguous
        or not out.flags.writeable
    ):
        received = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InputError(name, "must be a writable, contiguous, non-empty 1-D uint64 vector", received)
    return out.size
