"""One answer of a time-stamping authority: asking for it, and checking it (docs/dates.md, "What is checked").

The signature and the chain of certificates are checked by rfc3161-client, that is by OpenSSL, at the time that the
stamp names. Before that come checks of our own, so that each refusal has its own reason: `check_token` has the order.

A response comes from anybody: it is read within limits, and whatever is wrong with it is a StampError.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quorumark.errors import InputError, MissingDependencyError, QuorumarkError, StampError
from quorumark.reasons import Reason, Value, printable

if TYPE_CHECKING:
    from cryptography import x509
    from rfc3161_client import TimeStampRequest, TimeStampResponse

__all__ = ["LARGEST", "Token", "ask", "check_token", "inspect_token", "read_request", "read_roots", "time_text"]

LARGEST = 1 << 16
"""Bytes of a response. Common ones have 1 to 8 kB, certificates included."""
LARGEST_REQUEST = 1 << 12
LARGEST_ROOTS = 1 << 20
_MOST_CERTIFICATES = 16  # in a response
_MOST_ROOTS = 256
_HASHES = {
    "2.16.840.1.101.3.4.2.1": "sha256",
    "2.16.840.1.101.3.4.2.2": "sha384",
    "2.16.840.1.101.3.4.2.3": "sha512",
}
_SIGNING_CERTIFICATE = bytes.fromhex("060b2a864886f70d010910020c")  # RFC 2634, by SHA-1
_SIGNING_CERTIFICATE_V2 = bytes.fromhex("060b2a864886f70d010910022f")  # RFC 5035
_OIDS = {bytes.fromhex(f"060960864801650304020{x}"): name for x, name in ((1, "sha256"), (2, "sha384"), (3, "sha512"))}

_TEXTS = {
    "stamp.too-large": "it is larger than any answer of an authority",
    "stamp.malformed": "it is not an answer of a time-stamping authority, or is truncated or damaged",
    "stamp.unsorted": (
        "a set in it is not sorted, as DER asks for, so its signature has no one meaning; let the authority leave out "
        "its CA's certificates, or ask another one"
    ),
    "stamp.refused": "the authority refused to stamp",
    "stamp.hash": "it hashes with an algorithm other than SHA-256, SHA-384 and SHA-512",
    "stamp.other-bytes": "it dates something else",
    "stamp.nonce": "it answers another request: its nonce is not the one that was sent",
    "stamp.no-certificate": "the certificate of the one who signed it is not in it; ask for it to be included",
    "stamp.purpose": "the certificate that signed it is not one for time stamps (critical, and for nothing else)",
    "stamp.signer": "what is signed names another certificate than the one that it comes with",
    "stamp.untrusted": "its certificates do not lead to any of the roots given",
    "stamp.not-valid-then": "its certificates were not valid, or no longer, at the time that it names",
    "stamp.signature": "its signature does not hold: altered or forged",
    "stamp.future": "it names a time that has not come yet, by the clock of this machine",
    "stamp.expired": "its certificates have expired, and nothing renewed it before",
    "stamp.renewed-late": "it was renewed after its certificates had expired",
    "stamp.renewed-early": "its renewal is older than what it renews",
    "stamp.twice": "it is there already",
}
"""What is wrong, for an error; `quorumark.report.texts` has the sentences for records."""


def refuse(code: str, **values: Value) -> NoReturn:
    """Raises the StampError for a code."""
    shown = f" ({', '.join(f'{name} {value}' for name, value in values.items())})" if values else ""
    raise StampError(f"the stamp is refused: {_TEXTS[code]}{shown}", reason=Reason.of(code, **values))


def time_text(time: datetime) -> str:
    """A time as records write it, in UTC; parts of a second count as a whole one."""
    whole = time.astimezone(UTC)
    if whole.microsecond:
        whole = whole.replace(microsecond=0) + timedelta(seconds=1)
    return whole.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Token:
    """What a stamp says. `latest` is its time plus the authority's own accuracy: the bytes existed by then.

    `expires`: when the first certificate on the way from the authority to the reader's root ends; None if no roots
    were given, so that nothing was checked but what the stamp dates.
    """

    authority: str
    time: datetime
    latest: datetime
    serial: int
    algorithm: str
    imprint: bytes
    expires: datetime | None


def _library() -> Any:
    try:
        import rfc3161_client
    except ImportError:
        raise MissingDependencyError("rfc3161-client", "a time stamp") from None
    return rfc3161_client


# --- asking -------------------------------------------------------------------------------------------------


def ask(message: bytes) -> bytes:
    """A request (DER) for a stamp over SHA-512 of these bytes, with a fresh nonce; the authority's certificate too."""
    library = _library()
    builder = library.TimestampRequestBuilder().data(message).hash_algorithm(library.HashAlgorithm.SHA512)
    made: bytes = builder.nonce(nonce=True).cert_request(cert_request=True).build().as_bytes()
    return made


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    algorithm: str
    imprint: bytes
    nonce: int | None

    def is_about(self, message: bytes) -> bool:
        return hashlib.new(self.algorithm, message).digest() == self.imprint


