"""What a suspect is compared with: the consortium's signed manifest, the model's layout, the anchor, the groups.

For an adapter (docs/lora.md) also: which tensors are factors of what, and the public base model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from quorumark import codec
from quorumark.align.groups import Groups
from quorumark.align.lora import Base, Lora, base_layout, find_factors
from quorumark.consortium.home import follow_back, read_as
from quorumark.consortium.records import Manifest, streamed_anchor_digest
from quorumark.errors import LayoutError, RecordError
from quorumark.field import parallel
from quorumark.model.layout import ModelLayout, Source
from quorumark.model.suspect import Suspect, read_suspect

__all__ = ["ANCHOR", "GROUPS", "LAYOUT", "LORA", "Reference", "describe_lora", "digest_of_anchor", "read_chain"]

_BLOCK = 1 << 20  # weights at a time: as field elements they stay in a cache until they are hashed
LAYOUT, ANCHOR, GROUPS, LORA = "layout.json", "anchor.safetensors", "groups.json", "lora.json"
BASE = ("base.safetensors", "base")


def read_chain(manifest: str | os.PathLike[str]) -> list[Manifest]:
    """All manifests up to one in a file, the earlier ones from the folder `history` beside it; every link checked.

    Those that are not there may lie beside the manifest itself, as a browser saves them, or as in such a folder.
    """
    path = Path(manifest)
    inside = Path(os.path.realpath(path)).parent.name == "history"
    folders = [path.parent] if inside else [path.parent / "history", path.parent]
    return follow_back(read_as(path, "a consortium's manifest", Manifest.from_bytes), *folders)


@dataclass(frozen=True, eq=False)
class Anchor:
    """The anchor as its digest sees it, in fixed point with 40 fractional bits, read in blocks.

    Smaller parts are not committed to. Rows are balanced whatever their size, so anyone who could choose them after
    the key is known would give any model any z.
    """

    model: Suspect
    dtype: Any

    def blocks(self, name: str, limit: int = 1 << 22) -> Iterator[tuple[int, NDArray[Any]]]:
        for begin, values in self.model.blocks(name, limit):
            yield begin, codec.round_trip(values.astype(self.dtype, copy=False), name=f"tensor {name!r}")


@dataclass(frozen=True, eq=False)
class Reference:
    """The public side of a consortium. `Reference.read` and `Reference.of` check that its parts belong together.

    `groups` are the coupled channels that the terms name, for verification with alignment (docs/alignment.md). `lora`
    says which tensors of an adapter are whose factors, and `base_source` where the public base model is (docs/lora.md);
    the groups are the base's then.
    """

    chain: tuple[Manifest, ...]
    layout: ModelLayout
    anchor: Anchor
    groups: Groups | None = None
    lora: Lora | None = None
    base_source: Source | Suspect | None = None

    @cached_property
    def base(self) -> Base | None:
        """The public base model, if it is here: read, and compared with its digest, when it is first needed."""
        if self.lora is None or self.base_source is None:
            return None
        source = self.base_source
        stored = source if isinstance(source, Suspect) else read_suspect(source)
        shape = base_layout(stored)
        if digest_of_anchor(shape, stored) != self.lora.base:
            raise RecordError("the base is not the one that was agreed on: take the public model that was adapted")
        self.lora.check_base(self.layout, shape)
        return Base(stored, Anchor(stored, shape.dtype))

    @property
    def manifest(self) -> Manifest:
        """The one in force."""
        return self.chain[-1]

    @classmethod
    def of(
        cls,
        chain: Sequence[Manifest],
        layout: ModelLayout,
        anchor: Source | Suspect,
        groups: Groups | None = None,
        lora: Lora | None = None,
        base: Source | Suspect | None = None,
        *,
        progress: Callable[[str], None] | None = None,
    ) -> Self:
        """From what is at hand: a checked chain, the layout, the anchor as tensors or as a file, and the groups.

        For an adapter also the description of its factors, and the base model as tensors, a file or a folder.
        `progress` is told what is being worked on, in words.
        """
        terms = chain[-1].terms
        if layout.digest() != terms.layout:
            raise RecordError("the layout is not the one that the manifest names: take the consortium's layout.json")
        model = anchor if isinstance(anchor, Suspect) else read_suspect(anchor)
        if digest_of_anchor(layout, model, progress) != terms.anchor:
            raise RecordError(
                "the anchor is not the model that the manifest names: take the public initial model, or the warm-up "
                "model if the consortium has one"
            )
        if groups is not None and groups.digest() != terms.policy.groups:
            agreed = "agreed on others" if terms.policy.groups is not None else "agreed on none when it was made"
            raise RecordError(f"the groups are not the ones that the manifest names: the consortium {agreed}")
        if lora is not None and lora.digest() != terms.policy.lora:
            agreed = "agreed on others" if terms.policy.lora is not None else "agreed on none when it was made"
            raise RecordError(f"the factors are not the ones that the manifest names: the consortium {agreed}")
        if lora is not None:
            lora.check(layout)
        return cls(tuple(chain), layout, Anchor(model, layout.dtype), groups, lora, base)

    @classmethod
    def read(
        cls,
        manifest: str | os.PathLike[str],
        layout: str | os.PathLike[str] | None = None,
        anchor: str | os.PathLike[str] | None = None,
        groups: str | os.PathLike[str] | None = None,
        lora: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        *,
        progress: Callable[[str], None] | None = None,
    ) -> Self:
        """From files; layout.json and anchor.safetensors are looked for beside the manifest unless they are named.

        So is groups.json, where the consortium agreed on groups; without it only alignment is not possible. For an
        adapter so are lora.json, and base.safetensors or the folder base, which only whole models need.
        """
        folder = Path(manifest).parent
        layout_path, anchor_path = Path(layout or folder / LAYOUT), Path(anchor or folder / ANCHOR)
        for path, what, option in ((layout_path, "layout", "--layout"), (anchor_path, "anchor", "--anchor")):
            if not path.exists():
                raise RecordError(
                    f"the {what} is not at {str(path)!r}: put it beside the manifest, name it with "
                    f"{option}, or name the manifest of a public folder with --manifest"
                )
        chain = read_chain(manifest)
        shape = read_as(layout_path, "a layout", ModelLayout.from_bytes)
        if groups is None and chain[-1].terms.policy.groups is not None and (folder / GROUPS).exists():
            groups = folder / GROUPS
        found = None if groups is None else read_as(Path(groups), "a model's groups", Groups.from_bytes)
        if lora is None and chain[-1].terms.policy.lora is not None and (folder / LORA).exists():
            lora = folder / LORA
        factors = None if lora is None else read_as(Path(lora), "an adapter's description", Lora.from_bytes)
        if base is None and factors is not None:
            base = next((folder / name for name in BASE if (folder / name).exists()), None)
        return cls.of(chain, shape, anchor_path, found, factors, base, progress=progress)


def describe_lora(layout: ModelLayout, base: Source | Suspect) -> Lora:
    """Which carriers of an adapter's layout are factors of which weights of a base model, for the terms to name."""
    stored = base if isinstance(base, Suspect) else read_suspect(base)
    shape = base_layout(stored)
    lora = Lora(digest_of_anchor(shape, stored), find_factors(layout, shape))
    lora.check(layout)
    return lora


