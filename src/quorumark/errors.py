"""Every error that quorumark raises on purpose.

    QuorumarkError              caught once, by the command line, which exits with 2
    ├── InputError              an argument breaks a rule: names argument, rule and what was received
    │   └── EncodingError       a number that fixed point cannot hold: NaN, infinity, overflow
    ├── ShareError              shares that do not fit together
    │   └── DecodingError       more wrong shares than the honest ones can correct
    ├── LayoutError             tensors that do not fit the model's layout
    ├── RecordError             a card, terms or manifest that is damaged, unknown or contradicts itself
    ├── SignatureError          a signature that does not hold: names whose
    ├── RefusalError            what stops a round or a ceremony: has a code of `quorumark.refusals`
    │   ├── MessageError        a message that is refused: names the sender and the step
    │   ├── CeremonyError       a key ceremony that cannot go on: says why, and who, where that is known
    │   └── RoundError          a round of training that cannot go on, or that a member refuses to go on with
    │       └── AnsweredError   a member has answered from this state: says in which round, and over whom
    ├── EvidenceError           a query, a partial or a certificate that is refused: names whose, and why
    ├── StampError              a time stamp, or a request for one, that is refused: says why, with a code
    ├── InconclusiveError       a suspect that cannot be tested: says why
    ├── GuardError              a verification query that this member refuses: says why
    ├── KeystoreError           a sealed file that cannot be opened: wrong secret, flipped bit, truncated
    │   └── BusyError           another process works on the same folder
    ├── RoomError               what a room, or a member's agent in one, refuses: says why, with a code
    ├── UserCodeError           a function in the user's own file failed: shows the traceback from that file on
    └── MissingDependencyError  a part that needs an extra which is not installed

A text that people read: one sentence that says what is wrong, and the remedy where there is one. Refusals that a record
keeps carry a `reason` as well: a code with its values, which no better wording changes. What stops a round or a
ceremony has a code of `quorumark.refusals`, so that a program need not read the sentence.
No message ever holds a key, a share or a seed. (A number that is *refused* as a field element is shown:
it is not one.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

from quorumark.refusals import REFUSALS, Refusal


class QuorumarkError(Exception):
    """Base of everything that quorumark raises on purpose.

    Attributes:
        reason: for what a record keeps, or a test asks for: a `quorumark.reasons.Reason`, or None.
    """

    reason: Any = None

    def __init__(self, *texts: object, reason: Any = None) -> None:
        super().__init__(*texts)
        if reason is not None:
            self.reason = reason

    @property
    def code(self) -> str:
        """The reason's code; empty if there is none."""
        return str(self.reason.code) if self.reason is not None else ""


def code_of(error: Exception) -> str:
    """A code for a report or a reply, whatever was raised while a member's or a server's message was handled."""
    if isinstance(error, EncodingError):
        return "round.not-encodable"
    if isinstance(error, QuorumarkError):
        return error.code or "node.refused"
    return "message.malformed"


class RefusalError(QuorumarkError):
    """What stops a round or a ceremony: one of the errors below.

    Attributes:
        code: which kind of refusal it is, of the closed list `quorumark.refusals`.
    """

    def __init__(self, text: str, *, code: Refusal) -> None:
        if code not in REFUSALS:
            raise InputError("code", "must be one of quorumark.refusals", repr(code))
        super().__init__(text)
        self._code = code

    @property
    def code(self) -> Refusal:
        return self._code

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return partial(type(self), code=self.code), self.args  # so that it travels between processes


class InputError(QuorumarkError, ValueError):
    """An argument breaks a rule.

    Attributes:
        argument: the argument's name, as the caller knows it.
        rule: what must hold.
        received: what came instead, already as text; None where the rule says it all.
    """

    def __init__(self, argument: str, rule: str, received: object = None) -> None:
        self.argument = argument
        self.rule = rule
        self.received = None if received is None else str(received)
        super().__init__(f"{argument} {rule}" + ("" if received is None else f", but got {received}"))

    def __reduce__(self) -> tuple[type[InputError], tuple[object, ...]]:
        return type(self), (self.argument, self.rule, self.received)  # so that it travels between processes


