"""Fates of settings -> a run file that loads, each line with the setting it came from, then what was left behind.

What such settings cannot know (model, data) stands there as a question in a comment: `# model: ?`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coremill.config.imports.fates import Fate, one_line, without_secrets
from coremill.config.keys import TOP, keys
from coremill.config.open_questions import QUESTIONS
from coremill.config.rules import breaches_of
from coremill.config.schema import RunConfig
from coremill.config.show import scalar_text

_WIDTH = 118
_COMMENT_COLUMN = 44
_ANSWERS = {"model": "?", "data.source": "hf://?/?"}  # a dataset: splits and revisions are of one
_HEADS = {
    "dropped": "Dropped: not needed here, or nothing here to hand it to.",
    "retired": "Retired: gone where it came from, too.",
    "unknown": "Not known.",
}


@dataclass(frozen=True)
class Written:
    """A key of the run file with its value, and where that comes from, in words."""

    value: Any
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Composed:
    """A run file in the making; every fate is what finally became of its setting."""

    settings: Mapping[str, Written]
    fates: tuple[Fate, ...]

    @property
    def questions(self) -> tuple[str, ...]:
        has_data = "data.source" in self.settings or "data.sources" in self.settings
        open_keys = {"model": "model.name" not in self.settings, "data.source": not has_data}
        return tuple(key for key, is_open in open_keys.items() if is_open)


def compose(fates: Sequence[Fate], task: str | None = None) -> Composed:
    """Bring the settings together; of two for one key the first counts, and what breaks a rule is left behind."""
    settings: dict[str, Written] = {}
    if task is not None:
        settings["task"] = Written(task, ("what the script trains",))
    final = [_settled(fate, settings) for fate in fates]
    if "train.steps" in settings and "train.epochs" in settings:
        _take_back("train.epochs", "train.steps is given too, and goes before it there", settings, final)
    for _ in keys():  # each turn takes one back
        breach = next(iter(breaches_of(_config(settings), frozenset())), None)
        broken = [key for key in (breach.key, *breach.others) if key in settings] if breach is not None else []
        if breach is None or not broken:
            break
        _take_back(broken[0], f"{breach.what}: {breach.why}", settings, final)
    if not {"train.steps", "train.epochs"} & settings.keys():
        settings["train.epochs"] = Written(1, ("not said there: one pass over the data, until you say otherwise",))
    return Composed(settings, tuple(final))


def _settled(fate: Fate, settings: dict[str, Written]) -> Fate:
    taken, refused = {}, []
    for key, value in fate.settings.items():
        note = fate.note
        if note.startswith((", or", ", if")):  # a hint to whoever types it; what comes behind it is about the value
            note = "".join(note.partition(";")[1:])
        said = fate.brought.text + one_line(note)
        there = settings.get(key)
        if there is None:
            settings[key] = Written(value, (said,))
        elif there.value == value:
            settings[key] = replace(there, sources=(*there.sources, fate.brought.text))
        else:
            refused.append(f"{key} is {scalar_text(there.value)} already, by {there.sources[0]}")
            continue
        taken[key] = value
    if not refused:
        return fate
    return replace(fate, settings=taken, kind="mapped" if taken else "dropped", why="; ".join(refused))


def _take_back(key: str, why: str, settings: dict[str, Written], fates: list[Fate]) -> None:
    del settings[key]
    for place, fate in enumerate(fates):
        if key in fate.settings:
            rest = {name: value for name, value in fate.settings.items() if name != key}
            fates[place] = replace(fate, settings=rest, kind=fate.kind if rest or fate.command else "dropped", why=why)


def _config(settings: Mapping[str, Written]) -> RunConfig:
    """What is still asked counts as answered: rules are about what will stand there, not about the built-in example."""
    tree: dict[str, Any] = {"train": {}}
    for key in Composed(settings, ()).questions:
        section, _, name = (key if "." in key else f"{key}.name").partition(".")
        tree.setdefault(section, {})[name] = _ANSWERS[key]
    for key, written in settings.items():
        section, _, name = key.partition(".")
        if name:
            tree.setdefault(section, {})[name] = written.value
        else:
            tree[section] = written.value
    if not {"steps", "epochs"} & tree["train"].keys():
        tree["train"]["epochs"] = 1
    return RunConfig.model_validate(tree)


def render(composed: Composed, head: Sequence[str]) -> str:
    """The text of the run file; `head` are comments to begin with."""
    lines = [line for text in head for line in _comment(text)]
    lines += ["", *_sections(composed)]
    commands = [fate for fate in composed.fates if fate.kind == "mapped" and fate.command]
    if commands:
        lines += ["", "# On the command line."]
        lines += [line for each in commands for line in _comment(_on_command_line(each), "    ")]
    for kind, title in _HEADS.items():
        those = [fate for fate in composed.fates if fate.kind == kind]
        if those:
            lines += ["", f"# {title}"]
            lines += [line for text in _by_reason(those) for line in _comment(text, "    ")]
    return "\n".join(lines) + "\n"


def _on_command_line(fate: Fate) -> str:
    note = fate.note if fate.note.startswith(";") else ""
    return without_secrets(f"- {fate.brought.text} -> {fate.command}{note}")


def _by_reason(fates: Sequence[Fate]) -> Iterator[str]:
    """One entry for all settings that have the same reason."""
    for why in dict.fromkeys(fate.why for fate in fates):
        yield f"- {', '.join(fate.brought.text for fate in fates if fate.why == why)} -- {why}"


def _sections(composed: Composed) -> Iterator[str]:
    settings, questions = dict(composed.settings), composed.questions
    by_section: dict[str, list[str]] = {}
    for key in keys():
        by_section.setdefault(key.partition(".")[0] if "." in key else TOP, []).append(key)
    model = settings.pop("model.name", None)
    of_model = [key for key in by_section.get("model", ()) if key in settings]
    if model is not None and not of_model:
        yield _line("", "model", model)
    elif "model" in questions and not of_model:
        yield _ask("", "model", "model")
    for key in by_section.pop(TOP):
        if key in settings:
            yield _line("", key, settings[key])
    for section, names in by_section.items():
        given = [key for key in names if key in settings]
        question = "data.source" if section == "data" and "data.source" in questions else None
        if section == "model" and given:
            yield "model:"
            yield _line("  ", "name", model) if model is not None else _ask("  ", "name", "model")
        elif given:
            yield f"{section}:"
        elif question:
            yield "# data:"
        if question:
            yield _ask("  ", "source", question) if given else _ask("", "  source", question)
        for key in given:
            yield _line("  ", key.partition(".")[2], settings[key])


def _line(indent: str, name: str, written: Written) -> str:
    text = f"{indent}{name}: {scalar_text(written.value)}"
    return f"{text:<{_COMMENT_COLUMN}}  # {'; '.join(written.sources)}"


def _ask(indent: str, name: str, key: str) -> str:
    return f"{f'{indent}# {name}: ?':<{_COMMENT_COLUMN}}  # {key}: {QUESTIONS[key]}"


def _comment(text: str, later: str = "  ") -> list[str]:
    """As comment lines; what is typed as one line stays one."""
    if text.startswith(" "):
        return [f"#   {one_line(text.strip())}"]
    return textwrap.wrap(one_line(text), _WIDTH, initial_indent="# ", subsequent_indent=f"# {later}",
                         break_long_words=False, break_on_hyphens=False) or ["#"]  # fmt: skip
