"""docs/layers.md, "Blocks" and "What escapes": its tables of small models are what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def body(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "benchmarks/results/layers-small.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "docs/layers.md").read_text(encoding="utf-8")


def test_the_tables_are_what_was_measured(text: str, body: dict[str, Any]) -> None:
    from benchmarks import layers

    assert layers.page(text, body) == text, "python -m benchmarks.layers --tables"
    row = next(row for row in body["mlp"]["rows"] if row["attack"] == "fine-tuning")
    wrong = json.loads(json.dumps(body))
    wrong["mlp"]["rows"][body["mlp"]["rows"].index(row)]["z"] += 1
    assert layers.page(text, wrong) != text, "another figure is noticed"


def test_every_removal_by_an_oracle_says_whether_its_amounts_were_found(body: dict[str, Any]) -> None:
    for name in ("mlp", "cnn", "gpt2", "demo"):
        for row in body[name]["rows"]:
            by_oracle = row["settings"].get("amounts") == "oracle"
            assert ("left" in row) == by_oracle
            assert row["log10_q"] <= 0
            if by_oracle and row["settings"].get("epochs") == 0 and row["left"] < 1:
                assert abs(row["z"]) < 1, "right after the removal"


def test_what_the_page_says_of_the_demo_and_of_decoys(text: str, body: dict[str, Any]) -> None:
    from benchmarks.layers import escapes

    rows = body["demo"]["rows"]
    released = rows[0]["accuracy"]

    def named(attack: str, **wanted: Any) -> dict[str, Any]:
        return next(r for r in rows if r["attack"] == attack and wanted.items() <= r["settings"].items())

    for how in ("regression", "gls"):
        assert named("adaptive-fine-tuning", estimate=how)["z"] < 0
        assert not escapes(named("adaptive-fine-tuning", estimate=how))
    outsider = named("removal", estimate="gls", amounts="expected", epochs=20)
    by_oracle = named("removal", estimate="regression", amounts="oracle", epochs=20)
    assert escapes(outsider)
    assert escapes(by_oracle)
    assert 100 * (released - outsider["accuracy"]) < 1 < 100 * (released - by_oracle["accuracy"]) <= 2.01
    assert "escapes for less than a point of accuracy, with no oracle" in " ".join(text.split())
    assert not any(escapes(row) for row in rows if row["attack"].split(" ")[0] in ("padding", "splitting", "merging"))
    assert not any(escapes(row) for row in rows if row["attack"] == "averaging")
    decoys, noisy = named("decoys"), named("decoys + noise")
    for row in (decoys, noisy, named("decoys + noise + compacted")):
        assert escapes(row)
        assert row["accuracy"] == released
        assert row["surplus"] == 704
    undone = named("decoys + compacted")
    assert (undone["z"], undone["accuracy"], undone["surplus"]) == (rows[0]["z"], released, 0)


def test_the_page_says_whether_the_stored_benchmark_has_its_row(root: Path, text: str) -> None:
    rows = json.loads((root / "benchmarks/results/verify.json").read_text(encoding="utf-8"))
    found = [row for row in rows if row["name"] == "a partial by layers, CPU time"]
    if found:
        assert f"takes {found[0]['ratio']:.2f} times the CPU time of its plain one" in " ".join(text.split())
    assert ("`benchmarks/results/verify.json` is older and lacks it" in " ".join(text.split())) == (not found)