class EncodingError(InputError):
    """A number that the fixed-point code cannot hold: NaN, infinity or overflow; `index` says which."""

    def __init__(self, argument: str, rule: str, received: object, index: int) -> None:
        self.index = index
        super().__init__(argument, rule, received)

    def __reduce__(self) -> tuple[type[InputError], tuple[object, ...]]:
        return type(self), (self.argument, self.rule, self.received, self.index)


class ShareError(QuorumarkError):
    """Shares that do not fit together: not on one polynomial, or of different sharings."""


class DecodingError(ShareError):
    """More wrong shares than the honest ones can correct."""


class LayoutError(QuorumarkError):
    """Tensors that do not fit the model's layout."""


class RecordError(QuorumarkError):
    """A card, terms or manifest that is damaged, of an unknown version, or contradicts itself."""


class SignatureError(QuorumarkError):
    """A signature that does not hold."""


class MessageError(RefusalError):
    """A message that is refused; the text names its sender and its step."""


class CeremonyError(RefusalError):
    """A key ceremony that cannot go on; the text says why, and who, where that is known."""


class RoundError(RefusalError):
    """A round that cannot go on, or a step of it that a member refuses; the text says why."""


class AnsweredError(RoundError):
    """A member has answered from this state, and does so in one round only.

    Attributes:
        round: the round in which it answered.
        members: the points of those whose sum it helped to open.
        halvings: how often the mark of that round was halved.
        draw: how often the cohort of that round was drawn anew.
    """

    def __init__(self, text: str, round_no: int, members: tuple[int, ...], halvings: int = 0, draw: int = 0) -> None:
        self.round, self.members, self.halvings, self.draw = round_no, members, halvings, draw
        super().__init__(text, code="round.answered-already")

    def __reduce__(self) -> tuple[type[AnsweredError], tuple[object, ...]]:
        return type(self), (str(self), self.round, self.members, self.halvings, self.draw)


class EvidenceError(QuorumarkError):
    """A query, a partial or a certificate that is refused; the text names whose, and why."""


class StampError(QuorumarkError):
    """A time stamp, or a request for one, that is refused; the text says why, and `reason` in a code."""


class InconclusiveError(QuorumarkError):
    """A suspect that cannot be tested; the text says why. It is neither ours nor not ours.

    Attributes:
        problems: what of it does not fit, as reasons.
    """

    problems: tuple[Any, ...] = ()

    def __init__(self, *texts: object, reason: Any = None, problems: tuple[Any, ...] = ()) -> None:
        super().__init__(*texts, reason=reason)
        if problems:
            self.problems = problems


class GuardError(QuorumarkError):
    """A verification query that this member refuses; the text says why."""


class KeystoreError(QuorumarkError):
    """A sealed file that cannot be opened or written."""


class BusyError(KeystoreError):
    """Another process works on the same folder: try again when it is done."""


class RoomError(QuorumarkError):
    """What a room, or a member's agent in one, refuses; the text says why.

    Attributes:
        code: which kind of refusal it is, of the closed list `quorumark.room.codes`.
    """

    def __init__(self, text: str, *, code: str) -> None:
        super().__init__(text)
        self._code = code

    @property
    def code(self) -> str:
        return self._code

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return partial(type(self), code=self.code), self.args  # so that it travels between processes


class UserCodeError(QuorumarkError):
    """A function in the user's own file raised an exception; the text has the line and the traceback."""


class MissingDependencyError(QuorumarkError, ImportError):
    """A part of quorumark needs an optional package that is not installed."""

    def __init__(self, package: str, purpose: str) -> None:
        self.package, self.purpose = package, purpose
        super().__init__(f"{purpose} needs the package {package!r}: pip install {package}")

    def __reduce__(self) -> tuple[type[MissingDependencyError], tuple[str, str]]:
        return type(self), (self.package, self.purpose)
