"""The tail is the style: run/story.py stays one story, long files and functions are named with their reason."""

from __future__ import annotations

import ast
import re

from house import PACKAGE, file_of, project_files, sources

FILE_LINES = 400
FUNCTION_LINES = 80
STAGE_LINES = 45  # of the story: each stage fits on one screen

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[tuple[str, str], str] = {}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STORY = ("config", "hardware", "plan", "data", "model", "engine", "train", "report")
# The calls that stand for the stages, in the order a reader meets them in each function.
CHAPTERS = {
    "run_as_launcher": ("own_run(", "prepare_run(", "write_orders(", "watch_ranks(", "close_launcher("),
    "run_as_rank": ("join_world(", "orders_of_launcher(", "prepare_together(", "train_rank(", "close_rank("),
    "train_rank": ("announce(", "build(", "load(", "resume(", "train(", "export("),
}


def long_functions() -> set[tuple[str, str]]:
    return {
        (file_of(module), node.name)
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES
    }


def test_long_files_are_named_with_a_reason():
    long = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if lines(path) > FILE_LINES}
    assert long == set(LONG_FILES)


def test_long_functions_are_named_with_a_reason():
    assert long_functions() == set(LONG_FUNCTIONS)


def test_the_story_is_in_order_and_each_stage_fits_one_screen():
    text, tree = (PACKAGE / "run" / "story.py").read_text(), sources()["coremill.run.story"]
    opening = ast.get_docstring(tree) or ""
    places = [re.search(rf"\b{stage}\b", opening) for stage in STORY]
    assert all(places), STORY
    assert [place.start() for place in places if place] == sorted(place.start() for place in places if place)
    stages = {node.name: ast.get_source_segment(text, node) or "" for node in tree.body if isinstance(node, FUNCTIONS)}
    assert {name: body.count("\n") for name, body in stages.items() if body.count("\n") > STAGE_LINES} == {}
    for name, chapters in CHAPTERS.items():
        positions = [stages[name].find(chapter) for chapter in chapters]
        assert min(positions) >= 0 and positions == sorted(positions), dict(zip(chapters, positions, strict=True))
    # What stands in the story is typed: no arguments hidden in dicts, but for what is written as an event.
    hidden = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) != "write"
        for keyword in node.keywords
        if keyword.arg is None
    ]
    assert hidden == []


def test_every_module_says_what_it_is_for():
    assert [file_of(module) for module, tree in sources().items() if not ast.get_docstring(tree)] == []


def test_there_is_no_drawer():
    drawers = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [path for path in project_files() if path.name in drawers] == []


def lines(path) -> int:
    return path.read_text().count("\n")
