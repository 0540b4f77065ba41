"""What an imported run file could not know stands in it as a question, `# model: ?`, and is told until answered."""

from __future__ import annotations

import re
from collections.abc import Mapping

from coremill.config.layers import DEFAULT, Origin

QUESTIONS = {
    "model": "which model: a hub id or a folder",
    "data.source": "which text: files (notes/*.jsonl) or hf://owner/name",
}
_QUESTION = re.compile(r"^\s*# +\w+: \?\s+# ([a-z_.]+): ")


def questions_left(text: str, origins: Mapping[str, Origin]) -> list[str]:
    """In words, with their lines; a key that is given elsewhere is answered."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        asked = _QUESTION.match(line)
        key = asked[1] if asked else ""
        full = "model.name" if key == "model" else key
        given = any(origins.get(name, DEFAULT) is not DEFAULT for name in (full, *_INSTEAD.get(full, ())))
        if key in QUESTIONS and not given:
            found.append(f"line {number} asks for {key} ({QUESTIONS[key]}); until it is answered it is built-in")
    return found


_INSTEAD = {"model.name": ("model.config",), "data.source": ("data.sources",)}