def read_request(data: bytes) -> Asked:
    """A request as `ask` or `openssl ts -query` makes it."""
    if len(data) > LARGEST_REQUEST:
        raise StampError("the request is larger than any request for a stamp: take the file that `stamp request` wrote")
    _library()
    from rfc3161_client import _rust

    try:
        with _reading():
            request: TimeStampRequest = _rust.parse_timestamp_request(data)
            imprint = request.message_imprint
            algorithm = _HASHES.get(imprint.hash_algorithm.dotted_string, "")
            asked = Asked(algorithm, imprint.message, request.nonce)
    except StampError:
        raise StampError("this is not a request for a stamp: take the file that `stamp request` wrote") from None
    if not asked.algorithm:
        raise StampError("the request hashes with an algorithm other than SHA-256, SHA-384 and SHA-512: make another")
    return asked


def read_roots(paths: Sequence[str | os.PathLike[str]]) -> tuple[x509.Certificate, ...]:
    """The certificates, in PEM, that the reader trusts for time stamps; intermediate ones may be among them."""
    from cryptography import x509

    found: list[x509.Certificate] = []
    for path in map(Path, paths):
        try:
            if not path.is_file() or path.stat().st_size > LARGEST_ROOTS:
                raise InputError("--tsa-roots", "must name PEM files of at most 1 MiB", repr(str(path)))
            found += x509.load_pem_x509_certificates(path.read_bytes())
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("--tsa-roots", "must hold certificates in PEM", repr(str(path))) from None
    if paths and len(found) > _MOST_ROOTS:
        raise InputError("--tsa-roots", f"must hold at most {_MOST_ROOTS} certificates", len(found))
    if paths and not any(_issued_itself(one) for one in found):
        raise InputError("--tsa-roots", "must hold at least one root: a certificate that signs itself", "none")
    return tuple(found)


# --- checking -----------------------------------------------------------------------------------------------


def inspect_token(response: bytes, message: bytes, nonce: int | None = None) -> Token:
    """What a response says about these bytes. Nobody's signature is checked: that takes roots (`check_token`)."""
    with _reading():
        return _opened(response, message, nonce)[0]


def check_token(response: bytes, message: bytes, roots: Sequence[x509.Certificate], nonce: int | None = None) -> Token:
    """Checks a response against the bytes that it should date and the reader's roots; a StampError says what is wrong.

    `nonce`: that of the request, where it is known.
    """
    with _reading():
        # 1. it can be read, and the authority granted it; 2. it dates these bytes; 3. it answers this request
        token, decoded = _opened(response, message, nonce)
        # 4. the certificate that signed it is there, and is for time stamps; 5. what is signed names it
        certificates = _certificates(decoded)
        signer = _signer(decoded, certificates)
        _require_purpose(signer)
        _require_named(response, signer)
        # 6. from it a chain leads to one of the roots; 7. all of that chain was valid at the time of the stamp
        ends = _chains(signer, certificates, roots)
        if not ends:
            refuse("stamp.untrusted", authority=token.authority)
        good = [end for begin, end in ends if begin <= token.time <= end]
        if not good:
            refuse("stamp.not-valid-then", authority=token.authority, time=time_text(token.time))
        # 8. OpenSSL says the same, and that the signature holds
        _require_signature(decoded, message, roots)
        return Token(**{**token.__dict__, "expires": max(good)})


