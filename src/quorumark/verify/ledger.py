"""A member's ledger: what it answered, what it heard of, which leaves of the shares are public; and its own policy
(docs/verification.md, "The guard").

    with ledger.exclusive():                                    # nobody else answers between the check and the record
        approved_by = check_query(query, x, manifest, ledger, policy, approved)
        ledger.record_answer(query, x, approved_by)             # on disk before the answer leaves
"""

from __future__ import annotations

import calendar
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import is_count, is_hex, is_text, is_time
from quorumark.consortium.home import ConsortiumFolder, read_file
from quorumark.consortium.records import Manifest
from quorumark.errors import InputError, KeystoreError, RecordError
from quorumark.files import locked, write_private
from quorumark.model.statistic import vector_digest
from quorumark.reasons import Reason
from quorumark.verify.evidence import Query, now
from quorumark.verify.vectors import Numbers, StoredVector

__all__ = ["Ledger"]

FORMAT = "quorumark-ledger/v1"
HEAD_FORMAT = "quorumark-ledger-head/v1"
_KINDS = {
    "answered": {"x", "suspect", "query", "files", "left_out", "equations", "approved_by"},
    "refused": {"query", "reason"},
    "outcome": {"x", "outcome", "certificate"},
    "seen": {"x", "outcome", "equations", "source"},
    "burnt": {"leaves", "audit"},
}
_COMMON = {"number", "previous", "time", "kind"}
# a ledger comes back from backups, so its entries may be anybody's: what each field may hold
_TYPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("previous", "x", "suspect", "query", "certificate", "audit"), lambda v: is_hex(v, 32)),
    "approved_by": lambda v: v in ("person", "rules"),
    "reason": lambda v: _is_refusal(v),
    "source": lambda v: v == "" or is_hex(v, 32),
    "number": is_count,
    "equations": lambda v: is_count(v, 1),
    "time": lambda v: is_time(v) and _moment(v) is not None,
    "files": lambda v: isinstance(v, list) and all(is_text(name) for name in v),
    "outcome": lambda v: v in ("passed", "failed", "open"),
    "leaves": lambda v: isinstance(v, list) and all(is_count(leaf) for leaf in v),
}
# anybody who reaches a member can be refused, and a certificate can be combined anew, as often as they like: that must
# not make a ledger that is too large to be read
_MOST_REFUSALS = 1000
_MOST_LINES = 100_000  # of which the last ones are answers and burnt leaves only


