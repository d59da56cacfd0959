"""Heads of ledgers: honest ones never contradict each other; two pasts of one ledger do, wherever they part."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumark.consortium.identity import Identity
from quorumark.errors import QuorumarkError
from quorumark.verify.heads import Head, Seen, contradiction, differs, occasion

AVON = Identity.generate("Avon")


def name(number: int, past: str = "") -> str:
    return hashlib.sha256(f"{past}{number}".encode()).hexdigest()


def make(said: tuple[str, ...], lines: tuple[str, ...], created: str = "2026-01-31T12:00:00Z") -> Head:
    return Head.sign(AVON, manifest="ab" * 32, point=1, said=said, lines=lines, seen={}, created=created)


def history(steps: list[int], past: str = "", start: int = 0) -> list[Head]:
    """A member that says a head after it wrote some lines, again and again; `start`: from where it has another past."""
    heads, said, lines = list[Head](), list[str](), list[str]()
    for index, count in enumerate(steps):
        other = past if index >= start else ""
        lines += [name(len(lines) + n, f"line {other}") for n in range(count)]
        said.append(name(index, f"said {other}"))
        heads.append(make(tuple(said), tuple(lines)))
    return heads


steps = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(steps)
def test_an_honest_members_heads_never_contradict_each_other(counts: list[int]) -> None:
    heads = history(counts)
    for one, two in itertools.combinations_with_replacement(heads, 2):
        assert contradiction(one, two) == ""
        assert contradiction(two, one) == ""
        assert not differs(one.as_seen, two.as_seen, two.lines) or one.number > two.number
        assert not differs(one.as_seen, heads[-1].as_seen, heads[-1].lines)


@given(steps, steps, st.data())
def test_a_home_that_was_set_back_contradicts_what_it_said_since(
    counts: list[int], more: list[int], data: st.DataObject
) -> None:
    """It forgets everything from some head on, and goes on: each head that it says then contradicts the last one."""
    heads = history(counts)
    back = data.draw(st.integers(0, len(heads) - 1))
    later = history(counts[:back] + more, past="other", start=back)[back:]
    for one in later:
        assert contradiction(heads[-1], one), (back, one.number)
        assert contradiction(one, heads[-1])


@given(steps, st.data())
def test_lines_that_are_lost_alone_are_noticed(counts: list[int], data: st.DataObject) -> None:
    """The ledger is set back, and the count of heads is not."""
    last = history([*counts, 1])[-1]
    left = data.draw(st.integers(0, len(last.lines) - 1))
    later = make((*last.said, name(99)), last.lines[:left])
    assert "before" in contradiction(last, later)
    assert differs(last.as_seen, later.as_seen, later.lines)


def test_two_heads_with_one_number_are_two_even_if_they_say_the_same() -> None:
    one = make((name(1),), ())
    assert contradiction(one, make((name(1),), (), "2026-02-01T12:00:00Z"))
    assert not contradiction(one, one)


def test_an_occasion_is_one_query_before_or_after_its_answer() -> None:
    assert len({occasion(name(n), answered) for n in range(3) for answered in (False, True)}) == 6


def test_heads_are_read_as_they_were_signed() -> None:
    head = Head.sign(
        AVON,
        manifest="ab" * 32,
        point=1,
        said=(name(1), name(2)),
        lines=(name(3),),
        seen={AVON.ed25519: Seen(1, 1, name(3))},
        created="2026-01-31T12:00:00Z",
    )
    again = Head.from_bytes(head.to_bytes())
    assert again == head
    again.verify_by(AVON.ed25519, "Avon")
    for changed in (
        replace(head, lines=()),
        replace(head, said=(name(2),)),
        replace(head, seen={}),
        replace(head, point=2),
    ):
        with pytest.raises(QuorumarkError):
            changed.verify_by(AVON.ed25519, "Avon")


@pytest.mark.parametrize(
    "changes",
    [{"said": ()}, {"said": (name(1), name(1))}, {"lines": ("x",)}, {"point": 0}, {"seen": {"x": Seen(1, 0, "")}}],
    ids=str,
)
def test_heads_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(QuorumarkError):
        replace(make((name(1),), ()), **changes)  # type: ignore[arg-type]
    with pytest.raises(QuorumarkError):
        Seen(1, 1, "")
