"""The examiner's page: bars, and what they show in words."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Genesis, Manifest
from quorumark.errors import RecordError
from quorumark.model.blocks import blocks_of
from quorumark.model.layout import ModelLayout
from quorumark.report.layers import layers_page, shape_of
from quorumark.report.texts import PHRASES
from quorumark.verify.examine import Examined
from quorumark.verify.layered import Examiner, Layers, Opened
from quorumark.verify.null import log10_layers, three_digits
from tests.kit.ceremony import make_terms
from tests.kit.evidence import label, make_query
from tests.kit.ledgers import PEOPLE

LAYOUT = ModelLayout.of({"<b>conv</b>.weight": np.zeros((96, 360), np.float32), "fc.weight": np.zeros((160, 256))})
JUDGE = Identity.generate("Judge <Oak>")
RNG = np.random.default_rng(1)
COUNT = blocks_of(LAYOUT).count


def _manifest() -> Manifest:
    terms = make_terms(PEOPLE, 2, LAYOUT.coordinates, layout=LAYOUT.digest())
    roots = tuple(label(f"root {x}") for x in range(3))
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, label("session"), roots)
    return Manifest(terms, genesis, roots)


def _examined(manifest: Manifest, z: NDArray[np.float64], left_out: int | None = None) -> Examined:
    norm2 = [0 if b == left_out else 10**8 for b in range(COUNT)]
    values = [None if b == left_out else round(float(one) * 10**4) for b, one in enumerate(z)]
    total = sum(value or 0 for value in values)
    norm1 = tuple(10**7 if n else 0 for n in norm2)
    layers = Layers("rows/v1", "ab" * 32, str(total), norm1, tuple(norm2), Examiner.of(JUDGE.card()))
    query = replace(make_query(manifest, norm2=COUNT * 10**8, norm1=COUNT * 10**7), layers=layers)
    q = three_digits([(value, n) for value, n in zip(values, norm2, strict=True) if value is not None])
    opened = Opened.sign(JUDGE, query=query.digest(), partials=(), q=q, wrong=(2,), created="2026-03-01T10:00:00Z")
    return Examined(query, tuple(values), opened)


@pytest.mark.parametrize(
    ("shape", "z"),
    [
        ("copy", RNG.normal(30, 3, COUNT)),
        ("faded", np.abs(RNG.normal(6, 5, COUNT))),
        ("against", np.where(np.arange(COUNT) % 2, -9.0, 9.0)),
        ("nothing", RNG.normal(0, 1, COUNT)),
    ],
)
def test_what_the_bars_show(shape: str, z: NDArray[np.float64]) -> None:
    manifest = _manifest()
    page = layers_page(_examined(manifest, z), manifest, LAYOUT)
    assert PHRASES[f"layers-{shape}"] in page
    assert page.count('class="track"') == COUNT
    assert page.count("loud below") + page.count("below loud") == int((z <= -4).sum())
    assert "<b>conv" not in page
    assert "<Oak>" not in page
    assert "Birch" in page
    assert "<script" not in page


def test_a_block_that_is_left_out_has_no_number_and_z_far_below_0_is_explained() -> None:
    manifest = _manifest()
    page = layers_page(_examined(manifest, np.full(COUNT, -8.0), 3), manifest, LAYOUT)
    assert page.count(">left out<") == 1
    assert PHRASES["layers-below"] in page
    assert PHRASES["layers-below"] not in layers_page(_examined(manifest, np.full(COUNT, 8.0)), manifest, LAYOUT)
    other = ModelLayout.of({"fc.weight": np.zeros((160, 256))})
    with pytest.raises(RecordError, match="not the one that the manifest names"):
        layers_page(_examined(manifest, np.full(COUNT, 8.0)), manifest, other)


def test_the_page_shows_a_bound_that_is_never_too_strong() -> None:
    """Rounded to whole powers of ten, up; and 1 where Q is what chance gives."""
    manifest = _manifest()
    found = _examined(manifest, np.full(COUNT, 8.0))
    bound = Decimal(log10_layers(found.opened.q, COUNT))
    shown = re.search(r"10<sup>−(\d+)</sup>", layers_page(found, manifest, LAYOUT))
    assert shown is not None
    assert 0 <= -int(shown[1]) - bound < 1
    assert "10<sup>" not in layers_page(_examined(manifest, np.full(COUNT, 0.5)), manifest, LAYOUT)


def test_chance_is_not_called_a_mark() -> None:
    assert shape_of([5.0, -5.0], -2.9) == "nothing"
    assert shape_of([5.0, -3.9], -3.1) == "faded"
