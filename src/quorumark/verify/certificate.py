"""The certificate: a finding that the coalition signs (docs/format.md, "Certificates").

It is an in-toto Statement v1 in a DSSE envelope, so that common tools can store it, show it and check its signatures:

    subject         the suspect's files, each by its SHA-256, and the digest of OpenSSF model signing over all of them
    predicateType   what the rest means: "urn:quorumark:certificate:v1"
    predicate       the finding, with the query and all partials: everything that a reader needs to compute it again

The payload is canonical JSON: the same finding gives the same bytes, and every member signs the same ones. A signature
is plain Ed25519 over DSSE's encoding of the payload; its key id is the member's Ed25519 key in hex.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from quorumark.canonical import canonical, digest, read_json
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest, Member
from quorumark.errors import RecordError, SignatureError
from quorumark.model.signing import signing_digest
from quorumark.verify.evidence import Finding

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope

__all__ = [
    "PAYLOAD_TYPE",
    "PREDICATE_TYPE",
    "SIGNING_SUBJECT",
    "STATEMENT_TYPE",
    "Certificate",
    "verify_signatures",
]

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:quorumark:certificate:v1"
SIGNING_SUBJECT = "openssf-model-signing"
"""The name of the subject with the digest that a signature by OpenSSF model signing has for the same files."""

_WHAT = "a certificate"
_FIELDS = {"_type", "subject", "predicateType", "predicate"}


def _refuse(good: bool, why: str) -> None:
    if not good:
        raise RecordError(f"this is not {_WHAT} that can be used: {why}")


def _subject(finding: Finding) -> list[dict[str, Any]]:
    """The suspect's files; for a model that was never a file, its digest as the query states it."""
    files = [{"name": file.name, "digest": {"sha256": file.sha256}} for file in finding.query.files]
    if not files:
        return [{"name": "memory", "digest": {"quorumark-suspect": finding.query.suspect}}]
    return [*files, {"name": SIGNING_SUBJECT, "digest": {"sha256": signing_digest(finding.query.files)}}]


