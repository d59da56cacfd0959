"""`quorumark groups`"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quorumark.align.groups import Groups
    from quorumark.model.layout import ModelLayout


def groups(
    model: Annotated[str, typer.Option(help="FILE.py:FUNCTION, a function without arguments that gives the module.")],
    example: Annotated[
        list[str],
        typer.Option(help="The shape of an input, like 1,3,32,32, or int:1,16 for words; once for each input."),
    ],
    out: Annotated[Path, typer.Option(help="Where to write the groups.")] = Path("groups.json"),
) -> None:
    """Find which channels of a model belong together, for `consortium create --groups` and `verify prepare --align`.

    Runs your file. The groups are tried before they are written: a permutation must leave the output as it is. So are
    the mixings: channels within heads that can be replaced by mixtures of each other; and the stream: channels between
    RMSNorms that can be turned as a whole.
    """
    from quorumark.align.coverage import Coverage
    from quorumark.files import write_shared

    found, layout, unknown = find_groups("--model", model, example)
    write_shared(out, found.to_bytes())
    heads = sum(group.within is not None for group in found.groups)
    channels = sum(group.size for group in found.groups if group.within is None)
    within = f" ({heads} within others)" if heads else ""
    mixed = f", {len(found.mixings)} mixings" if found.mixings else ""
    turning = "" if found.stream is None else f", a stream of {found.stream.size:,} channels"
    typer.echo(
        f"{len(found.groups)} groups{within}, {channels:,} channels{mixed}{turning}\n"
        f"groups {found.digest()}\n"
        f"written to {out}; the consortium agrees on them with: quorumark consortium create --groups {out.name} …"
    )
    for line in [*unknown, *Coverage.of(found, layout).lines()]:
        typer.echo(line)


def find_groups(argument: str, model: str, example: Sequence[str]) -> tuple[Groups, ModelLayout, list[str]]:
    """The groups of the model that a function of the user's file gives; its layout; what is not understood of it."""
    from quorumark.align.trace import UnknownOperation, derive_groups
    from quorumark.errors import InputError, LayoutError
    from quorumark.model.layout import ModelLayout
    from quorumark.model.usercode import example_inputs, load_function, told_by

    inputs = example_inputs(example)
    module = load_function(model, argument)()
    if not hasattr(module, "state_dict"):
        raise InputError(argument, "must name a function that gives a torch module", type(module).__name__)
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    told_by(module.eval(), f"--example {' '.join(example)}", "must be an input that the model takes")(*given)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        found = derive_groups(module, inputs)
    layout = ModelLayout.of(module)
    found.check(layout)
    if not found:
        raise LayoutError(
            "no channels of this model can be permuted, as far as its operations are understood: nothing was written. "
            "To do without alignment, pass --without-alignment to quorumark consortium create"
        )
    unknown = [str(warning.message) for warning in noted if warning.category is UnknownOperation]
    return found, layout, unknown
