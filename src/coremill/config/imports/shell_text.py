"""Text as it is pasted from a tutorial or a shell script -> the command that starts a training, with its variables.

Nothing is run and nothing is expanded: `$HOSTS` stays as it is written.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coremill.errors import InputError

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PLAIN = re.compile(r"(^|/)(python[\d.]*|[\w.-]+\.py)$")  # may as well prepare data
_REDIRECTION = re.compile(r"\d*[<>]")
_SBATCH = re.compile(r"^#SBATCH[ \t]+(-.*?)(?:[ \t]#.*)?$", re.MULTILINE)
_SUBSTITUTED = re.compile(r"^\s*(export\s+)?\w+=\$?[(`]")  # path=$(python -c ...)


@dataclass(frozen=True)
class ShellCommand:
    """One command with what was exported before it."""

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    folders: tuple[str, ...] = ()  # that a script had changed to before it, one after the other
    others: tuple[str, ...] = ()  # commands beside it that start Python too
    of_slurm: tuple[str, ...] = ()  # what lines of #SBATCH say, which srun takes over


def command_in(text: str, is_start: re.Pattern[str], where: str) -> ShellCommand:
    """The first command of a launcher, else the first that starts Python; InputError where there is none."""
    found: list[ShellCommand] = []
    variables: dict[str, str] = {}
    folders: tuple[str, ...] = ()
    for line in _logical_lines(text):
        if _SUBSTITUTED.match(line):
            continue
        try:
            commands = _commands(line)
        except ValueError as error:
            raise InputError(
                "the command cannot be taken apart", where=where, why=f"{str(error).lower()}, at: {line.strip()[:80]}",
                do="close the quote that was opened",
            ) from None  # fmt: skip
        for words in commands:
            own = _leading(words)
            rest = words[len(own) :]
            if not rest:
                variables |= dict(own)
            elif rest[0] in ("cd", "pushd") and len(rest) == 2:
                folders = (*folders, rest[1])
            elif is_start.search(rest[0]):
                found.append(ShellCommand(tuple(rest), tuple((variables | dict(own)).items()), folders))
    if found:
        chosen = next((each for each in found if not _PLAIN.search(each.words[0])), found[0])
        others = tuple(" ".join(each.words[:3]) for each in found if each is not chosen)
        of_slurm = tuple(word for line in _SBATCH.findall(text) for word in line.split())
        return replace(chosen, others=others, of_slurm=of_slurm)
    why = "no line starts with torchrun, accelerate launch, mpirun, srun, deepspeed, ipexrun or python"
    raise InputError("there is no command that starts a training", where=where, why=why,
                     do="name a file, or a command after --: -- torchrun train.py")  # fmt: skip


def _leading(words: Sequence[str]) -> list[tuple[str, str]]:
    """The assignments in front of a command."""
    found = []
    for word in words:
        if not ASSIGNMENT.fullmatch(word):
            break
        name, _, value = word.partition("=")
        found.append((name, value))
    return found


def _logical_lines(text: str) -> list[str]:
    """Lines joined where a backslash says so."""
    return [line for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines() if line.strip()]


def _commands(line: str) -> list[list[str]]:
    """The words of each command on a line; `export`, a prompt and where output goes are left out."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    reader.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in reader:
        if set(word) <= set(";&|"):
            found.append([])
        else:
            found[-1].append(word)
    cut = [list(itertools.takewhile(lambda word: not _REDIRECTION.match(word), words)) for words in found]
    return [words[1:] if words[:1] in (["export"], ["$"]) else words for words in cut if words]
