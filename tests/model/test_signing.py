"""The digest of OpenSSF model signing: vectors by its own package, and a certificate about files on disk."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.model.layout import write_safetensors
from quorumark.model.signing import signing_digest
from quorumark.model.suspect import SuspectFile, read_suspect

CASES = json.loads((Path(__file__).parents[1] / "vectors/v1/signing/openssf.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["title"] for case in CASES])
def test_the_digest_is_that_of_the_package_itself(case: dict[str, Any]) -> None:
    """Whatever order the files are listed in; and one bit of one of them changes it."""
    files = [SuspectFile(**file) for file in case["files"]]
    random.Random(1).shuffle(files)
    assert signing_digest(files) == case["digest"]
    changed = SuspectFile(files[0].name, hashlib.sha256(b"other").hexdigest(), 5)
    assert signing_digest([changed, *files[1:]]) != case["digest"]


def test_a_suspect_on_disk(tmp_path: Path) -> None:
    """A single file, whatever it is called; a folder of shards by the shards and their index, not by a README."""
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        write_safetensors({f"{name}.weight": rng.standard_normal((4, 4)).astype(np.float32)}, tmp_path / name)
    data = {name: (tmp_path / name).read_bytes() for name in ("one", "two")}
    single = tmp_path / "any name.safetensors"
    single.write_bytes(data["one"])
    inner = hashlib.sha256(data["one"]).digest()
    assert signing_digest(read_suspect(single).files) == hashlib.sha256(inner).hexdigest()
    folder = tmp_path / "folder"
    folder.mkdir()
    index = json.dumps({"weight_map": {f"{n}.weight": f"model-{n}.safetensors" for n in data}}).encode()
    contents = {f"model-{n}.safetensors": content for n, content in data.items()}
    contents["model.safetensors.index.json"] = index
    for name, content in {**contents, "README.md": b"hello"}.items():
        (folder / name).write_bytes(content)
    digests = b"".join(hashlib.sha256(contents[name]).digest() for name in sorted(contents))
    assert signing_digest(read_suspect(folder).files) == hashlib.sha256(digests).hexdigest()
