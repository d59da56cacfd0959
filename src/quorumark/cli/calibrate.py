"""`quorumark calibrate`"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from quorumark.cli.options import Json


def calibrate(
    models: Annotated[list[Path], typer.Argument(help="Models of the layout, trained without any mark.")],
    layout: Annotated[Path, typer.Option(help="layout.json")],
    anchor: Annotated[Path, typer.Option(help="The public anchor model.")],
    keys: Annotated[int, typer.Option(min=10, help="Random keys for each model.")] = 2000,
    seed: Annotated[int | None, typer.Option(help="To repeat a run; by default from the operating system.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the figure, as SVG (needs the extra `report`).")] = None,
    json: Json = False,
) -> None:
    """Measure the null: z of models under random keys, against the standard normal that the theory says it is."""
    from rich.progress import Progress

    from quorumark.cli.console import make_console
    from quorumark.consortium.home import read_as
    from quorumark.errors import InputError, LayoutError
    from quorumark.model.layout import ModelLayout
    from quorumark.model.statistic import canonical_form
    from quorumark.model.suspect import match_layout, read_suspect
    from quorumark.report.texts import sentence
    from quorumark.verify.calibration import calibrate as run

    shape = read_as(layout, "a layout", ModelLayout.from_bytes)
    reference = read_suspect(anchor)
    forms = []
    for path in models:
        suspect = read_suspect(path)
        match = match_layout(suspect, shape)
        if not match.fits:
            raise LayoutError(f"{str(path)!r} does not fit the layout: {sentence(match.problems[0])}")
        form = canonical_form("balanced-anchor/v1", shape, suspect, reference, match.names)
        if not form.x.any():
            raise InputError("MODELS", "must be trained from the anchor, not be the anchor itself", str(path))
        forms.append(form)
    console = make_console(stderr=True)
    with Progress(console=console, disable=json or not console.is_terminal, transient=True) as bar:
        task = bar.add_task("random keys", total=keys)
        found = run(
            forms, keys, seed=seed, names=[p.stem for p in models], progress=lambda n: bar.update(task, completed=n)
        )
    if plot is not None:
        from quorumark.report.calibration import draw

        draw(found, plot)
    if json:
        typer.echo(jsonlib.dumps(found.as_dict()))
        return
    typer.echo(
        f"{len(models)} model{'s' * (len(models) > 1)}, {keys:,} random keys each: mean {found.mean:+.4f}, "
        f"deviation {found.deviation:.4f}, largest {float(found.z.max()):.2f}\n"
        f"distance from the standard normal {found.distance():.4f} (Kolmogorov); so far or farther with probability "
        f"{found.p_normal():.2f}"
    )
    for limit in (2, 3, 4):
        typer.echo(f"z ≥ {limit}: {found.above(limit):.2e} of them, {found.expected_above(limit):.2e} expected")
    if plot is not None:
        typer.echo(f"drawn: {plot}")
