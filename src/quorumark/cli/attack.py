"""`quorumark attack …`: how hard is it to remove? For models whose key may be known: demos and experiments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quorumark.research.attacks.plan import Plan
    from quorumark.research.attacks.suite import Subject

app = typer.Typer(
    help="How hard is the mark to remove? Attacks on a model whose key was put together for it: research only.",
    no_args_is_help=True,
)

Out = Annotated[Path, typer.Option(help="The folder for results.csv, the figures and index.html; goes on if begun.")]
Figures = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw the figures too (needs the extra `report`).")]


@app.command("run")
def run(
    plan: Annotated[Path, typer.Argument(help="A TOML file with [[attack]] entries and a [target].")],
    out: Out,
    plot: Figures = True,
) -> None:
    """Run a plan of attacks on a model of your own. Rows that results.csv has already are not run again."""
    from quorumark.research.attacks.plan import read_plan
    from quorumark.research.attacks.suite import read_subject

    read = read_plan(plan)
    _run(read_subject(read), read, out, plot)


@app.command("suite")
def suite(
    demo: Annotated[Path, typer.Argument(help="The folder that `quorumark demo --out` left.")],
    out: Out,
    quick: Annotated[bool, typer.Option("--quick", help="Small budgets: minutes instead of hours.")] = False,
    plan: Annotated[Path | None, typer.Option(help="A plan of your own, without a [target].")] = None,
    plot: Figures = True,
) -> None:
    """Run every attack on the demo's model: with the paper's settings, or quickly with small budgets."""
    from quorumark.errors import InputError
    from quorumark.research.attacks.demo import subject
    from quorumark.research.attacks.plan import read_plan

    if quick and plan is not None:
        raise InputError("--quick and --plan", "exclude each other")
    _run(subject(demo), read_plan(plan or ("quick" if quick else "paper")), out, plot)


@app.command("plot")
def plot_results(
    out: Annotated[Path, typer.Argument(help="The folder of a suite, with results.csv.")],
) -> None:
    """Draw the figures and the page again, from results.csv."""
    from quorumark.research.attacks.suite import read_results
    from quorumark.research.page import write_report

    title, threshold, rows = read_results(out)
    written = write_report(out, title, rows, threshold)
    typer.echo(f"{len(rows)} rows; written: {', '.join(path.name for path in written)}")


def _run(subject: Subject, plan: Plan, out: Path, plot: bool) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from quorumark.cli.console import make_console
    from quorumark.research.attacks.suite import run as run_plan
    from quorumark.research.page import write_report

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = make_console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("attacks", total=None)

        def note(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name[:50])
            if not console.is_terminal:  # it may take hours: a log says how far it is
                typer.echo(f"{done} of {total}: {name}", err=True)

        rows, failed = run_plan(subject, plan, out, note)
    original = rows[0]
    weakest = min((row for row in rows if row.best is not None), key=lambda row: row.best or 0.0)
    typer.echo(
        f"{len(rows) - 1} attacked models in {out / 'results.csv'}\n"
        f"as released: accuracy {100 * original.accuracy:.1f} %, z = {original.best or 0.0:.1f}; the least z is "
        f"{weakest.best:.1f}, by {weakest.attack} at accuracy {100 * weakest.accuracy:.1f} %"
    )
    for text in failed:
        typer.echo(f"could not be run: {text}", err=True)
    if plot:
        written = write_report(out, subject.title, rows, subject.threshold)
        typer.echo(f"look at {written[0]}")
