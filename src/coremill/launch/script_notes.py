"""What a script asks of transformers that the installed version no longer has: said at its start, not by a traceback.

The script and the installed `TrainingArguments` are read, neither is imported (torch alone takes seconds). Only what is
plain to see is said: arguments behind the script, names in a call, imports that fail.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from coremill.config.foreign import find_foreign

_CLASS = "TrainingArguments"
_PARSER = "HfArgumentParser"
_LARGEST_BYTES = 1 << 20  # of a script
# Archived, and nothing that a script needs is lost without them.
_ARCHIVED = {
    "intel_extension_for_pytorch": "IPEX is archived upstream; stock PyTorch has its kernels: remove the import and"
    " ipex.optimize",
    "oneccl_bindings_for_pytorch": "archived upstream; ranks talk over gloo: remove the import",
    "torch_ccl": "archived upstream; ranks talk over gloo: remove the import",
}


def text_of_script(script: str) -> str:
    """Of a file; empty where it is none, or too large to be one."""
    try:
        path = Path(script)
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _LARGEST_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def notes_on_script(script: str, arguments: tuple[str, ...], text: str) -> list[str]:
    """One line for each thing that will not work, with what to write instead where that is known."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # Python says it better
        return []
    notes = [
        f"{script}:{line} imports {name}, which is not installed: {_ARCHIVED[name]}"
        for name, line in _imports(tree)
        if name in _ARCHIVED and importlib.util.find_spec(name) is None
    ]
    if _CLASS not in text or not known_arguments():
        return notes
    names = {word: _name_of(word) for word in dict.fromkeys(arguments) if re.match(r"--\w", word)}
    if _PARSER in text:
        notes += [
            f"{word.partition('=')[0]}: {_gone(name, is_option=True)}"
            for word, name in names.items()
            if not _is_known(name) and not re.search(rf"\b{re.escape(name)}\b", text)
        ]
    notes += [
        f"{script}:{line} {_CLASS}({name}=...): {_gone(name, is_option=False)}"
        for name, line in _keywords(tree)
        if name not in known_arguments()
    ]
    return notes


def uses_deepspeed(arguments: tuple[str, ...], text: str) -> bool:
    """Whether the script imports DeepSpeed, or hands it to the Trainer: accelerate leaves it out where told of CPUs."""
    if any(word.partition("=")[0] == "--deepspeed" for word in arguments):
        return True
    if "deepspeed" not in text:
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return "deepspeed" in dict(_imports(tree)) or "deepspeed" in dict(_keywords(tree))


@functools.cache
def known_arguments() -> frozenset[str]:
    """The fields of the installed `TrainingArguments`; none where they cannot be found."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return frozenset()
    folder = Path(package.origin).parent
    found: set[str] = set()
    for file, kind in (("training_args.py", _CLASS), ("training_args_seq2seq.py", f"Seq2Seq{_CLASS}")):
        try:
            tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
        found |= {
            entry.target.id
            for body in bodies
            for entry in body
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        }
    return frozenset(found) if "output_dir" in found else frozenset()  # else the file looks different by now


def _name_of(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def _is_known(name: str) -> bool:
    """Also short forms of a name, and the opposite of a switch, both of which the parser takes."""
    bare = name.removeprefix("no_") if name.startswith("no_") else name
    return bare in known_arguments() or any(field.startswith(name) for field in known_arguments())


def _gone(name: str, *, is_option: bool) -> str:
    row = find_foreign((name,))
    cure = "remove it"
    if row is not None and row.today:
        today = row.today if is_option else row.today.removeprefix("--").replace(" ", "=")
        cure = f"remove it; today's name is {today}"
    return f"transformers {metadata.version('transformers')} has no such argument and will refuse it; {cure}"


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node.lineno


def _keywords(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Of calls of the class by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in (_CLASS, f"Seq2Seq{_CLASS}"):
                yield from ((keyword.arg, keyword.value.lineno) for keyword in node.keywords if keyword.arg)
