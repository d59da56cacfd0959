"""Makes tests/vectors/v1/signing/openssf.json: digests of small models by OpenSSF's own package, with none of our code.

python -m venv oracle && oracle/bin/pip install model-signing==1.1.1 pyopenssl
oracle/bin/python tests/kit/openssf.py
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from importlib.metadata import version
from pathlib import Path

from model_signing import hashing
from model_signing._signing import signing

# names whose order is not obvious: case, digits, dashes; contents are the names, repeated
FOLDERS = {
    "safetensors in shards": [
        "model.safetensors.index.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00010-of-00003.safetensors",
    ],
    "torch": ["pytorch_model.bin"],
    "torch in shards": [
        "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    ],
    "numpy": ["b.npy", "B.npy", "a-1.npy", "a.1.npy", "a_1.npy", "a 1.npy", "ä.npy", "10.npy", "9.npy"],
}


def content(name: str) -> bytes:
    return name.encode() * 1000


def root(path: Path) -> str:
    """The subject's digest in the statement that model signing signs."""
    payload = signing.Payload(hashing.Config().hash(path))
    return str(payload.statement.pb.subject[0].digest["sha256"])


def main() -> None:
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        for title, names in FOLDERS.items():
            folder = Path(temporary) / title
            folder.mkdir()
            for name in names:
                (folder / name).write_bytes(content(name))
            files = [
                {"name": name, "sha256": hashlib.sha256(content(name)).hexdigest(), "size": len(content(name))}
                for name in names
            ]
            cases.append({"title": title, "files": files, "digest": root(folder)})
        for name in ("model.safetensors", "model.pt"):
            file = Path(temporary) / name
            file.write_bytes(content(name))
            found = {"name": name, "sha256": hashlib.sha256(content(name)).hexdigest(), "size": len(content(name))}
            cases.append({"title": f"the file {name}", "files": [found], "digest": root(file)})
    made = {"by": f"model-signing {version('model-signing')}", "cases": cases}
    out = Path(__file__).parents[1] / "vectors" / "v1" / "signing" / "openssf.json"
    out.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
