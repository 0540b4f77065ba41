"""The command line as a tree, and a reader of command lines that are written down somewhere."""

from __future__ import annotations

import functools
from typing import Any

import typer.main

from coremill.cli import app


@functools.cache
def tree() -> Any:
    """The root command."""
    return typer.main.get_command(app)


def surface(command: Any = None, name: str = "coremill") -> dict[str, list[str]]:
    """Each command with its arguments and options, as they are typed."""
    command = tree() if command is None else command
    typed = [
        parameter.name.upper() if parameter.param_type_name == "argument" else "/".join(option_names(parameter))
        for parameter in command.params
        if parameter.name != "help"
    ]
    found = {name: sorted(typed)}
    for child, its_command in getattr(command, "commands", {}).items():
        found |= surface(its_command, f"{name} {child}")
    return found


def option_names(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


def parse(words: list[str]) -> None:
    """Read the words after `coremill` as the command line would, without running anything; raises what it would say."""
    command, name = tree(), "coremill"
    if words and words[0] in ("--help", "--version"):
        return
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            raise ValueError(f"{name} has no command {words[:1]}")
        name, command, words = f"{name} {words[0]}", command.commands[words[0]], words[1:]
    if words != ["--help"]:
        command.make_context(name, list(words))
