"""The words of a command that starts a training -> which launchers, which script, with which options and variables.

Launchers may stand inside each other: `mpirun ... accelerate launch script.py`. Nothing is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from coremill.config.imports.shell_text import ASSIGNMENT
from coremill.config.other_tools import Word, flags, launcher_word
from coremill.config.unknown_keys import plain_name
from coremill.errors import InputError

PROGRAMS: Mapping[str, str] = {
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpiexec.openmpi", "orterun", "prterun",
                     "mpirun.mpich", "mpiexec.mpich", "mpirun_rsh"), "mpirun"),
    **dict.fromkeys(("srun",), "srun"),
    **dict.fromkeys(("accelerate", "accelerate-launch"), "accelerate"),
    **dict.fromkeys(("torchrun",), "torchrun"),
    **dict.fromkeys(("deepspeed", "ds"), "deepspeed"),
    **dict.fromkeys(("ipexrun",), "ipexrun"),
    **dict.fromkeys(("numactl", "taskset"), "numactl"),
}  # fmt: skip
_MODULES = {
    **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic"), "torchrun"),
    **dict.fromkeys(("intel_extension_for_pytorch.cpu.launch", "intel_extension_for_pytorch.launch"), "ipexrun"),
    **dict.fromkeys(("torch.backends.xeon.run_cpu", "intel_extension_for_pytorch.cpu.runtime"), "ipexrun"),
    **dict.fromkeys(("accelerate.commands.launch", "accelerate.commands.accelerate_cli"), "accelerate"),
    **dict.fromkeys(("deepspeed.launcher.runner", "deepspeed.launcher.launch"), "deepspeed"),
}
_WRAPPERS = ("env", "nohup", "time", "exec", "command", "sudo", "stdbuf", "nice")
_SHELLS = ("bash", "sh", "zsh", "dash", "sbatch", "source", ".")
_PYTHON = re.compile(r"^(python|pypy)(\d+(\.\d+)*)?$")
_PYTHON_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
STARTS = re.compile(
    rf"(^|/)({'|'.join(re.escape(name) for name in (*PROGRAMS, *_WRAPPERS))}|coremill|python[\d.]*|[\w.-]+\.py)$"
)
_ONE_SCRIPT = ("accelerate", "torchrun", "deepspeed", "ipexrun")  # after their options comes the script itself
WHERE = "command line"


@dataclass(frozen=True)
class Option:
    """One option of a launcher, or a variable that one sets."""

    tool: str
    text: str  # as it was typed, without its value
    name: str  # as the table has it
    value: str | None
    word: Word | None

    @property
    def typed(self) -> str:
        return self.text if self.value is None else f"{self.text} {self.value}"


@dataclass
class Start:
    """A command taken apart."""

    tools: list[str] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    variable_texts: dict[str, str] = field(default_factory=dict)  # how each was typed
    script: str = ""
    is_module: bool = False
    arguments: list[str] = field(default_factory=list)

    @property
    def script_name(self) -> str:
        return PurePath(self.script).name if not self.is_module else self.script

    def fact(self, says: str) -> Option | None:
        """The first option that says it; srun's come last: it may start one launcher a node, which starts ranks."""
        found = [each for each in self.options if each.word is not None and each.word.says == says]
        return next((each for each in found if each.tool != "srun"), found[0] if found else None)

    def set_variable(self, name: str, value: str, text: str) -> None:
        self.variables.setdefault(name, value)
        self.variable_texts.setdefault(name, text)


def take_apart(words: Sequence[str], variables: Sequence[tuple[str, str]] = ()) -> Start:
    """InputError where it is no command that starts a Python training."""
    start = Start()
    for name, value in variables:
        start.set_variable(name, value, f"{name}={value}")
    rest = list(words)
    while rest and not start.script:
        word = rest[0]
        program = PurePath(word).name
        if ASSIGNMENT.fullmatch(word):
            name, _, value = rest.pop(0).partition("=")
            start.set_variable(name, value, word)
        elif program in _WRAPPERS:
            rest.pop(0)
            _skip_options(rest)
        elif _PYTHON.match(program):
            _python(rest, start)
        elif program in PROGRAMS:
            rest.pop(0)
            _launcher(PROGRAMS[program], program, rest, start)
        elif word.endswith(".py"):
            start.script = rest.pop(0)
        elif program == "coremill":
            raise InputError("this is a command of coremill already", where=WHERE, do="run it as it is")
        elif program in _SHELLS and len(rest) > 1 and not rest[1].startswith("-"):
            do = f"import the file itself: coremill config import {rest[1]}"
            raise InputError(f"{rest[1]} is a shell script, which is not run", where=WHERE, do=do)
        else:
            why = "known are mpirun, srun, accelerate launch, torchrun, deepspeed, ipexrun, python and Python scripts"
            raise InputError(f"{word} is no launcher that is known here", where=WHERE, why=why,
                             do="give the command that starts your Python script")  # fmt: skip
    if not start.script:
        why = "after the launcher and its options comes a Python script, or -m and a module"
        raise InputError("the command names no script", where=WHERE, why=why, do="add it: -- torchrun train.py")
    if "mpirun" in start.tools and ":" in rest:
        why = "behind the : is another program, and all ranks of a training are one"
        do = "give the part that starts your Python script, with the number of all its ranks"
        raise InputError("mpirun starts several programs here", where=WHERE, why=why, do=do)
    start.arguments += rest
    return start


