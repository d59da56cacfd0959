"""Whether a key signed something: all that a server needs of members' identities, without the arithmetic of shares."""

from __future__ import annotations

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from quorumark.canonical import digest
from quorumark.consortium.curve import is_ed25519_key
from quorumark.errors import SignatureError

__all__ = ["verify"]


def verify(ed25519: str, purpose: str, data: bytes, signature: bytes | str, who: str) -> None:
    """Raises SignatureError, naming `who`, unless the signature is that key's over this data for this purpose."""
    try:
        raw = bytes.fromhex(signature) if isinstance(signature, str) else signature
        if not is_ed25519_key(ed25519):
            raise InvalidSignature  # the primitive accepts keys of small order, under which it fits many messages
        _check_signature(ed25519, digest("signature", purpose.encode(), data), bytes(raw))
    except (InvalidSignature, ValueError):
        raise SignatureError(f"the signature of {who} does not hold ({purpose})") from None


@lru_cache(maxsize=1 << 14)
def _check_signature(ed25519: str, signed: bytes, signature: bytes) -> None:
    """Whether a signature holds is a function of these three, so one that held in this process is not computed again:
    a manifest's come with every message of a round. What does not hold raises, and is not remembered."""
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(ed25519)).verify(signature, signed)
