"""The page of the package on an index (setup.py): the README, without links that would lead nowhere there."""

from __future__ import annotations

import importlib.util
import re

import pytest
from house import ROOT

README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\(([^)\s]+)\)")


def page(source: str | None) -> str:
    spec = importlib.util.spec_from_file_location("setup_of_coremill", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.long_description(README, source, "1.2.3"))


@pytest.mark.parametrize("source", [None, "https://github.com/example/coremill/"])
def test_no_link_is_relative(source: str | None) -> None:
    links = LINK.findall(page(source))
    assert all(re.match(r"https?://|#", link) for link in links), links
    assert (len(links) == len(LINK.findall(README))) == (source is not None), "with a place to lead to, all of them"


def test_links_lead_to_the_tag() -> None:
    text = page("https://github.com/example/coremill")
    assert "https://github.com/example/coremill/blob/v1.2.3/CHANGELOG.md)" in text
    assert "https://github.com/example/coremill/raw/v1.2.3/docs/pictures/" in text


def test_words_and_code_stay() -> None:
    def blocks(text: str) -> list[str]:
        return re.findall(r"^```.*?^```$", text, flags=re.DOTALL | re.MULTILINE)

    assert blocks(page(None)) == blocks(README)
    headings = re.findall(r"^#+ .*$", README, flags=re.MULTILINE)
    assert [heading for heading in headings if heading not in page(None)] == []
