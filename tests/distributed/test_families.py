"""Families beside transformers itself: a sample of those in docs/families.md; `make test-long` tries every one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from benchmarks.families import try_family

from coremill.tasks.causal_lm.known_models import causal_families
from tiers import some_long

PAGE = Path(__file__).resolve().parents[2] / "docs/families.md"
# One of each sort, and whether it keeps documents apart.
SAMPLE = {
    "llama": "apart",
    "gpt2": "apart",  # learned positions, transposed products
    "hrm_text": "apart",  # layers that run several times
    "bert": "refused",  # an encoder made a decoder; its head's bias has two names
    "bart": "refused",  # half of an encoder-decoder, with weights that nothing uses
    "bloom": "refused",  # no positions
    "falcon_h1": "refused",  # state and attention side by side
    "jamba": "refused",  # layers of several classes, experts
    "mixtral": "apart",  # experts that the files keep one by one
    "gemma3": "apart",  # pictures beside the text
    "gemma3n_text": "apart",  # sparse layers, layers that take keys and values over, capped logits
    "inkling_text": "refused",  # a lookup with a norm of its own
}


# Of these some in `make test`: two plain ones, one whose layers are unlike each other.
FIRST_TIER = ("llama", "gpt2", "gemma3n_text")


@pytest.mark.parametrize("family", some_long(SAMPLE, FIRST_TIER, "of the families the plainest and the oddest"))
def test_losses_and_export_are_those_of_transformers(family: str) -> None:
    row = try_family(family)
    assert (row.one_rank, row.two_ranks, row.two_hosts) == ("exact", "exact", "exact"), row.reason
    assert row.documents == SAMPLE[family]


def test_what_is_none_is_refused_before_anything_is_made() -> None:
    row = try_family("git")
    assert (row.one_rank, row.two_ranks) == ("refused", "refused")
    assert "picture" in row.reason


@pytest.mark.skipif(not os.environ.get("COREMILL_LONG_TESTS"), reason="ten minutes; make test-long")
@pytest.mark.parametrize("family", sorted({*causal_families()} - {*SAMPLE}))
def test_every_other_family_is_exact_or_refused(family: str) -> None:
    row = try_family(family)
    assert not row.fails, row.reason


def test_the_page_has_every_family_and_none_that_fails() -> None:
    text = PAGE.read_text()
    rows = {cells[0]: cells for cells in re.findall(r"^\| (\S+) \| (\w+) \| (\w+) \| (\w+) \|", text, re.MULTILINE)}
    assert [name for name in causal_families() if name not in rows] == []
    assert [name for name, cells in rows.items() if "fails" in cells] == []
