"""A member's ledger and guard: what it remembers, what damage it notices, what it refuses, and why: the attacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark.canonical import canonical
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.policy import Policy
from quorumark.errors import EvidenceError, GuardError, InputError, KeystoreError, QuorumarkError, RecordError
from quorumark.model.statistic import vector_digest
from quorumark.reasons import Reason
from quorumark.verify import ledger as ledger_module
from quorumark.verify.combine import reconcile
from quorumark.verify.evidence import Partial, now
from quorumark.verify.guard import budget, check_query, least_effective
from quorumark.verify.null import raised_threshold, z_text
from quorumark.verify.rules import AnswerRules, read_rules
from tests.kit.ceremony import make_terms
from tests.kit.ledgers import LEAF, PEOPLE, Member, Vector, rounded
from tests.kit.refusals import refused


@pytest.fixture
def member(tmp_path: Path) -> Member:
    return Member(tmp_path / "home")


def vector(seed: int, size: int = 20_000, spread: float = 30) -> Vector:
    """What an unmarked model gives: numbers that fall like a bell, rounded to int8."""
    return rounded(np.random.default_rng(seed).standard_normal(size) * spread)


# --- the file ----------------------------------------------------------------------------------------------


def test_entries_are_chained_and_come_back(member: Member) -> None:
    ledger = member.ledger()
    empty = ledger.head
    x, other, third = (vector(seed) for seed in range(3))
    ledger.record_answer(member.query(x), x, "person")
    ledger.record_refusal(member.query(other), Reason.of("guard.budget", budget=16))
    ledger.record_outcome(vector_digest(x), "failed", "aa" * 32)
    ledger.learn({vector_digest(third): "passed"}, "cc" * 32)
    ledger.record_burnt([7, 3, 7], "bb" * 32)
    again = member.ledger()
    assert [entry["kind"] for entry in again.entries] == ["answered", "refused", "outcome", "seen", "burnt"]
    assert again.entries == ledger.entries
    assert again.head == ledger.head != empty
    assert len(bytes.fromhex(again.head)) == 32
    assert again.known() == {vector_digest(x): "failed", vector_digest(third): "passed"}
    assert again.answered() == {vector_digest(x)}
    assert again.burnt() == (3, 7)
    assert again.notes == ()
    assert again.entries[0]["files"] == ["suspect.safetensors"]
    for path in (member.place.ledger_path, member.place.ledger_head_path, *member.place.queries_path.iterdir()):
        assert path.stat().st_mode & 0o777 == 0o600
    for line in member.place.ledger_path.read_bytes().splitlines():
        assert canonical(json.loads(line)) == line


def test_the_same_again_adds_nothing(member: Member) -> None:
    x = vector(1)
    for _ in range(2):  # as after a crash between the record and the answer
        ledger = member.ledger()
        ledger.record_answer(member.query(x), x, "person")
        ledger.record_refusal(member.query(vector(2), created="2026-01-31T12:00:00Z"), Reason.of("guard.norms"))
        ledger.record_outcome(vector_digest(x), "passed", "aa" * 32)
        ledger.learn({vector_digest(vector(3)): "failed"})
        ledger.record_burnt([1], "bb" * 32)
    assert len(member.ledger().entries) == 5
    (kept,) = member.place.queries_path.iterdir()
    kept.unlink()
    member.ledger().record_answer(member.query(x), x, "person")  # puts a lost vector back
    assert kept.exists()
    assert len(member.ledger().entries) == 5


def _filled(member: Member, count: int = 5) -> list[bytes]:
    ledger = member.ledger()
    for seed in range(count):
        ledger.learn({vector_digest(vector(seed, 10)): "failed"}, "cc" * 32)
    return member.place.ledger_path.read_bytes().splitlines(keepends=True)


def test_every_flipped_byte_is_noticed_and_its_line_named(member: Member) -> None:
    lines = _filled(member, 3)
    content = b"".join(lines)
    ends = np.cumsum([len(line) for line in lines])
    for at in range(len(content)):
        spoiled = bytearray(content)
        spoiled[at] ^= 1
        member.place.ledger_path.write_bytes(bytes(spoiled))
        line = int(np.searchsorted(ends, at, side="right")) + 1
        with pytest.raises(RecordError, match=f"line {line} of .*ledger.jsonl"):
            member.ledger()
        assert member.place.ledger_path.read_bytes() == bytes(spoiled), "damage is not repaired away"
    member.place.ledger_path.write_bytes(content)
    assert len(member.ledger().entries) == 3


def test_missing_swapped_added_and_foreign_lines_are_noticed(member: Member, tmp_path: Path) -> None:
    lines = _filled(member)
    other = Member(tmp_path / "other", name="others")
    foreign = _filled(other)
    damage = {
        "a middle line is missing": ([*lines[:2], *lines[3:]], 3),
        "the first line is missing": (lines[1:], 1),
        "the tail is cut": (lines[:4], 5),
        "more of the tail is cut": (lines[:2], 3),
        "all is gone": ([], 1),
        "cut within the last line": ([*lines[:4], lines[4][:50]], 5),
        "cut within the line before": ([*lines[:3], lines[3][:50]], 4),
        "two lines are swapped": ([lines[0], lines[2], lines[1], *lines[3:]], 2),
        "a line comes twice": ([*lines[:2], lines[1], *lines[2:]], 3),
        "a line is empty": ([*lines[:2], b"\n", *lines[2:]], 3),
        "another consortium's": (foreign, 1),
        "another consortium's tail": ([*lines[:3], *foreign[3:]], 3),
    }
    for what, (spoiled, line) in damage.items():
        member.place.ledger_path.write_bytes(b"".join(spoiled))
        with pytest.raises(RecordError) as caught:
            member.ledger()
        assert f"line {line} of" in str(caught.value), (what, str(caught.value))
        assert "backup" in str(caught.value)
    member.place.ledger_path.unlink()
    with pytest.raises(RecordError, match=r"line 1 of .* is missing: the ledger had 5 lines"):
        member.ledger()


def test_an_old_copy_with_the_newer_head_is_noticed_and_so_is_an_old_head(member: Member) -> None:
    _filled(member, 3)
    old, old_head = member.place.ledger_path.read_bytes(), member.place.ledger_head_path.read_bytes()
    _filled(member, 5)
    new, new_head = member.place.ledger_path.read_bytes(), member.place.ledger_head_path.read_bytes()
    member.place.ledger_path.write_bytes(old)
    with pytest.raises(RecordError, match=r"line 4 of .* is missing: the ledger had 5 lines"):
        member.ledger()
    member.place.ledger_path.write_bytes(new)
    member.place.ledger_head_path.write_bytes(old_head)
    with pytest.raises(RecordError, match=r"line 5 of .* was added after the ledger's head"):
        member.ledger()
    member.place.ledger_head_path.unlink()
    with pytest.raises(RecordError, match=r"line 2 of .* was added"):
        member.ledger()
    for head in (b"", b"{}", new_head.replace(b'"number":5', b'"number":0'), new_head.replace(b"5", b'"5"')):
        member.place.ledger_head_path.write_bytes(head)
        with pytest.raises(RecordError):
            member.ledger()


def test_every_state_that_a_crash_during_an_append_leaves_is_recovered(member: Member) -> None:
    lines = _filled(member, 2)
    before, head = b"".join(lines), member.place.ledger_head_path.read_bytes()
    member.ledger().record_refusal(member.query(vector(9)), Reason.of("guard.statistic-policy", statistic="\u00fcber"))
    after = member.place.ledger_path.read_bytes()
    new_head = member.place.ledger_head_path.read_bytes()
    for size in range(len(before) + 1, len(after)):
        member.place.ledger_path.write_bytes(after[:size])
        member.place.ledger_head_path.write_bytes(head)
        ledger = member.ledger()
        assert (len(ledger.entries), len(ledger.notes)) == (2, 1)
        assert "an entry that a crash interrupted was dropped" in ledger.notes[0]
        assert member.place.ledger_path.read_bytes() == before
        assert member.ledger().notes == (), "once repaired, it is whole"
    # the line is whole and the head is not yet there: the entry counts
    member.place.ledger_path.write_bytes(after)
    ledger = member.ledger()
    assert len(ledger.entries) == 3
    assert "was brought up to line 3" in ledger.notes[0]
    assert member.place.ledger_head_path.read_bytes() == new_head
    # the very first entry, with no head at all
    for content, entries in ((lines[0], 1), (lines[0][:-1], 0), (lines[0][:20], 0)):
        member.place.ledger_path.write_bytes(content)
        member.place.ledger_head_path.unlink()
        assert len(member.ledger().entries) == entries
        member.ledger().learn({"00" * 32: "open"})
        assert len(member.ledger().entries) == entries + 1


KILLED = """
import contextlib, os, signal, sys
from pathlib import Path
import numpy as np
from quorumark import files
from quorumark.consortium import keystore
from quorumark.consortium.home import ConsortiumFolder
from quorumark.consortium.records import Manifest
from quorumark.verify import vectors
from quorumark.verify.evidence import Query
from quorumark.verify.ledger import Ledger

