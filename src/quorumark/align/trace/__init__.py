"""Which channels of a model belong together, derived from the operations that it runs (docs/alignment.md, "Groups").

A model is run once on an example, and every operation is followed with labels instead of numbers. Channels whose labels
were joined must move together; those that then look alike, and are not pinned, can be permuted: a group. The same walk
follows which channels can be scaled against which others. A group that only sums and products with matrices touch, and
whose channels can be scaled, can be mixed by any invertible matrix. The queries and keys of a head that constants hold
in place can be rotated in pairs, if positions rotate them. A group whose gains can be scaled against what reads them is
a residual stream that can be rotated, if its norms are RMSNorms. In the end everything is tried on a copy with random
weights: the output must stay the same.

This needs the extra `torch`. Verifiers do not need it: they read the groups from a file.
"""

from __future__ import annotations

from quorumark.align.trace.derive import UnknownOperation, derive_groups, derive_scalings, derive_signs
from quorumark.align.trace.labels import Knob, Scaling

__all__ = ["Knob", "Scaling", "UnknownOperation", "derive_groups", "derive_scalings", "derive_signs"]
