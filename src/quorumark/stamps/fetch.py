"""Asking an authority for a stamp over HTTP: the only connection that quorumark opens by itself, and only when told to.

What goes out is the request: a hash and a random number. The answer is checked like one from a file, so neither the
network nor the authority's web server needs to be trusted; plain http is as good as https.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from urllib.parse import urlsplit

from quorumark.errors import InputError, StampError
from quorumark.stamps.tokens import LARGEST

__all__ = ["fetch"]

_SECONDS = 30.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An authority's address is the one that was named."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:  # noqa: ARG002 - the base class names them
        return None


def fetch(url: str, request: bytes) -> bytes:
    """The authority's response to a request: a POST as RFC 3161, 3.4, describes it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise InputError("--url", "must be an http or https address without a password", repr(url[:200]))
    head = {"Content-Type": "application/timestamp-query", "Accept": "application/timestamp-reply"}
    asked = urllib.request.Request(url, data=request, headers=head, method="POST")  # noqa: S310 - http and https only
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(asked, timeout=_SECONDS) as answer:
            data: bytes = answer.read(LARGEST + 1)
            kind = answer.headers.get_content_type()
    except urllib.error.HTTPError as error:
        error.close()
        raise StampError(f"the authority at {url[:200]!r} answered with the HTTP status {error.code}") from None
    except (OSError, ValueError) as error:  # URLError, a timeout and a broken answer are such
        raise StampError(f"the authority at {url[:200]!r} cannot be reached ({type(error).__name__})") from None
    if kind != "application/timestamp-reply":
        raise StampError(f"the authority at {url[:200]!r} answered with {kind[:80]!r}, not with a time stamp")
    return data
