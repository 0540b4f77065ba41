"""Questions and answers: each is a key of the run file, told by the schema, with a suggestion and its reason.

An answer goes through the same reader as the run file, so what it refuses is refused here, with the same words. Off a
terminal nobody is asked: answers come from the command line, and suggestions are taken where that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from coremill.config.keys import keys, sections
from coremill.config.load import LoadedConfig, load_config
from coremill.config.show import scalar_text
from coremill.errors import ConfigError, InputError, Interrupted
from coremill.plan.types import Choice
from coremill.report.terminal import print_line

Check = Callable[[LoadedConfig], str]  # what was found of an answer, in words; raises InputError

_SHORT = {"model": "model.name"}
_NOT_YET = "not/answered-yet"  # some model and some data, so that rules on both can be kept meanwhile
_NAMED = ("model.name", "data.source")  # known by options of their own to the reader of run files


@dataclass
class Interview:
    """What is answered so far; `given` came with the command."""

    console: Console
    given: Mapping[str, str]
    asks: bool  # somebody is there to be asked
    takes_suggestions: bool
    answers: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Take in what came with the command; all that is wrong with it is told at once."""
        self.answers.update(self.given)
        try:
            self.load()
        except ConfigError as error:
            raise _as_answers(error) from None

    def load(self) -> LoadedConfig:
        """The run as answered so far; keys that nobody spoke of have their defaults."""
        others = [f"{key}={text}" for key, text in self.answers.items() if key not in _NAMED]
        model = None if "model.config" in self.answers else self.answers.get("model.name", _NOT_YET)
        data = None if "data.sources" in self.answers else self.answers.get("data.source", f"hf://{_NOT_YET}")
        return load_config(None, others, model=model, data=data)

    def ask(self, key: str, suggestion: Choice[str], check: Check = lambda loaded: "") -> None:
        """Settle a key: by the command, by the suggestion, or by asking until an answer will do."""
        if key in self.given:
            self._settle(key, self.given[key], check)
            return
        if not self.asks:
            if not self.takes_suggestions:
                raise InputError(
                    f"{key} is not answered, and there is no terminal to ask at",
                    where=f"coremill config init, question {len(self.asked) + 1}",
                    why=f"coremill would suggest {suggestion.value}: {suggestion.reason}",
                    do=f"add --answer {key}=VALUE, or --yes to take every suggestion",
                )
            self._say(f"{key}: {suggestion.value} ({suggestion.reason})", "dim")
            self._settle(key, suggestion.value, check)
            self.asked.append(key)
            return
        self._show_question(key, suggestion)
        refused: str | None = None
        while True:
            text = self._read(suggestion.value)
            if text == "?":
                self._show_more(key)
                continue
            if self._takes_other_key(text):
                continue
            if text == refused:  # said twice: it may be right on the machine that trains
                self.answers[key] = text
                self._say("kept as you say; it could not be checked here", "yellow")
                break
            try:
                self._settle(key, text, check)
                break
            except InputError as problem:
                self._show_problem(problem)
                refused = text if self._is_readable(key, text) else None
                if refused is not None:
                    self._say("type another, or the same again to keep it", "dim")
        self.asked.append(key)

    def _settle(self, key: str, text: str, check: Check) -> None:
        before = self.answers.get(key)
        self.answers[key] = text
        try:
            found = check(self.load())
        except InputError:
            if before is None:
                del self.answers[key]
            else:
                self.answers[key] = before
            raise
        if found:
            self._say(found, "green")

    def _is_readable(self, key: str, text: str) -> bool:
        """Whether a run file may say it, so that only what it names is in doubt."""
        try:
            self._settle(key, text, lambda loaded: "")
        except InputError:
            return False
        del self.answers[key]
        return True

    def _takes_other_key(self, text: str) -> bool:
        """`data.column=body` settles that key at any question."""
        key, equals, value = (part.strip() for part in text.partition("="))
        key = _SHORT.get(key, key)
        if not equals or key not in keys():
            return False
        try:
            self._settle(key, value, lambda loaded: "")
            self._say(f"{key}: {value}", "green")
        except InputError as problem:
            self._show_problem(problem)
        return True

    # --- on the screen

    def _show_question(self, key: str, suggestion: Choice[str]) -> None:
        self.console.print()
        title = Text(key.removesuffix(".name"), style="bold")
        title.append(f"  {keys()[key].description.partition(';')[0]}", style="not bold")
        self.console.print(title)
        self._say(suggestion.reason, "dim")

    def _show_more(self, key: str) -> None:
        known = keys()[key]
        section = f" {sections()[known.section]}" if known.section else ""
        near = ", ".join(other.dotted for other in keys().values() if other.section == known.section != "" != key)
        self._say(f"{known.description}", "cyan")
        self._say(f"takes {known.takes}; a run file that leaves it out has {scalar_text(known.default)}", "cyan")
        if near:
            self._say(f"section {known.section}:{section}", "cyan")
            self._say(f"its keys: {near}", "cyan")
        self._say("any key can be set at any question: data.column=body; docs/config.md has them all", "cyan")

    def _show_problem(self, problem: InputError) -> None:
        first = problem.problems[0] if isinstance(problem, ConfigError) else problem
        self._say(first.what, "red")
        for label, text in (("why", first.why), ("do", first.do)):
            if text:
                self._say(f"{label}: {text}", "red" if label == "why" else "not dim")

    def warn(self, text: str) -> None:
        """Of what will not keep the file from being written."""
        self._say(f"warning: {text}", "yellow")

    def _say(self, text: str, style: str) -> None:
        if self.console.is_terminal:
            self.console.print(Padding(Text(text, style=style), (0, 0, 0, 2)))
        else:  # one finding, one line
            print_line(self.console, f"  {text}")

    def _read(self, suggested: str) -> str:
        prompt = Text("  [").append(suggested, style="bold cyan").append("] ").append("? for more: ", style="dim")
        try:
            self.console.print(prompt, end="", soft_wrap=True)  # wrapped by words it would lose its last space
            return self.console.input().strip() or suggested
        except EOFError:
            self.console.print()
            raise Interrupted("no more answers: nothing was written") from None


def answers_given(words: list[str]) -> dict[str, str]:
    """--answer key=value, as often as given."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            do = "write for instance --answer model=gpt2 --answer train.epochs=2"
            raise InputError(f"--answer needs key=value, not {word}", where=f"--answer {word}", do=do)
        name = _SHORT.get(key.strip(), key.strip())
        if name in found:
            raise InputError(f"--answer {name} is given twice", where=f"--answer {word}", do="keep one of them")
        found[name] = value
    return found


def _as_answers(error: ConfigError) -> ConfigError:
    """The same problems, where these settings came by --answer."""
    problems = [
        InputError(each.what, where=(each.where or "").replace("--set ", "--answer "), why=each.why, do=each.do)
        for each in error.problems
    ]
    return ConfigError(problems, "in the answers")
