"""`quorumark key …`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quorumark.cli.bundles import Here, Keys, bundled

app = typer.Typer(help="The key itself: only where it must be revealed.", no_args_is_help=True)


@app.command("reconstruct", short_help="Reconstruct the key from t shares, and check it.")
@bundled
def reconstruct(
    share: Annotated[list[Path], typer.Option(help="A share that another member handed over; once for each.")],
    out: Annotated[Path, typer.Option(help="Where to write the key: numpy, int32, the raw entries before whitening.")],
    understood: Annotated[
        bool,
        typer.Option("--i-understand-this-reveals-the-key", help="Afterwards one person can prove, forge and remove."),
    ] = False,
    *,
    here: Here,
    keys: Keys,
) -> None:
    """Reconstruct the key from t shares, this member's among them, and check it against what was committed to."""
    from quorumark.errors import InputError
    from quorumark.setup.reveal import reconstruct_key

    if not understood:
        raise InputError("--i-understand-this-reveals-the-key", "must be given")
    if out.exists():
        raise InputError("--out", "must not exist yet", str(out))
    opened = keys.unlock(here.home)
    member = here.member
    checked = reconstruct_key(member, here.folder, opened, share, out)
    typer.echo(f"the key is in {out} (mode 0600): {checked}")
