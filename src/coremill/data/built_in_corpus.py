"""The built-in corpus: the source text of the Python standard library, about 11 MB that every user already has.

One document per .py file, in the order of their paths. Left out: installed packages, tests (17 MB of one kind) and
IDLE. A file that is not UTF-8 is left out too; the library has none in what remains.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from coremill.errors import InputError

LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"})


def built_in_files() -> tuple[Path, ...]:
    """The files of the corpus; a walk that never enters installed packages takes 10 ms, a recursive glob 400."""
    root = sysconfig.get_path("stdlib")
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in LEFT_OUT_FOLDERS)
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    if not found:
        raise InputError(
            "this Python has no source text for the built-in corpus",
            where=f"data.source: built-in ({root})",
            why="the standard library is there in compiled form only",
            do="set data.source to files of your own, for instance texts/*.txt",
        )
    return tuple(sorted(found, key=lambda path: path.relative_to(root).as_posix()))
