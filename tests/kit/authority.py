"""A time-stamping authority of our own: a CA and an authority made with openssl, and `openssl ts` to answer queries.

Tests fail, and say so, where openssl is missing: nothing about dates would be tested then.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CONFIG = """
[ tsa ]
default_tsa = one
[ one ]
serial = {folder}/serial
crypto_device = builtin
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256, sha384, sha512
accuracy = secs:1
ordering = no
tsa_name = yes
ess_cert_id_chain = no
ess_cert_id_alg = sha256
"""
NOW = datetime.now(UTC).replace(microsecond=0)


def openssl(*arguments: str | Path, cwd: Path | None = None) -> bytes:
    program = shutil.which("openssl")
    if program is None:
        pytest.fail("openssl is not installed: time stamps cannot be tested (apt-get install openssl)")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, check=False, timeout=60, cwd=cwd)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    signed_by: ec.EllipticCurvePrivateKey,
    begin: datetime,
    end: datetime,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signed_by.public_key()), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signed_by, hashes.SHA256())


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


_CA = (
    (x509.BasicConstraints(ca=True, path_length=None), True),
    (
        x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        ),
        True,
    ),
)  # fmt: skip
STAMPING = ((x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING]), True),)


@dataclass
class Authority:
    """A CA's root, and an authority under it that answers queries; `root` is what verifiers are given."""

    folder: Path
    name: str

    @property
    def root(self) -> Path:
        return self.folder / "root.pem"

    def answer(self, query: bytes, *, at: datetime | None = None, chain: bool = False) -> bytes:
        """The response to a query; `at`: as if it were another time; `chain`: with the root's certificate in it."""
        (self.folder / "query.tsq").write_bytes(query)
        more: list[str | Path] = ["-chain", self.root] if chain else []
        command: list[str | Path] = [
            "ts", "-reply", "-queryfile", self.folder / "query.tsq", "-config", self.folder / "tsa.cnf",
            "-signer", self.folder / "tsa.pem", "-inkey", self.folder / "tsa.key", *more,
        ]  # fmt: skip
        if at is None:
            return openssl(*command)
        tampered = self._tst(openssl(*command, "-token_out"), at)
        return self.sign(tampered)

    def _tst(self, token: bytes, at: datetime | None = None) -> bytes:
        """What a token says (TSTInfo), with its time set to another one: openssl's clock cannot be set."""
        (self.folder / "token.der").write_bytes(token)
        said = openssl("cms", "-verify", "-noverify", "-inform", "DER", "-in", self.folder / "token.der")
        if at is None:
            return said
        place = said.index(b"\x18\x0f") + 2  # GeneralizedTime of 15 bytes
        return said[:place] + at.strftime("%Y%m%d%H%M%SZ").encode() + said[place + 15 :]

    def said(self, query: bytes) -> bytes:
        """TSTInfo of an answer, to be signed in other ways."""
        (self.folder / "query.tsq").write_bytes(query)
        return self._tst(
            openssl(
                "ts", "-reply", "-queryfile", self.folder / "query.tsq", "-config", self.folder / "tsa.cnf",
                "-signer", self.folder / "tsa.pem", "-inkey", self.folder / "tsa.key", "-token_out",
            )
        )  # fmt: skip

    def sign(self, said: bytes, signer: str = "tsa", certificates: bool = True) -> bytes:
        """A response about a TSTInfo, signed with the key of `signer`, which need not be one for stamps."""
        (self.folder / "said.der").write_bytes(said)
        token = openssl(
            "cms", "-sign", "-binary", "-nodetach", "-nosmimecap", "-cades", "-md", "sha256", "-outform", "DER",
            "-econtent_type", "1.2.840.113549.1.9.16.1.4", "-in", self.folder / "said.der",
            "-signer", self.folder / f"{signer}.pem", "-inkey", self.folder / f"{signer}.key",
            *([] if certificates else ["-nocerts"]),
        )  # fmt: skip
        return der(0x30, der(0x30, der(0x02, b"\0")), token)


def make_authority(
    folder: Path,
    name: str = "Avon Stamps",
    *,
    begin: datetime = NOW - timedelta(days=400),
    end: datetime = NOW + timedelta(days=400),
    root_end: datetime = NOW + timedelta(days=4000),
) -> Authority:
    """A root that is good until `root_end`, and an authority from `begin` to `end`.

    Beside it are certificates that must not stamp, under the same root: `plain` (no purpose at all), `mail` (another
    purpose), `loose` (the right purpose, not critical).
    """
    folder.mkdir(parents=True)
    root_key = ec.generate_private_key(ec.SECP256R1())
    issuer = named(f"{name} root")
    start = begin - timedelta(days=1)
    root = _certificate(f"{name} root", root_key, issuer, root_key, start, root_end, _CA)
    (folder / "root.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    mail = ((x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION]), True),)
    loose = ((x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING]), False),)
    for file, extensions in {"tsa": STAMPING, "plain": (), "mail": mail, "loose": loose}.items():
        key = ec.generate_private_key(ec.SECP256R1())
        made = _certificate(name, key, issuer, root_key, begin, end, extensions)
        (folder / f"{file}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        (folder / f"{file}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    (folder / "serial").write_text("01\n")
    (folder / "tsa.cnf").write_text(_CONFIG.format(folder=folder))
    return Authority(folder, name)


# --- DER, as little as it takes to spoil it -----------------------------------------------------------------


def der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    if len(body) < 128:
        return bytes([tag, len(body)]) + body
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + body


def elements(body: bytes) -> list[bytes]:
    """The elements in the body of a SEQUENCE or SET, whole."""
    found = []
    while body:
        length, head = body[1], 2
        if length & 0x80:
            head += length & 0x7F
            length = int.from_bytes(body[2:head], "big")
        found.append(body[: head + length])
        body = body[head + length :]
    return found


def inside(element: bytes) -> list[bytes]:
    head = 2 + (element[1] & 0x7F if element[1] & 0x80 else 0)
    return elements(element[head:])


def changed(element: bytes, path: Sequence[int], change: Callable[[bytes], bytes]) -> bytes:
    """The same with one inner element changed; `path` are the numbers of the elements on the way to it."""
    if not path:
        return change(element)
    parts = inside(element)
    parts[path[0]] = changed(parts[path[0]], path[1:], change)
    return der(element[0], *parts)


def reverse(element: bytes) -> bytes:
    """A set in the other order, which is not DER's."""
    return der(element[0], *reversed(inside(element)))


# --- over HTTP ----------------------------------------------------------------------------------------------


@contextmanager
def serving(reply: Callable[[bytes], tuple[int, str, bytes]]) -> Iterator[str]:
    """A web server on loopback that answers each POST with (status, content type, body); gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            good = self.headers["Content-Type"] == "application/timestamp-query"
            status, kind, body = reply(asked) if good else (415, "text/plain", b"")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/tsr"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
