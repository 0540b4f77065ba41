"""The house in numbers: how many files and lines each room has, and how many places know what they need not know.

    python scripts/house.py                    the working tree
    python scripts/house.py COMMIT             a commit
    python scripts/house.py BEFORE AFTER       two commits, and what became of each number

A room is a folder of the package; modules beside the rooms count as one more. All is read from git, nothing is run.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
PACKAGE = "src/coremill/"
WORKING_TREE = "working tree"
BESIDE_THE_ROOMS = "(beside the rooms)"


@dataclass(frozen=True)
class Part:
    """An engine or a task: what a run file calls it, its classes, and where these names belong."""

    literal: str
    classes: frozenset[str]
    homes: tuple[str, ...]  # in the layout before it had a folder, too


PARTS = (
    Part(
        "replicate",
        frozenset({"Replicate", "ReplicateEngine"}),
        ("engines/replicate/", "parallel/replicate.py"),
    ),
    Part(
        "shard",
        frozenset({"Shard", "ShardEngine"}),
        ("engines/shard/", "parallel/shard.py", "parallel/one_host.py"),
    ),
    Part("causal-lm", frozenset({"CausalLm"}), ("tasks/causal_lm/", "tasks/causal_lm.py")),
)
REGISTRY = "registry.py"  # the one list
RARE_NUMBER = 1000  # above it, the same number in two files is no coincidence

Sources = Mapping[str, str]  # content by path below the package


def read_sources(commit: str) -> Sources:
    """The package's Python files."""
    if commit == WORKING_TREE:
        folder = ROOT / PACKAGE
        return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))}
    listed = _git("ls-tree", "-r", "--name-only", commit, PACKAGE).splitlines()
    return {name.removeprefix(PACKAGE): _git("show", f"{commit}:{name}") for name in listed if name.endswith(".py")}


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def room_of(path: str) -> str:
    """The first folder of the path."""
    parts = PurePosixPath(path).parts
    return f"{parts[0]}/" if len(parts) > 1 else BESIDE_THE_ROOMS


def rooms(sources: Sources) -> dict[str, tuple[int, int]]:
    """Files and lines of each room; empty files are not counted."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path, text in sources.items():
        if text.strip():
            files[room_of(path)] += 1
            lines[room_of(path)] += len(text.splitlines())
    return {room: (files[room], lines[room]) for room in sorted(files)}


def imported(tree: ast.Module) -> Iterator[str]:
    """The dotted name of all that is imported, at the top or in a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers_of(room: str, trees: Mapping[str, ast.Module]) -> list[str]:
    """Files outside a room that import from it."""
    whole = f"coremill.{room}"
    return [
        path
        for path, tree in trees.items()
        if room_of(path) != f"{room}/" and any(f"{name}.".startswith(f"{whole}.") for name in imported(tree))
    ]


def on_the_way_of_the_run_file(trees: Mapping[str, ast.Module]) -> list[str]:
    """Modules outside config/ that know the run file: they import from config, or take it or a section by type."""
    importing = set(importers_of("config", trees))
    return [path for path, tree in trees.items() if room_of(path) != "config/" and (path in importing or _takes(tree))]


def _takes(tree: ast.Module) -> bool:
    """Has a function with an argument that is annotated as the run file or one of its sections."""
    annotations = (
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and node.annotation
        for name in ast.walk(node.annotation)
    )
    return any(
        isinstance(name, ast.Name) and (name.id == "RunConfig" or name.id.endswith("Section")) for name in annotations
    )


def places_that_name_a_part(trees: Mapping[str, ast.Module]) -> list[str]:
    """Each literal, class name and import, `path:line`, of an engine or a task outside its home and the registry."""
    return [
        f"{path}:{node.lineno} {part.literal}"
        for path, tree in trees.items()
        for part in PARTS
        if path != REGISTRY and not path.startswith(part.homes)
        for node in ast.walk(tree)
        if _names(node, part)
    ]


