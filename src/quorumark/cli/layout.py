"""`quorumark layout FILE`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def layout(
    file: Annotated[Path, typer.Argument(help="A model as a .safetensors file.")],
    include: Annotated[list[str] | None, typer.Option(help="Glob of tensors that may carry; may be repeated.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Glob of tensors that must not; may be repeated.")] = None,
    max_coordinates: Annotated[
        int | None, typer.Option(help="Carry on a public sample of this many coordinates.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the layout itself, as canonical JSON.")] = False,
) -> None:
    """Show which of a model's weights would carry a mark, and how strong it could be."""
    from quorumark.layout import DEFAULT_EXCLUDE, ModelLayout

    found = ModelLayout.of(
        file, include=include or ("*",), exclude=exclude or DEFAULT_EXCLUDE, max_coordinates=max_coordinates
    )
    if json:
        typer.echo(found.to_bytes().decode())
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("tensor", "type", "shape", "elements", "role", title=str(file), title_justify="left")
    table.columns[3].justify = "right"
    for spec in found.tensors:
        role = f"alias of {spec.of}" if spec.of else spec.role
        table.add_row(spec.name, spec.dtype, "×".join(map(str, spec.shape)) or "scalar", f"{spec.size:,}", role)
    console.print(table)
    console.print(
        f"{found.coordinates:,} of {found.size:,} numbers carry; a share is {8 * found.coordinates / 2**20:,.1f} MiB\n"
        f"layout {found.digest()}"
    )
