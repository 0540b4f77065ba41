"""Data flows one way: a stage imports earlier stages only, and every module has its place in that order."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

from house import PACKAGE, ROOT, file_of, sources

from coremill.registry import BUILT_IN


def layers() -> list[str]:
    """The order in pyproject.toml, latest stage first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = settings["contracts"]
    return [layer.replace("coremill.", "") for layer in contract["layers"]]


def test_imports_point_backwards():
    # A process of its own: import-linter turns off the loggers of the process it runs in.
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    outcome = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_every_stage_has_a_layer():
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert entries - {"__init__"} == {layer.partition(".")[0] for layer in layers()}


def test_the_architecture_page_draws_the_same_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    (drawn,) = re.findall(r"^`(errors < [^`]*)`$", page, flags=re.MULTILINE)
    assert [*reversed(layers())] == [*drawn.split(" < "), "__main__"]


def test_imports_are_absolute():
    relative = [
        f"{file_of(module)}:{node.lineno}"
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, relative


def test_engines_learn_of_the_run_file_through_the_plan_and_their_optimizer():
    knowing = {
        module
        for module, tree in sources().items()
        if module.startswith("coremill.engines")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("coremill.config")
    }
    assert knowing == {"coremill.engines.optimizers"}  # which makes one value of the settings


def test_engines_are_named_by_their_own_folder_and_the_registry():
    named = set(BUILT_IN["coremill.engines"])
    elsewhere = {
        f"{file_of(module)}:{node.lineno}"
        for module, tree in sources().items()
        if module != "coremill.registry" and not module.startswith("coremill.engines.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in named
    }
    assert elsewhere == set()