@dataclass(frozen=True)
class Certificate:
    """The exact bytes that are signed, what they say, and the signatures so far: key id → signature, both in hex.

    Signatures are checked by `signers`, not here: only a manifest says whose keys count.
    """

    payload: bytes = field(repr=False)
    signatures: Mapping[str, str] = field(default_factory=dict)
    finding: Finding = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        statement = read_json(self.payload, _WHAT)
        _refuse(isinstance(statement, dict), "its payload is not a JSON object")
        _refuse(canonical(statement) == self.payload, "its payload is not canonical JSON")
        for name, expected in (("_type", STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
            got = statement.get(name)
            _refuse(got == expected, f"its {name} is {str(got)[:80]!r}, not {expected!r}")
        for name in sorted(_FIELDS - statement.keys()):
            _refuse(False, f"it lacks {name!r}")
        for name in sorted(statement.keys() - _FIELDS):
            _refuse(False, f"it has the unknown field {name!r}")  # who signs the bytes has said what it says
        finding = Finding.from_dict(statement["predicate"])
        _refuse(statement["subject"] == _subject(finding), "its subject is not the suspect of its query")
        for keyid, signature in self.signatures.items():
            sound = re.fullmatch("[0-9a-f]{64}", keyid) and re.fullmatch("[0-9a-f]{128}", signature)
            _refuse(
                sound is not None, "a signature must be 64 bytes by a key of 32 bytes, which its keyid gives in hex"
            )
        object.__setattr__(self, "finding", finding)

    @classmethod
    def of(cls, finding: Finding) -> Self:
        """A certificate that nobody has signed yet."""
        statement = {
            "_type": STATEMENT_TYPE,
            "subject": _subject(finding),
            "predicateType": PREDICATE_TYPE,
            "predicate": finding.as_dict(),
        }
        return cls(canonical(statement))

    # --- bytes ---

    def envelope(self) -> Envelope:
        """As the library that does envelopes sees it."""
        from securesystemslib.dsse import Envelope
        from securesystemslib.signer import Signature

        signatures = {keyid: Signature(keyid, signature) for keyid, signature in sorted(self.signatures.items())}
        return Envelope(self.payload, PAYLOAD_TYPE, signatures)

    def to_bytes(self) -> bytes:
        """The envelope as JSON, signatures in the order of their keys: the same certificate, the same bytes."""
        return (json.dumps(self.envelope().to_dict(), indent=2, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Refuses, with a RecordError, all that `to_bytes` could not have meant; spaces and line breaks are free."""
        from securesystemslib.dsse import Envelope

        body = read_json(data, _WHAT)
        sound = isinstance(body, dict) and body.keys() == {"payload", "payloadType", "signatures"}
        _refuse(sound, "it is not a DSSE envelope with payload, payloadType and signatures")
        kind, entries = body["payloadType"], body["signatures"]
        _refuse(kind == PAYLOAD_TYPE, f"its payloadType is {str(kind)[:80]!r}, not {PAYLOAD_TYPE!r}")
        sound = isinstance(entries, list) and all(isinstance(e, dict) and e.keys() == {"keyid", "sig"} for e in entries)
        _refuse(sound, "its signatures must be a list of entries with keyid and sig")
        texts = [body["payload"], *(text for entry in entries for text in entry.values())]
        _refuse(all(isinstance(text, str) for text in texts), "its payload and signatures must be strings")
        keyids = [entry["keyid"] for entry in entries]
        _refuse(len(set(keyids)) == len(keyids), "it is signed twice by one key")
        try:
            envelope = Envelope.from_dict({**body, "signatures": [dict(entry) for entry in entries]})
        except ValueError:  # binascii.Error is one
            raise RecordError(f"this is not {_WHAT} that can be used: it holds base64 that cannot be decoded") from None
        # decoders pass over strange characters and stray bits: only what encodes to the same text again is meant
        _refuse(envelope.to_dict() == body, "its base64 is not the standard spelling of what it holds")
        return cls(envelope.payload, {keyid: s.signature for keyid, s in envelope.signatures.items()})

    def digest(self) -> str:
        """Of the payload: what members compare before they sign. Signatures do not change it."""
        return digest("certificate", self.payload).hex()

    # --- signatures ---

    def signed_by(self, identity: Identity) -> Self:
        """With that member's signature, added or made anew."""
        signature = identity.sign_dsse(self.envelope().pae())
        return replace(self, signatures={**self.signatures, identity.ed25519: signature.hex()})

    def signers(self, manifest: Manifest) -> tuple[Member, ...]:
        """The members who signed it, in the order of their points; every signature must be a member's and must hold."""
        from securesystemslib.exceptions import UnverifiedSignatureError
        from securesystemslib.signer import SSlibKey

        if self.finding.query.manifest != manifest.digest().hex():
            raise RecordError(
                "this certificate was made under another manifest than the one it is checked against: if that is an "
                f"earlier one, name it, history/{self.finding.query.manifest[:16]}.json"
            )
        members = {member.ed25519: member for member in manifest.terms.roster}
        envelope = self.envelope()
        for keyid, signature in envelope.signatures.items():
            if keyid not in members:
                raise SignatureError(f"the certificate is signed by a key that belongs to no member: {keyid}")
            try:
                key = SSlibKey(keyid, "ed25519", "ed25519", {"public": keyid})
                key.verify_signature(signature, envelope.pae())
            except UnverifiedSignatureError:
                raise SignatureError(
                    f"the signature of {members[keyid].name} does not hold (certificate): altered or forged"
                ) from None
        return tuple(member for member in manifest.terms.roster if member.ed25519 in self.signatures)


def verify_signatures(certificate: Certificate, manifest: Manifest) -> None:
    """Everybody whose partial counts must have signed what came of it; a SignatureError names who is missing."""
    signed = {member.point for member in certificate.signers(manifest)}
    finding = certificate.finding
    if not signed:
        raise SignatureError(
            "nobody has signed the certificate: every member whose partial counts signs it (verify sign)"
        )
    counted = {partial.point for partial in finding.partials} - set(finding.wrong)
    missing = [manifest.terms.member(point).name for point in sorted(counted - signed)]
    if missing:
        raise SignatureError(
            f"the certificate lacks the signature of {', '.join(missing)}: they sign it with verify sign"
        )
