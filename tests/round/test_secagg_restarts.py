"""Members of a secure sum that restart or crash: they go on, and send nothing twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quorumark import field
from quorumark.consortium.home import _KEPT
from quorumark.errors import BusyError, KeystoreError
from quorumark.round.memory import FolderState, MemoryState, State, apart
from quorumark.round.secagg.member import SecAggMember
from tests.kit.refusals import stopped
from tests.kit.secure_sums import BINDING, LENGTH, PEOPLE, Net, make_group

# --- restarts ---------------------------------------------------------------------------------------------


def test_a_member_restarts_at_any_time_and_goes_on(tmp_path: Path) -> None:
    net = Net(5, 2)
    net.states[1] = FolderState.create(tmp_path / "rounds", PEOPLE[0], net.group, after=0)

    def restart() -> None:
        net.states[1] = FolderState(tmp_path / "rounds", PEOPLE[0])
        net.members[1] = net.member(1)

    restart()
    before = net.members[1].ready(1, BINDING, LENGTH)
    restart()
    assert net.members[1].ready(1, BINDING, LENGTH) == before
    told = net.announce()
    restart()
    net.upload(told, [1, 2, 3, 4])
    restart()
    with stopped("round.wrong-attempt"):
        net.members[1].plan(told)
    net.upload(net.server.retry(), [1, 2, 3, 4])
    restart()
    said = net.members[1].unmask(net.server.request(1))
    net.answer([1, 2, 3, 4])
    restart()
    assert net.members[1].unmask(net.requests[1]) == said
    assert (net.server.finish() == net.expected([1, 2, 3, 4])).all()


def test_an_error_leaves_the_memory_as_it_was() -> None:
    state = MemoryState(make_group(3, 2))
    before = state._load()

    def fail() -> None:
        with state.edit() as memory:
            memory["round"] = 9
            raise CrashError

    with pytest.raises(CrashError):
        fail()
    assert state._load() == before


class CrashError(Exception):
    """The machine stops here."""


class Fragile(MemoryState):
    """Fails at its next write, before or after it is done."""

    when: str | None = None

    def _save(self, content: bytes) -> None:
        when, self.when = self.when, None
        if when == "before":
            raise CrashError
        super()._save(content)
        if when == "after":
            raise CrashError


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_a_write_never_makes_a_member_send_twice(when: str) -> None:
    net = Net(5, 2)
    state = Fragile(net.group)
    net.states[1] = state
    net.members[1] = net.member(1)

    def crash(call: Callable[[], object]) -> None:
        state.when = when
        with pytest.raises(CrashError):
            call()
        net.members[1] = net.member(1)

    crash(lambda: net.members[1].ready(1, BINDING, LENGTH))
    told = net.announce()
    plan = net.members[1].plan(told)
    crash(lambda: net.members[1].upload(plan, field.random(LENGTH)))
    if when == "after":  # it may have been sent: this attempt is lost, the next one is not
        with stopped("round.wrong-attempt"):
            net.members[1].plan(told)
        net.upload(told, [2, 3, 4, 5])
        told = net.server.retry()
        net.upload(told, [2, 3, 4, 5])
        alive = [2, 3, 4, 5]
    else:
        net.upload(told, net.members)
        crash(lambda: net.members[1].unmask(net.server.request(1)))
        alive = list(net.members)
    net.answer(alive)
    assert (net.server.finish() == net.expected(alive)).all()


def test_an_answer_that_may_have_been_sent_is_the_same_when_it_is_sent_again() -> None:
    net = Net(5, 2)
    state = Fragile(net.group)
    net.states[1] = state
    net.members[1] = net.member(1)
    net.until_uploaded()
    state.when = "after"
    with pytest.raises(CrashError):
        net.members[1].unmask(net.server.request(1))
    with state.edit() as memory:
        written = bytes.fromhex(memory["answer"]["model"]["message"])
    net.members[1] = net.member(1)
    assert net.members[1].unmask(net.server.request(1)) == written
    net.answer(net.members)
    assert (net.server.finish() == net.expected(net.members)).all()
    assert not net.server.disputed


def test_what_is_remembered_is_sealed_whole_and_never_restored(tmp_path: Path) -> None:
    group, folder = make_group(4, 2), tmp_path / "consortia" / ("0" * 16) / "rounds"
    state = FolderState.create(folder, PEOPLE[0], group, after=3)
    member = SecAggMember(PEOPLE[0], group, state)
    with stopped("round.over"):
        member.ready(3, BINDING, LENGTH)
    member.ready(4, BINDING, LENGTH)
    path = folder / "rounds.sealed"
    assert path.stat().st_mode & 0o777 == 0o600
    content = path.read_bytes()
    with state.edit() as memory:
        secret = memory["purposes"]["model"]["secret"]
        with pytest.raises(KeystoreError, match="another command is working"), FolderState(folder, PEOPLE[0]).edit():
            pass
    assert secret.encode() not in content
    assert bytes.fromhex(secret) not in content
    assert secret not in repr(member)
    assert not _KEPT.fullmatch(path.relative_to(tmp_path).as_posix())
    with pytest.raises(KeystoreError, match="exists already"):
        FolderState.create(folder, PEOPLE[0], group, after=0)
    with pytest.raises(KeystoreError, match="damaged or another member's"):
        SecAggMember(PEOPLE[0], group, FolderState(folder, PEOPLE[1]))
    for bad in (content[:-1], content[:20] + bytes([content[20] ^ 1]) + content[21:], b""):
        path.write_bytes(bad)
        with pytest.raises(KeystoreError, match="damaged"):
            SecAggMember(PEOPLE[0], group, FolderState(folder, PEOPLE[0]))
    path.unlink()
    with pytest.raises(KeystoreError, match="cannot read the memory of rounds"):
        member.ready(5, BINDING, LENGTH)
    with pytest.raises(KeystoreError, match="create it"):
        SecAggMember(PEOPLE[0], group, FolderState(tmp_path / "nowhere", PEOPLE[0]))


def test_a_memory_that_is_open_is_read_once_and_written_at_every_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several edits in a row: nobody else edits in between, each change is on disk when its edit has ended, an error in
    one undoes that one only, and after a write that failed there are no more."""
    folder = tmp_path / "rounds"
    state = FolderState.create(folder, PEOPLE[0], make_group(4, 2), after=3)

    def written() -> int:
        copied = shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
        with FolderState(copied, PEOPLE[0]).edit() as memory:
            return int(memory["round"])

    with state.opened() as same:
        assert same is state
        for number in (5, 6):
            with monkeypatch.context() as patch:
                patch.setattr(Path, "read_bytes", crash)
                with state.edit() as memory:
                    memory["round"] = number
            assert written() == number
            with pytest.raises(BusyError), FolderState(folder, PEOPLE[0]).edit():
                pass
        _fail_after(state, lambda memory: memory["answered"].update(x={}))
        with state.edit() as memory:
            assert (memory["round"], memory["answered"]) == (6, {})
            with pytest.raises(BusyError), state.edit():  # what it wrote would be undone
                pass
        with monkeypatch.context() as patch:
            patch.setattr("quorumark.consortium.memory.write_private", crash)
            with pytest.raises(CrashError), state.edit() as memory:
                memory["round"] = 7
        with pytest.raises(BusyError), state.edit():
            pass
    with FolderState(folder, PEOPLE[0]).edit() as memory:
        assert memory["round"] == 6