def _names(node: ast.AST, part: Part) -> bool:
    match node:
        case ast.Constant():
            return node.value == part.literal
        case ast.Name():
            return node.id in part.classes
        case ast.Attribute():
            return node.attr in part.classes
        case ast.ImportFrom() if node.module:
            module = node.module.removeprefix("coremill.").replace(".", "/")
            return f"{module}/".startswith(part.homes) or f"{module}.py" in part.homes
    return False


def copied_constants(trees: Mapping[str, ast.Module]) -> list[str]:
    """Numbers at the top of two files or more: of one name and value, or of one unit and a value above RARE_NUMBER."""
    places: dict[tuple[str, float], dict[str, str]] = defaultdict(dict)
    for path, name, value in _all_constants(trees):
        unit = name.rsplit("_", 1)[-1]
        # Powers of two are everybody's sizes in bytes: there the name decides.
        places[unit if value > RARE_NUMBER and unit != "BYTES" else name, value][path] = name
    return [
        f"{value:g}: {', '.join(f'{path} {name}' for path, name in found.items())}"
        for (_, value), found in sorted(places.items())
        if len(found) > 1
    ]


def ambiguous_constants(trees: Mapping[str, ast.Module]) -> list[str]:
    """Names that stand for one number in one file and for another elsewhere: copies that drifted, or poor names."""
    values: dict[str, dict[float, str]] = defaultdict(dict)
    for path, name, value in _all_constants(trees):
        values[name][value] = path
    several = {name: of_name for name, of_name in values.items() if len(of_name) > 1}
    return [
        f"{name}: {', '.join(f'{value:g} ({path})' for value, path in found.items())}"
        for name, found in sorted(several.items())
    ]


def _all_constants(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str, float]]:
    for path, tree in trees.items():
        for name, value in _constants(tree):
            yield path, name, value


def _constants(tree: ast.Module) -> Iterator[tuple[str, float]]:
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = _number(getattr(node, "value", None))
        if isinstance(target, ast.Name) and target.id.isupper() and value is not None:
            yield target.id.lstrip("_"), value


def _number(node: ast.AST | None) -> float | None:
    """The value of a number, or of numbers added, multiplied and raised: `16 * 2**20`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        if left is None or right is None:
            return None
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.Pow():
                return left**right
    return None


def places(sources: Sources) -> dict[str, list[str]]:
    """The places each of the counts below the rooms is made of."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    return {
        "files that import launch": importers_of("launch", trees),
        "modules outside config/ that import from it, or take the run file or a section": on_the_way_of_the_run_file(
            trees
        ),
        "places that name an engine or a task outside its folder": places_that_name_a_part(trees),
        "constants with a copy": copied_constants(trees),
        "names of constants with several values": ambiguous_constants(trees),
    }


def table(columns: Mapping[str, Sources]) -> str:
    """Markdown: a row per room, the sum, then the counts."""
    by_column = [rooms(sources) for sources in columns.values()]
    counts = [places(sources) for sources in columns.values()]
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    for room in sorted({room for of_column in by_column for room in of_column}):
        cells = ["{} files, {:,} lines".format(*found[room]) if room in found else "" for found in by_column]
        lines.append(f"| {room} | {' | '.join(cells)} |")
    sums = [[sum(part) for part in zip(*found.values(), strict=True)] for found in by_column]
    lines.append(f"| all | {' | '.join(f'{files} files, {count:,} lines' for files, count in sums)} |")
    for name in counts[0]:
        lines.append(f"| {name} | {' | '.join(str(len(found[name])) for found in counts)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table and, where asked, the places behind the counts of the last column."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", default=[WORKING_TREE], help="one or two; left out: the working tree")
    parser.add_argument("--places", action="store_true", help="list the places counted in the last column as well")
    options = parser.parse_args()
    columns = {commit: read_sources(commit) for commit in options.commits}
    print(table(columns))
    if options.places:
        for name, found in places(columns[options.commits[-1]]).items():
            print(f"\n{name}:", *found, sep="\n- ")


if __name__ == "__main__":
    main()
