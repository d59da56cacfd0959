"""Where a member is in a run, as its machine notes it (HOME/consortia/ID/rounds/notes.json)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from quorumark.canonical import canonical, parse
from quorumark.errors import RecordError

__all__ = ["Notes"]

_DAMAGED = (
    "a member's notes of rounds are damaged: remove rounds/notes.json in the consortium's folder, and the member takes "
    "part again as one that missed rounds"
)


@dataclass(frozen=True)
class Notes:
    """Where a member is. `mark` is the state's own record, `buffers` a digest of the model's integers and booleans,
    `verified` whether this member has checked itself that its model is what was summed, `joined` which message of the
    server a result belongs to, `turn` what the server said of that round, `ready` the round that it is ready for,
    `settings` a digest of what the app was told last, `survival` what this member told last of the mark that is left,
    with its error, `place` which of the two folders has the state's files, and `checked` the link into this state whose
    sum this member has checked itself, if it has."""

    FORMAT = "quorumark-round-notes/v3"

    mark: str = ""
    buffers: str = ""
    verified: bool = False
    joined: str = ""
    turn: str = ""
    ready: int = 0
    settings: str = ""
    survival: str = ""
    place: int = 0
    checked: str = ""

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Notes:
        body = parse(data, cls.FORMAT, "a member's notes of rounds")
        try:
            notes = cls(**{name: body[name] for name in cls.__dataclass_fields__ if name != "FORMAT"})
        except KeyError:
            raise RecordError(_DAMAGED) from None
        if not all(type(getattr(notes, name)) is type(value) for name, value in asdict(cls()).items()):
            raise RecordError(_DAMAGED)
        if notes.place not in (0, 1):
            raise RecordError(_DAMAGED)
        return notes
