"""Code that comes with a model: which code was meant, whether it is still that, and the copy that is imported.

It is run only where the run file asks for it and pins it: by a full commit on the hub, or by a hash for a folder. What
was hashed and what is imported are the same bytes: they are read once, right before the import, and go to a folder of
this process alone. transformers imports from a second copy that it makes in a cache shared by all programs of a user
and compares by date and size; here that cache is a fresh folder too. No torch; transformers is imported in functions.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.errors import CoremillError, InputError
from coremill.files import CACHE_ADVICE, at_home

# The files in which a model says what classes of its own it has.
DOCUMENTS = ("config.json", "tokenizer_config.json")
TRUST_ADVICE = (
    "use a model whose code is part of transformers; or read this one's code and set model.trust_remote_code: true,"
    " with its commit as model.revision (hub) or with model.code_sha256 (folder)"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CLASS = re.compile(r"([A-Za-z_]\w*)\.[A-Za-z_]\w*")  # file.Class; paths lead out of the folder
_MODULES = "transformers_modules"  # the package under which transformers imports such code


@dataclass(frozen=True)
class PinProblem:
    """Why it is not certain which code is meant; `key` is what is to be set in the section model."""

    key: str
    what: str
    why: str
    do: str


def is_folder(name: str) -> bool:
    """Whether a model's name means a folder: a path that exists, or one that can only be a path."""
    path = at_home(name)
    only_a_path = name.startswith(("/", ".", "~")) or name.endswith("/") or (name.count("/") > 1 and "://" not in name)
    return path.is_dir() or only_a_path or (path.suffix != "" and path.is_file())


def is_code(file: str) -> bool:
    """Whether a file beside config.json is code; transformers looks into no folders."""
    return file.endswith(".py") and not file.startswith(".") and "/" not in file


def read_code(folder: Path) -> dict[str, bytes]:
    """The code files of a folder, by name."""
    try:
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if is_code(path.name)}
    except OSError as error:
        raise InputError(f"the model's code cannot be read: {error.strerror}", where=str(error.filename)) from None


