"""Members' keys, signatures and messages (docs/protocol.md, "Identities and messages").

A member has an Ed25519 key, which signs, and an X25519 key, which others seal messages to. Both are made by
`Identity.generate` and live in the member's keystore; the public halves are its `Card`.

A message says in its header what it belongs to (consortium, session, step, sender, recipient) and is signed over all
of it. A sealed one is encrypted to its recipient: a fresh X25519 key, HKDF-SHA256 bound to the header, AES-256-GCM.
So a message that was altered, cut, sent to somebody else, replayed in another session or given for another step is
refused, by the sender's name and the step.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quorumark.canonical import canonical, digest, parse
from quorumark.consortium.records import Card, Manifest, Member
from quorumark.consortium.signatures import verify
from quorumark.consortium.succession import check_follows
from quorumark.errors import InputError, MessageError, RecordError, SignatureError
from quorumark.field import derive_key

__all__ = [
    "Header",
    "Identity",
    "Roster",
    "check_sealed",
    "exchange",
    "is_signed_by",
    "open_message",
    "verify",
    "verify_card",
    "verify_chain",
    "verify_manifest",
]

_RAW = serialization.Encoding.Raw
_PUBLIC = serialization.PublicFormat.Raw
_PRIVATE = serialization.PrivateFormat.Raw


class Roster(Protocol):
    """What says who sits where: a consortium's terms, or a group."""

    def member(self, point: int) -> Member: ...


def verify_card(card: Card) -> None:
    """A card must be signed by the key that it shows: it binds the two keys and the name together."""
    verify(card.ed25519, "card", card.signed_bytes(), card.signature, f"the card of {card.name!r}")


