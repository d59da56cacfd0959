"""The examiner's page: a bar for each block of a query by layers, and what the picture shows (docs/layers.md).

It is for the examiner alone: numbers by layer tell how to take the mark out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal

from quorumark.consortium.records import Manifest
from quorumark.errors import RecordError
from quorumark.model.blocks import blocks_of
from quorumark.model.layout import ModelLayout
from quorumark.report import environment
from quorumark.report.texts import PHRASES
from quorumark.verify import null
from quorumark.verify.examine import Examined

__all__ = ["layers_page", "shape_of"]

_LOUD = 4.0  # |z_b| that one block of an unrelated model reaches in 1 of 15,000
_CHANCE = -3.0  # log10 of the bound above which Q is what chance gives
_WIDEST = 6.0  # the axis shows at least so much, so that noise looks like noise


def shape_of(z: Sequence[float], log10_bound: float) -> str:
    """What the bars show: `nothing`, `against` the mark, a `copy`, or a `faded` one."""
    if log10_bound > _CHANCE:
        return "nothing"
    if any(one <= -_LOUD for one in z):
        return "against"
    return "copy" if sum(one >= _LOUD for one in z) >= 0.9 * len(z) else "faded"


def layers_page(examined: Examined, manifest: Manifest, layout: ModelLayout) -> str:
    """The numbers by layer as one HTML page."""
    query, terms = examined.query, manifest.terms
    if query.layers is None or layout.digest() != terms.layout:
        raise RecordError("the layout is not the one that the manifest names: take the consortium's layout.json")
    blocks = blocks_of(layout, query.layers.rule)
    numbers = [None if text is None else float(text) for text in examined.z]
    kept = [number for number in numbers if number is not None]
    bound = null.log10_layers(examined.opened.q, query.equations)
    widest = max(_WIDEST, *(abs(number) for number in kept))
    bars = [
        {
            "parts": re.split(r"(?<=[._/])", name),  # where a long name may be broken
            "coordinates": span.stop - span.start,
            "z": None if number is None else f"{number:.2f}",
            "width": 0 if number is None else round(50 * abs(number) / widest, 2),
            "below": number is not None and number < 0,
            "loud": number is not None and abs(number) >= _LOUD,
        }
        for name, span, number in zip(blocks.names, blocks.spans, numbers, strict=True)
    ]
    shape = shape_of(kept, float(bound))
    z = Decimal(null.z_text(int(query.layers.value), query.norm2))
    return (
        environment()
        .get_template("layers.html")
        .render(
            terms=terms,
            query=query,
            examiner=query.layers.examiner,
            opened=examined.opened,
            wrong=[terms.member(point).name for point in examined.opened.wrong],
            bars=bars,
            widest=f"{widest:.0f}",
            shape=shape,
            heading=PHRASES[f"layers-{shape}"],
            lead=PHRASES[f"layers-{shape}-why"],
            below=PHRASES["layers-below"] if z <= -_LOUD else "",
            z=f"{z:.2f}",
            bound=Decimal(bound).to_integral_value(ROUND_CEILING),
            chance=f"{_LOUD:.0f}",
            band=round(50 * _LOUD / widest, 2),
            left_out=len(kept) < len(numbers),
        )
    )
