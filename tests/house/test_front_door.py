"""The front door: from homes to a checked certificate with `import quorumark as qm` and nothing else of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quorumark as qm
from quorumark.errors import EvidenceError, InputError, KeystoreError, RecordError
from quorumark.model.layout import ModelLayout

NAMES, EXAMPLES = ("Avon", "Birch", "Cedar"), (120, 100, 90)
Model = dict[str, Any]


def initial(seed: int = 0) -> Model:
    rng = np.random.default_rng(seed)
    return {"a.weight": rng.standard_normal((160, 96)).astype(np.float32), "a.bias": np.zeros(160, np.float32)}


def train(weights: Model, data: int, seed: int) -> Model:
    rng = np.random.default_rng([data, seed])
    return {name: w + rng.standard_normal(w.shape).astype(np.float32) / 40 for name, w in weights.items()}


def make_homes(folder: Path) -> list[qm.Home]:
    return [qm.Home.create(folder / name, name, key_file=folder / f"{name}.key") for name in NAMES]


def agree(homes: list[qm.Home], model: Model, **settings: Any) -> qm.Terms:
    cards = [(home.card, count) for home, count in zip(homes, EXAMPLES, strict=True)]
    strength = {"rule": "rho", "rho": "0.3", "c_max": "0.25", "dither": "2"}
    options = {"rounds": 10, "target_z": 4, "strength": strength, "without_alignment": True, **settings}
    return qm.Terms.agree("trial", 2, cards, model, **options)


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> list[qm.Home]:
    made = make_homes(tmp_path_factory.mktemp("members"))
    qm.Home.make_key(made, agree(made, initial()))
    return made


def test_from_homes_to_a_checked_certificate(homes: list[qm.Home], tmp_path: Path) -> None:
    run = qm.Federation.of_homes(homes, initial(), train, data=(1, 2, 3), seed=5)
    reports = list(run.rounds(12))
    assert not any(report.given_up for report in reports)
    public = qm.Reference.publish(tmp_path / "public", homes[0], initial())
    query = public.ask(run.model)
    partials = [home.answer(public, run.model, query, approve=True) for home in homes]
    with pytest.raises(EvidenceError):
        public.combine(query, partials[:1])
    certificate = public.combine(query, partials)
    for home in homes:
        certificate = home.sign(certificate)
    finding = public.check(certificate, run.model, report=tmp_path / "report.html")
    assert (finding.verdict, finding.corroboration) == ("PASSED", "corroborated")
    assert "PASSED" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert qm.Certificate.from_bytes(certificate.to_bytes()) == certificate
    other = public.ask(initial(seed=9))
    answers = [home.answer(public, initial(seed=9), other, approve=True) for home in homes[:2]]
    assert public.combine(other, answers).finding.verdict == "FAILED"


def test_a_ceremony_over_a_folder_says_when_it_is_finished(tmp_path: Path) -> None:
    homes, notes = make_homes(tmp_path), list[str]()
    terms = agree(homes, initial())
    manifests: list[Any] = [None] * len(homes)
    for _ in range(100):
        if all(manifests):
            break
        manifests = [home.setup(terms, tmp_path / "exchange", note=notes.append) for home in homes]
    assert {manifest.digest() for manifest in manifests} == {homes[0].manifest.digest()}
    assert notes
    again = qm.Home(tmp_path / "Avon", key_file=tmp_path / "Avon.key")
    assert again.name == "Avon"
    assert "secrets hidden" in repr(again)


def test_what_opens_a_home(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither"):
        qm.Home.create(tmp_path / "x", "X")
    with pytest.raises(InputError, match="both"):
        qm.Home(tmp_path / "x", key_file=tmp_path / "x.key", passphrase="long enough to be one")  # noqa: S106
    home = qm.Home.create(tmp_path / "x", "X", key_file=tmp_path / "keys" / "x.key")
    with pytest.raises(KeystoreError):
        qm.Home.create(tmp_path / "x", "X", key_file=tmp_path / "keys" / "x.key")
    assert (tmp_path / "keys" / "x.key").stat().st_mode & 0o777 == 0o600
    assert home.card.name == "X"


def test_a_layout_of_one_s_own_goes_all_the_way(tmp_path: Path) -> None:
    homes, model = make_homes(tmp_path), initial() | {"head.weight": np.ones((9, 160), np.float32)}
    layout = ModelLayout.of(model, exclude=("head.*",))
    terms = agree(homes, model, layout=layout)
    qm.Home.make_key(homes, terms)
    run = qm.Federation.of_homes(homes, model, train, data=(1, 2, 3), seed=5, layout=layout)
    assert run.round().members == (1, 2, 3)
    assert qm.Reference.publish(tmp_path / "public", homes[0], model, layout=layout).layout == layout
    with pytest.raises(RecordError, match="layout is not the one that the manifest names"):
        qm.Reference.publish(tmp_path / "other", homes[0], model)


def test_every_home_gets_its_own_data(homes: list[qm.Home]) -> None:
    with pytest.raises(InputError, match="one entry for each of the 3 homes"):
        qm.Federation.of_homes(homes, initial(), train, data=(1, 2))
