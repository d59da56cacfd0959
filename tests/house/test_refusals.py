"""Every refusal of a round or a ceremony has a code, of one closed list."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from quorumark import refusals
from quorumark.errors import (
    AnsweredError,
    CeremonyError,
    EncodingError,
    InputError,
    KeystoreError,
    MessageError,
    RoundError,
    code_of,
)
from quorumark.refusals import REFUSALS, Refusal, listed
from tests.kit.refusals import wrong_argument

CODED = {"RoundError", "TooStrongError", "MessageError", "CeremonyError"}
FAMILIES = ("round.", "message.", "ceremony.", "node.")


def made_without_code(tree: ast.AST) -> Iterator[int]:
    """The lines on which one of these errors is made without a code."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in calls:
        named = isinstance(call.func, ast.Name) and call.func.id in CODED
        if named and "code" not in {keyword.arg for keyword in call.keywords}:
            yield call.lineno


def strings(tree: ast.AST) -> set[str]:
    found = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in found if isinstance(value, str)}


def test_no_error_is_made_without_a_code_and_every_code_is_used(root: Path) -> None:
    sources = sorted(path for path in (root / "src").rglob("*.py") if path != Path(refusals.__file__))
    trees = {str(path): ast.parse(path.read_text(encoding="utf-8")) for path in sources}
    assert [(name, line) for name, tree in trees.items() for line in made_without_code(tree)] == []
    assert list(made_without_code(ast.parse('x = 1\nraise RoundError(f"round {x}")'))) == [2]  # it would be seen
    assert REFUSALS - set[str]().union(*map(strings, trees.values())) == set()


def test_the_list_has_no_code_twice_and_four_families() -> None:
    assert len(REFUSALS) == len(get_args(Refusal))
    assert all(code.startswith(FAMILIES) for code in REFUSALS)


def test_the_page_about_engines_lists_every_code(root: Path) -> None:
    page = (root / "docs/engines.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith(tuple(f"| `{f}" for f in FAMILIES))]
    assert rows == list(get_args(Refusal))


@pytest.mark.parametrize("kind", [RoundError, MessageError, CeremonyError])
def test_a_code_of_another_list_is_refused_and_one_of_this_list_travels(
    kind: type[RoundError | MessageError | CeremonyError],
) -> None:
    with wrong_argument("code"):
        kind("text", code="guard.per-day")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        kind("text")  # type: ignore[call-arg]
    there = pickle.loads(pickle.dumps(kind("text", code="round.too-few")))  # noqa: S301
    assert (type(there), str(there), there.code) == (kind, "text", "round.too-few")


def test_who_has_answered_says_so_in_a_code_too() -> None:
    there = pickle.loads(pickle.dumps(AnsweredError("text", 3, (1, 2), 1, 2)))  # noqa: S301
    assert (there.code, there.round, there.members) == ("round.answered-already", 3, (1, 2))
    assert (there.halvings, there.draw) == (1, 2)


def test_what_another_machine_sends_is_a_code_of_the_list_or_none() -> None:
    assert listed("round.over", "node.refused") == "round.over"
    assert [listed(code, "node.refused") for code in ("guard.per-day", "", None, 7, ["round.over"])] == [
        "node.refused"
    ] * 5


def test_errors_of_other_kinds_have_a_code_in_reports() -> None:
    assert code_of(EncodingError("w", "must be finite", "nan", 3)) == "round.not-encodable"
    assert code_of(KeystoreError("damaged")) == code_of(InputError("a", "must be b")) == "node.refused"
    assert code_of(MessageError("text", code="message.altered")) == "message.altered"
    assert code_of(KeyError("ready")) == "message.malformed"
