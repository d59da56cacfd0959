"""The public surface: a change here is a change for users, and is written down in CHANGELOG.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import quorumark
from quorumark import codec, errors, field

FRONT_DOOR = ["Certificate", "Federation", "Home", "Reference", "Terms", "derive_groups"]
ALLOWED = {"quorumark", "quorumark.errors", "quorumark.flower", "quorumark.nvflare"}


def test_public_names() -> None:
    assert quorumark.__all__ == FRONT_DOOR
    for name in FRONT_DOOR:
        assert getattr(quorumark, name).__doc__, f"{name} says what it is"
    with pytest.raises(AttributeError, match="banana"):
        _ = quorumark.banana


def _imported(text: str) -> set[str]:
    """Modules of ours that a program imports; `from quorumark import x` counts as quorumark.x unless x is public."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = node.module == "quorumark"
            names = {alias.name for alias in node.names if alias.name not in FRONT_DOOR}
            found |= {f"quorumark.{name}" for name in names} if inner else {node.module}
    return {name for name in found if name.partition(".")[0] == "quorumark"}


def test_what_users_copy_comes_through_the_front_door(root: Path) -> None:
    """The README's examples, the demo and the example apps import the public names and nothing else of ours."""
    programs = {"demo.py": (root / "src/quorumark/demo.py").read_text(encoding="utf-8")}
    for path in sorted((root / "examples").rglob("*")):
        if path.suffix == ".py" or path.name in ("deploy", "prepare"):
            programs[str(path.relative_to(root))] = path.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    programs |= {f"README.md, example {number}": block for number, block in enumerate(blocks, 1)}
    assert blocks
    assert len(programs) > 6
    assert {name: inner for name, text in programs.items() if (inner := _imported(text) - ALLOWED)} == {}


def test_every_error_is_ours() -> None:
    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert all(issubclass(e, errors.QuorumarkError) for e in found)
    assert all(e.__name__ in (errors.__doc__ or "") for e in found), "the tree at the top of errors.py is complete"


def test_constants() -> None:
    assert field.P == 2305843009213693951
    assert (codec.FRACTION_BITS, codec.LIMIT) == (40, 524288.0)
    assert quorumark.__version__
