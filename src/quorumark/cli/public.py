"""`quorumark public`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quorumark.cli.bundles import AgreedFiles, Here, bundled


@bundled
def public(
    out: Annotated[Path, typer.Option(help="The folder to write, or to bring up to date.")] = Path("public"),
    *,
    files: AgreedFiles,
    here: Here,
) -> None:
    """Make the public folder: all that anybody needs to prepare a query about a model, or to check a certificate.

    The manifest goes there as consortium.json, with those before it, the layout, the anchor and the groups. Every file
    is compared with the signed manifest first. Nothing in the folder is secret. After an amendment or a resharing run
    it again.
    """
    from quorumark.verify.public import MANIFEST, OPTIONS, agreed, publish
    from quorumark.verify.reference import ANCHOR, GROUPS, LAYOUT, LORA

    named = {LAYOUT: files.layout, ANCHOR: files.anchor, GROUPS: files.groups, LORA: files.factors}
    found = publish(here.folder, out, named)
    terms = found.manifest.terms
    names = [name for name in agreed(terms) if (out / name).exists()]
    typer.echo(
        f"{terms.name}, epoch {found.manifest.epoch}: {', '.join([MANIFEST, *names])} are in {out}\n"
        f"manifest {found.manifest.digest().hex()}\n"
        f"anybody can ask now: quorumark verify prepare SUSPECT --manifest {out / MANIFEST}"
    )
    for name in agreed(terms):
        if name not in names:
            typer.echo(f"{name} was agreed on and is not there: name it with {OPTIONS[name]}", err=True)
