"""A share behind a socket, and which member a node is."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.errors import InputError, KeystoreError, RecordError, RoundError
from quorumark.node.journal import MODEL
from quorumark.node.member import MemberNode
from quorumark.node.signer import SignerClient
from quorumark.round.history import research_seed
from quorumark.round.server import RoundServer
from tests.kit.flower_runs import SEED, run, same
from tests.kit.flowers import Consortium, LocalGrid, app_for
from tests.kit.refusals import stopped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def test_a_share_behind_a_socket(world: Consortium, signers: Path) -> None:
    """The node's own process has neither home nor key; the model is the same."""
    for x in range(1, 6):
        assert (signers / f"{x}.sock").stat().st_mode & 0o777 == 0o660
    grid = LocalGrid(
        app_for(world.folder, find=lambda c: SignerClient(signers / f"{c.node_config['partition-id'] + 1}.sock")), 5
    )
    _, model = run(world, grid, 3)
    assert same(model, world.in_process(3, SEED).model)
    client = SignerClient(signers / "1.sock")
    with stopped("message.no-stage", names="'reveal'", kind=RoundError):
        client.handle("reveal", {}, {})
    with pytest.raises(KeystoreError, match="quorumark member serve"):
        SignerClient(signers / "none.sock").handle("join", {}, {})


def _tell(path: Path, *pieces: bytes) -> tuple[str, int]:
    """What a signer says to these bytes, and the most memory that it took for them."""
    tracemalloc.start()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(20)
            connection.connect(str(path))
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        return reply.decode("utf-8", "replace"), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _head(stage: str, *arrays: Any) -> bytes:
    head = json.dumps({"config": {"stage": stage}, "arrays": arrays}, separators=(",", ":")).encode()
    return len(head).to_bytes(8, "big") + head


def test_a_signer_takes_memory_for_what_has_come_only(world: Consortium, signers: Path) -> None:
    path = signers / "1.sock"
    few = _head("join", ["a", "uint8", [1 << 29]])
    assert len(few) < 80
    said, peak = _tell(path, few)
    assert "ended in the middle of a message" in said
    assert peak < 1 << 23
    said, peak = _tell(path, (1 << 26).to_bytes(8, "big"), b"{")
    assert "ended in the middle" in said
    assert peak < 1 << 23
    said, peak = _tell(path, few, bytes(1 << 22))  # of what has come at most twice as much, and one copy
    assert "ended in the middle" in said
    assert 1 << 22 < peak < 1 << 25
    for stage in ("upload", "unmask", "sign"):
        assert "has more than 0 bytes" in _tell(path, _head(stage, ["a", "uint8", [1]]))[0]
    run(world, LocalGrid(app_for(world.folder), 5), 1)  # the layout is known now
    size = 128 * world.layout.size + (1 << 26)
    assert (
        f"'join' has more than {size} bytes"
        in _tell(path, _head("join", ["a", "uint8", [size]], ["b", "bool", [1]]))[0]
    )
    assert "ended in the middle" in _tell(path, _head("join", ["a", "uint8", [size]]))[0]
    for bad in (["a", "uint8", [1] * 99], ["a", "uint8", [-1]], ["a", "object", [1]]):
        assert "of an unknown" in _tell(path, _head("answer", bad), b"1")[0]
    for head in (b"[" * 100_000, b'{"config":{},"arrays":[["a","bool",[Infinity]]]}', b"\xff"):
        assert "a head that cannot be read" in _tell(path, len(head).to_bytes(8, "big"), head)[0]
    assert "a head of more than 67108864 bytes" in _tell(path, b"\xff" * 8)[0]


