"""The environment is an input like any other: read in two places, handed on as a value."""

from __future__ import annotations

import ast

from house import file_of, sources

READERS = {"world/group.py", "hardware/probe.py"}
# Libraries take these from the environment and from nowhere else, in a process that has no other use for it.
WRITERS = {"data/tokenise_child.py": "threads of the tokenizer library, offline mode of the hub's; in its own process"}
NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def uses(tree: ast.Module) -> list[tuple[int, bool]]:
    """Line of each use of the process's environment, and whether it only sets a variable."""
    set_here = {
        id(target.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Subscript)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in NAMES and getattr(node.value, "id", None) == "os":
            found.append((node.lineno, id(node) in set_here))
        if isinstance(node, ast.ImportFrom) and node.module == "os" and NAMES & {name.name for name in node.names}:
            found.append((node.lineno, False))
    return found


def test_the_scan_sees_reads_and_writes():
    source = "import os\na = os.environ['A']\nos.environ['B'] = '1'\nb = os.getenv('B')\nfrom os import environ\n"
    assert uses(ast.parse(source)) == [(5, False), (2, False), (3, True), (4, False)]


def test_only_two_modules_read_the_environment():
    wrong = [
        f"{file_of(module)}:{line}"
        for module, tree in sources().items()
        for line, only_set in uses(tree)
        if file_of(module) not in READERS and not (only_set and file_of(module) in WRITERS)
    ]
    assert not wrong, f"take environment_snapshot() as an argument instead: {wrong}"


def test_no_entry_is_stale():
    using = {file_of(module) for module, tree in sources().items() if uses(tree)}
    assert using == READERS | set(WRITERS)