class Identity:
    """A member's private keys. Never printed, never pickled; `to_secret_bytes` is for the keystore alone."""

    __slots__ = ("_exchanged", "_sign", "_unseal", "ed25519", "name")

    def __init__(self, name: str, sign: Ed25519PrivateKey, unseal: X25519PrivateKey) -> None:
        self.name = name
        self.ed25519: str = sign.public_key().public_bytes(_RAW, _PUBLIC).hex()
        self._sign = sign
        self._unseal = unseal
        self._exchanged: dict[str, bytes] = {}  # no more secret than the key that they come from, and gone with it

    @classmethod
    def generate(cls, name: str) -> Identity:
        """New keys from the operating system's randomness."""
        identity = cls(name, Ed25519PrivateKey.generate(), X25519PrivateKey.generate())
        identity.card()  # refuses a bad name before anything is stored
        return identity

    @classmethod
    def from_secret_bytes(cls, name: str, secret: bytes) -> Identity:
        if len(secret) != 64:
            raise InputError("secret", "must be the 64 bytes of two private keys", f"{len(secret)} bytes")
        return cls(
            name, Ed25519PrivateKey.from_private_bytes(secret[:32]), X25519PrivateKey.from_private_bytes(secret[32:])
        )

    def to_secret_bytes(self) -> bytes:
        return _private(self._sign) + _private(self._unseal)

    def __repr__(self) -> str:
        return f"Identity({self.name!r}, keys hidden)"

    def __reduce__(self) -> str:
        raise TypeError("an Identity holds private keys and is not pickled")

    @property
    def x25519(self) -> str:
        return self._unseal.public_key().public_bytes(_RAW, _PUBLIC).hex()

    def card(self) -> Card:
        """The public face, signed."""
        unsigned = Card(self.name, self.ed25519, self.x25519, "00" * 64)
        return Card(self.name, self.ed25519, self.x25519, self.sign("card", unsigned.signed_bytes()).hex())

    def sign(self, purpose: str, data: bytes) -> bytes:
        """Ed25519 over digest("signature", purpose, data): a signature for one purpose is none for another."""
        return self._sign.sign(digest("signature", purpose.encode(), data))

    def sign_dsse(self, pae: bytes) -> bytes:
        """Ed25519 over the bytes themselves, as DSSE envelopes want it; only over what such an envelope signs.

        `sign` signs 32 bytes, this only more than 32 that start with "DSSEv1 ": neither can be taken for the other.
        """
        if not pae.startswith(b"DSSEv1 ") or len(pae) <= 32:
            raise InputError("pae", "must be what a DSSE envelope signs: DSSEv1, type and payload")
        return self._sign.sign(pae)

    def exchange(self, x25519: str) -> bytes:
        """The secret that this member shares with the holder of another X25519 key."""
        return exchange(self._unseal, x25519)

    def exchange_lasting(self, x25519: str) -> bytes:
        """The same with another member's lasting key, which comes again in every round."""
        if x25519 not in self._exchanged:
            self._exchanged[x25519] = exchange(self._unseal, x25519)
        return self._exchanged[x25519]

    # --- messages ---

    def write(
        self,
        header: Header,
        body: bytes | memoryview,
        recipient_x25519: str | None = None,
        *,
        secret: bytes | None = None,
    ) -> bytes:
        """A message: sealed if the header names a recipient, else in the open; signed in both cases.

        It is sealed to the recipient's key, or under a `secret` of the two that both will forget: then who steals the
        recipient's keys later cannot read it.
        """
        if (header.recipient == 0) != (recipient_x25519 is None and secret is None):
            raise InputError("recipient_x25519", "must be given exactly for messages to one member")
        shown = {"format": _FORMAT, **header.as_dict()}
        if secret is not None:
            shown["nonce"] = os.urandom(32).hex()  # so that no two messages have one key
            prefix = canonical(shown)
            body = AESGCM(_message_key(secret, prefix)).encrypt(_NONCE, body, prefix)
        elif recipient_x25519 is not None:
            ephemeral = X25519PrivateKey.generate()
            shown["ephemeral"] = ephemeral.public_key().public_bytes(_RAW, _PUBLIC).hex()
            prefix = canonical(shown)
            body = AESGCM(_message_key(exchange(ephemeral, recipient_x25519), prefix)).encrypt(_NONCE, body, prefix)
        else:
            prefix = canonical(shown)
        signature = self.sign("message", digest("message", prefix, body))
        return b"".join([len(prefix).to_bytes(4, "big"), prefix, signature, body])

    def read(
        self,
        data: bytes,
        terms: Roster,
        expected: Header,
        *,
        secret: bytes | None = None,
        private: X25519PrivateKey | None = None,
    ) -> bytes:
        """The body of a message that must be exactly the expected one, sealed to this member or in the open.

        `secret`: what it was sealed under; `private`: another key of this member's that it was sealed to.
        """
        prefix, shown, signature, body = _split(data, terms, expected, "ephemeral" if secret is None else "nonce")
        sender = terms.member(expected.sender)
        _verify_message(sender.ed25519, prefix, body, signature, expected, sender.name)
        if expected.recipient == 0:
            return body
        try:
            if secret is None:
                secret = exchange(private or self._unseal, str(shown["ephemeral"]))
            return AESGCM(_message_key(secret, prefix)).decrypt(_NONCE, body, prefix)
        except (InvalidTag, ValueError, KeyError, MessageError):
            raise MessageError(
                f"the message of {sender.name!r} for step {expected.step!r} cannot be opened",
                code="message.cannot-open",
            ) from None


