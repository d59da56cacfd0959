"""The blocks of the tutorial and of the README run as they are printed: every Python block, every command."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quorumark as qm
from tests.kit.blocks import blocks_of, commands_of, run_page, written_out

PAGES = ("docs/tutorial.md", "README.md")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """This Python's own `quorumark` first, and nothing of this person's home."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOME": str(tmp_path), "COLUMNS": "120"}


@pytest.fixture
def follow(
    root: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Runs a page in an empty folder. What it wrote is not for other tests to import."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(name: str) -> None:
        assert run_page((root / name).read_text(encoding="utf-8"), tmp_path, environment)["blocks"] >= 5

    yield run
    for module in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(tmp_path))]:
        del sys.modules[module]


def test_every_block_of_the_tutorial_runs(follow: Callable[[str], None]) -> None:
    follow("docs/tutorial.md")


@pytest.mark.research
def test_every_block_of_the_readme_runs_and_the_mark_is_found(follow: Callable[[str], None], tmp_path: Path) -> None:
    """A CNN of 151,072 carriers, five members, 30 rounds, with the strength that the plan proposes."""
    follow("README.md")
    certificate = qm.Certificate.from_bytes((tmp_path / "certificate.json").read_bytes())
    assert certificate.finding.verdict == "PASSED"
    assert float(certificate.finding.z) >= 12
    assert len(certificate.signatures) == 4


def test_the_readme_is_short_and_takes_few_commands(root: Path) -> None:
    page = (root / "README.md").read_text(encoding="utf-8")
    assert page.count("\n") <= 150
    counts = written_out(page)
    assert counts.total() == 25 <= 26  # as it says
    assert f"That is {counts.total()} commands" in page
    assert max(count for name, count in counts.items() if name) <= 5


def test_what_the_readme_claims_of_its_path_was_measured_as_it_is_printed(root: Path) -> None:
    """Five seeds: PASSED with z ≥ 12 each time, at most 26 commands, at most five for a member, and the mean accuracy
    within half a point of plain FedAvg's, or twice its standard error."""
    rows = json.loads((root / "benchmarks/results/readme.json").read_text())["rows"]
    assert not [row["commit"] for row in rows if row["commit"].endswith("+")], "measured with changes that nobody has"
    holds(rows, (root / "README.md").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.research
def test_the_page_holds_with_five_seeds() -> None:
    """The page itself, read and run anew by the function that fills the file."""
    pytest.importorskip("sklearn")
    from benchmarks import readme

    page = (Path(readme.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    holds([readme.measured(seed) for seed in readme.SEEDS], page)


def holds(rows: list[dict[str, Any]], page: str) -> None:
    assert [row["seed"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["verdict"] == "PASSED" and row["z"] >= 12 for row in rows)
    assert {row["commands"] for row in rows} == {written_out(page).total()}
    assert max(row["commands"] for row in rows) <= 26
    assert max(row["most_commands"] for row in rows) <= 5
    cost = [row["accuracy"] - row["plain_accuracy"] for row in rows]
    assert abs(statistics.fmean(cost)) < max(0.005, 2 * statistics.stdev(cost) / len(cost) ** 0.5)
    expected, z = (statistics.fmean(row[name] for row in rows) for name in ("expected_z", "z"))
    assert abs(expected - z) < max(0.1 * z, 2)


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
    assert run_page(good, tmp_path, environment)["blocks"] == 4
    for right, wrong in (("hello 4", "bye 4"), ("z is 19.5", "z was 19.5"), ("  # exits with 1", ""), ("x = 2", "")):
        assert right in good
        with pytest.raises((AssertionError, NameError)):
            run_page(good.replace(right, wrong), tmp_path, environment)
    with pytest.raises(AssertionError):
        run_page(good.replace("<!-- not run: it has no end -->\n", ""), tmp_path, environment)


def test_commands_are_read_with_what_they_print() -> None:
    text = "$ one --a \\\n    --b\nsays\nthis\n$ two  # exits with 2\n"
    assert list(commands_of(text)) == [("one --a \\\n    --b", 0, ["says", "this"]), ("two", 2, [])]