@pytest.mark.parametrize("options", [[], ["--seeds"]])
def test_a_signer_follows_the_servers_seed_only_if_its_operator_says_so(
    world: Consortium, environment: dict[str, str], options: list[str]
) -> None:
    assert world.manifest is not None
    path = world.folder / "s.sock"
    secrets = ["--home", str(world.folder / "member-1"), "--key-file", str(world.folder / "member-1.key")]
    command = [sys.executable, "-m", "quorumark", "member", "serve", "--socket", str(path), *secrets, *options]
    serving = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        serving.stdout.readline()
        server = RoundServer(world.manifest, world.layout, world.model, run="1", seed=SEED)
        offer, arrays = server.offer(world.model)
        model = {MODEL + name: tensor for name, tensor in world.model.items()}
        told, _ = SignerClient(path).handle("join", {**offer, "node": "1"}, {**arrays, **model})
    finally:
        serving.terminate()
        assert serving.wait(20) == 0
        assert serving.stdout is not None
        serving.stdout.close()
    assert (told["seed"] == research_seed(SEED, 1, 1)) == bool(options)


def test_the_commands_for_a_signer(world: Consortium, environment: dict[str, str]) -> None:
    """A memory of rounds that is there is not made anew; `member serve` until it is told to stop."""
    home, _ = world.home(1)
    options = ["--home", str(home.path), "--key-file", str(world.folder / "member-1.key")]
    command = [sys.executable, "-m", "quorumark", "member"]
    again = subprocess.run([*command, "rounds", "--lost", *options], env=environment, capture_output=True, text=True)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    path = world.folder / "s.sock"
    serving = subprocess.Popen(
        [*command, "serve", "--socket", str(path), *options], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        assert "Hospital 1 is served" in serving.stdout.readline()
        with stopped("message.incomplete", names="'manifest'", kind=RoundError):
            SignerClient(path).handle("join", {}, {})
        for more, text in [
            (options, "another process serves at"),
            ([*options[:3], str(world.folder / "member-2.key")], "the passphrase or key file is wrong"),
            ([*options, "--manifest", "abc"], "--manifest must be a digest of 64 hex digits"),
        ]:
            refused = subprocess.run(
                [*command, "serve", "--socket", str(path), *more], env=environment, capture_output=True, text=True
            )
            assert refused.returncode == 2
            assert text in refused.stderr
        with stopped("message.incomplete", names="'manifest'", kind=RoundError):  # the first one still serves
            SignerClient(path).handle("join", {}, {})
    finally:
        serving.terminate()
        assert serving.wait(20) == 0
        assert serving.stdout is not None
        serving.stdout.close()
    assert not path.exists()


def test_a_node_config_names_the_member(world: Consortium) -> None:

    from quorumark.flower.client import member_of

    folder = str(world.folder)
    home = {"quorumark-home": f"{folder}/member-1"}
    named = SimpleNamespace(node_config={**home, "quorumark-key-file": f"{folder}/member-1.key"}, run_config={})
    assert "member-1" in repr(member_of(named))
    with pytest.raises(InputError, match="quorumark-key-file"):
        member_of(SimpleNamespace(node_config=home, run_config={}))
    with pytest.raises(InputError, match="quorumark-home"):
        member_of(SimpleNamespace(node_config={}, run_config={}))
    for name, value in (("home", folder), ("manifest", "00" * 32), ("terms", "00" * 32), ("seeds", True)):
        both = {"quorumark-socket": "/run/q.sock", f"quorumark-{name}": value}
        with pytest.raises(InputError, match=f"to the signer .* got quorumark-{name}"):
            member_of(SimpleNamespace(node_config=both, run_config={}))
    homes = SimpleNamespace(node_config={"partition-id": 1}, run_config={"quorumark-homes": folder})
    assert "member-2" in repr(member_of(homes))
    assert isinstance(
        member_of(SimpleNamespace(node_config={"quorumark-socket": "/run/q.sock"}, run_config={})), SignerClient
    )
    pinned = MemberNode(HomeFolder(f"{folder}/member-1"), Unlock.key_file(f"{folder}/member-1.key"), manifest="00" * 32)
    with pytest.raises(RecordError, match="its operator pinned"):
        pinned.handle("unmask", {"request": b""}, {})
