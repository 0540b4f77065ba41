"""The counts of scripts/house.py on a house of a few lines."""

from __future__ import annotations

import ast

import pytest
from scripts.house import (
    ambiguous_constants,
    copied_constants,
    importers_of,
    on_the_way_of_the_run_file,
    places_that_name_a_part,
    rooms,
    table,
)


def parsed(**files: str) -> dict[str, ast.Module]:
    """`run__story` stands for run/story.py."""
    return {f"{name.replace('__', '/')}.py": ast.parse(text) for name, text in files.items()}


def test_rooms_are_the_first_folders_and_empty_files_do_not_count():
    sources = {"cli.py": "a\n", "run/story.py": "a\nb\n", "run/__init__.py": "", "engines/shard/engine.py": "a\n"}

    assert rooms(sources) == {"(beside the rooms)": (1, 1), "run/": (1, 2), "engines/": (1, 1)}


def test_importers_are_outside_the_room():
    trees = parsed(
        cli="from coremill.launch import script",
        run__story="def late():\n    import coremill.launch.request",
        launch__shim="from coremill.launch.request import Request",
        other="from coremill.launcher import Launcher",
    )

    assert importers_of("launch", trees) == ["cli.py", "run/story.py"]


def test_the_run_file_passes_those_that_import_it_or_take_it():
    trees = parsed(
        a="from coremill.config.schema import AUTO",
        b="def f(train: TrainSection | None): ...",
        c="def f(train: int): ...",
        config__load="def f(config: RunConfig): ...",
    )

    assert on_the_way_of_the_run_file(trees) == ["a.py", "b.py"]


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("plan__time", "x == 'shard'", 1),
        ("plan__time", "engine = ShardEngine()", 1),
        ("run__story", "from coremill.tasks.causal_lm import rows", 1),
        ("engines__replicate__cost", "x == 'replicate'", 0),
        ("engines__replicate__cost", "x == 'shard'", 1),
        ("registry", "x = {'shard': 1}", 0),
        ("parallel__shard", "class ShardEngine: name = 'shard'", 0),
        ("plan__time", "'shard the rows'", 0),
    ],
)
def test_a_part_is_named_at_home_and_in_the_registry_only(path: str, text: str, count: int):
    assert len(places_that_name_a_part(parsed(**{path: text}))) == count


def test_copies_of_a_constant():
    trees = parsed(
        a="POLL_SECONDS = 0.1\nFIRST_ROWS = 2**20\nBLOCK_BYTES = 4096",
        b="POLL_SECONDS = 0.1\nOTHER_ROWS: int = 1024 * 1024\nPIECE_BYTES = 4096",
        c="POLL_SECONDS = 5\nNAME = 'x'",
    )

    assert copied_constants(trees) == [
        "0.1: a.py POLL_SECONDS, b.py POLL_SECONDS",
        "1.04858e+06: a.py FIRST_ROWS, b.py OTHER_ROWS",
    ]
    assert ambiguous_constants(trees) == ["POLL_SECONDS: 0.1 (b.py), 5 (c.py)"]


def test_a_room_that_is_gone_has_an_empty_cell():
    printed = table({"old": {"parallel/a.py": "a = 1\n"}, "new": {"engines/a.py": "a = 1\nb = 1\n"}}).splitlines()

    assert "| engines/ |  | 1 files, 2 lines |" in printed
    assert "| parallel/ | 1 files, 1 lines |  |" in printed
    assert "| all | 1 files, 1 lines | 1 files, 2 lines |" in printed