def crash(*_: object) -> None:
    raise CrashError


def _fail_after(state: State, change: Callable[[dict[str, Any]], None]) -> None:
    """An edit that changes the memory, and ends with an error."""

    def edit() -> None:
        with state.edit() as memory:
            change(memory)
            raise CrashError

    with pytest.raises(CrashError):
        edit()


def test_what_two_edits_read_belongs_to_each_alone() -> None:
    """What a block did to the dict and took back by an error, or kept of it, is in no later one."""
    state = MemoryState(make_group(3, 2))
    with state.edit() as memory:
        memory["answered"] = {"a": {"model": [[1, "g", 0]]}}
    _fail_after(state, lambda memory: memory["answered"]["a"]["model"].append([2, "g", 0]))
    with state.edit() as memory:
        assert memory["answered"] == {"a": {"model": [[1, "g", 0]]}}
        looked = apart(memory, b"\n")
        looked["answered"]["0a"] = {"model": []}
        looked["known"].append("x")
    with state.edit() as memory:
        assert (memory["answered"], memory["known"]) == ({"a": {"model": [[1, "g", 0]]}}, [])


def test_keys_are_erased_once_they_are_not_needed() -> None:
    net = Net(4, 2)
    net.until_uploaded()
    with net.states[1].edit() as memory:
        assert "secret" in memory["purposes"]["model"]
    net.answer([1])
    with net.states[1].edit() as memory:
        assert memory["purposes"] == {"model": {"answered": 1}}
    assert not net.members[1]._shared
    assert net.members[2]._shared
    net.members[2].close()
    with net.states[2].edit() as memory:
        assert memory["purposes"] == {}


# --- derivations: what each key must hang on --------------------------------------------------------------


def test_two_threads_of_one_member_upload_once() -> None:
    """A simulation's memory is locked while it is edited."""
    import threading

    net = Net(5, 2)
    state = net.states[1]
    assert isinstance(state, MemoryState)
    entered, release, order = threading.Event(), threading.Event(), []

    def slow() -> None:
        with state.edit():
            entered.set()
            release.wait(5)
            order.append("slow")

    def quick() -> None:
        entered.wait(5)
        with state.edit():
            order.append("quick")

    threads = [threading.Thread(target=slow), threading.Thread(target=quick)]
    for thread in threads:
        thread.start()
    entered.wait(5)
    threads[1].join(0.2)
    release.set()
    for thread in threads:
        thread.join()
    assert order == ["slow", "quick"]
