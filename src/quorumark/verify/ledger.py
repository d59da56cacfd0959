"""A member's guard over the key: what it answered, what it heard of, and what it therefore refuses
(docs/verification.md, "The guard").

An answered query opens Y = ⟨x, τ⟩, one linear equation in the secret key τ ∈ {±1}^d with a public x. Three things
follow from too many of them, or from crafted ones:

    a direction     n answers give a vector of cosine √(n/d) with τ: Σ Y_i·x_i/‖x_i‖², if the x_i are orthogonal
    a forgery       n models that failed combine into one "model" of z ≈ √n: 64 give 8
    an oracle       answers whose combination rests on few coordinates read those off: x₂ = x₁ + e_j gives τ_j

The first is bounded by a budget, the second by raising z* (`reconcile` counts, `null.raised_threshold` raises), the
third by two rules on every query: x, and what x adds to the span of the queries answered before (its residual r), must
rest on many coordinates, measured as ‖r‖₂⁴/‖r‖₄⁴ ≥ E. The residuals of m answers are orthogonal, so a combination v of
them with ‖v‖₂ = 1 has ‖v‖₄ ≤ √m·E^(−1/4): it rests on at least E/m² coordinates, whatever the queries were. Residuals
are computed in floating point, so an x is refused too if rounding could hide what it adds. For
residuals E is 1024: a copy of a tested model in another number format is another suspect, and must be answered; m such
copies that were crafted to differ on the same 1024 coordinates give a vector of cosine √(m/1024) with the key there.

Each member guards alone, and knows of other members' answers only what it is told. t−1 colluders need one more answer,
so they can let each of the other K−t+1 members spend a budget of its own, and put x to one and x + e_j to another: the
bounds hold for each member's answers, not for all together. A member who lists failed queries that never were can hold
up a proof, in a partial that it signed. And whoever sets a member's whole folder back to an earlier day makes it
forget; others hold the later heads of its ledger in its partials.

    with ledger.exclusive():                                    # nobody else answers between the check and the record
        approved_by = check_query(query, x, manifest, ledger, policy, approved)
        ledger.record_answer(query, x, approved_by)             # on disk before the answer leaves
"""

from __future__ import annotations

import calendar
import contextlib
import fcntl
import hashlib
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from quorumark.checks import is_count, is_hex, is_text, is_time
from quorumark.errors import GuardError, InputError, KeystoreError, RecordError
from quorumark.home import ConsortiumFolder, read_file
from quorumark.keystore import replacing, write_private
from quorumark.records import Manifest, canonical, digest, parse
from quorumark.verify.evidence import Partial, Query, now
from quorumark.verify.statistic import norms, vector_digest

__all__ = [
    "Ledger",
    "Policy",
    "budget",
    "check_query",
    "least_effective",
    "read_policy",
    "reconcile",
]

FORMAT = "quorumark-ledger/v1"
HEAD_FORMAT = "quorumark-ledger-head/v1"
_VECTOR = "quorumark-vector/v1"
_KINDS = {
    "answered": {"x", "suspect", "query", "files", "approved_by"},
    "refused": {"query", "reason"},
    "outcome": {"x", "outcome", "certificate"},
    "seen": {"x", "outcome", "source"},
    "burnt": {"leaves", "audit"},
}
_COMMON = {"format", "number", "previous", "time", "kind"}
# a ledger comes back from backups, so its entries may be anybody's: what each field may hold
_TYPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("previous", "x", "suspect", "query", "certificate", "audit"), lambda v: is_hex(v, 32)),
    **dict.fromkeys(("approved_by", "reason", "source"), lambda v: isinstance(v, str)),
    "number": is_count,
    "time": lambda v: is_time(v) and _moment(v) is not None,
    "files": lambda v: isinstance(v, list) and all(is_text(name) for name in v),
    "outcome": lambda v: v in ("passed", "failed", "open"),
    "leaves": lambda v: isinstance(v, list) and all(is_count(leaf) for leaf in v),
}
_ADDED = 1024  # coordinates that what a query adds must rest on
_DISTINCT = 1e-10  # what floating point can tell: far above its 2^-52, below 1024 places in 10^9 coordinates
_DAY = 24 * 60 * 60
# anybody who reaches a member can be refused, and a certificate can be combined anew, as often as they like: that must
# not make a ledger that is too large to be read
_MOST_REFUSALS = 1000
_MOST_LINES = 100_000  # of which the last ones are answers and burnt leaves only
_LONGEST_REASON = 300
_PIECE = 1 << 16  # bytes of a stored vector that are read at a time
_FLOATS = 1 << 22  # float64 numbers in memory while residuals are computed: 32 MB

