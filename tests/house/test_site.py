"""The documentation as a site: it builds without a warning, and a reader's browser asks nobody else for anything."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer.main

import quorumark
from quorumark.cli import app


@pytest.fixture(scope="module")
def pages(root: Path) -> dict[str, Any]:
    return runpy.run_path(str(root / "docs" / "site" / "pages.py"))


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    pytest.importorskip("zensical", reason="the site needs the extra `docs`")
    out = tmp_path_factory.mktemp("docs")
    subprocess.run([sys.executable, root / "docs" / "site" / "pages.py", out], check=True)
    zensical = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(out / "zensical.toml")]
    done = subprocess.run(zensical, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / "site"


class _Resources(HTMLParser):
    """What a browser loads with a page, without a click: addresses of scripts, styles, pictures, fonts, frames."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "a":
            self.found |= {value for name, value in attrs if name in ("src", "href", "data", "srcset") and value}


def _from_elsewhere(text: str) -> set[str]:
    styles = re.findall(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')]+)", text)
    return {a for a in _Resources(text).found | set(styles) if re.match("(https?:)?//", a)}


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    files = [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]
    assert {file.name for file in files} > {"index.html", "cli.html", "api.html", "style.css"}
    drawn = {"http://www.w3.org/1999/xlink"}  # namespaces are names; no browser loads them
    assert {f.name: a for f in files if (a := _from_elsewhere(f.read_text(encoding="utf-8")) - drawn)} == {}


def test_what_is_loaded_from_elsewhere_would_be_noticed() -> None:
    assert _from_elsewhere('<script src="https://a.example/b.js"></script>') == {"https://a.example/b.js"}
    assert _from_elsewhere('<link rel="stylesheet" href="//a.example/c.css">') == {"//a.example/c.css"}
    assert _from_elsewhere("@font-face { src: url('https://a.example/f.woff2') }") == {"https://a.example/f.woff2"}
    assert _from_elsewhere('<a href="https://a.example">a link is no resource</a><img src="figures/d.svg">') == set()


def test_every_page_is_in_the_navigation(root: Path, pages: dict[str, Any]) -> None:
    nav = tomllib.loads((root / "docs" / "site" / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    listed = [page for entry in nav for part in entry.values() for page in ([part] if isinstance(part, str) else part)]
    names = [page if isinstance(page, str) else next(iter(page.values())) for page in listed]
    assert len(names) == len(set(names))
    assert set(names) - set(pages["sources"]().values()) == {
        "cli.md",
        "api.md",
        "api-flower.md",
        "api-nvflare.md",
        "api-errors.md",
    }
    assert set(pages["sources"]().values()) <= set(names)


def test_links_follow_their_pages(pages: dict[str, Any]) -> None:
    names = pages["sources"]()
    assert pages["moved"]("[a](docs/flower.md#diff)", "README.md", names) == "[a](flower.md#diff)"
    assert pages["moved"]("[a](../README.md)", "docs/flower.md", names) == "[a](index.md)"
    assert pages["moved"]("![a](docs/figures/lab-rivals.svg)", "README.md", names) == "![a](figures/lab-rivals.svg)"
    assert pages["moved"]("[flower.md](flower.md), docs/lora.md", "docs/deploy.md", names) == (
        "[Flower](flower.md), [LoRA adapters](lora.md)"
    )
    assert pages["moved"]("[docs/lora.md](docs/lora.md)", "README.md", names) == "[LoRA adapters](lora.md)"
    assert pages["moved"]("`docs/lora.md`", "docs/deploy.md", names) == "`docs/lora.md`"
    assert pages["moved"]("[`a` page](docs/lora.md)", "README.md", names) == "[`a` page](lora.md)"
    assert pages["moved"]("see [the file](LICENSE)", "README.md", names) == "see the file"
    assert pages["moved"]("```\n[a](docs/none.md)\n```", "README.md", names) == "```\n[a](docs/none.md)\n```"
    with pytest.raises(SystemExit, match=re.escape("docs/none.md")):
        pages["moved"]("[a](docs/none.md)", "README.md", names)


def test_the_references_have_every_command_and_every_name(pages: dict[str, Any]) -> None:
    titles, *parts = re.split(r"^#+ (.*)$", pages["cli_page"](), flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    for _, name, command in pages["commands"](typer.main.get_command(app), "quorumark", 1):
        if name != "quorumark":
            section = sections.pop(name.removeprefix("quorumark "))
            assert all(f"`{p.opts[0]}" in section for p in command.params if p.opts[0].startswith("--")), name
    assert (titles, list(sections)) == ("", ["Command line"])
    names = re.findall(r"^::: quorumark\.(\w+)$", pages["api_page"](), re.MULTILINE)
    assert sorted(names) == sorted(quorumark.__all__)


def test_the_reference_shows_what_docstrings_say(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in quorumark.__all__:
        assert f'id="quorumark.{name}"' in page
    assert "secagg.html" in page, "a page that a docstring names is a link"
    assert 'id="quorumark.flower.watermarked"' in (site / "api-flower.html").read_text(encoding="utf-8")