folder, manifest, query, kill_at, late = sys.argv[1:6]
real, writes = files.replacing, []

@contextlib.contextmanager
def dying(path, *mode):
    hit = len(writes) == int(kill_at)
    with real(path, *mode) as file:
        if hit and late == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        yield file
    if hit:
        os.kill(os.getpid(), signal.SIGKILL)
    writes.append(path)

files.replacing = vectors.replacing = dying
x = np.load(Path(folder) / "x.npy")
ledger = Ledger.open(ConsortiumFolder(Path(folder)), Manifest.from_bytes(Path(manifest).read_bytes()))
ledger.record_answer(Query.from_bytes(Path(query).read_bytes()), x, "person")
print("answered", ledger.head)
"""


def test_a_member_killed_at_any_write_answers_again_and_counts_once(member: Member, tmp_path: Path) -> None:
    """The vector's file, then the line, then the head: killed before and after each file's write."""
    x = vector(5)
    np.save(member.place.path / "x.npy", x)
    (tmp_path / "manifest.json").write_bytes(member.manifest.to_bytes())
    (tmp_path / "query.json").write_bytes(member.query(x).to_bytes())
    found = []
    for write, late in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for path in (member.place.ledger_path, member.place.ledger_head_path, *member.place.queries_path.glob("*")):
            path.unlink(missing_ok=True)
        command = [sys.executable, "-c", KILLED, str(member.place.path), str(tmp_path / "manifest.json")]
        command += [str(tmp_path / "query.json"), str(write), str(late)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert "answered" not in done.stdout
        found.append((len(member.ledger().entries), len(list(member.place.queries_path.glob("*.bin")))))
        member.answer(x)
        assert len(member.ledger().entries) == 1
        assert member.ledger().known() == {vector_digest(x): "open"}
    assert found == [(0, 0), (0, 1), (1, 1), (1, 1)]


WRITER = """
import sys
from pathlib import Path
from quorumark.consortium.home import ConsortiumFolder
from quorumark.consortium.records import Manifest
from quorumark.verify.ledger import Ledger