Numbers = NDArray[np.signedinteger[Any]]


# --- the vector x ------------------------------------------------------------------------------------------


def _plain(x: Numbers) -> Numbers:
    """A flat vector of signed whole numbers, little-endian."""
    if not isinstance(x, np.ndarray) or x.ndim != 1 or x.dtype.kind != "i":
        raise InputError("x", "must be a flat vector of signed whole numbers", getattr(x, "dtype", type(x).__name__))
    return np.ascontiguousarray(x, x.dtype.newbyteorder("<"))


class _Stored:
    """A vector in a file: a line "quorumark-vector/v1 TYPE LENGTH", then its little-endian numbers under zlib.

    It is read piece by piece, and no file stays open meanwhile: there may be many of them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():  # a pipe would be waited for
            raise self._damaged()
        try:
            with path.open("rb") as file:
                line = file.readline(100)
                self._offset = file.tell()
        except OSError as error:
            raise KeystoreError(f"cannot read {str(path)!r}: {error.strerror}") from None
        found = re.fullmatch(rb"quorumark-vector/v1 (int8|int16|int32|int64) ([0-9]{1,18})\n", line)
        if not found:
            raise self._damaged()
        self._type = np.dtype(found[1].decode()).newbyteorder("<")
        self.size = int(found[2])
        self._left = self.size
        self._zlib = zlib.decompressobj()
        self._buffer = b""

    def _damaged(self) -> KeystoreError:
        remedy = "put it back from a backup, or answer the query of that model again after removing the file"
        return KeystoreError(f"{str(self._path)!r} is not a whole vector of an answered query: {remedy}")

    @staticmethod
    def write(path: Path, x: Numbers) -> None:
        plain = _plain(x)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        packer = zlib.compressobj(level=1)
        view = plain.data.cast("B")
        with replacing(path) as file:
            file.write(f"{_VECTOR} {plain.dtype.name} {plain.size}\n".encode())
            for start in range(0, len(view), 1 << 22):
                file.write(packer.compress(view[start : start + (1 << 22)]))
            file.write(packer.flush())

    def take(self, count: int) -> Numbers:
        """The next numbers; with the last ones the checksum must hold."""
        wanted = count * self._type.itemsize
        pieces, have = [self._buffer], len(self._buffer)
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while have < wanted or (count == self._left and not self._zlib.eof):
                    packed = self._zlib.unconsumed_tail or file.read(_PIECE)
                    piece = self._zlib.decompress(packed, 1 << 20)
                    if not piece and not packed:
                        raise self._damaged()
                    pieces.append(piece)
                    have += len(piece)
                    if count == self._left and have > wanted:  # it inflates to more than it says it holds
                        raise self._damaged()
                self._offset = file.tell()
        except OSError as error:
            raise KeystoreError(f"cannot read {str(self._path)!r}: {error.strerror}") from None
        except zlib.error:
            raise self._damaged() from None
        whole = b"".join(pieces)
        self._buffer, self._left = whole[wanted:], self._left - count
        if self._left == 0 and self._buffer:
            raise self._damaged()
        return np.frombuffer(whole[:wanted], self._type)


# --- the ledger --------------------------------------------------------------------------------------------


class Ledger:
    """An append-only file of JSON lines. Each entry names the hash of the one before it, the first one a hash of the
    consortium's first terms; the last hash is kept in a second file, so that a cut is noticed too.

    `entries` are the entries as dictionaries, `head` the hash of the last one (32 bytes in hex), `notes` sentences on
    what was repaired when the ledger was read: an append that a crash interrupted. What is appended is on disk when the
    method returns, and commands that run at the same time wait for each other.
    """

    def __init__(self, place: ConsortiumFolder, manifest: Manifest) -> None:
        self._place = place
        self._start = digest("ledger", bytes.fromhex(manifest.genesis.terms)).hex()
        self._depth = 0
        self.entries: tuple[Mapping[str, Any], ...] = ()
        self.head = self._start
        self.notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, place: ConsortiumFolder, manifest: Manifest) -> Ledger:
        """The ledger of a member in a consortium, checked; an empty one if there is none yet."""
        ledger = cls(place, manifest)
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
        try:
            lock = os.open(self._place.path / ".ledger.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise KeystoreError(f"cannot lock {str(self._place.ledger_path)!r}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._depth = 1
            self._read()
            yield
        finally:
            self._depth = 0
            os.close(lock)

    # --- reading ---

    def _wrong(self, line: int, what: str) -> RecordError:
        path = str(self._place.ledger_path)
        return RecordError(f"line {line} of {path!r} {what}; put the ledger and its head back from a backup")

    def _read(self) -> None:
        """Reads and checks everything, and repairs what a crash during an append leaves behind."""
        path = self._place.ledger_path
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
        self.entries, self.head = tuple(entries), hashes[-1]

    def _check_chain(self, hashes: list[str], entries: list[dict[str, Any]], count: int, head: str) -> None:
        """hashes[i] is that of line i; line i+1 must name it, and the head that of line `count`."""
        named: dict[int, set[str]] = {i: {entry["previous"]} for i, entry in enumerate(entries)}
        named.setdefault(count, set()).add(head)
        broken = [i for i, names in sorted(named.items()) if i < len(hashes) and names != {hashes[i]}]
        if broken:
            line = broken[0]
            # a line whose own `previous` was changed breaks the link before it and, by its new hash, the one behind it
            sound = line == 0 or line + 1 in broken or (line == count and head == hashes[line])
            changed = line + 1 if sound else line
            raise self._wrong(changed, "was changed, or does not follow the lines around it")
        if len(entries) > count + 1:
            raise self._wrong(count + 2, "was added behind the ledger's head")

    def _entry(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            body = parse(line, FORMAT, "an entry of a ledger")
            canonical_line = canonical(body)
        except RecordError as error:
            raise self._wrong(number, f"cannot be read ({error})") from None
        kind = body.get("kind")
        known = isinstance(kind, str) and kind in _KINDS and body.keys() == _COMMON | _KINDS[kind]
        if not known or canonical_line != line or not all(_TYPES[n](v) for n, v in body.items() if n in _TYPES):
            raise self._wrong(number, "is not an entry that this release writes")
        if body["number"] != number:
            raise self._wrong(number, f"has the number {body['number']}")
        return body

    def _kept_head(self) -> tuple[int, str]:
        """How many lines there were when the last append was finished, and the hash of the last one."""
        path = self._place.ledger_head_path
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
        write_private(self._place.ledger_head_path, canonical(body))

    def _cut(self, size: int) -> None:
        try:
            with self._place.ledger_path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
        except OSError as error:
            raise KeystoreError(f"cannot repair {str(self._place.ledger_path)!r}: {error.strerror}") from None

    def _append(self, kind: str, **values: Any) -> None:
        """The line first, then the head: whatever a crash leaves of it, `_read` can tell."""
        number = len(self.entries) + 1
        common = {"format": FORMAT, "number": number, "previous": self.head, "time": now(), "kind": kind}
        entry = common | values
        line = canonical(entry)
        try:
            descriptor = os.open(self._place.ledger_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise KeystoreError(f"cannot write {str(self._place.ledger_path)!r}: {error.strerror}") from None
        head = digest("ledger entry", line).hex()
        self._keep_head(number, head)
        self.entries, self.head = (*self.entries, entry), head

    def record_answer(self, query: Query, x: Numbers, approved_by: str) -> None:
        """Before an answer leaves. The same x again adds nothing, and puts a lost vector back.

        `approved_by`: "--approve" for a person, or "policy".
        """
        if vector_digest(x) != query.x:
            raise InputError("x", "must be the vector that the query names", "another one")
        with self.exclusive():
            path = self._vector_path(query.x)
            if not path.exists():
                _Stored.write(path, x)
            if query.x not in self.answered():
                files = [file.name for file in query.files]
                asked = {"x": query.x, "suspect": query.suspect, "query": query.digest()}
                self._append("answered", **asked, files=files, approved_by=approved_by)

    def record_refusal(self, query: Query, reason: str) -> None:
        """A query that was refused, once for each reason; the first thousand of them."""
        with self.exclusive():
            entry = {"query": query.digest(), "reason": reason[:_LONGEST_REASON]}
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

    def learn(self, known: Mapping[str, str], source: str = "") -> None:
        """What somebody else says of earlier queries; `source`, for people, says who.

        Hearsay counts if it makes things worse, and never if it makes them better: "failed" replaces open and another's
        "passed"; "passed" counts for an x that nobody had mentioned, and replaces nothing. Only a certificate
        (`record_outcome`) turns an open or failed query into a passed one, and hearsay does not touch it. A liar can
        use up the budget with queries that never were; `source` then tells whom to ask.
        """
        for x, outcome in known.items():
            _hex("x", x)
            _check_outcome(outcome, ("passed", "failed", "open"))
        with self.exclusive():
            states = self._states()
            for x, outcome in sorted(known.items()):
                state, certified = states.get(x, (None, False))
                worse = outcome == "failed" and state in ("open", "passed") and not certified
                if (state is None or worse) and not self._full:
                    self._append("seen", x=x, outcome=outcome, source=source)

    def record_burnt(self, leaves: Sequence[int], audit_digest: str) -> None:
        """Leaves of the shares that an audit opened: their signs are public, and no query may rest on them again."""
        if not all(isinstance(leaf, int) and not isinstance(leaf, bool) and leaf >= 0 for leaf in leaves):
            raise InputError("leaves", "must be whole numbers, at least 0", list(leaves))
        with self.exclusive():
            new = sorted(set(leaves) - set(self.burnt()))
            if new:
                self._append("burnt", leaves=new, audit=_hex("audit", audit_digest))

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
                states[entry["x"]] = entry["outcome"], False
            elif entry["kind"] == "answered" and states.get(entry["x"]) in (None, ("passed", False)):
                # "passed" by hearsay, spread before the query was asked, must not hide what becomes of it now
                states[entry["x"]] = "open", False
        return states

    def known(self) -> dict[str, str]:
        """All queries that this member answered or heard of, by x: passed, failed or open."""
        return {x: outcome for x, (outcome, _) in self._states().items()}

    def answered(self) -> set[str]:
        """The x of the queries that this member answered."""
        return {entry["x"] for entry in self.entries if entry["kind"] == "answered"}

    def burnt(self) -> tuple[int, ...]:
        """The leaves that were opened in audits, in order."""
        return tuple(sorted({leaf for e in self.entries if e["kind"] == "burnt" for leaf in e["leaves"]}))

    def _vector_path(self, x: str) -> Path:
        return self._place.queries_path / f"{x}.bin"

    def _kept_queries(self) -> list[Mapping[str, Any]]:
        """The answered queries. All their vectors must be there: x + e_j is a fresh query to whoever forgot x."""
        answered = [entry for entry in self.entries if entry["kind"] == "answered"]
        for path in (self._vector_path(entry["x"]) for entry in answered):
            if not path.exists():
                raise KeystoreError(
                    f"{str(path)!r}, the vector of an answered query, is missing: put it back from a backup, or answer "
                    "the query of that model again"
                )
        return answered

    def _answers_since(self, moment: float) -> int:
        times = [_moment(entry["time"]) for entry in self.entries if entry["kind"] == "answered"]
        return sum(t is not None and t > moment for t in times)


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


# --- the member's own policy -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """What a member answers, by its own decision; the file is HOME/policy.json.

    `approve`: "ask" (a person approves each query) or "always" (up to `max_queries_per_day` in 24 hours without a
    person). `statistics`: only these; None leaves it to the terms. `max_answers`: how many different x this member
    answers in its life, if fewer than the consortium's budget.
    """

    FORMAT: ClassVar[str] = "quorumark-policy/v1"

    approve: str = "ask"
    max_queries_per_day: int | None = None
    statistics: tuple[str, ...] | None = None
    max_answers: int | None = None

    def __post_init__(self) -> None:
        if self.approve not in ("ask", "always"):
            raise RecordError(f"a policy's approve must be ask or always, not {self.approve!r}")
        for name in ("max_queries_per_day", "max_answers"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise RecordError(f"a policy's {name} must be a whole number, at least 0")
        if self.approve == "always" and self.max_queries_per_day is None:
            raise RecordError("a policy that approves always must have max_queries_per_day")
        if self.statistics is not None and not all(isinstance(text, str) for text in self.statistics):
            raise RecordError("a policy's statistics must be a list of texts")


def read_policy(path: str | os.PathLike[str]) -> Policy:
    """A member's policy; without a file, a person is asked."""
    if not Path(path).exists():
        return Policy()
    body = parse(read_file(Path(path), "a policy"), Policy.FORMAT, "a policy")
    names = ("approve", "max_queries_per_day", "statistics", "max_answers")
    unknown = [name for name in body if name not in ("format", *names) and not name.startswith("x-")]
    if unknown:
        raise RecordError(f"this is not a policy that can be used: it has the unknown critical field {unknown[0]!r}")
    if "approve" not in body:
        raise RecordError("this is not a policy that can be used: it lacks 'approve'")
    values = {name: body[name] for name in names if name in body}
    if "statistics" in values:
        if not isinstance(values["statistics"], list):
            raise RecordError("a policy's statistics must be a list of texts")
        values["statistics"] = tuple(values["statistics"])
    return Policy(**values)


