"""How much of a mark can be aligned: which carriers have channels that may be permuted though no group covers them."""

from __future__ import annotations

from dataclasses import dataclass

from quorumark.align.groups import Axis, Groups
from quorumark.model.layout import ModelLayout

__all__ = ["WITHOUT", "Coverage"]

WITHOUT = (
    "no alignment: anyone who renumbers the channels of this model, which changes nothing that it computes, hides the "
    "whole mark"
)


@dataclass(frozen=True)
class Coverage:
    """Attributes:
    open: the axes of carriers that may be permuted in ways that no group covers.
    depends: how many weights that carry are in such tensors.
    carrying: how many weights carry.
    """

    open: tuple[Axis, ...]
    depends: int
    carrying: int

    @classmethod
    def of(cls, groups: Groups, layout: ModelLayout) -> Coverage:
        sizes = {spec.name: spec.size for spec in layout.tensors if spec.role == "carrier"}
        axes = tuple(axis for axis in groups.open if axis[0] in sizes)
        return cls(axes, sum(sizes[name] for name in {name for name, _ in axes}), sum(sizes.values()))

    @property
    def share(self) -> float:
        """Of the weights that carry, those that a permutation may hide."""
        return self.depends / max(1, self.carrying)

    def lines(self) -> list[str]:
        """What people should know before they agree on the groups."""
        if not self.open:
            return ["all channels of the carriers that can be permuted are in groups"]
        found = [
            f"axis {axis} of {tensor} is in no group, or only a part of how it can be permuted is"
            for tensor, axis in self.open
        ]
        share = (
            f"{self.depends:,} of {self.carrying:,} weights that carry ({100 * self.share:.0f} %) depend on these axes"
        )
        return [*found, f"{share}: anyone who renumbers their channels hides that part of the mark at no cost"]
