"""A process that holds a member's share, between an engine's code and the secrets (docs/deploy.md, "The signer").

An engine's node runs code that the server ships, under the node's user. With the share in a folder that this user can
read, that code could read it too. So another user runs `quorumark member serve`, which holds home and key file and
answers on a Unix socket: for the manifest that is pinned, each round once, and verifications under the member's rules.

A message is a head (its length in 8 bytes, big-endian, then JSON) and the arrays' bytes after it. Bytes in a config
travel as {"hex": …}. One message and one reply for each connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import threading
import traceback
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import KeystoreError, MessageError, QuorumarkError, RoundError, code_of
from quorumark.node.member import Config, MemberNode, refusal
from quorumark.refusals import listed

__all__ = ["SignerClient", "SignerServer"]

Arrays = Mapping[str, NDArray[Any]]
_KINDS = {"uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool"}
_KINDS |= {"float16", "float32", "float64"}
_LARGEST_HEAD = 1 << 26
_LARGEST = 1 << 36
_PIECE = 1 << 16
_IDLE = 10.0
Limit = Callable[[str], int]
"""The most bytes of arrays that a stage's message may have."""


def _send(connection: socket.socket, config: Mapping[str, Any], arrays: Arrays) -> None:
    plain = {n: {"hex": v.hex()} if isinstance(v, bytes) else v for n, v in config.items()}
    about = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    head = json.dumps({"config": plain, "arrays": about}).encode()
    connection.sendall(len(head).to_bytes(8, "big") + head)
    for array in arrays.values():
        connection.sendall(array.tobytes())


def _receive(connection: socket.socket, limit: Limit) -> tuple[Config, dict[str, NDArray[Any]]]:
    size = int.from_bytes(_exactly(connection, 8), "big")
    if size > _LARGEST_HEAD:
        raise MessageError(
            f"a message to the signer has a head of more than {_LARGEST_HEAD} bytes", code="message.too-large"
        )
    try:
        head = json.loads(_exactly(connection, size))
        config = {n: bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for n, v in head["config"].items()}
        places = [(str(name), str(kind), tuple(int(n) for n in shape)) for name, kind, shape in head["arrays"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise MessageError("a message to the signer has a head that cannot be read", code="message.malformed") from None
    if any(kind not in _KINDS or any(n < 0 for n in shape) for _, kind, shape in places):
        raise MessageError("a message to the signer holds an array of an unknown kind", code="message.malformed")
    lengths = [prod(shape) * np.dtype(kind).itemsize for _, kind, shape in places]
    stage = str(config.get("stage", ""))
    most = limit(stage)
    if sum(lengths) > most:
        raise MessageError(
            f"a message to the signer for the stage {stage[:40]!r} has more than {most} bytes of arrays",
            code="message.too-large",
        )
    arrays = {}
    for (name, kind, shape), length in zip(places, lengths, strict=True):
        content = np.frombuffer(_exactly(connection, length), kind)
        try:
            arrays[name] = content.reshape(shape)
        except ValueError:  # more dimensions than numpy has
            raise MessageError(
                "a message to the signer holds an array of an unknown shape", code="message.malformed"
            ) from None
    return config, arrays


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """Reads so many bytes. The length is only what the other side says, so memory grows with what has arrived, to at
    most twice as much."""
    content, at = bytearray(min(size, _PIECE)), 0
    while at < size:
        if at == len(content):
            content += bytes(min(size - at, at))
        with memoryview(content) as view:
            got = connection.recv_into(view[at:])
        if not got:
            raise MessageError(
                "the connection to the signer ended in the middle of a message", code="message.malformed"
            )
        at += got
    return content


class SignerClient:
    """A member behind a socket: `handle` as `MemberNode` has it."""

    def __init__(self, path: str | os.PathLike[str], timeout: float = 600.0) -> None:
        self._path, self._timeout = os.fspath(path), timeout

    def handle(self, stage: str, config: Mapping[str, Any], arrays: Arrays) -> tuple[Config, dict[str, NDArray[Any]]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self._timeout)
            try:
                connection.connect(self._path)
                _send(connection, {**config, "stage": stage}, arrays)
                reply, arrays_back = _receive(connection, lambda _: _LARGEST)
            except OSError as error:
                raise KeystoreError(
                    f"this member's signer does not answer ({error.strerror or type(error).__name__}): its operator "
                    "must start it (quorumark member serve)"
                ) from None
        if "raised" in reply:  # not "refused": a member that does not take part says more than why
            raise RoundError(str(reply["raised"]), code=listed(reply.get("code"), "node.refused"))
        return reply, arrays_back


def _handled(node: MemberNode, stage: str, config: Config, arrays: Arrays) -> tuple[Config, dict[str, NDArray[Any]]]:
    try:
        return node.handle(stage, config, arrays)
    except QuorumarkError:
        raise
    except Exception as error:  # noqa: BLE001 - a fault of ours: what it says stays in this process
        traceback.print_exc()
        text = f"the signer failed ({type(error).__name__}): its log has the rest"
        return {"raised": text, "code": "node.failed"}, {}


class SignerServer:
    """Serves one member on a Unix socket of mode 0660, one message at a time."""

    def __init__(self, node: MemberNode, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        lock = threading.Lock()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the asker is gone
                    try:
                        config, arrays = _receive(self.request, lambda stage: min(_LARGEST, node.most(stage)))
                        with lock:
                            reply = _handled(node, str(config.pop("stage", "")), config, arrays)
                    except QuorumarkError as error:
                        reply = {"raised": refusal(error), "code": code_of(error)}, {}
                    _send(self.request, *reply)
                    self.request.settimeout(_IDLE)
                    while self.request.recv(_PIECE):  # what was refused unread: else the refusal would not arrive
                        pass

        if self._path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(self._path)) == 0:
                    raise KeystoreError(f"another process serves at {str(self._path)!r}: stop it first")
            self._path.unlink()  # left behind by one that was killed
        try:
            before = os.umask(0o117)
            try:
                self._server = socketserver.ThreadingUnixStreamServer(str(self._path), Handler)
            finally:
                os.umask(before)
        except OSError as error:
            raise KeystoreError(f"cannot serve at {str(self._path)!r}: {error.strerror}") from None
        self._server.daemon_threads = True

    def serve(self) -> None:
        """Until `stop`."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._server.server_close()
            self._path.unlink(missing_ok=True)

    def stop(self) -> None:
        self._server.shutdown()
