"""Codes of what a room or an agent refuses, and the HTTP status of each (docs/room.md, "Codes")."""

from __future__ import annotations

__all__ = ["REFUSED", "STATUS"]

STATUS = {
    # the room
    "room.malformed": 400,
    "room.not-signed": 401,
    "room.replayed": 401,
    "room.clock": 401,
    "room.not-a-member": 403,
    "room.not-allowed": 403,
    "room.no-invitation": 403,
    "room.name-taken": 409,
    "room.exists": 409,
    "room.wrong-part": 409,
    "room.wrong-digest": 409,
    "room.gone": 410,
    "room.too-large": 413,
    "room.quota": 413,
    "room.too-many": 429,
    "room.not-found": 404,
    # the agent
    "room.unreachable": 503,
    "room.answer": 502,
    "room.set-back": 409,
    "room.not-fetched": 409,
    "room.not-proposed": 409,
    "room.other-terms": 409,
    "room.other-query": 409,
    "room.ledger-head": 409,
    "room.other-call": 409,
    "room.other-audit": 409,
    "room.not-shown": 409,
    "room.elsewhere": 403,
    "room.signer": 409,
}
"""Code → HTTP status. What only agents refuse never travels; it has a status all the same."""

REFUSED = {
    "room.malformed": "the request is none that it knows: use the same release as the room",
    "room.not-signed": "it does not take the request for signed: use the room's own address",
    "room.replayed": "the request came before",
    "room.clock": "the clocks differ by more than two minutes: set this machine's clock",
    "room.not-a-member": "you are not a member there: ask the founder for an invitation",
    "room.not-allowed": "that is for the founder, the author, or holders of another link only",
    "room.no-invitation": "the invitation is unknown, used or too old: ask the founder for another",
    "room.name-taken": "somebody, or some link, has this name already: choose another",
    "room.exists": "this name is given to another file already",
    "room.wrong-part": "the part does not follow what is there: upload it again",
    "room.wrong-digest": "the file is not what its digest says: upload it again",
    "room.gone": "there is no such file, or it was deleted",
    "room.too-large": "the request or the file is above the host's limit",
    "room.quota": "the host's limit is reached: delete a suspect, or ask the host",
    "room.too-many": "there are too many requests: wait a little",
    "room.not-found": "there is no such thing there",
}
"""What an agent says of a room's refusal: its own sentence, since a room's words may be anything."""
