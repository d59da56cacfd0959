"""Results name the commit of the code that made them: it is in the history, or in a list with the reason."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quorumark.research.lab.results import LOST_COMMITS

ROOT = Path(__file__).parents[2]


def named(value: Any) -> Iterator[str]:
    """All entries `commit` of a JSON value."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if key == "commit" and isinstance(entry, str):
                yield entry
            else:
                yield from named(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from named(entry)


def git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def in_history(commits: set[str]) -> set[str]:
    """Those that are ancestors of what is checked out, by any length of their names."""
    every = git("rev-list", "HEAD").splitlines()
    return {commit for commit in commits if any(one.startswith(commit.removesuffix("+")) for one in every)}


@pytest.fixture(scope="module")
def results() -> dict[str, set[str]]:
    """Commits, and the files that name them."""
    found: dict[str, set[str]] = {}
    for folder in ("results", "benchmarks/results"):
        for path in sorted((ROOT / folder).rglob("*.json")):
            for commit in named(json.loads(path.read_text())):
                found.setdefault(commit, set()).add(path.name)
    return found


def test_every_commit_of_a_result_is_in_the_history_or_in_the_list(results: dict[str, set[str]]) -> None:
    assert len(results) > 20
    assert set(LOST_COMMITS) <= set(results)  # nothing is in the list for no reason
    if git("rev-parse", "--show-toplevel") != str(ROOT) or git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs the repository with its whole history")
    here = in_history(set(results))
    assert {commit: results[commit] for commit in set(results) - here - set(LOST_COMMITS)} == {}
    assert not here & set(LOST_COMMITS)  # a commit that is found again leaves the list
    assert in_history(set(LOST_COMMITS.values())) == set(LOST_COMMITS.values())
    assert in_history({"0" * 40, "zzzzzzz"}) == set()


def test_the_page_says_what_lost_commits_mean() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    for commit, near in LOST_COMMITS.items():
        assert f"{commit[:12]} (in {near})" in page