def exchange(private: X25519PrivateKey, x25519: str) -> bytes:
    """X25519 between a private key and a public one in hex. A key of small order is refused."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(x25519)))
    except ValueError:
        raise MessageError("a public key that no secret can be shared with", code="message.invalid-key") from None


def check_sealed(data: bytes, terms: Roster, expected: Header) -> None:
    """Whether a sealed message is the expected one, signed by its sender; nothing is opened."""
    prefix, _, signature, body = _split(data, terms, expected)
    sender = terms.member(expected.sender)
    _verify_message(sender.ed25519, prefix, body, signature, expected, sender.name)


def is_signed_by(data: bytes, ed25519: str) -> bool:
    """Whether a key signed a message, whatever it belongs to."""
    length = int.from_bytes(data[:4], "big")
    prefix, rest = data[4 : 4 + length], data[4 + length :]
    try:
        verify(ed25519, "message", digest("message", prefix, rest[64:]), rest[:64], "a message")
    except SignatureError:
        return False
    return True


def open_message(data: bytes, terms: Roster, expected: Header) -> bytes:
    """The body of an open message, for somebody who is not a member (the relay)."""
    if expected.recipient != 0:
        raise InputError("expected", "must be an open message", f"one to the member at point {expected.recipient}")
    prefix, _, signature, body = _split(data, terms, expected)
    sender = terms.member(expected.sender)
    _verify_message(sender.ed25519, prefix, body, signature, expected, sender.name)
    return body


_FORMAT = "quorumark-message/v1"
# every message has a key of its own (a fresh ephemeral key, or 32 random bytes in its header): one nonce is right
_NONCE = bytes(12)


@dataclass(frozen=True)
class Header:
    """What a message belongs to. `recipient` 0 means everybody: such a message is signed, not encrypted."""

    consortium: str
    session: str
    step: str
    sender: int
    recipient: int = 0
    attempt: int = field(default=0)

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _private(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    return key.private_bytes(_RAW, _PRIVATE, serialization.NoEncryption())


def _message_key(shared: bytes, prefix: bytes) -> bytes:
    return derive_key(shared, "message", prefix)


def _verify_message(ed25519: str, prefix: bytes, body: bytes, signature: bytes, expected: Header, name: str) -> None:
    try:
        verify(ed25519, "message", digest("message", prefix, body), signature, name)
    except SignatureError:
        raise MessageError(
            f"the message of {name!r} for step {expected.step!r} is not what {name!r} signed: altered, cut or forged",
            code="message.altered",
        ) from None


def _split(
    data: bytes, terms: Roster, expected: Header, extra: str = "ephemeral"
) -> tuple[bytes, dict[str, Any], bytes, bytes]:
    """Prefix, header, signature and body; refused unless the header is the expected one."""
    name = terms.member(expected.sender).name
    refuse = f"the message of {name!r} for step {expected.step!r}"
    length = int.from_bytes(data[:4], "big")
    if not 0 < length <= 4096 or len(data) < 4 + length + 64:
        raise MessageError(f"{refuse} is truncated, or is no message", code="message.malformed")
    prefix, rest = data[4 : 4 + length], data[4 + length :]
    try:
        shown = parse(prefix, _FORMAT, "a message")
    except RecordError as error:
        raise MessageError(f"{refuse} cannot be read: {error}", code="message.malformed") from None
    allowed = expected.as_dict()
    if expected.recipient:
        allowed[extra] = shown.get(extra)
    for key, value in allowed.items():
        if shown.get(key) != value or type(shown.get(key)) is not type(value):
            received = repr(shown.get(key))[:80]
            raise MessageError(
                f"{refuse} belongs elsewhere: its {key} is {received}, not {value!r}", code="message.elsewhere"
            )
    if shown.keys() != allowed.keys():
        raise MessageError(f"{refuse} has a header with unknown fields", code="message.malformed")
    return prefix, shown, rest[:64], rest[64:]


def verify_manifest(manifest: Manifest) -> None:
    """Every member's signature must be there and hold; a SignatureError names who is missing or wrong."""
    missing = [m.name for m in manifest.terms.roster if m.point not in manifest.signatures]
    if missing:
        raise SignatureError(f"the manifest of {manifest.terms.name!r} lacks the signature of {', '.join(missing)}")
    strangers = manifest.signatures.keys() - {m.point for m in manifest.terms.roster}
    if strangers:
        raise SignatureError(
            f"the manifest of {manifest.terms.name!r} is signed for points that are nobody's: {strangers}"
        )
    signed = manifest.sign_bytes()  # the roster with its keys is in it
    known = signed, tuple(sorted(manifest.signatures.items()))
    if known not in _VERIFIED:
        for member in manifest.terms.roster:
            verify(member.ed25519, "manifest", signed, manifest.signatures[member.point], member.name)
        if len(_VERIFIED) >= _MOST_VERIFIED:
            _VERIFIED.clear()
        _VERIFIED.add(known)


_VERIFIED: set[tuple[bytes, tuple[tuple[int, str], ...]]] = set()
_MOST_VERIFIED = 64
"""Manifests whose signatures were all found right in this process: what was signed, and every signature."""


def verify_chain(chain: Sequence[Manifest]) -> None:
    """All manifests from the first to the current one: each signed by all its members, each a right successor."""
    if not chain or chain[0].predecessor is not None:
        raise RecordError("the chain of manifests does not reach the first one")
    for manifest in chain:
        verify_manifest(manifest)
    for before, manifest in itertools.pairwise(chain):
        check_follows(manifest, before)
