"""Collects the pages of the site in a folder, from which Zensical builds it (`make docs`).

Pages are written once, where people read them in the repository, and link to each other as files. Here they are copied
into one flat folder, and links follow: README.md becomes the first page, and a link to a file that is no page becomes
plain text. The references of the command line and of Python are made from the code, so they cannot fall behind it.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import typer.main

import quorumark
from quorumark.cli import app

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent

OTHERS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/flower-quickstart/README.md": "example-quickstart.md",
    "examples/flower-hospitals/README.md": "example-hospitals.md",
    "examples/nvflare-quickstart/README.md": "example-nvflare.md",
}
"""Pages that are not in docs/, and their names on the site."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"(`[^`\n]+`)|\bdocs/([a-z-]+\.md)\b")  # code first: it stays


def sources() -> dict[str, str]:
    """Every written page: its path in the repository, and its name on the site."""
    return OTHERS | {f"docs/{page.name}": page.name for page in sorted((ROOT / "docs").glob("*.md"))}


def title(path: str) -> str:
    """A page's heading."""
    return (ROOT / path).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def moved(text: str, path: str, names: dict[str, str]) -> str:
    """A page's text with its links as they are on the site; code stays as it is.

    Where a file's name stands for a page, [flower.md](flower.md) or docs/flower.md, the site shows the page's title.
    """
    here = posixpath.dirname(path)

    def link(found: re.Match[str]) -> str:
        picture, words, target, anchor = found.groups()
        full = posixpath.normpath(posixpath.join(here, target))
        if full in names:
            words = title(full) if words in (target, posixpath.basename(full)) else words
            return f"{picture}[{words}]({names[full]}{anchor or ''})"
        if full.startswith("docs/figures/"):
            return f"{picture}[{words}]({full.removeprefix('docs/')})"
        if not (ROOT / full).exists():
            raise SystemExit(f"{path} links to {target}, which is not there")
        return words

    def page(found: re.Match[str]) -> str:
        return f"[{title(found[0])}]({found[2]})" if found[0] in names else found[0]

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _NAMED.sub(page, _LINK.sub(link, part)) for part in parts)


def cli_page() -> str:
    """Every command with its arguments and options, in the words of its --help."""
    lines = ["# Command line", "", "What `quorumark --help` and the `--help` of every command say.", ""]
    for depth, name, command in commands(typer.main.get_command(app), "quorumark", 1):
        if depth > 1:
            lines += [f"{'#' * min(depth, 4)} {name.removeprefix('quorumark ')}", "", _plain(command.help or ""), ""]
        if not isinstance(command, click.Group):
            context = click.Context(command, info_name=name)
            lines += ["```text", " ".join([name, *command.collect_usage_pieces(context)]), "```", ""]
            for parameter in command.get_params(context):
                record = parameter.get_help_record(context)
                if record and "--help" not in parameter.opts:
                    lines += [f"`{record[0]}`", f":   {_plain(record[1]) or '&nbsp;'}", ""]
    return "\n".join(lines)


def commands(command: click.Command, name: str, depth: int) -> Iterator[tuple[int, str, click.Command]]:
    """A command and those below it: depth, whole name, command."""
    yield depth, name, command
    if isinstance(command, click.Group):
        for word in command.list_commands(click.Context(command)):
            yield from commands(command.commands[word], f"{name} {word}", depth + 1)


def _plain(text: str) -> str:
    """Help text as Markdown: signs that mean something to Markdown mean themselves, outside `code`."""
    parts = re.split(r"(`[^`]*`)", text.replace("\b\n", ""))
    return "".join(p if p.startswith("`") else re.sub(r"([*_<>\[\]|])", r"\\\1", p) for p in parts)


def api_page() -> str:
    """The names of the front door; mkdocstrings fills in what their docstrings say."""
    introduction = "`import quorumark as qm` gives these names, each loaded when it is first used."
    names = ("Home", "Terms", "Federation", "Reference", "Certificate", "derive_groups")
    if set(names) != set(quorumark.__all__):
        raise SystemExit("the front door has other names than the reference lists: mend api_page")
    return "\n\n".join(["# Python: `quorumark`", introduction, *(f"::: quorumark.{name}" for name in names)]) + "\n"


def write(out: Path) -> None:
    """Makes the folder anew: zensical.toml, and everything that it builds from."""
    pages = out / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "figures", pages / "figures")
    names = sources()
    texts = {name: moved((ROOT / path).read_text(encoding="utf-8"), path, names) for path, name in names.items()}
    made = {
        "cli.md": cli_page(),
        "api.md": api_page(),
        "api-flower.md": "# Python: `quorumark.flower`\n\n::: quorumark.flower\n",
        "api-nvflare.md": "# Python: `quorumark.nvflare`\n\n::: quorumark.nvflare\n",
        "api-errors.md": "# Python: `quorumark.errors`\n\n::: quorumark.errors\n",
    }
    for name, text in (texts | made).items():
        (pages / name).write_text(text, encoding="utf-8")
    shutil.copy(SITE / "style.css", pages / "style.css")
    settings = (SITE / "zensical.toml").read_text(encoding="utf-8")
    for here in (ROOT / "src", SITE / "links.py"):  # what it reads where it lies
        settings = settings.replace(f'["{here.name}"]', f'["{here.as_posix()}"]')
    (out / "zensical.toml").write_text(settings, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Collects the pages of the site in a folder.")
    parser.add_argument("out", type=Path, help="The folder to write: zensical.toml and pages/.")
    write(parser.parse_args().out)
