"""A room behind a proxy, in a container's command line, and as a service: what examples/room has, as far as this
machine can run it."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.kit.rooms import Group, free_port, room_on, until, visit

pytest.importorskip("starlette")
pytestmark = pytest.mark.room

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
ANALYZE = shutil.which("systemd-analyze")


def strangers(address: str, *hosts: str) -> list[int]:
    """One request of somebody unknown from each of these hosts; the statuses."""
    return [visit(f"{address}/api/c/{'00' * 16}", x_forwarded_for=host)[0] for host in hosts]


def test_limits_by_host_count_those_behind_a_proxy_that_is_named(tmp_path: Path) -> None:
    with room_on(tmp_path / "named", "--anyone-may-found", "--proxy", "127.0.0.1") as room:
        assert 429 in strangers(room.address, *["203.0.113.5"] * 90)
        assert strangers(room.address, "203.0.113.6") == [401]  # another host
        # what a client adds itself comes before what the proxy adds, and is not believed
        assert strangers(room.address, "203.0.113.99, 203.0.113.5") == [429]
    with room_on(tmp_path / "unnamed") as room:
        assert 429 in strangers(room.address, *["203.0.113.5"] * 90)
        assert strangers(room.address, "203.0.113.6") == [429]  # nobody's word counts


@pytest.mark.parametrize("text", ["*", "room.example", ""])
def test_a_proxy_is_named_by_its_address(tmp_path: Path, text: str) -> None:
    command = [sys.executable, "-c", "from quorumark.cli import main; main()", "room", "serve", "--data", str(tmp_path)]
    command += ["--address", "http://127.0.0.1:9", "--anyone-may-found", "--proxy", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "must be an IP address" in done.stderr


@pytest.mark.skipif(NGINX is None, reason="no nginx here")
def test_members_meet_behind_nginx(tmp_path: Path, root: Path) -> None:
    """The printed configuration, without TLS and on other ports."""
    assert NGINX is not None
    port, text = free_port(), (root / "examples" / "room" / "nginx.conf").read_text()
    with room_on(tmp_path / "room", "--anyone-may-found", "--proxy", "127.0.0.1") as room:
        room.kill()
        data = str(tmp_path / "room" / "data")
        address = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", "from quorumark.cli import main; main()", "room", "serve", "--data", data]
        command += ["--address", address, "--port", str(room.port), "--anyone-may-found", "--proxy", "127.0.0.1"]
        text = re.sub(r"listen 443 ssl", f"listen 127.0.0.1:{port}", text).replace(
            "127.0.0.1:8420", f"127.0.0.1:{room.port}"
        )
        text = re.sub(r" *ssl_certificate.*\n", "", text)
        places = "".join(
            f"{name}_temp_path {tmp_path}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        user = "user root;" if os.geteuid() == 0 else ""  # its workers write to this test's folder
        start = f"daemon off; {user} pid {tmp_path}/pid; error_log {tmp_path}/error.log;\nevents {{}}\n"
        whole = f"{start}http {{\n{places}{text}\n}}\n"
        (tmp_path / "nginx.conf").write_text(whole)
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        proxy = subprocess.Popen([NGINX, "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)])
        try:
            until(lambda: _answers(address), f"nginx: {(tmp_path / 'error.log')}")
            group = Group.join(tmp_path / "members", address, members=3, threshold=2)
            group.start()
            try:
                group.found()  # signed requests, uploads and questions for news pass through unchanged
            finally:
                group.stop()
        finally:
            for process in (proxy, server):
                process.terminate()
                process.wait()


def _answers(address: str) -> bool:
    try:
        return visit(address + "/")[0] == 200
    except OSError:
        return False


def test_the_containers_command_starts_a_room(tmp_path: Path, root: Path) -> None:
    text = (root / "examples" / "room" / "Containerfile").read_text()
    found = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    name, *rest = json.loads(found[1])
    assert name == "quorumark"
    port = free_port()
    rest = [str(tmp_path / "data") if one == "/data" else one for one in rest]
    command = [sys.executable, "-c", "from quorumark.cli import main; main()", *rest, "--anyone-may-found"]
    command += ["--address", f"http://127.0.0.1:{port}", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: _answers(f"http://127.0.0.1:{port}"), "the room answers")
        assert healthy(text, port)
    finally:
        process.terminate()
        process.wait()
    assert not healthy(text, port)
    for source in re.findall(r"^COPY (.*) /source", text, re.MULTILINE):
        assert all((root / one).exists() for one in source.split())


def healthy(text: str, port: int) -> bool:
    """The container's own health check, at another port."""
    check = re.search(r"^HEALTHCHECK CMD (\[.*\])$", text, re.MULTILINE)
    assert check is not None
    name, *rest = json.loads(check[1])
    assert name == "quorumark"
    command = [sys.executable, "-c", "from quorumark.cli import main; main()", *rest, "--port", str(port)]
    return subprocess.run(command, timeout=60, check=False).returncode == 0


def test_the_health_check_speaks_tls(tmp_path: Path, root: Path) -> None:
    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "room.example")]),
    )
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    kinds = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "key.pem").write_bytes(key.private_bytes(*kinds))
    (tmp_path / "cert.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    files = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    text = (root / "examples" / "room" / "Containerfile").read_text()
    with room_on(tmp_path / "room", "--anyone-may-found", *files) as room:
        assert healthy(text, room.port)
    assert not healthy(text, room.port)


@pytest.mark.slow
def test_what_the_container_installs_is_enough_for_a_room(tmp_path: Path, root: Path) -> None:
    """Its RUN line in a new environment: the extra alone, in the tested versions."""
    text = (root / "examples" / "room" / "Containerfile").read_text()
    line = re.search(r"^RUN (pip install .*?) &&", text, re.MULTILINE)
    assert line is not None
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        (tmp_path / "source").mkdir(exist_ok=True)
        shutil.copy(root / name, tmp_path / "source" / name)
    shutil.copytree(root / "src" / "quorumark", tmp_path / "source" / "src" / "quorumark")
    command = line[1].replace("/source", str(tmp_path / "source")).replace("pip ", f"{tmp_path}/venv/bin/pip ", 1)
    subprocess.run(command, shell=True, check=True, timeout=600)
    done = subprocess.run(
        [tmp_path / "venv/bin/quorumark", "room", "serve", "--help"], capture_output=True, check=False
    )
    assert done.returncode == 0
    imports = "import quorumark.room.server, quorumark.room.agent_page"
    assert subprocess.run([tmp_path / "venv/bin/python", "-c", imports], check=False).returncode == 0


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("name", ["quorumark-room.service", "quorumark-agent.service", "quorumark-signer.service"])
def test_the_units_are_sound(tmp_path: Path, root: Path, name: str) -> None:
    text = (root / "examples" / "room" / name).read_text()
    command = re.search(r"^ExecStart=(\S+) ((?:room|member) \S+) (.*)$", text, re.MULTILINE)
    assert command is not None
    options = set(re.findall(r"--[a-z-]+", command[3]))
    own = shutil.which("true")
    (tmp_path / name).write_text(text.replace(command[1], str(own)))
    user = ["--user"] if "agent" in name else []
    assert ANALYZE is not None
    done = subprocess.run(
        [ANALYZE, "verify", "--man=no", *user, str(tmp_path / name)], capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, [line for line in done.stderr.splitlines() if name in line]) == (0, []), done.stderr
    shown = subprocess.run(
        [sys.executable, "-c", "from quorumark.cli import main; main()", *command[2].split(), "--help"],
        capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", "COLUMNS": "200"},
    ).stdout  # fmt: skip
    assert all(option in shown for option in options)
