"""What hosts compare before they train, and the words for what differs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from coremill.config.schema import RunConfig
from coremill.hosts import fingerprint
from coremill.hosts.fingerprint import (
    Fact,
    digest_of_files,
    disagreement,
    facts_from_json,
    facts_of_settings,
    facts_of_versions,
    facts_to_json,
)


def settings(**changes: object) -> dict[str, Fact]:
    return facts_of_settings(RunConfig.model_validate(changes).model_dump(mode="json"))


def test_hosts_that_are_alike_have_nothing_to_say() -> None:
    facts = {**facts_of_versions(), **settings()}
    assert set(facts_of_versions()) == {"coremill", "torch", "transformers", "tokenizers"}
    assert disagreement({"a": facts, "b": facts_from_json(facts_to_json(facts)), "c": facts}) is None


def test_where_things_lie_may_differ() -> None:
    there = settings(
        model="/mnt/model",
        tokenizer="/mnt/tokenizer",
        data={"source": "/mnt/*.txt"},
        run={"folder": "/mnt/run"},
        checkpoint={"spot_notices": "off"},
        parallel={"ranks_per_node": 4, "threads_per_rank": 2},
    )
    here = settings(model="/data/model", parallel={"ranks_per_node": 2})
    assert disagreement({"a": here, "b": there}) is None


def test_builds_of_one_version_are_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {}
    for host, version in (("a", "2.13.0"), ("b", "2.13.0+cpu"), ("c", "2.14.0+cpu")):
        monkeypatch.setattr(fingerprint, "versions", lambda v=version: dict.fromkeys(fingerprint.CHANGE_NUMBERS, v))
        facts[host] = facts_of_versions()
    assert disagreement({"a": facts["a"], "b": facts["b"]}) is None
    error = disagreement(facts)
    assert error is not None and "torch: 2.13.0 on a and b; 2.14.0 on c" in error.what


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"steps": 5}}, "train.steps: null on a; 5 on b"),
        ({"data": {"sequence_length": 8}}, "data.sequence_length: 512 on a; 8 on b"),
        ({"evaluation": {"every_steps": 3}}, "evaluation.every_steps: null on a; 3 on b"),
        ({"model": {"config": {"rope": {"theta": 2}}}}, "model.config.rope.theta: nothing on a; 2 on b"),
    ],
)
def test_whatever_else_a_run_file_says_may_not(changes: dict[str, object], words: str) -> None:
    error = disagreement({"a": settings(), "b": settings(**changes)})
    assert error is not None and error.exit_code == 78
    assert words in error.what and error.what.startswith("b and a differ in ")


def test_the_majority_is_taken_for_usual_and_notes_are_not_compared() -> None:
    here, there = Fact("60 documents", "text/*.txt"), Fact("61 documents", "/mnt/text/*.txt")
    moved = Fact("60 documents", "elsewhere")
    error = disagreement({"a": {"the data": here}, "b": {"the data": there}, "c": {"the data": moved}})
    assert error is not None
    lines = error.what.splitlines()
    assert lines == [
        "b and a and c differ in the data",
        "  the data: 60 documents on a and c (text/*.txt); 61 documents on b (/mnt/text/*.txt)",
    ]


def test_a_long_list_is_cut() -> None:
    here = {f"key{index}": Fact("x" * 1000) for index in range(20)}
    error = disagreement({"a": here, "b": {name: Fact("y") for name in here}})
    assert error is not None and "and 12 more" in error.what and len(str(error)) < 2400  # what fits through a pipe


def test_small_files_are_compared_to_the_byte_and_large_ones_by_samples(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(fingerprint, "SAMPLED_BYTES", 1024)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 64)
    content = bytearray(random.Random(1).randbytes(1000))
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(content)
    digests = {digest_of_files([small])}
    for place in (0, 500, 999):
        content[place] ^= 1
        small.write_bytes(content)
        digests.add(digest_of_files([small]))
    assert len(digests) == 4
    content = bytearray(random.Random(2).randbytes(100_000))
    large.write_bytes(content)
    before = digest_of_files([large])
    for place, seen in ((0, True), (99_999, True), (100, False)):
        content[place] ^= 1
        large.write_bytes(content)
        assert (digest_of_files([large]) != before) == seen
        content[place] ^= 1
    large.write_bytes(content[:-1])
    assert digest_of_files([large]) != before
    large.write_bytes(random.Random(3).randbytes(100_000))  # another training
    assert digest_of_files([large]) != before
    for file in (tmp_path / f"many-{index}" for index in range(100)):  # a few blocks of each all the same
        file.write_bytes(content[:300])
    many = sorted(tmp_path.glob("many-*"))
    before = digest_of_files(many)
    many[50].write_bytes(content[:299] + b"x")
    assert digest_of_files(many) != before
