"""Words of the command line that belong to other tools: `--num_train_epochs 3`, `--nproc_per_node 2`, `lr=2e-5`.

Looked at before the command line is read, which would only say that there is no such option. What is not known here is
left to it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coremill.config.document import read_document
from coremill.config.foreign import find_foreign
from coremill.config.keys import keys
from coremill.config.other_tools import flags, launcher_words
from coremill.config.translate import as_written
from coremill.config.unknown_keys import explain_unknown_key, plain_name
from coremill.errors import ConfigError, InputError

_RUN_FILE = ("config", "config_file", "config_path", "c", "f", "yaml", "recipe")
_COMMANDS = {
    **dict.fromkeys(("run", "finetune", "fine-tune", "fit", "sft", "pretrain", "pt", "resume", "start"), "train"),
    **dict.fromkeys(("env", "info", "check", "test"), "doctor"),
    **dict.fromkeys(("estimate", "estimate-memory", "estimate_memory", "dry-run"), "plan"),
    **dict.fromkeys(("validate", "cat"), "config show"),
    **dict.fromkeys(("torchrun", "mpirun", "accelerate", "exec"), "launch SCRIPT"),
}


@dataclass(frozen=True)
class Word:
    """One option or key=value of the command line."""

    text: str  # as it was typed, without its value
    name: str  # as the tables have it
    value: str | None


def refuse_words_of_other_tools(
    command: str, words: Sequence[str], options: Mapping[str, bool], *, to_script: bool
) -> None:
    """Raise ConfigError where a command is given options that other tools have, all of them at once.

    `options` are the command's own, each with whether a value follows it. With `to_script` all that comes after the
    first word that is no option is for somebody else.
    """
    unknown = _unknown_words(words, options, to_script=to_script)
    given = {word.name: _value_of(word) for word in unknown}
    found = [_explain(word, given, command, options) for word in unknown]
    problems = [problem for problem in found if problem is not None]
    if problems:
        if to_script and (line := _whole_line(words, options)) is not None:
            last = problems[-1]
            problems[-1] = InputError(
                last.what, where=last.where, why=last.why, do=f"{last.do}; the line to type: {line}"
            )
        raise ConfigError(problems, "on the command line")


def refuse_command_of_another_tool(name: str, commands: Collection[str]) -> None:
    """Raise InputError where ours is known."""
    ours = _COMMANDS.get(name.lower())
    if ours is not None and ours.split()[0] in commands:
        why = f"coremill has {', '.join(commands)}"
        raise InputError(f"there is no command {name}", where="command line", why=why, do=f"run coremill {ours}")


def _whole_line(words: Sequence[str], options: Mapping[str, bool]) -> str | None:
    """What to type instead, all of it: read as a line of the launcher that has such words; None: there is no script."""
    from coremill.config.imports.commands import import_start
    from coremill.config.imports.launchers import take_apart

    names = {plain_name(word.partition("=")[0].lstrip("-")) for word in words if word.startswith("-")}
    of_mpirun = any(re.match(r"-\w\w", word) for word in words) or names & {"n", "f", "x"}
    tools = {tool for name in names if (word := launcher_words().get(name)) is not None for tool in word.tools[:1]}
    tool = "mpirun" if of_mpirun else tools.pop() if len(tools) == 1 else "torchrun"
    own: list[str] = []
    rest = list(words)
    if "--via" in rest:  # its value is the name of a launcher
        place = rest.index("--via")
        own += rest[place : place + 2]
        del rest[place : place + 2]
    try:
        start = take_apart([tool, *(["launch"] if tool == "accelerate" else []), *rest])
        ours = [option for option in start.options if option.word is None and option.text in options]
        start.options = [option for option in start.options if option not in ours]
        line = list(import_start(start).launch)
    except InputError:
        return None
    own += [word for option in ours for word in (option.text, option.value) if word is not None]
    place = line.index("launch") + 1
    return shlex.join([*line[:place], *own, *line[place:]])


def _unknown_words(words: Sequence[str], options: Mapping[str, bool], *, to_script: bool) -> list[Word]:
    found: list[Word] = []
    position, positionals = 0, 0
    while position < len(words) and words[position] != "--":
        word = words[position]
        following = words[position + 1] if position + 1 < len(words) else None
        position += 1
        if not word.startswith("-"):
            positionals += 1
            if to_script:
                break
            if positionals > 1 and "=" in word and "--set" in options:
                name, _, value = word.partition("=")
                found.append(Word(word, plain_name(name), value))
            continue
        text, equals, value = word.partition("=")
        if text in options:
            position += options[text] and not equals
            continue
        name = plain_name(text.lstrip("-"))
        has_value = following is not None and not _is_option(following)
        if name in flags() and str(following).lower() not in ("true", "false", "yes", "no", "1", "0"):
            has_value = False
        found.append(Word(text, name, value if equals else following if has_value else None))
        position += has_value and not equals
    return found


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _value_of(word: Word) -> Any:
    return True if word.value is None else read_document(word.value).value


def _explain(word: Word, given: Mapping[str, Any], command: str, options: Mapping[str, bool]) -> InputError | None:
    is_option = word.text.startswith("-")
    what = f"{command} has no option {word.text}" if is_option else f"{word.text} is not an argument of {command}"
    where = f"command line ({word.text}{f' {word.value}' if is_option and word.value is not None else ''})"
    of_launchers = launcher_words().get(word.name)
    own, becomes = f"--{word.name.replace('_', '-')}", of_launchers.becomes if of_launchers else ""
    if is_option and own in options:
        value = f" {word.value}" if word.value is not None and options[own] else ""
        return InputError(what, where=where, why="options are written with hyphens here", do=f"write {own}{value}")
    if becomes.partition(" ")[0] in options:
        do = f"write {becomes.format(word.value or 'N')}"
        return InputError(what, where=where, why="the same option has another name here", do=do)
    if "--set" in options and word.name in _RUN_FILE:
        do = f"name it without an option: {command} {word.value or 'FILE'}"
        return InputError(what, where=where, why="the run file is the argument", do=do)
    if "--set" in options and (cure := _as_setting(word, given)) is not None:
        why, do = cure
        return InputError(what, where=where, why=why, do=do)
    if of_launchers is not None and len(word.name) > 1:
        do = "remove it" + (f"; instead: {becomes.format(word.value or 'N')}" if becomes else "")
        return InputError(what, where=where, why=of_launchers.why, do=do)
    return None


def _as_setting(word: Word, given: Mapping[str, Any]) -> tuple[str, str] | None:
    """For a key of ours or of another tool: why, and what `--set` takes."""
    at_home = [key.dotted for key in keys().values() if word.name in (key.dotted, key.name)]
    if at_home:
        value = "VALUE" if word.value is None else word.value
        return "every key of the run file is set with --set", f"write --set {at_home[0]}={value}"
    if find_foreign((word.name,)) is None:
        return None
    unknown = explain_unknown_key("", word.name, _value_of(word), given)
    if not unknown.settings:
        return unknown.why, unknown.do
    ours = " ".join(f"--set {key}={as_written(one)}" for key, one in unknown.settings.items())
    return unknown.why, f"write {ours}{unknown.note}"
