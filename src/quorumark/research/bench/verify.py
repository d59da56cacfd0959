"""`quorumark bench verify`: what a verification costs a member, for ResNet-18's 11.2 million weights.

The canonical form against one copy of the model, the inner product against one copy of the share, both in one thread;
the commands as people run them, in processes of their own, against hashing the files that they read; and a partial by
layers against a plain one about the same suspect, both by CPU time.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import new_salt
from quorumark.consortium.records import Genesis, Manifest, Terms, anchor_of, roster_of
from quorumark.consortium.shares import ShareInfo, ShareWriter, share_root
from quorumark.files import write_private, write_shared
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.model.statistic import canonical_form, inner_product
from quorumark.research.bench import Row, compare
from quorumark.research.known import TensorsInMemory
from quorumark.verify.answer import answer
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import sign
from quorumark.verify.evidence import Query
from quorumark.verify.query import AskLayers, prepare
from quorumark.verify.reference import Reference

STATISTIC = "balanced-anchor/v1"


def resnet18(seed: int, width: int = 64) -> dict[str, NDArray[np.float32]]:
    """Tensors of ResNet-18's shapes for small images, with random numbers of the usual sizes."""
    rng = np.random.default_rng(seed)
    shapes = {"conv1": (width, 3, 3, 3), "fc": (10, 8 * width)}
    inner = width
    for stage in range(4):
        outer = width << stage
        for block in range(2):
            shapes[f"layer{stage}.{block}.conv1"] = (outer, inner, 3, 3)
            shapes[f"layer{stage}.{block}.conv2"] = (outer, outer, 3, 3)
            if inner != outer:
                shapes[f"layer{stage}.{block}.shortcut"] = (outer, inner, 1, 1)
            inner = outer
    return {
        f"{name}.weight": rng.standard_normal(shape, np.float32) * np.float32((2 / np.prod(shape[1:])) ** 0.5)
        for name, shape in shapes.items()
    }


