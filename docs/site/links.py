"""For mkdocstrings: a page that a docstring names, such as docs/secagg.md, becomes a link to it."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Pages(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"\bdocs/([a-z-]+)\.md", r"[\1](\1.md)", obj.docstring.value)
