"""The page of the package on an index; everything else is in pyproject.toml.

README.md as it is, but for links to files of the repository, which are not there: with `Source` in `[project.urls]`
they lead to it, at the tag of this version; without, their words stay and the link goes, and so does a picture.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!\w+:)([^()\s]+)\)")  # no scheme: relative


def long_description(readme: str, source: str | None, version: str) -> str:
    """The README without relative links."""

    def absolute(link: re.Match[str]) -> str:
        is_picture, words, target = link.groups()
        if source is not None:
            kind = "raw" if is_picture else "blob"
            return f"{is_picture}[{words}]({source.rstrip('/')}/{kind}/v{version}/{target})"
        return "" if is_picture else words

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(absolute, readme))


if __name__ == "__main__":
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=long_description(text, PROJECT.get("urls", {}).get("Source"), PROJECT["version"]),
        long_description_content_type="text/markdown",
    )
