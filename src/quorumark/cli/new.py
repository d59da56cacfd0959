"""`quorumark new`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# what an app consists of; examples/ has more beside it: the plain app, and a README that links into the docs
FILES = {
    "flower": (
        ".gitignore",  # Flower packs the app's folder, and leaves out what this names: the members' homes
        "pyproject.toml",
        "prepare",
        "quickstart/__init__.py",
        "quickstart/client_app.py",
        "quickstart/server_app.py",
        "quickstart/task.py",
    ),
    "nvflare": (".gitignore", "prepare", "job.py", "client.py", "net.py"),
}
NEXT = {
    "flower": (
        "./prepare makes five members' homes and their key for a simulation, plans the rounds, and prints the command",
        "is final_model.pt theirs? quorumark verify prepare final_model.pt --manifest consortium/consortium.json",
        "any four answer: quorumark verify partial query.json --suspect final_model.pt --approve \\\n"
        "    --manifest consortium/consortium.json --home consortium/Avon",
        "together: quorumark verify combine query.json partial-*.json --manifest consortium/consortium.json",
        "your own model: change quickstart/task.py, and the example input in prepare",
    ),
    "nvflare": (
        "./prepare makes five members' homes and their key for the simulator; then: python job.py",
        "your own model: change net.py and client.py, and the example input in prepare",
    ),
}


def new(
    engine: Annotated[str, typer.Argument(help="flower or nvflare.")],
    folder: Annotated[Path, typer.Argument(help="A new or empty folder for the app.")],
) -> None:
    """Write a small app with the mark in it, to begin with: the quickstart of Flower or NVIDIA FLARE, ready to run."""
    from importlib import resources

    from quorumark.errors import InputError

    if engine not in FILES:
        raise InputError("ENGINE", "must be flower or nvflare", engine)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("FOLDER", "must be a new or empty folder", str(folder))
    template = resources.files("quorumark").joinpath("templates", engine)
    for name in FILES[engine]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(template.joinpath(*name.split("/")).read_bytes())
    (folder / "prepare").chmod(0o755)
    typer.echo(f"an app for {engine} is in {folder}. Next, there:")
    typer.echo("\n".join(f"  {line}" for line in NEXT[engine]))