@contextmanager
def _reading() -> Iterator[None]:
    """Whatever goes wrong with a file that is anybody's is a StampError. A panic in Rust is a BaseException."""
    try:
        yield
    except QuorumarkError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt
        refuse("stamp.unsorted" if "SetOrdering" in str(error) else "stamp.malformed")


def _opened(response: bytes, message: bytes, nonce: int | None) -> tuple[Token, TimeStampResponse]:
    library = _library()
    if len(response) > LARGEST:
        refuse("stamp.too-large", bytes=len(response), most=LARGEST)
    decoded: TimeStampResponse = library.decode_timestamp_response(response)
    if decoded.status != 0:  # 1 is granted with changes: what was changed is for nobody here to judge
        refuse("stamp.refused", status=decoded.status)
    info = decoded.tst_info
    algorithm = _HASHES.get(info.message_imprint.hash_algorithm.dotted_string, "")
    imprint, time, accuracy = info.message_imprint.message, info.gen_time, info.accuracy
    margin = timedelta(0)
    if accuracy is not None:  # the library says None where there is none
        margin = timedelta(
            seconds=accuracy.seconds or 0, milliseconds=accuracy.millis or 0, microseconds=accuracy.micros or 0
        )
    authority = _name(_signer(decoded, _certificates(decoded)))
    if not algorithm:
        refuse("stamp.hash")
    if hashlib.new(algorithm, message).digest() != imprint:
        refuse("stamp.other-bytes")
    if nonce is not None and info.nonce != nonce:
        refuse("stamp.nonce")
    return Token(authority, time, time + margin, info.serial_number, algorithm, imprint, None), decoded


def _certificates(decoded: TimeStampResponse) -> list[x509.Certificate]:
    from cryptography import x509

    found = decoded.signed_data.certificates
    if len(found) > _MOST_CERTIFICATES:
        refuse("stamp.malformed")
    return [x509.load_der_x509_certificate(one) for one in sorted(found)]


def _signer(decoded: TimeStampResponse, certificates: Sequence[x509.Certificate]) -> x509.Certificate:
    """The certificate of the one signature."""
    infos = list(decoded.signed_data.signer_infos)
    if len(infos) != 1:
        refuse("stamp.malformed")
    for one in certificates:
        if one.issuer == infos[0].issuer and one.serial_number == infos[0].serial_number:
            return one
    refuse("stamp.no-certificate")


def _name(certificate: x509.Certificate) -> str:
    """The authority, as its certificate calls it: the common name where there is one."""
    from cryptography.x509.oid import NameOID

    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    text = str(common[0].value) if common else certificate.subject.rfc4514_string()
    return printable(text) or "unnamed"