# --- the guard ---------------------------------------------------------------------------------------------


def _agreed(policy: Mapping[str, str] | None, name: str, default: int) -> int:
    text = (policy or {}).get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InputError(f"policy {name!r}", "must be a whole number", repr(text))
    return int(text)


def budget(coordinates: int, policy: Mapping[str, str] | None = None) -> int:
    """How many different x are answered in a consortium's life: max(16, ⌊d/10⁴⌋), or `budget` in the terms' policy.

    n answers give a vector of cosine √(n/d) with the key: 1 % at this bound, from d = 160,000 on.
    """
    return _agreed(policy, "budget", max(16, coordinates // 10_000))


def least_effective(coordinates: int, policy: Mapping[str, str] | None = None) -> int:
    """On how many coordinates a query must rest, at least: max(1024, ⌊d/32⌋), or `effective` in the terms' policy;
    never more than d.

    Weights that spread like a normal distribution rest on d/3 coordinates, so models of d < 3,072 need an agreed
    `effective` to be verified at all.
    """
    return min(coordinates, _agreed(policy, "effective", max(1024, coordinates // 32)))


def _require(good: bool, text: str) -> None:
    if not good:
        raise GuardError(text)


def check_query(query: Query, x: Numbers, manifest: Manifest, ledger: Ledger, policy: Policy, approved: bool) -> str:
    """Whether this member answers a query with the vector x, which it has computed from the suspect itself.

    A GuardError says why not. Otherwise it returns who approved: "--approve" (a person) or "policy".
    """
    with ledger.exclusive():
        return _check_query(query, x, manifest, ledger, policy, approved)


def _check_query(query: Query, x: Numbers, manifest: Manifest, ledger: Ledger, policy: Policy, approved: bool) -> str:
    terms, d = manifest.terms, manifest.terms.coordinates
    again = query.x in ledger.answered()  # the same answer once more tells nobody anything

    # 1. It is about this consortium as it is now, and x is the vector that it names.
    _require(
        query.manifest == manifest.digest().hex() and query.epoch == manifest.epoch,
        "the query is for another manifest or epoch than the one in force here; run consortium update, and ask again "
        "under the newest manifest",
    )
    _require(
        query.coordinates == d == x.size and vector_digest(x) == query.x,
        "the query does not name the vector x that this member computed from the suspect; compare the suspect's files",
    )

    # 2. The statistic is the agreed one: another could be made to show other combinations of the key.
    _require(
        query.statistic == terms.statistic,
        f"the query uses the statistic {query.statistic!r}, but {terms.statistic!r} is agreed; ask again with that one",
    )
    _require(
        policy.statistics is None or query.statistic in policy.statistics,
        f"this member's policy does not list the statistic {query.statistic!r}; its statistics can be changed there",
    )

    # 3. Leaves opened in audits are left out: their signs are public, so weights there can be made to fit.
    forgotten = sorted(set(ledger.burnt()) - set(query.burnt))
    _require(
        not forgotten,
        f"the query does not leave out the leaf {forgotten[0] if forgotten else ''}, which an audit opened; ask again "
        f"with all burnt leaves: {', '.join(map(str, ledger.burnt()))}",
    )
    for leaf in query.burnt:
        _require(
            not x[leaf * terms.leaf : (leaf + 1) * terms.leaf].any(),
            f"the vector x is not zero on the leaf {leaf}, which an audit opened; ask again without it",
        )

    # 4. The budget, for the consortium's life: n answers give a vector of cosine √(n/d) with the key.
    if not again:
        known, most = ledger.known().keys() | {query.x}, budget(d, terms.policy)
        _require(
            len(known) <= most,
            f"{most} different queries are the budget of this consortium's life, and all are used; the members can "
            "amend the terms with another policy budget=N, which tells more of the key",
        )
        answers = len(ledger.answered()) + 1
        _require(
            policy.max_answers is None or answers <= policy.max_answers,
            f"this member's policy allows {policy.max_answers} answers, and all are given; raise max_answers there",
        )

    # 5. x rests on many coordinates: ‖x‖₂⁴/‖x‖₄⁴, from x itself.
    least = least_effective(d, terms.policy)
    norm1, norm2, norm4 = norms(x)
    _require(
        (norm1, norm2, norm4) == (query.norm1, query.norm2, query.norm4),
        "the query's norms are not those of its vector x; compute the query again from the suspect",
    )
    _require(
        norm4 > 0 and norm2 * norm2 >= least * norm4,
        f"the query rests on {norm2 * norm2 // norm4 if norm4 else 0} coordinates, fewer than {least}, and would read "
        "off signs of the key; ask about a model whose weights differ from the anchor in more places",
    )

    # 6. So does what x adds to the answers that were given. Signs in burnt leaves are public, so whatever an earlier x
    # had there can be subtracted, and must not make up the number: once by what is known here to be burnt, once by
    # what the query says.
    for burnt in () if again else dict.fromkeys((ledger.burnt(), query.burnt)):
        _check_residual(x, ledger, least, [slice(i * terms.leaf, (i + 1) * terms.leaf) for i in burnt])

    # 7. A person approved it, or the member's policy does.
    if approved:
        return "--approve"
    _require(
        policy.approve == "always",
        "nobody has approved this query here; look at the suspect and its purpose, then answer with --approve",
    )
    today = ledger._answers_since(calendar.timegm(time.gmtime()) - _DAY)
    _require(
        again or today < (policy.max_queries_per_day or 0),
        f"this member's policy approves {policy.max_queries_per_day} queries in 24 hours, and {today} were answered; "
        "wait, or answer with --approve",
    )
    return "policy"


def _check_residual(x: Numbers, ledger: Ledger, least: int, public: Sequence[slice]) -> None:
    past = ledger._kept_queries()
    if not past:
        return
    least = min(least, _ADDED)
    found = _residual(x, [ledger._vector_path(entry["x"]) for entry in past], public)
    if found.known:
        return  # an answered x but for leaves that were burnt since: its answer follows from the earlier one
    nearest = int(np.argmax(np.abs(found.cosines)))
    entry, cosine = past[nearest], abs(float(found.cosines[nearest]))
    earlier = f"the model of query {entry['query'][:16]} that was answered on {entry['time'][:10]}"
    _require(
        found.effective >= least,
        f"this query adds {found.effective} coordinates to those answered before, fewer than {least}, and would read "
        f"off signs of the key; the closest is {earlier} (cosine {cosine:.3f}), whose result stands",
    )
    _require(
        found.distinct >= _DISTINCT,
        "this query is too close to a combination of those answered before to tell what it adds, and could be made to "
        f"read off signs of the key; the closest is {earlier} (cosine {cosine:.3f}), whose result stands",
    )


@dataclass(frozen=True)
class _Residual:
    """r = x − its projection onto the span of stored vectors: ‖r‖₂², ⌊‖r‖₂⁴/‖r‖₄⁴⌋; x's cosines with the stored ones,
    and whether it is one of them; `distinct`: the smallest ‖Σ b_i·x_i/‖x_i‖‖² over them and x, for ‖b‖ = 1."""

    squared: float
    effective: int
    cosines: NDArray[np.float64]
    known: bool
    distinct: float


def _residual(x: Numbers, paths: Sequence[Path], public: Sequence[slice]) -> _Residual:
    """What x adds to stored vectors, outside of coordinates that are public.

    r = x − Σ a_i·x_i with G·a = c, where G_ij = ⟨x_i, x_j⟩ and c_i = ⟨x_i, x⟩ (scaled to vectors of length 1). Files
    are read in step, piece by piece; the projection is repeated on what is left until r is orthogonal to rounding. m
    stored vectors cost about m²·d multiplications.

    r can be far smaller than rounding, and still be one coordinate that whole numbers read exactly: x_1 = 32·c_1 − c_2,
    x_2 = 32·c_2 − c_3, … So `distinct`, the smallest eigenvalue of G, says whether rounding can hide anything.
    """
    count = len(paths)
    gram, names = np.zeros((count + 1, count + 1)), [hashlib.blake2b() for _ in range(count + 1)]
    for rows in _in_step(x, paths, public):
        gram += rows @ rows.T
        for name, row in zip(names, rows, strict=True):
            name.update(row)
    lengths = np.sqrt(gram.diagonal())
    first = {name.digest(): i for i, name in reversed(list(enumerate(names)))}  # equal ones but for public coordinates
    told = [i for i in sorted(first.values()) if lengths[i] > 0]
    lengths[lengths == 0] = 1  # a vector that was on public coordinates alone
    unit = gram / np.outer(lengths, lengths)
    distinct = float(np.linalg.eigvalsh(unit[np.ix_(told, told)])[0])
    weights, target = np.zeros(count), gram[:count, count]
    for _ in range(4):
        weights += np.linalg.lstsq(unit[:count, :count], target / lengths[:count], rcond=1e-12)[0] / lengths[:count]
        two = four = 0.0
        target = np.zeros(count)
        for rows in _in_step(x, paths, public):
            rest = rows[count] - weights @ rows[:count]
            square = rest * rest
            two, four = two + float(square.sum()), four + float(square @ square)
            target += rows[:count] @ rest
        if np.abs(target / lengths[:count]).max() <= 1e-9 * lengths[count]:
            break
    effective = math.floor(two * two / four) if four > 0 else 0
    return _Residual(two, effective, unit[:count, count], first[names[count].digest()] < count, distinct)


def _in_step(x: Numbers, paths: Sequence[Path], public: Sequence[slice]) -> Iterator[NDArray[np.float64]]:
    """Pieces of the stored vectors, and of x as the last row, as a matrix in a bounded memory; 0 where it is public."""
    stored = [_Stored(path) for path in paths]
    wrong = [path for path, vector in zip(paths, stored, strict=True) if vector.size != x.size]
    if wrong:
        raise KeystoreError(f"{str(wrong[0])!r} is not a vector of this consortium: it has another length")
    width = max(1024, _FLOATS // (len(paths) + 1))
    for start in range(0, x.size, width):
        part = x[start : start + width]
        rows = np.empty((len(paths) + 1, part.size))
        for row, vector in zip(rows, stored, strict=False):
            row[:] = vector.take(part.size)
        rows[-1] = part
        for span in public:
            rows[:, max(span.start - start, 0) : max(span.stop - start, 0)] = 0
        yield rows


# --- what the members know together ------------------------------------------------------------------------


def reconcile(partials: Sequence[Partial]) -> tuple[dict[str, str], int]:
    """All earlier queries that the partials of one query know of, and how many of them count as failed.

    For each x the worst that any partial says: an x counts as passed only if every partial that knows of it says so;
    else it is failed if anybody says failed, or open. A "passed" that one member claims alone is believed, since
    refusing it would gain nothing: that member could as well have left the x out. What honest members of this
    coalition answered themselves is in their own histories as failed or open until they have seen its certificate, and
    no claim of others overrides that. Open ones count as failed. The query's own x is left out.
    """
    if not partials:
        raise InputError("partials", "must be there", "none")
    if len({partial.x for partial in partials}) != 1:
        raise InputError("partials", "must answer one query", "answers to several")
    known: dict[str, str] = {}
    for partial in partials:
        for x, outcome in partial.history.items():
            if x != partial.x:
                known[x] = max(known.get(x, "passed"), outcome, key=("passed", "open", "failed").index)
    known = dict(sorted(known.items()))
    return known, sum(outcome != "passed" for outcome in known.values())
