"""The tail is the style: run/story.py stays one story, long files and functions are named with their reason."""

from __future__ import annotations

import ast
import re

from house import PACKAGE, file_of, project_files, sources

FILE_LINES = 400
FUNCTION_LINES = 80
STORY_LINES = 150

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS = {
    ("run/story.py", "train_rank"): "the story itself: the torch stages in order, one after the other",
}
STORY = ("config", "hardware", "plan", "data", "model", "engine", "train", "report")
# The calls that stand for the stages, in the order a reader meets them in each function.
CHAPTERS = {
    "run_as_rank": ("join_world(", "orders_for(", "train_rank(", "close_run("),
    "train_rank": (
        "build_on_meta(",
        "make_engine(",
        "fill_parameters(",
        "make_loader(",
        "train_steps(",
        "export_model(",
    ),
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


def test_the_story_is_short_and_in_order():
    text = (PACKAGE / "run/story.py").read_text()
    assert text.count("\n") <= STORY_LINES
    opening = ast.get_docstring(sources()["coremill.run.story"]) or ""
    places = [re.search(rf"\b{stage}\b", opening) for stage in STORY]
    assert all(places), STORY
    assert [place.start() for place in places if place] == sorted(place.start() for place in places if place)
    for function in sources()["coremill.run.story"].body:
        for chapters in [CHAPTERS[function.name]] if isinstance(function, ast.FunctionDef) else []:
            body = ast.get_source_segment(text, function) or ""
            positions = [body.find(chapter) for chapter in chapters]
            assert min(positions) >= 0 and positions == sorted(positions), dict(zip(chapters, positions, strict=True))


def test_every_module_says_what_it_is_for():
    assert [file_of(module) for module, tree in sources().items() if not ast.get_docstring(tree)] == []


def test_there_is_no_drawer():
    drawers = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [path for path in project_files() if path.name in drawers] == []


def lines(path) -> int:
    return path.read_text().count("\n")
