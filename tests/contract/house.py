"""What the contract tests look at: the project's files, its modules, its pages."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "coremill"
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
)


@functools.cache
def project_files() -> tuple[Path, ...]:
    """Every file git knows or would take, relative to the root: build outputs and run folders are not the project."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return tuple(sorted(Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()))


@functools.cache
def text_files() -> dict[str, str]:
    """The project's files that hold text, by path."""
    found = {}
    for path in project_files():
        content = (ROOT / path).read_bytes()
        if b"\0" not in content:
            found[path.as_posix()] = content.decode("utf-8")
    return found


@functools.cache
def sources() -> dict[str, ast.Module]:
    """The package's modules, parsed, by dotted name."""
    return {module_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def module_name(path: Path) -> str:
    """coremill.config.load for src/coremill/config/load.py."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def file_of(module: str) -> str:
    """config/load.py for coremill.config.load: how people name a module."""
    base = PACKAGE.parent.joinpath(*module.split("."))
    return (base / "__init__.py" if base.is_dir() else base.with_suffix(".py")).relative_to(PACKAGE).as_posix()


def code_blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and content of each fenced block of a page."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE):
        yield match[1], match[2]
