"""Ways to install, and their versions: pyproject.toml, constraints.txt and the pages agree."""

from __future__ import annotations

import re
import tomllib

import pytest
from house import ROOT, code_blocks

# A minor version of these may change numbers or break us without a word: they end at the newest one tested.
FRAGILE = ("torch", "transformers", "tokenizers")
# Pages of the guide that install something.
INSTALLING = ("text", "conversations", "more")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def bounds() -> dict[str, dict[str, tuple[int, ...]]]:
    """By package: its bounds by sign."""
    found = {}
    for requirement in PROJECT["dependencies"]:
        name = re.split(r"[<>=]", requirement)[0]
        found[name] = {sign: numbers(version) for sign, version in re.findall(r"(>=|<)([\d.]+)", requirement)}
    return found


def pins(file: str = "constraints.txt") -> dict[str, tuple[int, ...]]:
    lines = (ROOT / file).read_text().splitlines()
    return {name: numbers(version) for name, version in (line.split("==") for line in lines if "==" in line)}


@pytest.mark.parametrize("name", bounds())
def test_what_is_pinned_is_allowed(name: str) -> None:
    allowed, pinned = bounds()[name], pins()[name]
    assert pinned >= allowed[">="]
    assert "<" not in allowed or pinned[: len(allowed["<"])] < allowed["<"]


def test_the_oldest_are_those_that_are_allowed() -> None:
    """tests/end_to_end/test_wheel.py runs with them. torch has no older CPU build everywhere."""
    oldest = pins("constraints-oldest.txt")
    assert oldest.keys() == bounds().keys()
    assert oldest.pop("torch") == pins()["torch"]
    lowest = {name: bounds()[name][">="] for name in oldest}
    assert {name: oldest[name][: len(lowest[name])] for name in oldest} == lowest
    assert {name: oldest[name] for name in oldest if any(oldest[name][len(lowest[name]) :])} == {}


@pytest.mark.parametrize("name", FRAGILE)
def test_fragile_ones_end_at_what_was_tested(name: str) -> None:
    major, minor, *_ = pins()[name]
    assert bounds()[name]["<"] == (major, minor + 1), "raise both together, once the tests ran with it"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/guide/{name}.md" for name in INSTALLING)])
def test_the_pages_install_what_was_tested(page: str) -> None:
    lines = [line for language, block in code_blocks(page) if language == "sh" for line in block.splitlines()]
    installs = [line for line in lines if line.startswith("pip install")]
    assert installs and all("--constraint constraints.txt" in line for line in installs)