def code_sha256(files: Mapping[str, bytes]) -> str:
    """One hash over names and contents: that of what `sha256sum *.py` prints."""
    lines = (f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def pin_problem(name: str, revision: str | None, sha256: str | None) -> PinProblem | None:
    """Why the code of a model may not be run yet, where the run file asks for it; None where it is pinned."""
    trusting = "model.trust_remote_code is true"
    if not is_folder(name):
        if revision is not None and _COMMIT.fullmatch(revision):
            return None
        return PinProblem(
            "model.revision",
            f"{trusting}, but model.revision is {revision or 'left out'}, not a full commit",
            "a branch or tag can be moved to other code after you have read it",
            "read the code, then set model.revision to the 40 hexadecimal digits of its commit",
        )
    folder = at_home(name)
    files = read_code(folder) if folder.is_dir() else {}
    if folder.is_dir() and not files:
        return PinProblem(
            "model.trust_remote_code",
            f"{trusting}, but {folder} holds no code",
            "there is no .py file beside config.json",
            "remove model.trust_remote_code",
        )
    if sha256 is None:
        listed = f" ({', '.join(sorted(files))})" if files else ""
        value = code_sha256(files) if files else "what `LC_ALL=C sha256sum *.py | sha256sum` prints there"
        return PinProblem(
            "model.code_sha256",
            f"{trusting}, but model.code_sha256 does not say which code",
            "what lies in a folder can change after you have read it",
            f"read the code{listed}, then set model.code_sha256: {value}",
        )
    return None


def require_same_code(files: Mapping[str, bytes], sha256: str, where: str) -> None:
    """Refuse code that is not what was read by the user."""
    found = code_sha256(files)
    if found != sha256:
        raise InputError(
            "the model's code is not the code that model.code_sha256 names",
            where=where,
            why=f"its hash is {found}, not {sha256}",
            do="find out what changed; after reading the code again set model.code_sha256 to its hash",
        )


def require_own_classes(document: Mapping[str, Any], code_files: Collection[str], where: str) -> None:
    """Every class that `auto_map` names lies in a code file beside it."""
    for reference in _references(document):
        if "--" in reference:
            raise InputError(
                f"the model's code lies in another repository: {reference}",
                where=where,
                why="only code beside config.json is pinned",
                do="copy model and code into one folder, name the class there in auto_map as file.Class, and pin that",
            )
        match = _CLASS.fullmatch(reference)
        if match is None or f"{match[1]}.py" not in code_files:
            raise InputError(
                f"auto_map names {reference}, and there is no such code file",
                where=where,
                why=f"beside it lie {', '.join(sorted(code_files)) or 'no .py files'}",
                do="complete the folder, or download it again",
            )


def require_checked_code(folder: Path, sha256: str | None, where: str) -> str:
    """Check a folder whose code is to be run; returns the hash that ranks hold it to."""
    files = read_code(folder)
    documents = {name: _document(folder / name) for name in DOCUMENTS if (folder / name).is_file()}
    if not any(list(_references(document)) for document in documents.values()):
        raise InputError(
            "model.trust_remote_code is true, but the model has no code of its own",
            where=where,
            why=f"neither of {' and '.join(DOCUMENTS)} has an auto_map",
            do="remove model.trust_remote_code",
        )
    for name, document in documents.items():
        require_own_classes(document, files, str(folder / name))
    if sha256 is not None:
        require_same_code(files, sha256, where)
    return code_sha256(files)


@functools.cache
def checked_copy(folder: Path, sha256: str, cache: Path) -> Path:
    """The model's folder as this process alone has it, with exactly the code of this hash: for trust_remote_code.

    Weights and other large files are links. It is there until the process ends: code may import more of itself late.
    """
    files = read_code(folder)
    require_same_code(files, sha256, str(folder))
    _make_ours(cache / "code")
    copy = _home(cache) / f"code_{sha256}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    copy.mkdir()
    for name, content in files.items():
        (copy / name).write_bytes(content)
    for path in folder.iterdir():
        if path.name in DOCUMENTS:
            content = path.read_bytes()
            (copy / path.name).write_bytes(content)
            require_own_classes(_document(copy / path.name), files, str(path))
        elif path.is_file() and path.suffix != ".py":
            (copy / path.name).symlink_to(path.absolute())
    return copy


def remove_copies() -> None:
    """What `checked_copy` made; for processes that end without Python's own end."""
    while _homes:
        pid, home = _homes.pop()
        if pid == os.getpid():  # a forked child's end is not ours
            shutil.rmtree(home, ignore_errors=True)


_homes: list[tuple[int, Path]] = []


def _home(cache: Path) -> Path:
    """This process's own folder for code, from which transformers imports as well."""
    if _homes:
        return _homes[0][1]
    import transformers.dynamic_module_utils as dynamic

    if not hasattr(dynamic, "HF_MODULES_CACHE") or _MODULES in sys.modules:
        raise CoremillError("this transformers would import the model's code from a folder that nobody has checked")
    home = Path(tempfile.mkdtemp(dir=cache / "code"))
    _homes.append((os.getpid(), home))
    atexit.register(remove_copies)
    modules = home / "modules"
    modules.mkdir()
    (modules / "__init__.py").touch()
    sys.path.insert(0, str(modules))  # first: no other folder of that name stands in for it
    dynamic.HF_MODULES_CACHE = str(modules)
    return home


def _make_ours(root: Path) -> None:
    """A folder in the cache into which nobody else can put anything."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = {folder: folder.stat() for folder in (root.parent, root)}
    except OSError as error:
        what = f"cannot write the model's code to the cache: {error.strerror}"
        raise InputError(what, where=str(root), do=CACHE_ADVICE) from None
    for folder, status in found.items():
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            raise InputError(
                f"the cache {folder} is not safe to run code from",
                where="COREMILL_CACHE",
                why=f"other users may write into it (mode {stat.S_IMODE(status.st_mode):04o}, uid {status.st_uid})",
                do=f"chmod go-w {folder}, or set COREMILL_CACHE to a folder of your own",
            )


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path.name} cannot be read: {error}", where=str(path)) from None
    return document if isinstance(document, dict) else {}


def _references(document: Mapping[str, Any]) -> Iterator[str]:
    """The classes that a document says to import; a tokenizer names two, of which one may be missing."""
    auto_map = document.get("auto_map")
    values = list(auto_map.values()) if isinstance(auto_map, Mapping) else [auto_map]
    while values:
        value = values.pop(0)
        if isinstance(value, list | tuple):
            values = [*value, *values]
        elif value is not None:
            yield str(value)
