"""What differs between the settings a checkpoint was made with and those it is continued with, in words. No torch here.

Which keys may differ is `config/continuing.py`'s to say.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coremill.config.continuing import SCHEDULE_KEYS, may_change, words_of_what_may_change
from coremill.config.schema import AUTO, RunConfig, TrainSection
from coremill.config.show import scalar_text
from coremill.data.hub_datasets import PREFIX
from coremill.data.packed import is_without_special_tokens
from coremill.errors import InputError
from coremill.registry import find
from coremill.train.schedule import learning_rate_at
from coremill.train.scores import SCORING_KEYS

# Where a run lies is said by the line that it goes on; the config in its folder has the paths written out.
NOT_WORTH_SAYING = ("run.folder", "checkpoint.folder")
_MEANS = {
    "evaluation.rows": ": evaluations so far are not compared with later ones",
    **{
        f"evaluation.{name}": ": metrics so far, but for the loss, are not compared with later ones"
        for name in SCORING_KEYS
    },
    "train.optimizer": ": weights and moments are converted",
}


@dataclass(frozen=True)
class Change:
    """One setting that is another one now."""

    key: str
    old: Any
    new: Any

    @property
    def is_allowed(self) -> bool:
        return may_change(self.key)

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.old)} -> {_text(self.new)}"


def changes_of(earlier: Mapping[str, Any], config: RunConfig) -> list[Change]:
    """All that differ, by key; one that was not there yet had its default.

    `data.special_tokens` had none: whether its value now changes what such a run reads is for its data to say.
    """
    had, has = _with_defaults(earlier, RunConfig().model_dump(mode="json")), config.model_dump(mode="json")
    for each in (had, has):
        if each["evaluation"]["rows"] is None:  # what that means is for the task to say
            each["evaluation"] = {**each["evaluation"], "rows": find("coremill.tasks", config.task).evaluated_rows}
    has["data"] = _with_earlier_names(had["data"], has["data"])
    if is_without_special_tokens(dict(earlier)):
        had["data"] = {**had["data"], "special_tokens": config.data.special_tokens}
    return list(_differing(had, has))


def _with_earlier_names(had: Mapping[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    """A dataset of the hub whose commit is named only now is the same setting; whether it is the same data, its key
    tells."""

    def renamed(earlier: Any, now: Any) -> Any:
        is_named_now = isinstance(now, str) and now.startswith(PREFIX) and now.partition("@")[0] == earlier
        return earlier if is_named_now else now

    section = {**has, **{name: renamed(had.get(name), has.get(name)) for name in ("source", "evaluation_source")}}
    listed, before = has.get("sources") or (), had.get("sources") or ()
    if listed and len(listed) == len(before):
        pairs = zip(before, listed, strict=True)
        section["sources"] = [{**now, "source": renamed(old.get("source"), now.get("source"))} for old, now in pairs]
    return section


def fixed_keys(earlier: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Keys that differ although they may not."""
    return [change.key for change in changes_of(earlier, config) if not change.is_allowed]


def another_config(what: str, changes: Sequence[Change], why: str | None = None) -> InputError:
    """The refusal of settings that changed, with the values they had; without `why` they may not change at all."""
    old = " ".join(f"--set {shlex.quote(f'{change.key}={scalar_text(change.old)}')}" for change in changes)
    said = "; ".join(f"{change.key} was {_text(change.old)}, is {_text(change.new)}" for change in changes)
    return InputError(
        what,
        where=", ".join(change.key for change in changes),
        why=f"{said}; {why or f'only these may change: {words_of_what_may_change()}'}",
        do=f"bring the old values back ({old}), set run.folder to a new folder, or start anew with --fresh",
    )


def describe_changes(
    earlier: Mapping[str, Any], config: RunConfig, *, done: int, steps_before: int | None, steps: int
) -> list[str]:
    """A line for each setting that changed, one for those of the learning rate together; `steps` is the run's new end,
    `steps_before` the old one where the checkpoint says it."""
    changes = [change for change in changes_of(earlier, config) if change.key not in NOT_WORTH_SAYING]
    of_the_rate = [change for change in changes if change.key in SCHEDULE_KEYS]
    lines = [f"{change}{_means(change)}" for change in changes if change.key not in SCHEDULE_KEYS]
    if of_the_rate:
        before = _train_section(earlier)
        old_steps = before.steps or steps_before
        said = ", ".join(str(change) for change in of_the_rate)
        lines.insert(0, f"{said}: {_meaning(before, config.train, done=done, old_steps=old_steps, steps=steps)}")
    return lines


def _means(change: Change) -> str:
    """What another value leads to; which optimizer auto took is the plan's to say, what is converted the ranks'."""
    if change.key == "train.optimizer" and AUTO in (change.old, change.new):
        return ": weights and moments are converted where auto takes another one"
    return _MEANS.get(change.key, "")


def _meaning(before: TrainSection, train: TrainSection, *, done: int, old_steps: int | None, steps: int) -> str:
    """What becomes of the learning rate after step `done`."""
    if steps == done:
        return "no step is left"
    rate = learning_rate_at(done + 1, steps, train)
    parts = []
    if old_steps is None:
        parts.append(f"the run ends with step {steps:,}")
        parts.append(f"the learning rate in step {done + 1:,} is {rate:.3g}")
        return "; ".join(parts)
    if before.schedule == train.schedule == "constant" and rate == learning_rate_at(done + 1, old_steps, before):
        return "the learning rate stays as it was"
    if steps != old_steps and train.schedule != "constant":
        where = "there" if before.steps and train.steps else f"with step {steps:,}, not {old_steps:,},"
        parts.append(f"the {train.schedule} decay ends {where} now")
    would_be = ""
    if done < old_steps:
        would_be = f", where it would have been {learning_rate_at(done + 1, old_steps, before):.3g}"
    parts.append(
        f"the learning rate goes from {learning_rate_at(done, old_steps, before):.3g} in step {done:,} to {rate:.3g} in"
        f" step {done + 1:,}{would_be}"
    )
    return "; ".join(parts)


def _train_section(earlier: Mapping[str, Any]) -> TrainSection:
    """As it was; keys of another version left out."""
    given = {name: value for name, value in earlier["train"].items() if name in TrainSection.model_fields}
    return TrainSection.model_validate(given)


def _with_defaults(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    sections = {
        name: _with_defaults(tree[name], default)
        for name, default in defaults.items()
        if isinstance(default, dict) and isinstance(tree.get(name), dict)
    }
    return {**defaults, **tree, **sections}


def _differing(left: Mapping[str, Any], right: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    for name in sorted({*left, *right}):
        one, other = left.get(name), right.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differing(one, other, f"{prefix}{name}.")
        elif one != other:
            yield Change(f"{prefix}{name}", one, other)


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else scalar_text(value)