class Ledger:
    """An append-only file of JSON lines. Each entry names the hash of the one before it, the first one a hash of the
    consortium's first terms; the last hash is kept in a second file, so that a cut is noticed too.

    `entries` are the entries as dictionaries, `lines` their hashes (32 bytes in hex), `head` the last one, or that of
    the terms, `notes` sentences on
    what was repaired when the ledger was read: an append that a crash interrupted. What is appended is on disk when the
    method returns, and commands that run at the same time wait for each other.
    """

    def __init__(self, consortium: ConsortiumFolder, manifest: Manifest) -> None:
        self._consortium = consortium
        self._start = digest("ledger", bytes.fromhex(manifest.genesis.terms)).hex()
        self._depth = 0
        self.entries: tuple[Mapping[str, Any], ...] = ()
        self.lines: tuple[str, ...] = ()
        self.head = self._start
        self.notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, consortium: ConsortiumFolder, manifest: Manifest) -> Ledger:
        """The ledger of a member in a consortium, checked; an empty one if there is none yet."""
        ledger = cls(consortium, manifest)
        with ledger.exclusive():
            return ledger

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Only this command works with the ledger, and it sees what others have written before. May be nested."""
        if self._depth:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        with locked(self._consortium.path / ".ledger.lock", wait=True):
            try:
                self._depth = 1
                self._read()
                yield
            finally:
                self._depth = 0

    # --- reading ---

    def _wrong(self, line: int, what: str) -> RecordError:
        path = str(self._consortium.ledger_path)
        return RecordError(f"line {line} of {path!r} {what}; put the ledger and its head back from a backup")

    def _read(self) -> None:
        """Reads and checks everything, and repairs what a crash during an append leaves behind."""
        path = self._consortium.ledger_path
        content = read_file(path, "a ledger") if path.exists() else b""
        *lines, tail = content.split(b"\n")
        entries = [self._entry(number, line) for number, line in enumerate(lines, 1)]
        hashes = [self._start, *(digest("ledger entry", line).hex() for line in lines)]
        count, head = self._kept_head()
        if len(lines) < count and not (tail and len(lines) == count - 1):
            raise self._wrong(len(lines) + 1, f"is missing: the ledger had {count} lines")
        self._check_chain(hashes, entries, count, head)
        if tail:
            # a line without its end: never answered for, since the answer leaves after the head was written
            if count != len(lines):
                raise self._wrong(len(lines) + 1, "was cut")
            self._cut(len(content) - len(tail))
            self.notes += (f"an entry that a crash interrupted was dropped after line {len(lines)} of {str(path)!r}",)
        if count == len(lines) - 1:
            self._keep_head(len(lines), hashes[-1])
            self.notes += (f"the head of {str(path)!r} was brought up to line {len(lines)} after a crash",)
        self.entries, self.lines, self.head = tuple(entries), tuple(hashes[1:]), hashes[-1]

    def _check_chain(self, hashes: list[str], entries: list[dict[str, Any]], count: int, head: str) -> None:
        """hashes[i] is that of line i; line i+1 must name it, and the head that of line `count`."""
        named: dict[int, set[str]] = {i: {entry["previous"]} for i, entry in enumerate(entries)}
        named.setdefault(count, set()).add(head)
        broken = [i for i, names in sorted(named.items()) if i < len(hashes) and names != {hashes[i]}]
        if broken:
            line = broken[0]
            # a line whose own `previous` was changed breaks the link before it and, by its new hash, the one after it
            sound = line == 0 or line + 1 in broken or (line == count and head == hashes[line])
            changed = line + 1 if sound else line
            raise self._wrong(changed, "was changed, or does not follow the lines around it")
        if len(entries) > count + 1:
            raise self._wrong(count + 2, "was added after the ledger's head")

    def _entry(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            body = parse(line, FORMAT, "an entry of a ledger")
        except RecordError as error:
            raise self._wrong(number, f"cannot be read ({error})") from None
        kind = body.get("kind")
        known = isinstance(kind, str) and kind in _KINDS and body.keys() == _COMMON | _KINDS[kind]
        if not known or not all(_TYPES[n](v) for n, v in body.items() if n in _TYPES):
            raise self._wrong(number, "is not an entry that this release writes")
        if body["number"] != number:
            raise self._wrong(number, f"has the number {body['number']}")
        return body

    def _kept_head(self) -> tuple[int, str]:
        """How many lines there were when the last append was finished, and the hash of the last one."""
        path = self._consortium.ledger_head_path
        if not path.exists():
            return 0, self._start
        body = parse(read_file(path, "a ledger's head"), HEAD_FORMAT, "a ledger's head")
        count, head = body.get("number"), body.get("head")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1 or not is_hex(head, 32):
            raise RecordError(f"{str(path)!r} is damaged; put the ledger and its head back from a backup")
        return count, str(head)

    # --- writing ---

    def _keep_head(self, count: int, head: str) -> None:
        body = {"format": HEAD_FORMAT, "number": count, "head": head}
        write_private(self._consortium.ledger_head_path, canonical(body))

    def _cut(self, size: int) -> None:
        try:
            with self._consortium.ledger_path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
        except OSError as error:
            raise KeystoreError(f"cannot repair {str(self._consortium.ledger_path)!r}: {error.strerror}") from None

    def _append(self, kind: str, **values: Any) -> None:
        """The line first, then the head: whatever a crash leaves of it, `_read` can tell."""
        number = len(self.entries) + 1
        entry = {"number": number, "previous": self.head, "time": now(), "kind": kind} | values
        self._write(entry, canonical({"format": FORMAT, **entry}))

    def _write(self, entry: Mapping[str, Any], line: bytes) -> None:
        number = len(self.entries) + 1
        try:
            descriptor = os.open(self._consortium.ledger_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise KeystoreError(f"cannot write {str(self._consortium.ledger_path)!r}: {error.strerror}") from None
        head = digest("ledger entry", line).hex()
        self._keep_head(number, head)
        self.entries, self.lines, self.head = (*self.entries, entry), (*self.lines, head), head

    def follow(self, lines: bytes) -> None:
        """Adds lines that this member's signer wrote, to a copy of its ledger: each must continue what is here."""
        *whole, rest = lines.split(b"\n")
        with self.exclusive():
            for line in whole:
                entry = self._entry(len(self.entries) + 1, line)
                if rest or entry["previous"] != self.head:
                    raise self._wrong(len(self.entries) + 1, "does not continue the ledger of this member's signer")
                self._write(entry, line)

    def record_answer(self, query: Query, x: Numbers, approved_by: str) -> None:
        """Before an answer leaves. The same x again adds nothing, and puts a lost vector back.

        `approved_by`: "person" or "rules".
        """
        if approved_by not in ("person", "rules"):
            raise InputError("approved_by", "must be person or rules", repr(approved_by))
        if vector_digest(x) != query.x:
            raise InputError("x", "must be the vector that the query names")
        with self.exclusive():
            path = self.vector_path(query.x)
            if not path.exists():
                StoredVector.write(path, x)
            if query.equations > self.opened(query.x):
                files = [file.name for file in query.files]
                asked = {"x": query.x, "suspect": query.suspect, "query": query.digest()}
                about = {"left_out": len(query.burnt), "equations": query.equations, "approved_by": approved_by}
                self._append("answered", **asked, files=files, **about)

    def record_refusal(self, query: Query, reason: Reason) -> None:
        """A query that was refused, once for each reason; the first thousand of them."""
        with self.exclusive():
            entry = {"query": query.digest(), "reason": reason.as_dict()}
            if sum(e["kind"] == "refused" for e in self.entries) >= _MOST_REFUSALS or self._full:
                return
            if not any(e["kind"] == "refused" and entry.items() <= e.items() for e in self.entries):
                self._append("refused", **entry)

    def record_outcome(self, x: str, outcome: str, certificate_digest: str) -> None:
        """What became of a query, by a certificate that this member has checked."""
        _check_outcome(outcome, ("passed", "failed"))
        with self.exclusive():
            entry = {"x": _hex("x", x), "outcome": outcome, "certificate": _hex("certificate", certificate_digest)}
            told = [e for e in self.entries if e["kind"] == "outcome" and e["x"] == x]
            if self._full and told:
                return
            if not told or not entry.items() <= told[-1].items():
                self._append("outcome", **entry)

    def learn(self, known: Mapping[str, str], source: str = "", blocks: Mapping[str, int] | None = None) -> None:
        """What somebody else says of earlier queries; `source` is the digest of the certificate that says so, if any.
        `blocks`: how many equations those of them opened that were answered by layers.

        Hearsay counts if it makes things worse, and never if it makes them better: "failed" replaces open and another's
        "passed"; "passed" counts for an x that nobody had mentioned, and replaces nothing. Only a certificate
        (`record_outcome`) turns an open or failed query into a passed one, and hearsay does not touch it. A liar can
        use up the budget with queries that never were; `source` then tells whose certificate to look at.
        """
        if source:
            _hex("source", source)
        for x, outcome in known.items():
            _hex("x", x)
            _check_outcome(outcome, ("passed", "failed", "open"))
        for x, count in (blocks or {}).items():
            if x not in known or not is_count(count, 2):
                raise InputError("blocks", "must have numbers from 2 on, of queries that are known", repr(count))
        with self.exclusive():
            states, opened = self._states(), self.equations()
            for x, outcome in sorted(known.items()):
                state, certified = states.get(x, (None, False))
                worse = outcome == "failed" and state in ("open", "passed") and not certified
                count = max((blocks or {}).get(x, 1), opened.get(x, 1))
                if (state is None or worse or count > opened.get(x, 1)) and not self._full:
                    told = outcome if state is None or worse else state
                    self._append("seen", x=x, outcome=told, equations=count, source=source)

    def record_burnt(self, leaves: Sequence[int], audit_digest: str) -> None:
        """Leaves of the shares that an audit opened: their signs are public, and no query may rest on them again.

        `audit_digest` is that of its challenge. Only for audits in which this member opened its own share, or that are
        proved (`proof.explain`): with anything else in it this member would refuse every honest query for ever.
        """
        if not all(isinstance(leaf, int) and not isinstance(leaf, bool) and leaf >= 0 for leaf in leaves):
            raise InputError("leaves", "must be integers, at least 0", list(leaves))
        with self.exclusive():
            if _hex("audit", audit_digest) not in self.audits():
                self._append("burnt", leaves=sorted(set(leaves)), audit=audit_digest)

    @property
    def _full(self) -> bool:
        """Whether there is room for answers only: far more queries are known then than any budget allows."""
        return len(self.entries) >= _MOST_LINES

    # --- what it says ---

    def _states(self) -> dict[str, tuple[str, bool]]:
        """For each known x what became of it, and whether a certificate says so."""
        states: dict[str, tuple[str, bool]] = {}
        for entry in self.entries:
            if entry["kind"] == "outcome":
                states[entry["x"]] = entry["outcome"], True
            elif entry["kind"] == "seen":
                before, certified = states.get(entry["x"], (None, False))
                # hearsay of more equations leaves the outcome, and who says it, as they were
                states[entry["x"]] = entry["outcome"], certified and before == entry["outcome"]
            elif entry["kind"] == "answered" and states.get(entry["x"]) in (None, ("passed", False)):
                # "passed" by hearsay, spread before the query was asked, must not hide what becomes of it now
                states[entry["x"]] = "open", False
        return states

    def known(self) -> dict[str, str]:
        """All queries that this member answered or heard of, by x: passed, failed or open."""
        return {x: outcome for x, (outcome, _) in self._states().items()}

    def equations(self) -> dict[str, int]:
        """For each known x how many equations answers opened, or are said to have: 1, or one for each block."""
        found = dict.fromkeys(self.known(), 1)
        for entry in self.entries:
            if "equations" in entry:
                found[entry["x"]] = max(found[entry["x"]], entry["equations"])
        return found

    def opened(self, x: str) -> int:
        """How many equations about x this member's own answers open; 0 if it has not answered."""
        own = (entry for entry in self.entries if entry["kind"] == "answered" and entry["x"] == x)
        return max((entry["equations"] for entry in own), default=0)

    def answered(self) -> set[str]:
        """The x of the queries that this member answered."""
        return {entry["x"] for entry in self.entries if entry["kind"] == "answered"}

    def audits(self) -> dict[str, tuple[int, ...]]:
        """The leaves that audits opened, by the digest of their challenge."""
        return {entry["audit"]: tuple(entry["leaves"]) for entry in self.entries if entry["kind"] == "burnt"}

    def burnt(self) -> tuple[int, ...]:
        """The leaves that were opened in audits, in order."""
        return tuple(sorted({leaf for leaves in self.audits().values() for leaf in leaves}))

    def vector_path(self, x: str) -> Path:
        return self._consortium.queries_path / f"{x}.bin"

    def kept_queries(self) -> list[Mapping[str, Any]]:
        """The answered queries, one for each x, as the first answer's entry with the most equations that were opened.

        All their vectors must be there: x + e_j is a fresh query to a member that forgot x.
        """
        first: dict[str, Mapping[str, Any]] = {}
        for entry in self.entries:
            if entry["kind"] == "answered":
                first.setdefault(entry["x"], {**entry, "equations": self.opened(entry["x"])})
        answered = list(first.values())
        for path in (self.vector_path(entry["x"]) for entry in answered):
            if not path.exists():
                raise KeystoreError(
                    f"{str(path)!r}, the vector of an answered query, is missing: put it back from a backup, or answer "
                    "the query of that model again"
                )
        return answered

    def answers_since(self, moment: float) -> int:
        times = [_moment(entry["time"]) for entry in self.entries if entry["kind"] == "answered"]
        return sum(t is not None and t > moment for t in times)


def _is_refusal(body: object) -> bool:
    try:
        return Reason.from_dict(body).family == "guard"
    except RecordError:
        return False


def _moment(text: str) -> int | None:
    """Seconds since 1970; None for a day that no calendar has."""
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
    except (OverflowError, ValueError):
        return None


def _hex(name: str, value: str) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise InputError(name, "must be 32 bytes in hex", repr(value))
    return value


def _check_outcome(outcome: str, allowed: Sequence[str]) -> None:
    if outcome not in allowed:
        raise InputError("outcome", f"must be one of {', '.join(allowed)}", repr(outcome))