manifest = Manifest.from_bytes(Path(sys.argv[2]).read_bytes())
ledger = Ledger.open(ConsortiumFolder(Path(sys.argv[1])), manifest)
print("ready", flush=True)
sys.stdin.readline()
for i in range(40):
    with ledger.exclusive():
        if len(ledger.known()) < 60:  # a limit that both keep to
            ledger.learn({f"{sys.argv[3]}{i:062x}": "failed"})
"""


def test_an_entry_is_on_disk_before_its_head_and_both_before_the_answer(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves cannot be tried here, so the calls to the operating system are watched."""
    synced: list[tuple[int, int]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        about = os.fstat(descriptor)
        synced.append((about.st_ino, about.st_size))
        fsync(descriptor)

    member.answer(vector(1))
    x, place = vector(2), member.place
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", watched)
        member.answer(x)
    files = [path.stat() for path in (place.queries_path / f"{vector_digest(x)}.bin", place.ledger_path)]
    whole = [synced.index((about.st_ino, about.st_size)) for about in (*files, place.ledger_head_path.stat())]
    assert whole == sorted(whole)  # x, then the line that says it was answered, then the head that counts the line
    folders = [[inode for inode, _ in synced].index(path.stat().st_ino) for path in (place.queries_path, place.path)]
    assert folders[0] == whole[0] + 1  # a name is on disk before anything rests on it
    assert folders[1] == whole[2] + 1 == len(synced) - 1


def test_two_commands_at_once_wait_for_each_other(member: Member, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(member.manifest.to_bytes())
    command = [sys.executable, "-c", WRITER, str(member.place.path), str(tmp_path / "manifest.json")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers: list[Any] = [subprocess.Popen([*command, name], **pipes) for name in ("aa", "bb")]
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 2
    ledger = member.ledger()
    with ledger.exclusive():
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        time.sleep(1)  # time enough for all of it, if they did not wait
        assert not member.place.ledger_path.exists()
        ledger.learn({"cc" * 32: "open"})
        assert len(ledger.entries) == 1
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    ledger = member.ledger()
    assert len(ledger.entries) == len(ledger.known()) == 60
    assert ledger.notes == ()


def test_the_ledger_is_in_the_backup_and_works_after_it(tmp_path: Path) -> None:
    Unlock.new_key_file(tmp_path / "key")
    home = HomeFolder.create(tmp_path / "home", "Avon", Unlock.key_file(tmp_path / "key"))
    member = Member(home.path)
    member.answer(vector(1))
    home.rules_path.write_text('{"format": "quorumark-answer-rules/v1", "approve": "ask"}')
    home.backup(tmp_path / "backup.tar")
    restored = Member(HomeFolder.restore(tmp_path / "backup.tar", tmp_path / "again").path)
    assert restored.ledger().head == member.ledger().head
    assert restored.home.rules_path.exists()
    with refused("adds-little", effective=0):
        restored.check(-vector(1))


# --- what it knows -----------------------------------------------------------------------------------------


def test_hearsay_makes_things_worse_never_better(member: Member) -> None:
    ledger, x = member.ledger(), vector(1)
    name, new = vector_digest(x), "ee" * 32

    def told(outcome: str) -> str:
        ledger.learn({name: outcome})
        return member.ledger().known()[name]

    ledger.record_answer(member.query(x), x, "person")
    assert ledger.known()[name] == "open"
    assert told("passed") == "open", "a member's own open query waits for its certificate"
    assert told("failed") == "failed"
    assert told("open") == "failed"
    assert told("passed") == "failed"
    ledger.record_outcome(name, "passed", "aa" * 32)
    assert [told(outcome) for outcome in ("open", "failed", "passed")] == ["passed"] * 3, "a certificate stands"
    ledger.record_outcome(name, "failed", "bb" * 32)
    assert told("passed") == "failed"
    for outcome, expected in (("passed", "passed"), ("open", "passed"), ("failed", "failed"), ("passed", "failed")):
        ledger.learn({new: outcome})
        assert ledger.known()[new] == expected


def test_a_pass_claimed_before_the_query_does_not_hide_its_outcome(member: Member) -> None:
    x = vector(1)
    member.ledger().learn({vector_digest(x): "passed"}, "ab" * 32)
    member.answer(x)
    assert member.ledger().known() == {vector_digest(x): "open"}


def test_what_is_no_outcome_digest_or_leaf_is_refused(member: Member) -> None:
    ledger, x = member.ledger(), vector(1)
    for call in (
        lambda: ledger.record_outcome("aa" * 32, "open", "aa" * 32),
        lambda: ledger.record_outcome("aa" * 31, "passed", "aa" * 32),
        lambda: ledger.record_outcome("aa" * 32, "passed", "certificate"),
        lambda: ledger.learn({"aa" * 32: "maybe"}),
        lambda: ledger.learn({"short": "failed"}),
        lambda: ledger.record_burnt([-1], "aa" * 32),
        lambda: ledger.record_burnt([True], "aa" * 32),
        lambda: ledger.record_answer(member.query(x), vector(2), "person"),
        lambda: vector_digest(x.astype(np.float64)),
        lambda: vector_digest(x.astype(np.uint8)),
        lambda: vector_digest(x.reshape(2, -1)),
    ):
        with pytest.raises(InputError):
            call()
    assert member.ledger().entries == ()


def _partial(point: int, x: str, history: dict[str, str], blocks: dict[str, int] | None = None) -> Partial:
    values: dict[str, Any] = {
        "manifest": "aa" * 32,
        "epoch": 0,
        "query": "bb" * 32,
        "suspect": "cc" * 32,
        "x": x,
        "answer": "5",
    }
    values |= {"members": (), "history": history, "blocks": blocks or {}, "ledger": "dd" * 32, "created": now()}
    return Partial.sign(PEOPLE[point - 1], point=point, **values)


def test_members_together_count_the_worst_that_any_of_them_says() -> None:
    x, a, b, c, d = ("00" * 32, "0a" * 32, "0b" * 32, "0c" * 32, "0d" * 32)
    partials = [
        _partial(1, x, {x: "open", a: "passed", b: "passed", c: "open"}),
        _partial(2, x, {x: "open", a: "passed", b: "failed", c: "failed"}),
        _partial(3, x, {b: "open", d: "open"}),
    ]
    expected = {a: "passed", b: "failed", c: "failed", d: "open"}
    for order in (partials, partials[::-1], [partials[1], partials[2], partials[0]]):
        assert reconcile(order) == (expected, {}, 3)
    assert reconcile([_partial(1, x, {x: "failed"})]) == ({}, {}, 0)
    with pytest.raises(EvidenceError, match="answer several queries"):
        reconcile([_partial(1, x, {}), _partial(2, a, {})])
    with pytest.raises(EvidenceError, match="no partials given"):
        reconcile([])


# --- the member's rules ------------------------------------------------------------------------------------


def test_rules_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    assert read_rules(path) == AnswerRules("ask")
    good = {"format": "quorumark-answer-rules/v1", "approve": "always", "max_queries_per_day": 3, "x-note": "ours"}
    path.write_text(json.dumps({**good, "statistics": ["balanced-anchor/v1"], "max_answers": 5}))
    assert read_rules(path) == AnswerRules("always", 3, ("balanced-anchor/v1",), 5)
    changes: list[tuple[dict[str, object], str]] = [
        ({"format": "quorumark-answer-rules/v2"}, "quorumark-answer-rules/v2"),
        ({"approve": "never"}, "ask or always"),
        ({"approve": ["ask"]}, "ask or always"),
        ({"max_queries_per_day": 1.5}, "not JSON"),
        ({"max_queries_per_day": True}, "must be an integer"),
        ({"max_queries_per_day": None}, "must set max_queries_per_day"),
        ({"max_answers": -1}, "must be an integer"),
        ({"statistics": "balanced-anchor/v1"}, "list of strings"),
        ({"statistics": [1]}, "list of strings"),
        ({"statistic": []}, "unknown field 'statistic'"),
    ]
    for change, text in changes:
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(RecordError, match=text):
            read_rules(path)
    path.write_text('{"format": "quorumark-answer-rules/v1"}')
    with pytest.raises(RecordError, match="'approve' is missing"):
        read_rules(path)


def test_somebody_approves_or_the_rules_do_a_few_times_a_day(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("not-approved"):
        member.check(vector(0), approved=False)
    assert member.check(vector(0), approved=True) == "person"
    member.rules = AnswerRules("always", 2)
    with monkeypatch.context() as clock:  # two answers of long ago, and one of 23 hours ago, which still counts
        for seed, hours in enumerate((1000, 25, 23)):
            then = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600 * hours))
            clock.setattr(ledger_module, "now", lambda then=then: then)
            member.answer(vector(seed))
    assert member.check(vector(3), approved=False) == "rules"
    member.answer(vector(3))
    with refused("per-day", allowed=2, answered=2):
        member.check(vector(5), approved=False)
    assert member.check(vector(5), approved=True) == "person"
    assert member.check(vector(3), approved=False) == "rules", "the same again costs nothing"


# --- the guard, step by step -------------------------------------------------------------------------------


def test_queries_for_another_manifest_epoch_vector_or_statistic_are_refused(member: Member) -> None:
    x = vector(1)
    for change in ({"manifest": "ff" * 32}, {"epoch": 1}):
        with refused("manifest"):
            member.check(x, **change)
    for change in ({"x": "ff" * 32}, {"coordinates": x.size - 1}):
        with refused("vector"):
            member.check(x, **change)
    with refused("vector"):
        member.check(x[:-1])
    with refused("statistic", statistic="other/v1", agreed="balanced-anchor/v1"):
        member.check(x, statistic="other/v1")
    member.rules = AnswerRules(statistics=("other/v1",))
    with refused("statistic-policy", statistic="balanced-anchor/v1"):
        member.check(x)
    member.rules = AnswerRules(statistics=("balanced-anchor/v1",))
    assert member.check(x) == "person"


def test_leaves_opened_in_audits_are_left_out(member: Member) -> None:
    last = (20_000 - 1) // LEAF
    member.ledger().record_burnt([3, last], "aa" * 32)
    x = vector(1)
    with refused("forgotten-leaves", count=2, leaves=(3, last)):
        member.check(x)
    with refused("forgotten-leaves", count=1, leaves=(last,)):
        member.check(x, burnt=(3,))
    with refused("leaf-not-zero", leaf=3):
        member.check(x, burnt=(3, last))
    x[3 * LEAF : 4 * LEAF] = 0
    with refused("leaf-not-zero", leaf=last):
        member.check(x, burnt=(3, last))
    x[last * LEAF :] = 0
    member.check(x, burnt=(3, last))
    # more than this member knows to be opened
    x[5 * LEAF : 6 * LEAF] = 0
    with refused("unexplained-leaves", count=1, leaves=(5,)):
        member.check(x, burnt=(3, 5, last))
    with refused("unexplained-leaves", count=9, leaves=(0, 1, 2, 4, 5)):
        member.check(x, burnt=(*range(10), last))


def test_the_budget_is_for_life_and_counts_what_others_answered(member: Member) -> None:
    small = [make_terms(PEOPLE, 2, d, strength={"rho": "0.02"}) for d in (1, 160_000, 170_000, 10**8)]
    assert [budget(terms) for terms in small] == [16, 16, 17, 10_000]
    for seed in range(10):
        member.answer(vector(seed))
    member.ledger().learn({vector_digest(vector(seed)): "failed" for seed in range(8, 16)})
    for seed in (3, 12):  # answered here before; known already from others
        member.answer(vector(seed))
    with refused("budget", budget=16):
        member.check(vector(16))
    assert len(member.ledger().answered()) == 11
    member.rules = AnswerRules(max_answers=11)
    member.check(vector(3))
    with refused("max-answers", answers=11):
        member.check(vector(13))


def test_budget_and_coordinates_can_be_agreed_otherwise(tmp_path: Path) -> None:
    member = Member(tmp_path / "a", policy={"z": "6", "budget": "1", "effective": "7000"})
    member.answer(rounded(np.random.default_rng(0).uniform(-100, 100, 20_000)))  # rests on 5d/9 = 11,111
    with refused("budget", budget=1):
        member.check(vector(2))
    with refused("narrow", least=7000):
        Member(tmp_path / "b", policy={"effective": "7000"}).check(vector(1))  # rests on d/3 = 6,667
    with pytest.raises(RecordError, match="policy 'budget' must be an integer"):
        Member(tmp_path / "c", policy={"budget": "1.5"})
    assert [least_effective(d) for d in (500, 1024, 20_000, 10**6)] == [500, 1024, 1024, 31_250]
    assert least_effective(500, Policy(effective=600)) == 500


def test_queries_on_few_coordinates_are_refused_whatever_they_say(member: Member) -> None:
    x = np.zeros(20_000, np.int8)
    with refused("narrow", effective=0):
        member.check(x)
    x[:1023] = 1
    with refused("narrow", effective=1023, least=1024):
        member.check(x)
    x[1023] = -1
    member.check(x)
    x[:] = 1
    x[7] = 127  # 15 % of the squared length on one coordinate
    with refused("narrow"):
        member.check(x)
    with refused("norms"):
        member.check(x, norm4=20_000)
    x[7] = 1
    wrongs: list[dict[str, Any]] = [{"norm1": 20_001}, {"norm2": 20_001}, {"norm4": 20_001}]
    for wrong in wrongs:  # the first bounds what partials open, the second makes z of it, the third measures x
        with refused("norms"):
            member.check(x, **wrong)
    member.check(x, norm1=20_000, norm2=20_000, norm4=20_000)


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64])
def test_vectors_of_every_signed_type_are_measured_exactly_and_kept(member: Member, kind: type[Any]) -> None:
    limit = min(np.iinfo(kind).max, (1 << 31) - 1)
    x = np.random.default_rng(1).integers(-limit, limit, 20_000, endpoint=True).astype(kind)
    member.answer(x)  # the query's norms were computed with integers of any size
    member.answer(x.astype(x.dtype.newbyteorder(">")).astype(kind))
    with refused("adds-little"):
        member.check(-x)
    if kind is np.int64:
        with pytest.raises(InputError, match="below 2"):
            member.check(x * 8)


