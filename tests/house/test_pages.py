"""Pages that repeat what the code or a measurement says, held to it."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import click
import pytest
import typer.main

from quorumark.cli import app
from quorumark.consortium.policy import Policy
from quorumark.consortium.strength import Strength

RULES = {"rho": {}, "target": {"z": "6"}, "relative": {"c": "0.01"}, "paper": {"c": "0.01"}}


def _rows(root: Path, page: str, section: str) -> list[list[str]]:
    """The first table of a section, without its head."""
    text = (root / "docs" / page).read_text(encoding="utf-8")
    lines = text.split(f"\n## {section}\n")[1].split("\n## ")[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[2:]]


def test_the_page_of_settings_has_every_policy_with_its_default(root: Path) -> None:
    agreed = Policy().as_dict()
    rows = {row[0].strip("`"): row[1] for row in _rows(root, "settings.md", "Policy")}
    assert set(rows) == {field.name for field in fields(Policy)}
    assert {name: rows[name] for name in agreed} == agreed
    assert all(re.match("none|by the size", default) for name, default in rows.items() if name not in agreed)


def test_the_page_of_settings_has_every_setting_of_strength_with_its_default(root: Path) -> None:
    told: dict[str, dict[str, str]] = {rule: {"rule": rule} for rule in RULES}
    for name, rules, default, _ in _rows(root, "settings.md", "Strength"):
        for rule in RULES if rules == "all" else filter(None, rules.split(", ")):
            told[rule][name.strip("`")] = default
    for rule, needed in RULES.items():
        settings = Strength.of({"rule": rule, **needed}, coordinates=10**6).as_dict()
        assert told[rule] | needed == settings, rule
        assert all(told[rule][name].startswith("none") for name in needed)


@pytest.mark.parametrize("rule", RULES)
def test_the_page_of_strength_has_the_defaults_of_every_rule(root: Path, rule: str) -> None:
    settings = Strength.of({"rule": rule, **RULES[rule]}, coordinates=10**6).as_dict()
    row = next(row for row in _rows(root, "strength.md", "Rules") if row[0].startswith(f"`{rule}`"))
    for name, default in re.findall(r"`(\w+)` \(([^),]+)", row[2]):
        assert settings[name] == default, (rule, name)


def test_the_figures_among_the_answers_are_the_measured_ones(root: Path) -> None:
    text = " ".join((root / "docs" / "faq.md").read_text(encoding="utf-8").split())
    results = root / "benchmarks" / "results"
    setup = next(r for r in json.loads((results / "dkg.json").read_text()) if r["name"].endswith("(32,16)"))
    assert f"each member computes for {setup['seconds']:.1f} s" in text
    assert f"receives {setup['elements_per_member']:.2f} numbers for each carrier" in text
    rows = {(row["name"], row["threads"]): row for row in json.loads((results / "verify.json").read_text())}
    verify = rows["verify partial, the whole command", 2]
    assert f"`verify partial` takes {verify['seconds']:.1f} s on two cores" in text


def _named(text: str) -> list[tuple[str, str]]:
    """Sections that a text names: (page, section) of [page.md](page.md), "Section" and of docs/page.md, "Section"."""
    flat = " ".join(line.strip().removeprefix("# ") for line in text.splitlines())
    return re.findall(r'(?:\]\((?:docs/)?|\bdocs/)([a-z-]+)\.md\)?, "([^"]+?)[,.]?"', flat)


def test_sections_that_are_named_are_there(root: Path) -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (root / "docs").glob("*.md")}
    begins = {name: re.findall(r"(?:^#+ |\*\*)([^\n*]+)", text, re.MULTILINE) for name, text in pages.items()}
    texts = {f"docs/{name}.md": text for name, text in pages.items()}
    for path in [*root.glob("*.md"), *(root / "src").rglob("*.py"), *(root / "tests").rglob("*.py")]:
        texts[str(path.relative_to(root))] = path.read_text(encoding="utf-8")
    named = {(where, page, section) for where, text in texts.items() for page, section in _named(text)}
    assert len(named) > 50
    lost = {n for n in named if n[1] in begins and not any(title.startswith(n[2]) for title in begins[n[1]])}
    assert lost == set()


def test_a_section_that_is_not_there_would_be_noticed() -> None:
    assert _named('see [lora.md](lora.md), "Limits"; docs/format.md,\n    # "Nothing of\n# the kind".') == [
        ("lora", "Limits"),
        ("format", "Nothing of the kind"),
    ]


def _commands(text: str) -> list[str]:
    """Commands of ours that a page shows: in console blocks, with what follows a backslash, and in `code`."""
    shown = re.findall(r"^\$ (quorumark .*(?:(?<=\\)\n.*)*)", text, re.MULTILINE)
    return [re.sub(r"\s+#.*|\\\n", " ", command) for command in shown + re.findall(r"`(quorumark [a-z][^`]*)`", text)]


def _unknown(line: str) -> list[str]:
    """What the command line does not know: words that are no command, options that the command does not have."""
    command: click.Command = typer.main.get_command(app)
    words = line.split()[1:]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return [words[0]]
        command = command.commands[words.pop(0)]
    options = {"--help", *(option for parameter in command.params for option in parameter.opts)}
    given = re.findall(r"(?<!\S)\[?(--[a-z-]+)", " ".join(words))
    return [option for option in given if option not in options]


def test_commands_that_pages_show_are_there(root: Path) -> None:
    pages = [*(root / "docs").glob("*.md"), *(root / "examples").glob("*/README.md"), root / "README.md"]
    shown = {(page.name, line) for page in pages for line in _commands(page.read_text(encoding="utf-8"))}
    assert len(shown) > 60
    assert {(name, line, tuple(unknown)) for name, line in shown if (unknown := _unknown(line))} == set()


def test_a_command_that_is_not_there_would_be_noticed() -> None:
    assert _commands(
        "`quorumark setup dkg`\n```console\n$ quorumark verify sign a.json \\\n    --home x  # each\n```"
    ) == [
        "quorumark verify sign a.json      --home x ",
        "quorumark setup dkg",
    ]
    assert _unknown("quorumark setup dkg --terms a --folder b") == []
    assert _unknown("quorumark setup dgk --terms a") == ["dgk"]
    assert _unknown("quorumark setup dkg --term a") == ["--term"]
