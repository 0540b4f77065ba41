"""What `coremill config import` prints: a run file, in its head the commands that go with it; or the same as JSON."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.config.imports.commands import import_start
from coremill.config.imports.fates import one_line, without_secrets, words_without_secrets
from coremill.config.imports.files import TOOLS, import_settings
from coremill.config.imports.launchers import PROGRAMS, STARTS, WHERE, add_options_of_slurm, take_apart
from coremill.config.imports.run_file import Composed, render
from coremill.config.imports.settings_file import read_text_file, settings_of_text
from coremill.config.imports.shell_text import ShellCommand, command_in
from coremill.errors import InputError

_SCRIPT_ENDS = (".sh", ".bash", ".slurm", ".sbatch")


@dataclass(frozen=True)
class Imported:
    """A run file in the making, and the commands that go with it."""

    source: str
    composed: Composed
    head: tuple[str, ...]
    launch: tuple[str, ...] = ()
    train: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """A run file."""
        return render(self.composed, self.head)

    @property
    def as_json(self) -> str:
        """For scripts: what became of every setting."""
        fates = [
            {
                "setting": fate.brought.name,
                "value": without_secrets(fate.brought.shown),
                "tool": fate.brought.tool,
                "fate": fate.kind,
                "settings": dict(fate.settings),
                "command": without_secrets(fate.command) or None,
                "why": one_line(fate.why),
            }
            for fate in self.composed.fates
        ]
        tree: dict[str, Any] = {key: written.value for key, written in self.composed.settings.items()}
        launch, train = words_without_secrets(self.launch), words_without_secrets(self.train)
        whole = {"source": self.source, "launch": launch, "train": train, "settings": tree}
        return json.dumps({**whole, "questions": list(self.composed.questions), "fates": fates}, indent=2)


def import_words(words: Sequence[str], *, is_command: bool, environ: Mapping[str, str]) -> Imported:
    """A file, or the words of a command (`is_command`: they stood behind --; else the first word tells)."""
    if not words:
        do = "coremill config import FILE, or coremill config import -- COMMAND ..."
        raise InputError("there is nothing to import", where=WHERE, why="neither a file nor a command is named", do=do)
    first = words[0]
    path = Path(os.path.expanduser(first))
    launcher = Path(first).name in PROGRAMS or Path(first).name.startswith("python")
    if not is_command and (os.path.exists(path) or (len(words) == 1 and not launcher and " " not in first)):
        if len(words) > 1:
            why = f"{first} is a file, and one is read at a time"
            raise InputError("what follows the file is not understood", where=f"{WHERE} ({shlex.join(words[1:])})",
                             why=why, do=f"write coremill config import {first}, or -- before a command")  # fmt: skip
        return _of_file(path, environ)
    if len(words) == 1 and any(sign in first for sign in " \n"):  # one quoted text, as pasted
        return _of_command(command_in(first, STARTS, WHERE), first, environ)
    return _of_command(ShellCommand(tuple(words)), " ".join(map(quoted, words)), environ)


def quoted(word: str) -> str:
    """For the shell, with its variables left to it."""
    name, equals, value = word.partition("=")
    if equals and name.isidentifier():
        return f"{name}={quoted(value)}" if value else word
    return f'"{word}"' if "$" in word and not set(word) & set("\"\\`'") else shlex.quote(word)


def _of_file(path: Path, environ: Mapping[str, str]) -> Imported:
    text = read_text_file(path)
    if path.suffix in _SCRIPT_ENDS or text.startswith("#!"):
        return _of_command(command_in(text, STARTS, str(path)), str(path), environ)
    if path.suffix == ".py":
        do = f"start it as it is: coremill launch {path}; its command line is imported by -- python {path} ..."
        raise InputError(f"{path} is a Python script, not settings", where=str(path), do=do)
    found = import_settings(settings_of_text(text, path))
    head = [f"Made by coremill config import from {path.name}: {TOOLS[found.tool]}.", *found.notes]
    return Imported(str(path), found.composed, tuple(head))


def _of_command(command: ShellCommand, said: str, environ: Mapping[str, str]) -> Imported:
    start = take_apart(command.words, command.variables)
    add_options_of_slurm(command.of_slurm, start)
    found = import_start(start, default_accelerate_file(environ))
    launch, train = " ".join(map(quoted, found.launch)), " ".join(map(quoted, found.train))
    head = ["Made by coremill config import from:", f"  {one_line(said)}", "The script as it is:"]
    head += [f"  cd {quoted(folder)}" for folder in command.folders]
    head += [*(note for note in found.notes if note.startswith(" ")), f"  {launch}"]
    if "--node-rank" in found.launch:
        head.append("on every machine, each with its own --node-rank; or once, with --hostfile and --ppn instead.")
    if found.script is not None:
        head += ["The same work by coremill, with this file saved as run.yaml:", f"  {train}"]
    else:
        head.append(
            f"{start.script_name} is not an example script that is known here, so model and data are for you to name if"
            f" coremill is to do the work itself, with this file saved as run.yaml: {train}"
        )
    head += [note for note in found.notes if not note.startswith(" ")]
    if command.others:
        head.append(f"Not imported, each needs a run of its own: {'; '.join(command.others)}")
    head = [without_secrets(line) for line in head]
    return Imported(without_secrets(one_line(said)), found.composed, tuple(head), found.launch, found.train)


def default_accelerate_file(environ: Mapping[str, str]) -> Path | None:
    """What `accelerate launch` reads where no file is named."""
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    folder = Path(environ.get("HF_HOME") or cache / "huggingface") / "accelerate"
    found = (folder / f"default_config.{ending}" for ending in ("yaml", "yml", "json"))
    return next((path for path in found if path.is_file()), None)
