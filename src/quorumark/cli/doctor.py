"""`quorumark doctor`"""

from __future__ import annotations

import json as jsonlib

import typer

from quorumark.cli.options import DEFAULT_HOME, HomeOption, Json


def doctor(home: HomeOption = DEFAULT_HOME, json: Json = False) -> None:
    """Look at this machine and this member's home: versions, extras, kernels, GPU, clock, disk, permissions.

    Opens no secret and changes nothing. Exits with 1 if something is wrong; what may be missing is no fault.
    """
    from quorumark.doctor import examine_machine

    checks = examine_machine(home)
    wrong = [check for check in checks if check.well is False]
    if json:
        typer.echo(jsonlib.dumps({"well": not wrong, "checks": [check.as_dict() for check in checks]}))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            sign = {True: "ok", False: "WRONG", None: "-"}[check.well]
            remedy = f"; {check.remedy}" if check.remedy else ""
            typer.echo(f"{sign:<6}{check.name:<{width}}  {check.found}{remedy}")
        typer.echo("all is well" if not wrong else f"wrong: {', '.join(check.name for check in wrong)}")
    raise typer.Exit(1 if wrong else 0)
