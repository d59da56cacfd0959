"""The command line: thin. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import io
import sys
from typing import Any

import typer
import typer.core

from quorumark import __version__
from quorumark.cli import (
    attack,
    bench,
    calibrate,
    consortium,
    demo,
    doctor,
    groups,
    key,
    lab,
    layout,
    member,
    new,
    public,
    room,
    setup,
    share,
    stamp,
    trial,
    verify,
)
from quorumark.errors import InconclusiveError, QuorumarkError

# help is plain text here; where rich is installed typer escapes brackets for it all the same: \\[required]
typer.core.HAS_RICH = False


class _InOrder(typer.core.TyperGroup):
    """Commands in the order in which a newcomer meets them: typer has groups after single commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return [*ORDER, *(name for name in names if name not in ORDER)]


ORDER = (
    "demo",
    "try",
    "new",
    "doctor",
    "member",
    "consortium",
    "setup",
    "share",
    "public",
    "verify",
    "room",
    "stamp",
    "key",
    "layout",
    "groups",
)

app = typer.Typer(
    cls=_InOrder,
    context_settings={"max_content_width": 110},  # on terminals that are so wide, what commands do is not cut
    help="Shared, provable ownership of a jointly trained model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"quorumark {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_version, is_eager=True),
) -> None: ...


app.add_typer(member.app, name="member")
app.add_typer(consortium.app, name="consortium", short_help="What members agree on: terms, manifest, amendments.")
app.add_typer(setup.app, name="setup")
app.add_typer(share.app, name="share")
app.add_typer(key.app, name="key")
app.add_typer(verify.app, name="verify", short_help="Is this model ours? Query, answers, certificate, audit.")
app.add_typer(room.app, name="room", short_help="Where members meet: a server, and an agent beside your keys.")
app.add_typer(stamp.app, name="stamp", short_help="When did it exist? Time stamps for manifests and certificates.")
app.command("public", short_help="Make the folder that anybody needs who verifies.")(public.public)
app.command("calibrate", short_help="Measure the null: z of models under random keys.")(calibrate.calibrate)
app.command("demo", short_help="Five hospitals train one model; three prove that it is theirs.")(demo.demo)
app.command("doctor", short_help="Is this machine fit for it, and this member's home in order?")(doctor.doctor)
app.command("try", short_help="Does it work for your model? One file, one answer.")(trial.try_file)
app.command("new", short_help="Write a small Flower or FLARE app with the mark, to begin with.")(new.new)
app.command("layout", short_help="Show which weights of a model would carry a mark.")(layout.layout)
app.command("groups", short_help="Find which channels of a model belong together.")(groups.groups)
app.add_typer(attack.app, name="attack", short_help="How hard is the mark to remove? Research only.")
app.add_typer(bench.app, name="bench", short_help="Benchmarks: ratios to the alternatives.")
app.add_typer(lab.app, name="lab")


def main() -> None:
    """Runs a command; an error of ours, or of the operating system, becomes one sentence and exit code 2.

    What does not fit of a suspect that cannot be tested follows, a line each.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows only ASCII shows ? for a box character
    try:
        app()
    except QuorumarkError as error:
        typer.echo(f"quorumark: {error}", err=True)
        if isinstance(error, InconclusiveError) and error.problems:
            from quorumark.report.texts import sentences

            for text in sentences(error.problems):
                typer.echo(f"- {text}", err=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be read: none of it is a fault of the program
        where = "" if error.filename is None else f"{str(error.filename)!r}: "
        typer.echo(f"quorumark: {where}{error.strerror or error}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as ended:  # typer makes the first into the second, and says nothing
        if isinstance(ended, SystemExit) and ended.code != 130:
            raise
        typer.echo("quorumark: interrupted", err=True)
        sys.exit(130)
