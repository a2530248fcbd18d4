"""Examples of a docstring (`>>>`) as blocks of code: Markdown takes them for a quotation."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Puts a fence around each run of lines that begins with `>>>`, wherever a docstring has one."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", obj.docstring.value, flags=re.M)
            obj.docstring.value = text
