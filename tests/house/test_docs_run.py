"""The tutorial's blocks run as they are printed: every Python block, every command."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.kit.blocks import blocks_of, commands_of, run_page

PAGES = ("docs/tutorial.md",)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """This Python's own `quorumark` first, and nothing of this person's home."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOME": str(tmp_path), "COLUMNS": "120"}


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_the_page_runs(
    name: str, root: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (root / name).read_text(encoding="utf-8")
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert run_page(page, tmp_path, environment) >= 5
    for block in blocks_of(page):  # what the page wrote is not for other tests to import
        module = Path(block.title).stem
        if module in sys.modules and module not in before:
            del sys.modules[module]


@pytest.mark.parametrize("name", PAGES)
def test_what_is_not_run_says_why(name: str, root: Path) -> None:
    page = (root / name).read_text(encoding="utf-8")
    assert all(len(why.split()) >= 3 for why in re.findall(r"<!-- not run: (.*?) -->", page))
    kinds = {block.kind for block in blocks_of(page)}
    assert kinds <= {"python", "console", "text"}, "what the runner does not know, it would leave out"


def test_a_page_that_does_not_keep_its_word_is_noticed(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = (
        '```python title="mine.txt"\nhello 3\n```\n\n'
        "```console\n$ cat \\\n    mine.txt\nhello 4\n$ false  # exits with 1\n```\n"
        "```python\nx = 2\nprint('z is', x)\n```\n\nIt prints\n\n```text\nz is 19.5\n```\n"
        "<!-- not run: it has no end -->\n```console\n$ false\n```\n"
    )
    assert run_page(good, tmp_path, environment) == 4
    for right, wrong in (("hello 4", "bye 4"), ("z is 19.5", "z was 19.5"), ("  # exits with 1", ""), ("x = 2", "")):
        assert right in good
        with pytest.raises((AssertionError, NameError)):
            run_page(good.replace(right, wrong), tmp_path, environment)
    with pytest.raises(AssertionError):
        run_page(good.replace("<!-- not run: it has no end -->\n", ""), tmp_path, environment)


def test_commands_are_read_with_what_they_print() -> None:
    text = "$ one --a \\\n    --b\nsays\nthis\n$ two  # exits with 2\n"
    assert list(commands_of(text)) == [("one --a \\\n    --b", 0, ["says", "this"]), ("two", 2, [])]
