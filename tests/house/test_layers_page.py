"""docs/layers.md, "Blocks" and "What escapes": its tables are what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quorumark.research.lab.attacked import KNOWING, read_attacked
from quorumark.research.rows import LEAST_LOG10, ORIGINAL, Row


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


def _named_in_layers(row: Row) -> str:
    """An attack as docs/layers.md names it."""
    given = row.settings
    who = str(given.get("estimate", "")) + (f" of {given['coalition']} members" if "coalition" in given else "")
    weights, amounts = given.get("weights", "even"), "an oracle's" if given.get("amounts") == "oracle" else "expected"
    name = {
        ORIGINAL: "as released",
        "adaptive-fine-tuning": f"adaptive, {who}",
        "adaptive-by-part": f"by {given.get('by')}{'' if weights == 'even' else f', {weights} weights'}, {who}",
        "removal": f"removal, {who}, {amounts} amounts",
    }.get(row.attack, row.attack)
    return name + (f", after {given['epoch']} epochs" if "epoch" in given else "")


def test_the_docs_table_by_layers_is_what_was_measured(root: Path) -> None:
    """docs/layers.md, "What escapes": each row, and what its prose, README and measured.md say of them."""
    found = read_attacked(root / "results" / "attacks")["cifar100-resnet18-k32-iid-rho0.05-s3"]
    page = (root / "docs" / "layers.md").read_text()
    section = page.split("**On a ResNet-18**")[1].split("**On small models**")[0]
    rates = {1e-3: "10⁻³", 3e-4: "3·10⁻⁴", 1e-4: "10⁻⁴"}
    measured = set()
    for row in found.rows:
        if row.log10_q is None or row.best is None or row.settings.get("alpha", 0.7) not in (0.7, 0.9):
            continue
        rate = "" if row.attack in (ORIGINAL, "distillation") else rates[row.settings.get("lr", 1e-3)]
        bound = f"{row.log10_q:.0f}" if row.log10_q <= -10 else f"{row.log10_q:.1f}"
        by = ["z"] * (row.best >= 6.2) + ["Q"] * (row.log10_q <= LEAST_LOG10)
        cells = (_named_in_layers(row), rate, f"{100 * row.accuracy:.2f} %", f"{row.best:.1f}", f"{row.q:.0f}", bound)
        seen = f"({', '.join(by)})" if found.unsolved(row) else ", ".join(by) or "**none**"
        measured.add((*(cell.replace("-", "−") if i > 2 else cell for i, cell in enumerate(cells)), seen))
    shown = [
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in section.splitlines() if line[:2] == "| "
    ][1:]
    assert len(shown) == 31
    assert set(shown) <= measured
    text, release = " ".join(section.split()), found.original.accuracy
    tested = [row for row in found.rows if row.log10_q is not None and row.attack not in (ORIGINAL, "distillation")]
    unsolved = [row for row in tested if found.unsolved(row)]
    lost_in = {
        (row.settings["estimate"], row.settings.get("coalition", 0), row.settings.get("lr", 1e-3)) for row in unsolved
    }
    diverged = {("regression", 0, 1e-3), ("sum", 0, 1e-3), ("regression", 8, 1e-3), ("sum", 8, 1e-3)}
    assert lost_in == diverged | {("gls", 0, rate) for rate in rates}, "the oracle's amounts that were not found"
    assert f"These are {len(unsolved)} models" in text
    knowing = [row for row in tested if row.attack in KNOWING and row not in unsolved]
    escaped = [row for row in tested if row.escapes]
    assert not any(row in unsolved for row in escaped)
    assert all(row.settings.get("amounts") == "oracle" and row.settings.get("coalition") in (8, 16) for row in escaped)
    assert f"none of the {len(knowing)} models of those who know the test" in text
    best = {c: max((r for r in escaped if r.settings["coalition"] == c), key=lambda r: r.accuracy) for c in (8, 16)}
    lost = {c: 100 * (release - row.accuracy) for c, row in best.items()}
    assert min(lost.values()) > 12
    assert f"at {100 * best[16].accuracy:.1f} % at best: {lost[16]:.1f} points below the release" in text
    assert f"gets there at {100 * best[8].accuracy:.1f} % ({lost[8]:.1f} points below)" in text
    rate, epoch = best[16].settings["lr"], best[16].settings["epoch"]
    plain = next(
        row for row in found.rows
        if row.attack == "fine-tuning" and row.settings == {"fraction": 0.2, "lr": rate, "epoch": epoch}
    )  # fmt: skip
    assert f"at the rate {rates[rate]} after {epoch} epochs, where plain fine-tuning stands at" in text
    assert f"stands at {100 * plain.accuracy:.1f} %" in text
    assert f"all {len(found.rows) - 1} models" in text
    near = [row for row in tested if row not in escaped and abs(row.z or 99.0) < 6.2 and row.accuracy > 0.45]
    assert max(row.log10_q or 0.0 for row in near if row.attack not in ("removal",)) <= -160
    short, readme, attacks = (
        " ".join((root / name).read_text().split()) for name in ("docs/measured.md", "README.md", "docs/attacks.md")
    )
    assert f"of {len(knowing)} models by attackers who know that test, none escaped within twelve points" in short
    assert f"Of {len(unsolved)} more models the oracle's amounts were not found" in short
    words = {13: "thirteen", 16: "sixteen"}
    half, quarter = words[round(lost[16])], words[round(lost[8])]
    assert found.body["settings"]["members"] == 32, "16 are half of them, 8 a quarter"
    assert f"took half of the members, an oracle who knows the key, and {half} points." in readme
    assert f"{half} points below with half of the members, {quarter} with a quarter" in short
    assert f"half of the members for {half} points of accuracy or a quarter for {quarter}" in attacks
    assert "Q is at 10^−160 or further out" in attacks