def trained(anchor: dict[str, NDArray[np.float32]], seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {n: w + np.float32(0.3 * w.std()) * rng.standard_normal(w.shape, np.float32) for n, w in anchor.items()}


def rows(quick: bool = False) -> Iterator[Row]:
    """Kernels in one thread, then whole commands."""
    anchor = resnet18(0, 16 if quick else 64)
    model = trained(anchor, 1)
    layout = ModelLayout.of(anchor)
    yield from _kernels(layout, anchor, model)
    with tempfile.TemporaryDirectory(prefix="quorumark-bench-") as folder:
        yield from _commands(Path(folder), layout, anchor, model)


def _kernels(layout: ModelLayout, anchor: Any, model: Any) -> Iterator[Row]:
    size = layout.coordinates
    flat = layout.flatten(model)
    flat_copy = np.empty_like(flat)
    share = field.random(size)
    share_copy = np.empty_like(share)
    suspect, reference = TensorsInMemory(model), TensorsInMemory(anchor)
    x = canonical_form(STATISTIC, layout, suspect, reference).x
    before = field.threads()
    for threads in dict.fromkeys((1, before)):
        field.set_threads(threads)
        try:
            yield compare(
                lambda: canonical_form(STATISTIC, layout, suspect, reference), lambda: np.copyto(flat_copy, flat),
                name="canonical form", against="memcpy of the model", size=size, threads=threads,
            )  # fmt: skip
            yield compare(
                lambda: inner_product(x, share), lambda: np.copyto(share_copy, share),
                name="inner product", against="memcpy of the share", size=size, threads=threads, repeats=25,
            )  # fmt: skip
        finally:
            field.set_threads(before)


def _commands(folder: Path, layout: ModelLayout, anchor: Any, model: Any) -> Iterator[Row]:
    """prepare, partial, combine and check, each as a command."""
    homes = two_members(folder, layout, anchor_of(layout, anchor))
    write_safetensors(anchor, folder / "anchor.safetensors")
    write_safetensors(model, folder / "suspect.safetensors")
    write_shared(folder / "layout.json", layout.to_bytes())
    suspect = str(folder / "suspect.safetensors")
    reference = ["--manifest", str(folder / "manifest.json")]
    query, certificate = str(folder / "query.json"), str(folder / "certificate.json")
    nobody = ["--home", str(folder / "nobody")]
    share = next(homes[0].glob("consortia/*/share-0.sealed"))

    def command(*arguments: str, codes: tuple[int, ...] = (0,)) -> Callable[[], None]:
        line = [sys.executable, "-c", "from quorumark.cli import main; main()", "verify", *arguments]

        def call() -> None:
            done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603
            if done.returncode not in codes:
                raise AssertionError(done.stderr)

        return call

    def hashing(*paths: Path) -> Callable[[], None]:
        def call() -> None:
            for path in paths:
                with path.open("rb") as file:
                    hashlib.file_digest(file, "sha256")

        return call

    models = [folder / "suspect.safetensors", folder / "anchor.safetensors"]
    partials = [str(folder / f"partial{i}.json") for i in range(len(homes))]
    cases = [("prepare", command("prepare", suspect, "--out", query, *reference, *nobody), models)]
    for home, out in zip(homes, partials, strict=True):
        secret = ["--home", str(home), "--key-file", f"{home}.key"]
        line = ["partial", query, "--suspect", suspect, "--out", out, "--approve", *reference, *secret]
        cases.append(("partial", command(*line), [*models, share]))
    cases[3:] = []  # one member is timed; the other one answers once
    combine = command("combine", query, *partials, "--out", certificate, *reference, *nobody, codes=(1,))
    for name, call, files in [cases[0], cases[1]]:
        against = f"sha256 of {'both models and the share' if len(files) == 3 else 'both models'}"
        yield compare(
            call, hashing(*files), name=f"verify {name}, the whole command", against=against, size=layout.coordinates,
            threads=field.threads(), repeats=5,
        )  # fmt: skip
    cases[2][1]()
    yield compare(
        combine, hashing(*models), name="verify combine, the whole command", against="sha256 of both models",
        size=layout.coordinates, threads=field.threads(), repeats=5,
    )  # fmt: skip
    yield _by_layers(folder, homes, Path(query), Path(certificate))


def _by_layers(folder: Path, homes: list[Path], plain: Path, certificate: Path) -> Row:
    """A member's answer by layers against its plain one, in this process: the start of Python is the same for both."""
    ours, suspect = Reference.read(folder / "manifest.json"), folder / "suspect.safetensors"
    owners = [(HomeFolder(home), Unlock.key_file(Path(f"{home}.key"))) for home in homes]
    before = Certificate.from_bytes(certificate.read_bytes())
    for owner in owners:
        before = sign(*owner, before)
    query = Query.from_bytes(plain.read_bytes())
    layers = prepare(ours, suspect, layers=AskLayers.of(before, Identity.generate("Judge").card())).query
    return compare(
        lambda: answer(*owners[0], ours, suspect, layers, approved=True, after=before),
        lambda: answer(*owners[0], ours, suspect, query, approved=True),
        name="a partial by layers, CPU time", against="a plain one", size=ours.layout.coordinates,
        threads=field.threads(), repeats=15, clock=time.process_time,
    )  # fmt: skip


def two_members(folder: Path, layout: ModelLayout, anchor: str) -> list[Path]:
    """Two members of two with shares of a random key: how the key was made is not what is timed."""
    names = ("Avon", "Birch")
    for name in names:
        Unlock.new_key_file(folder / f"{name}.key")
    opened = [
        (HomeFolder.create(folder / n, n, Unlock.key_file(folder / f"{n}.key")), folder / f"{n}.key") for n in names
    ]
    people: list[Identity] = [home.identity(Unlock.key_file(key)) for home, key in opened]
    roster = roster_of((person.card(), 100) for person in people)
    terms = Terms(
        "bench", 2, roster, layout.digest(), layout.coordinates, anchor,
        created="2026-01-31T12:00:00Z", setup="dealer",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    key = field.from_signed(1 - 2 * rng.integers(0, 2, layout.coordinates))
    slope = field.random(layout.coordinates)
    shares = [field.axpy(x, slope, key) for x in (1, 2)]  # s_x = τ + x·r
    salts = [new_salt() for _ in shares]
    roots = tuple(
        share_root([s], salt, terms.leaf, terms.coordinates).hex() for s, salt in zip(shares, salts, strict=True)
    )
    session = os.urandom(32).hex()
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, session, roots)
    manifest = Manifest(terms, genesis, roots, commitment={"hash": "00" * 32, "nonce": "00" * 32})
    for x, person in enumerate(people, 1):
        manifest = manifest.with_signature(x, person.sign("manifest", manifest.sign_bytes()))
    write_shared(folder / "manifest.json", manifest.to_bytes())
    for x, (home, key_path) in enumerate(opened, 1):
        place = home.consortium(terms)
        info = ShareInfo.first(terms, session, x)
        others = np.zeros((2, 5), np.uint64)
        with ShareWriter(place.share_path(0), Unlock.key_file(key_path), info, salts[x - 1], others) as file:
            file.write(shares[x - 1])
        write_private(place.manifest_path, manifest.to_bytes())
    return [home.path for home, _ in opened]
