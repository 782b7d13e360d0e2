"""Docstrings as Markdown: an extension of griffe, which reads them.

They are Google-style, with two marks of reStructuredText: ``::`` before a block, and roles such as ``:func:``.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Roles(Extension):
    """``:func:`lightck.attach``` becomes a link to what it names, and ``::`` goes."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    text = re.sub(r":[a-z]+:`~?([\w.]+)`", r"[`\1`][\1]", text)
    text = re.sub(r"^( *)::\n\n?", "\n", text, flags=re.M)
    return re.sub(r"::$", ":", text, flags=re.M)