def add_options_of_slurm(words: Sequence[str], start: Start) -> None:
    """What #SBATCH lines say behind srun's own options, which go before them; nothing where srun starts nothing."""
    rest = list(words)
    while "srun" in start.tools and rest and rest[0].startswith("-"):
        _option("srun", rest, start)


def _skip_options(rest: list[str]) -> None:
    """env -u NAME, nice -n 10."""
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("-u", "-n", "--unset", "-C") and rest:
            rest.pop(0)


def _python(rest: list[str], start: Start) -> None:
    rest.pop(0)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "-m" and rest:
            module = rest.pop(0)
            if module in _MODULES:
                _launcher(_MODULES[module], module, rest, start)
            else:
                start.script, start.is_module = module, True
            return
        if option == "-c":
            raise InputError("python -c has no script", where=WHERE, do="write the code to a file: -- python train.py")
        if option in _PYTHON_WITH_VALUE and rest:
            rest.pop(0)
    if rest and not rest[0].startswith("-"):
        start.script = rest.pop(0)


def _launcher(tool: str, program: str, rest: list[str], start: Start) -> None:
    """Take the launcher's own options away; behind them is a script, or another program."""
    start.tools.append(tool)
    if program in ("accelerate", "accelerate.commands.accelerate_cli"):
        if rest[:1] != ["launch"]:
            why = f"accelerate {rest[0] if rest else ''} starts no script".strip()
            raise InputError("accelerate is followed by launch", where=WHERE, why=why,
                             do="write -- accelerate launch script.py")  # fmt: skip
        rest.pop(0)
    is_module = False
    with_python = True
    while rest and rest[0].startswith("-"):
        option = _option(tool, rest, start)
        is_module = is_module or (option is not None and option.word is not None and option.word.says == "module")
        with_python = with_python and not (option is not None and option.name == "no_python")
    if program == "taskset" and rest and not start.script:  # the mask, where -c was a flag
        rest[:] = rest[1:] if re.fullmatch(r"[\da-fx,-]+", rest[0]) else rest
    if tool in _ONE_SCRIPT and with_python and rest:
        start.script, start.is_module = rest.pop(0), is_module


def _option(tool: str, rest: list[str], start: Start) -> Option | None:
    """One option with its value; what it sets in the environment is a variable."""
    text, equals, value = rest.pop(0).partition("=")
    if tool == "srun" and re.fullmatch(r"-[A-Za-z]\d[\d-]*", text):  # -N2
        text, equals, value = text[:2], "=", text[2:]
    bare = text.lstrip("-")
    name = bare if len(bare) == 1 else plain_name(bare)
    word = launcher_word(tool, name)
    if word is not None and word.says == "variable":
        _variable(text, value if equals else rest.pop(0) if rest else "", rest, start)
        return None
    given: str | None = value if equals else None
    if given is None and _takes_value(name, word, rest):
        given = rest.pop(0)
        if name in ("mca", "gmca") and rest:
            given += f" {rest.pop(0)}"
    option = Option(tool, text, name, given, word)
    start.options.append(option)
    return option


def _variable(text: str, first: str, rest: list[str], start: Start) -> None:
    """`-genv NAME=VALUE`, `-genv NAME VALUE`, `-x NAME=VALUE`; `-x NAME` hands on what is set."""
    name, equals, value = first.partition("=")
    typed = f"{text} {first}"
    if not equals and text.lstrip("-") in ("genv", "env") and rest:
        value = rest.pop(0)
        typed += f" {value}"
    elif not equals:
        value = f"${name}"
    start.set_variable(name, value, typed)


def _takes_value(name: str, word: Word | None, rest: list[str]) -> bool:
    if not rest or (word.is_flag if word is not None else name in flags()):
        return False
    if word is not None:
        return True
    following = rest[0]
    return not following.startswith("-") and not STARTS.search(following)
