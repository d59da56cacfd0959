"""A page's code blocks, run as a reader would run them: in order, in one folder, in one Python session.

| in the page | here |
|---|---|
| ```` ```python ```` | run; a ```` ```text ```` block right after it is what it prints |
| ```` ```python title="digits.py" ```` | saved under that name |
| ```` ```console ```` | lines after `$ ` are run by bash (`\\` at the end goes on), the others are its output |
| `<!-- not run: why -->` before a block | left out |

Words must agree, figures need not: they differ from machine to machine. `…` in what is printed stands for anything.
Lines that the page leaves out are not missed. A command must exit with 0, or with N after `# exits with N`.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(
    r'(?P<skip><!-- not run: [^>]+ -->\n+)?^```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_EXIT = re.compile(r"\s+# exits with (\d)$")


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    title: str
    skipped: bool
    line: int


def blocks_of(page: str) -> list[Block]:
    return [
        Block(m["kind"], m["text"], m["title"] or "", bool(m["skip"]), page[: m.start("kind")].count("\n") + 1)
        for m in _FENCE.finditer(page)
    ]


def run_page(page: str, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs every block in the folder, which must be the working directory. Gives what Python has in the end; `blocks`
    says how many there were."""
    session: dict[str, Any] = {"__name__": "__main__"}
    printed, ran = "", 0
    for block in blocks_of(page):
        where = f"line {block.line}"
        if block.skipped:
            continue
        if block.kind == "text":
            assert_prints(block.text.splitlines(), printed, where)
        elif block.kind == "python" and block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.text, f"<the page, {where}>", "exec"), session)  # noqa: S102 (our own pages)
            printed = out.getvalue()
        elif block.kind == "console":
            for command, code, expected in commands_of(block.text):
                done = subprocess.run(
                    ["bash", "-c", command],
                    cwd=folder, env=dict(environment), capture_output=True, text=True, timeout=300, check=False,
                )  # fmt: skip
                assert done.returncode == code, f"{where}: {command}\n{done.stdout}{done.stderr}"
                assert_prints(expected, done.stdout + done.stderr, f"{where}: {command}")
        ran += 1
    return {**session, "blocks": ran}


def commands_of(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """The commands of a console block: each with its exit code and the lines that the page shows of its output."""
    assert text.startswith("$ "), f"a console block begins with a command, not with {text.splitlines()[0]!r}"
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        length = next(i for i, line in enumerate(lines, 1) if not line.endswith("\\"))
        command = "\n".join(lines[:length])
        code = _EXIT.search(command)
        yield _EXIT.sub("", command), int(code[1]) if code else 0, lines[length:]


def written_out(page: str) -> Counter[str]:
    """How many commands of this project a page has for each member; for nobody in particular under an empty name."""
    counts: Counter[str] = Counter()
    for block in blocks_of(page):
        for command, _, _ in commands_of(block.text) if block.kind == "console" and not block.skipped else ():
            every = re.search(r"for name in ([A-Z a-z]+);", command)
            own = re.findall(r"--home (?!\$)(\w+)", command)
            for name in every[1].split() if every else own or [""]:
                counts[name] += command.count("quorumark ")
    return counts


def assert_prints(expected: list[str], printed: str, where: str) -> None:
    """Every line that the page shows is printed, in this order."""
    lines = iter(_words(printed).splitlines())
    for line in filter(None, map(str.strip, expected)):
        pattern = ".*".join(re.escape(part) for part in _words(line).split("…"))
        if not any(re.fullmatch(pattern, told.strip()) for told in lines):
            raise AssertionError(f"{where}: the page shows {line!r}; what was printed:\n{printed}")


def _words(text: str) -> str:
    """The text with figures as #, and one space between words."""
    return re.sub(r"[ \t]+", " ", re.sub(r"[-−]?\d[\d,.]*(?<=\d)", "#", text))
