"""`quorumark layout FILE`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def layout(
    file: Annotated[Path, typer.Argument(help="A model as a .safetensors file.")],
    include: Annotated[list[str] | None, typer.Option(help="Glob of tensors that may carry; may be repeated.")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Glob of tensors that must not, besides embeddings; may be repeated.")
    ] = None,
    carry_embeddings: Annotated[bool, typer.Option("--carry-embeddings", help="Let embeddings carry too.")] = False,
    max_coordinates: Annotated[
        int | None, typer.Option(help="Carry on a public sample of this many coordinates.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the layout itself, as canonical JSON.")] = False,
) -> None:
    """Show which weights of a model (a .safetensors file) would carry a mark."""
    from quorumark.model.layout import DEFAULT_EXCLUDE, ModelLayout

    excluded = [*(() if carry_embeddings else DEFAULT_EXCLUDE), *(exclude or ())]
    found = ModelLayout.of(file, include=include or ("*",), exclude=excluded, max_coordinates=max_coordinates)
    if json:
        typer.echo(found.to_bytes().decode())
        return
    from rich.table import Table
    from rich.text import Text

    from quorumark.cli.console import make_console

    console = make_console()
    table = Table("tensor", "type", "shape", "elements", "role", title=Text(str(file)), title_justify="left")
    table.columns[0].overflow = table.columns[4].overflow = "fold"
    table.columns[3].justify = "right"
    for spec in found.tensors:
        role = f"alias of {spec.of}" if spec.of else spec.role
        table.add_row(spec.name, spec.dtype, "×".join(map(str, spec.shape)) or "scalar", f"{spec.size:,}", role)
    console.print(table)
    console.print(
        f"{found.coordinates:,} of {found.size:,} numbers carry; a share is {8 * found.coordinates:,} bytes\n"
        f"layout {found.digest()}\n"
        "Embeddings are told by their names here; a layout made from the torch module knows them for sure."
    )