def digest_of_anchor(layout: ModelLayout, model: Suspect, progress: Callable[[str], None] | None = None) -> str:
    """What terms name as their anchor, of a model of any size: it is read in blocks."""
    # one thread reads and encodes while the other hashes, which takes longer
    return streamed_anchor_digest(layout.digest(), 8 * layout.size, parallel.ahead(_encoded(layout, model, progress)))


def _encoded(
    layout: ModelLayout, model: Suspect, progress: Callable[[str], None] | None = None
) -> Iterator[memoryview]:
    """The anchor as field elements, tensor by tensor in the layout's order, a block at a time."""
    every = list(layout.spans())
    for number, (spec, _) in enumerate(every, 1):
        if progress is not None:
            progress(f"checking the anchor, tensor {number} of {len(every)}: {spec.name}")
        found = model.tensors.get(spec.name)
        if found is None or found.shape != spec.shape:
            problem = "lacks it" if found is None else f"has it with the shape {found.shape}, not {spec.shape}"
            raise LayoutError(f"the anchor does not fit the layout: tensor {spec.name!r}: the anchor {problem}")
        if spec.size:
            for _, values in model.blocks(spec.name, _BLOCK):
                yield _little(codec.encode(values.astype(layout.dtype, copy=False), name=f"tensor {spec.name!r}"))


def _little(encoded: Any) -> memoryview:
    return memoryview(encoded.astype("<u8", copy=False).reshape(-1).view("u1"))
