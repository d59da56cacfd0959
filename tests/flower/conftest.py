"""What the tests of Flower share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorumark.node.member import MemberNode
from quorumark.node.signer import SignerServer
from tests.kit.flowers import Consortium


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}.items():
        monkeypatch.setenv(name, value)
    logging.getLogger("flwr").setLevel(logging.ERROR)


@pytest.fixture
def world(tmp_path: Path) -> Consortium:
    return Consortium.make(tmp_path)


@pytest.fixture
def signers(world: Consortium) -> Iterator[Path]:
    """A process of another user in a deployment; a thread here."""
    folder = world.folder / "sockets"
    folder.mkdir()
    servers = [SignerServer(MemberNode(*world.home(x), seeds=True), folder / f"{x}.sock") for x in range(1, 6)]
    threads = [threading.Thread(target=server.serve) for server in servers]
    for thread in threads:
        thread.start()
    yield folder
    for server, thread in zip(servers, threads, strict=True):
        server.stop()
        thread.join()
    assert not list(folder.iterdir())