def test_a_damaged_vector_is_named(member: Member) -> None:
    member.answer(vector(1))
    (path,) = member.place.queries_path.iterdir()
    content = path.read_bytes()
    header = content.index(b"\n") + 1
    for spoiled in (
        b"",
        content[:header],
        content[:-1],
        content[: len(content) // 2],
        content[:-1] + bytes([content[-1] ^ 1]),
        content.replace(b"int8 20000", b"int8 19999"),
        content.replace(b"int8 20000", b"int8 20001"),
        content.replace(b"int8", b"text"),
    ):
        path.write_bytes(spoiled)
        with pytest.raises(KeystoreError, match=path.name):
            member.check(vector(2))
    path.unlink()
    near = vector(1)
    near[17] += 1
    with pytest.raises(KeystoreError, match=f"{path.name}.*is missing: put it back from a backup, or answer"):
        member.check(near)
    member.answer(vector(1))  # puts it back
    with refused("adds-little"):
        member.check(near)
    member.check(vector(2))


# --- copies, mixtures, fine-tuned models -------------------------------------------------------------------


def test_the_same_checkpoint_in_another_number_format_is_another_suspect(tmp_path: Path) -> None:
    """Weights of size 0.05 that moved by 0.01: half precision changes x in 2 % of the places, by one."""
    member, d = Member(tmp_path / "home", 100_000), 100_000
    rng = np.random.default_rng(3)
    anchor = (rng.standard_normal(d) * 0.05).astype(np.float32)
    model = anchor + (rng.standard_normal(d) * 0.01).astype(np.float32)
    x = rounded((model - anchor) / 0.01 * 30)
    member.answer(x)
    half = rounded((model.astype(np.float16).astype(np.float32) - anchor) / 0.01 * 30)
    assert 1024 < np.sum(half != x) < 4000
    member.check(half)
    # the same in fewer places than that is pointed to the earlier result
    places = np.flatnonzero(half != x)
    half[places[1000:]] = x[places[1000:]]
    query = member.ledger().entries[0]["query"]
    with refused("adds-little", effective=1000, query=query):
        member.check(half)
    with refused("adds-little", "too-close"):
        member.check(-x)


def test_a_model_that_differs_in_its_last_layer_alone_is_pointed_to_its_result(member: Member) -> None:
    x = vector(1)
    member.answer(x)
    x[-1000:] = vector(2)[-1000:]  # 333 coordinates, as ‖·‖₂⁴/‖·‖₄⁴ counts
    with refused("adds-little", least=1024):
        member.check(x)


def _honest(rng: np.random.Generator, size: int) -> list[Vector]:
    """16 suspects as they may come in a consortium's life: other models, with light and heavy tails, and fine-tuned
    versions of them that moved by 5 to 100 % of what they had moved."""
    shapes = [
        rng.standard_normal(size),
        rng.laplace(size=size) / 2**0.5,
        rng.standard_normal(size),
        rng.uniform(-(3**0.5), 3**0.5, size),
    ]
    found = list(shapes)
    for amount in (0.05, 0.05, 0.07, 0.1, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0):
        found.append(found[rng.integers(4)] + amount * rng.standard_normal(size))
    return [rounded(30 * v / np.sqrt(np.mean(v * v))) for v in found]


def test_honest_sequences_of_suspects_are_all_answered(tmp_path: Path) -> None:
    """12 lives of 16 suspects each, in any order: none of 192 is refused. Copies within 3 % would be."""
    told = []
    for life in range(12):
        rng = np.random.default_rng(life)
        member = Member(tmp_path / str(life), 20_000)
        suspects = _honest(rng, 20_000)
        for i in rng.permutation(16):
            try:
                member.answer(suspects[i])
            except GuardError as error:
                told.append((life, i, error.code))
    assert told == []


# --- attack 1: failed queries combined into a model --------------------------------------------------------


def test_64_failed_models_combine_into_one_that_passes_a_naive_threshold(tmp_path: Path) -> None:
    d, n = 20_000, 64
    tau = np.random.default_rng(99).choice([-1, 1], d)
    member = Member(tmp_path / "home", d, policy={"z": "6", "budget": "100"})
    xs = [vector(seed, d) for seed in range(n)]
    values = []
    for x in xs:
        member.answer(x)
        values.append(int(x @ tau.astype(np.int64)))  # what t answers open
        z = Decimal(z_text(values[-1], int((x.astype(int) ** 2).sum())))
        assert z < 6, "none of them is marked"
        member.ledger().record_outcome(vector_digest(x), "failed", "aa" * 32)
    direction = sum(y * x.astype(float) / float(x.astype(float) @ x) for x, y in zip(xs, values, strict=True))
    direction /= np.sqrt(np.mean(direction**2))

    forged = rounded(30 * direction)
    member.answer(forged)
    found = z_text(int(forged @ tau.astype(np.int64)), int((forged.astype(int) ** 2).sum()))
    assert Decimal(found) >= 6, "a verifier that forgets believes it"
    assert 7 < Decimal(found) < 9

    known, _, failed = reconcile([_partial(point, vector_digest(forged), member.ledger().known()) for point in (1, 2)])
    assert failed == n
    assert vector_digest(forged) not in known
    assert raised_threshold("6", failed) == "14.000000"
    assert Decimal(found) < Decimal(raised_threshold("6", failed))
    # one liar who calls them passed, or leaves them out, changes nothing
    liars = [dict.fromkeys(known, "passed"), {}]
    honest = _partial(1, vector_digest(forged), member.ledger().known())
    for history in liars:
        assert reconcile([_partial(2, vector_digest(forged), history), honest])[2] == n


# --- attack 2: queries that read signs off -----------------------------------------------------------------


def _oracle(d: int, base: Vector) -> list[tuple[Vector, Vector]]:
    """Seven coordinates at a time: base + (1, 2, 4, …, 64) there."""
    designs = []
    for start in range(0, d, 7):
        places = np.arange(start, min(start + 7, d))
        x = base.copy()
        x[places] += (1 << np.arange(places.size)).astype(np.int8)
        designs.append((places, x))
    return designs


def test_near_copies_read_the_whole_key_from_a_naive_verifier_and_nothing_from_this_one(tmp_path: Path) -> None:
    d = 20_000
    tau = np.random.default_rng(7).choice([-1, 1], d)
    base = vector(1, d, spread=15)
    base = np.clip(base, -60, 60).astype(np.int8)
    read = np.zeros(d, np.int64)
    wide = tau.astype(np.int64)
    opened = int(base @ wide)
    for places, x in _oracle(d, base):
        difference = int(x @ wide) - opened  # Σ 2^k·τ_k, from which every τ_k follows
        bits = (difference + (1 << places.size) - 1) // 2
        read[places] = 2 * ((bits >> np.arange(places.size)) & 1) - 1
    assert np.mean(read == tau) == 1.0, "2,858 answers, 20,000 signs"

    member = Member(tmp_path / "home", d, policy={"budget": "100000"})
    member.answer(base)
    for _, x in [*_oracle(d, base)[:3], *_oracle(d, base)[-3:]]:
        with refused("adds-little", "too-close"):
            member.check(x)
    for scale in (1, 60):  # a single coordinate, little or much
        x = base.copy()
        x[17] += scale
        with pytest.raises(GuardError):
            member.check(x)
    assert len(member.ledger().answered()) == 1


def _hadamard(order: int) -> NDArray[np.int64]:
    matrix = np.ones((1, 1), np.int64)
    while matrix.shape[0] < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _spread_design(d: int, targets: NDArray[np.int64], rank: int, strength: int, seed: int) -> list[Vector]:
    """As many queries as targets, and `rank` more. Each is a mixture of `rank` dense vectors with rows of a Hadamard
    matrix on the targets: no two of them are alike, and no difference of two is, but combinations in which the dense
    parts cancel rest on the targets alone."""
    rng = np.random.default_rng(seed)
    count = targets.size + rank
    dense = rng.integers(-2, 2, (rank, d), endpoint=True)
    dense[:, targets] = 0
    mixture = rng.integers(-2, 2, (count, rank), endpoint=True)
    mixture[:rank] = np.eye(rank, dtype=np.int64)
    mixture[rank:, 0] = 1 + np.arange(targets.size) % 2  # never nothing
    xs = mixture @ dense
    signs = np.tile(_hadamard(64)[: targets.size, : targets.size], (2, 1))[:count]
    xs[:, targets] += strength * signs
    assert np.abs(xs).max() <= 127
    return [x.astype(np.int8) for x in xs]


@pytest.mark.parametrize("strength", [1, 4])
def test_spread_designs_read_signs_from_a_naive_verifier_and_are_stopped_at_the_query_that_would(
    tmp_path: Path, strength: int
) -> None:
    d, rank = 20_000, 8
    rng = np.random.default_rng(5)
    tau = rng.choice([-1, 1], d)
    targets = np.sort(rng.choice(d, 64, replace=False))
    xs = _spread_design(d, targets, rank, strength, 3)
    wide = np.array(xs, np.float64)
    # they look innocent: every query and every difference of two rests on thousands of coordinates
    for i in range(len(xs)):
        for v in (wide[i], *(wide[i] - wide[j] for j in range(0, i, 7) if (xs[i] != xs[j]).mean() > 0.1)):
            assert (v @ v) ** 2 / np.sum(v**4) > 2048

    outside = np.delete(np.arange(d), targets)
    opened = wide @ tau
    dense = wide[:, outside]
    left = np.linalg.eigh(dense @ dense.T)[1][:, :-rank]  # the combinations in which the dense parts cancel
    guess = np.linalg.lstsq(left.T @ wide[:, targets], left.T @ opened, rcond=None)[0]
    assert np.mean(np.sign(np.rint(guess)) == tau[targets]) == 1.0, "a naive verifier gives away all 64"

    member = Member(tmp_path / "home", d, policy={"budget": "1000"})
    for x in xs[:rank]:
        member.answer(x)
    for x in xs[rank:]:  # each of them would complete a combination on the targets
        with refused("narrow", "remainder", "adds-little", "too-close"):
            member.answer(x)
    basis = np.linalg.qr(wide[:rank].T)[0]
    leverage = (basis[targets] ** 2).sum(axis=1)
    assert leverage.max() < 0.05, "of no target's sign is more known than 5 % of its variance"


def test_burnt_leaves_do_not_hide_what_a_query_reads(tmp_path: Path) -> None:
    """The signs of burnt leaves are public. x₁, then ten of its leaves burnt, then x₁ without them plus 60·e_j: over
    all coordinates the difference rests on thousands, but anyone who knows the burnt signs reads τ_j."""
    d, burnt, j = 20_000, tuple(range(10)), 15_000
    tau = np.random.default_rng(4).choice([-1, 1], d).astype(np.int64)
    first = np.clip(vector(1, d), -60, 60).astype(np.int8)
    kept = first.copy()
    kept[: 10 * LEAF] = 0
    second = kept.copy()
    second[j] += 60
    public = int(first[: 10 * LEAF] @ tau[: 10 * LEAF])
    assert int(second @ tau) - (int(first @ tau) - public) == 60 * tau[j], "a naive verifier gives it away"
    whole = second.astype(float) - first
    assert (whole @ whole) ** 2 / np.sum(whole**4) > 3000

    member = Member(tmp_path / "home", d)
    member.answer(first)
    member.ledger().record_burnt(burnt, "aa" * 32)
    with refused("adds-little", effective=1):
        member.check(second, burnt=burnt)
    member.answer(kept, burnt=burnt)  # the same suspect once more, as it must be asked now: nothing new
    # leaves that only the query calls burnt: one of them alone would be read off as a sum
    kept[10 * LEAF : 11 * LEAF] = 0
    with refused("unexplained-leaves", count=1, leaves=(10,)):
        member.check(kept, burnt=tuple(range(11)))


def test_a_coordinate_raised_in_every_query_is_never_certain(tmp_path: Path) -> None:
    """The most that can be gathered on one coordinate within the rules: 127 there in each query, small noise elsewhere.

    Each x may have √(1/1024) = 1/32 of its squared length there, so 16 answers tell at most half of that sign's
    variance, and nothing is read off: 16 answers are worth 16 signs, wherever they lie.
    """
    d = 20_000
    rng = np.random.default_rng(8)
    member = Member(tmp_path / "home", d)
    answered = []
    for _ in range(16):
        x = rounded(rng.laplace(0, 5.2, d).clip(-20, 20))
        x[0] = 127
        member.answer(x)
        answered.append(x.astype(float))
    basis = np.linalg.qr(np.array(answered).T)[0]
    assert 0.2 < (basis[0] ** 2).sum() < 0.5
    x = rounded(rng.laplace(0, 3, d).clip(-20, 20))
    x[0] = 127
    with refused("narrow"):
        Member(tmp_path / "other", d).check(x)


def test_refusals_are_errors_of_ours_and_are_remembered(member: Member) -> None:
    ledger, x = member.ledger(), np.ones(20_000, np.int8)
    query = replace(member.query(x), epoch=3)
    with pytest.raises(QuorumarkError) as caught:
        check_query(query, x, member.manifest, ledger, member.rules, True)
    ledger.record_refusal(query, caught.value.reason)
    assert member.ledger().entries[-1]["reason"] == {"code": "guard.manifest"}
    assert member.ledger().known() == {}, "a refused query is not an answered one"


def _digits(d: int, target: int, count: int, seed: int) -> tuple[list[Vector], list[int]]:
    """Broad vectors x_0 = c_1, x_i = 32·c_i − c_{i+1} with Σ x_i·32^−i = x_0 but for a 1 at one place of the last one.

    Their combination with the weights returned is 1 there and 0 elsewhere, and what the last one adds to the span of
    the others is as small, or its weights as large, as 32^count: more than floating point can tell.
    """
    c = np.random.default_rng(seed).integers(-3, 4, (count + 1, d))
    c[count] = 0
    vectors = [c[0], *(32 * c[i] - c[i + 1] for i in range(count))]
    vectors[count][target] += 1
    return [v.astype(np.int8) for v in vectors], [-(32**count), *(32 ** (count - i) for i in range(1, count + 1))]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("count", [4, 6, 9, 12])
def test_a_residual_that_rounding_hides_reads_no_sign(tmp_path: Path, count: int, backwards: bool) -> None:
    d, target = 20_000, 777
    vectors, weights = _digits(d, target, count, 4)
    key = np.random.default_rng(5).choice([-1, 1], d)
    answers = [int((v.astype(np.int64) * key).sum()) for v in vectors]
    assert sum(w * y for w, y in zip(weights, answers, strict=True)) == key[target]  # a naive verifier tells the sign
    member = Member(tmp_path / "home", d)
    order = vectors[::-1] if backwards else vectors

    def ask_all() -> None:
        for x in order:
            member.answer(x)

    with refused("narrow", "remainder", "adds-little", "too-close"):
        ask_all()


def test_an_asker_that_is_refused_without_end_does_not_fill_the_ledger(member: Member) -> None:
    """A server may ask as often as it likes, each time at another time. A ledger that is too large to be read would end
    all answers of this member."""
    x = vector(1)
    ledger = member.ledger()
    reason = Reason.of("guard.forgotten-leaves", count=10**12, leaves=tuple(10**11 + i for i in range(5)))
    with ledger.exclusive():
        for i in range(1100):
            query = member.query(x, created=f"2026-01-31T12:{i // 60:02d}:{i % 60:02d}Z")
            ledger.record_refusal(query, reason)
    again = member.ledger()
    assert len(again.entries) == 1000
    assert member.place.ledger_path.stat().st_size < 1000 * 700
    assert Reason.from_dict(again.entries[0]["reason"]) == reason
    member.answer(x)
    assert member.ledger().answered() == {query.x}


def test_a_full_ledger_still_takes_answers_and_nothing_else(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorumark.verify.ledger._MOST_LINES", 3)
    member.answer(vector(1))
    x = member.query(vector(1)).x
    ledger = member.ledger()
    for i in range(9):  # the same query, combined again and again with other thresholds
        ledger.record_outcome(x, ("passed", "failed")[i % 2], f"{i:064x}")
        ledger.learn({f"{i:064x}": "failed"})
        ledger.record_refusal(member.query(vector(2)), Reason.of("guard.budget", budget=i))
    assert [entry["kind"] for entry in ledger.entries] == ["answered", "outcome", "seen"]
    member.answer(vector(3))
    member.ledger().record_burnt([1], "ab" * 32)
    member.ledger().record_outcome(member.query(vector(3)).x, "failed", "cd" * 32)
    assert [entry["kind"] for entry in member.ledger().entries[3:]] == ["answered", "burnt", "outcome"]