def _require_purpose(signer: x509.Certificate) -> None:
    """RFC 3161, 2.3: the extended key usage must be critical, and time stamping alone."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        usage = signer.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
        good = usage.critical and list(usage.value) == [ExtendedKeyUsageOID.TIME_STAMPING]
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        good = False
    if not good:
        refuse("stamp.purpose", authority=_name(signer))


def _issued_itself(certificate: x509.Certificate) -> bool:
    return certificate.subject == certificate.issuer


def _chains(
    signer: x509.Certificate, others: Sequence[x509.Certificate], roots: Sequence[x509.Certificate]
) -> list[tuple[datetime, datetime]]:
    """For each chain of certificates from the signer to a root that the reader gave: from when to when all are valid.

    The signatures of the chain are checked; what else certificates may and must not is OpenSSL's part.
    """
    ends: list[tuple[datetime, datetime]] = []
    pool = [*others, *(one for one in roots if one not in others)]
    waiting: list[list[x509.Certificate]] = [[signer]]
    tried = 0
    while waiting and tried < 1000:  # what a response holds is bounded, but not how its certificates hang together
        path = waiting.pop()
        tried += 1
        if path[-1] in roots and _issued_itself(path[-1]):
            ends.append((max(c.not_valid_before_utc for c in path), min(c.not_valid_after_utc for c in path)))
            continue
        if len(path) < 8:
            waiting += [[*path, one] for one in pool if one not in path and _issued(path[-1], one)]
    return ends


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    if certificate.issuer != issuer.subject:
        return False
    try:
        certificate.verify_directly_issued_by(issuer)
    except Exception:  # noqa: BLE001 - a signature that does not hold, a key of a kind that is not known, …
        return False
    return True


def _require_signature(decoded: TimeStampResponse, message: bytes, roots: Sequence[x509.Certificate]) -> None:
    library = _library()
    builder = library.VerifierBuilder(
        roots=[one for one in roots if _issued_itself(one)],
        intermediates=[one for one in roots if not _issued_itself(one)],
    )
    try:
        builder.build().verify_message(decoded, message)
    except library.VerificationError:
        refuse("stamp.signature")


# --- which certificate the signature covers (ESSCertID) ------------------------------------------------------


def _require_named(response: bytes, signer: x509.Certificate) -> None:
    """RFC 3161, 2.4.2: the signed attributes name the signer's certificate by its hash.

    Which certificate a response comes with is not signed; another one with the same key could have other dates.
    """
    from cryptography.hazmat.primitives.serialization import Encoding

    whole = signer.public_bytes(Encoding.DER)
    try:
        algorithm, named = _named(response)
    except (IndexError, ValueError, KeyError):
        refuse("stamp.signer", authority=_name(signer))
    if hashlib.new(algorithm, whole, usedforsecurity=False).digest() != named:
        refuse("stamp.signer", authority=_name(signer))


def _named(response: bytes) -> tuple[str, bytes]:
    """The hash of the first certificate that the signed attributes name; that is the signer's.

    TimeStampResp → TimeStampToken → [0] SignedData → its last part, SignerInfos → SignerInfo → [0] signedAttrs.
    """
    signed_data = _parts(_parts(_parts(response)[1])[1])[0]
    attributes = next(part for part in _parts(_parts(_parts(signed_data)[-1])[0]) if part[0] == 0xA0)
    values = {_parts(one)[0]: _parts(_parts(one)[1]) for one in _parts(attributes)}
    if _SIGNING_CERTIFICATE_V2 in values:
        first = _parts(_parts(_parts(values[_SIGNING_CERTIFICATE_V2][0])[0])[0])
        if first[0][0] == 0x04:  # without an algorithm it is SHA-256
            return "sha256", _body(first[0])
        return _OIDS[_parts(first[0])[0]], _body(first[1])
    first = _parts(_parts(_parts(values[_SIGNING_CERTIFICATE][0])[0])[0])
    return "sha1", _body(first[0])


def _body(element: bytes) -> bytes:
    return element[_head(element)[0] :]


def _head(element: bytes) -> tuple[int, int]:
    """(length of tag and length, length of the body) of a DER element."""
    size = element[1]
    if size < 0x80:
        return 2, size
    count = size & 0x7F
    if not 1 <= count <= 4 or len(element) < 2 + count:
        raise ValueError("a length")
    return 2 + count, int.from_bytes(element[2 : 2 + count], "big")


def _parts(element: bytes) -> list[bytes]:
    """The elements of a constructed element. The response was parsed as DER before; this only finds places in it."""
    rest, found = _body(element), []
    while rest:
        head, body = _head(rest)
        if head + body > len(rest):
            raise ValueError("truncated")
        found.append(rest[: head + body])
        rest = rest[head + body :]
    return found
