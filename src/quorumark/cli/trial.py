"""`quorumark try`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def try_file(
    file: Annotated[Path | None, typer.Argument(help="Your file, with make(), data() and train().")] = None,
    template: Annotated[
        str | None, typer.Option(help="Print a file to begin with, and do nothing else: images, tables or text.")
    ] = None,
    members: Annotated[int, typer.Option(help="How many members train.")] = 5,
    threshold: Annotated[
        int | None, typer.Option(help="t: how many it takes to prove ownership.", show_default="more than half")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How many rounds they train.")] = 30,
    seed: Annotated[int, typer.Option(help="Of initial weights, training and attacks; keys are never seeded.")] = 0,
    strength: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, like rho=0.1 (docs/strength.md); may be repeated. The rest is planned."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder to keep the consortium, the certificate and the report in.")
    ] = None,
) -> None:
    """Does the mark work for your model? Train it with and without, verify it, attack it, and say so.

    Your file has make() (a torch module), data(member, members) and train(weights, data); evaluate(weights) says how
    good a model is. `quorumark try --template images > my.py` is one to begin with. It runs with your rights.

    Exits with 0 if it works, 1 if something must change, 2 if the file or an option is wrong.
    """
    from quorumark.errors import InputError

    if (file is None) == (template is None):
        raise InputError("FILE, --template", "must be exactly one of the two", "neither" if file is None else "both")
    from quorumark import trial

    if file is None:
        assert template is not None  # noqa: S101
        typer.echo(trial.template(template), nl=False)
        return
    from quorumark.cli.console import make_console
    from quorumark.cli.consortium import _pairs

    options = trial.Options(members, threshold, rounds, seed, _pairs("--strength", strength))
    found = trial.try_file(file, options, make_console(), out)
    raise typer.Exit(0 if found.works else 1)
