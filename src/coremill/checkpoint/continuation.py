"""Whether a run begins or goes on, told from its folder and its checkpoints before any rank starts. No torch here.

What decides is the checkpoint folder, not the run folder: where that was lost with its machine, the run still goes on.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from coremill.checkpoint.manifest import Checkpoint, Unusable, refuse_writable_by_others, survey
from coremill.checkpoint.store import Store
from coremill.config.layers import DEFAULT
from coremill.config.load import LoadedConfig
from coremill.config.schema import RunConfig
from coremill.data.packed import is_without_special_tokens
from coremill.errors import InputError
from coremill.tasks.base import Rows, deciding_metric
from coremill.train.schedule import learning_rate_at
from coremill.train.scores import Scores

# A run is the same run with other machines, another end and another rhythm of saving; with other data it is not.
MAY_CHANGE = tuple(
    f"{key}."
    for key in (
        *("train.steps", "model.fused", "checkpoint", "parallel", "fleet", "run", "supervise", "numerics"),
        "evaluation",
    )
)


def checkpoint_folder(config: RunConfig, run_folder: Path) -> Path:
    named = config.checkpoint.folder
    return run_folder / "checkpoints" if named is None else Path(named).absolute()


def newest_checkpoint(config: RunConfig, run_folder: Path) -> Checkpoint | None:
    """The newest one whose structure is sound; ranks still hash its files before they use it."""
    folder = checkpoint_folder(config, run_folder)
    refuse_writable_by_others(folder, "checkpoint.folder")
    return next(iter(survey(folder).sound), None)


def refuse_another_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """A checkpoint of another config is not continued: the numbers would be of neither run."""
    try:
        earlier = checkpoint.state()["config"]
    except (Unusable, ValueError, KeyError):
        return  # the ranks will pass it over by name
    differing = fixed_keys(earlier, config)
    if differing:
        raise InputError(
            f"the run in {checkpoint.folder.parent} cannot go on from step {checkpoint.step}: the config has changed",
            where=", ".join(differing),
            why="at a continuation only train.steps, model.fused, checkpoint, evaluation, parallel, fleet, supervise,"
            " numerics, run may change",
            do="bring the old values back, set run.folder to a new folder, or start anew with --fresh",
        )
    if config.train.steps is not None and config.train.steps < checkpoint.step:
        raise InputError(
            f"train.steps is {config.train.steps}, but {checkpoint.step} steps are done already",
            where="train.steps",
            do=f"set train.steps to {checkpoint.step} or more, or start anew with --fresh",
        )


def fixed_keys(earlier: dict[str, Any], config: RunConfig) -> list[str]:
    """Keys that differ although they may not; one that was not there yet had its default.

    `data.special_tokens` had none: whether its value now changes what such a run reads is for its data to say.
    """
    had = _with_defaults(earlier, RunConfig().model_dump(mode="json"))
    if is_without_special_tokens(earlier):
        had["data"] = {**had["data"], "special_tokens": config.data.special_tokens}
    differing = _differing_keys(had, config.model_dump(mode="json"))
    return [key for key in differing if not f"{key}.".startswith(MAY_CHANGE)]


def written_config(loaded: LoadedConfig) -> dict[str, Any]:
    """The config in the folder of a run, which has every key written out, less those that are newer than the run."""
    tree: dict[str, Any] = loaded.config.model_dump(mode="json")
    for key, origin in loaded.origins.items():
        section, _, name = key.partition(".")
        if origin is DEFAULT and name and isinstance(tree.get(section), dict):
            tree[section].pop(name, None)
    return tree


def refuse_other_data(config: RunConfig, checkpoint: Checkpoint, data: Rows) -> None:
    """Rows that are not those the run began with: some would be left out, others seen twice."""
    try:
        state = checkpoint.state()
        earlier, key = state["config"], state["loader"]["key"]
    except (Unusable, ValueError, KeyError):
        return  # the ranks will pass it over by name
    if key == data.key:
        return
    what = f"the run in {checkpoint.folder.parent} cannot go on from step {checkpoint.step}: its data has changed"
    anew = "start anew with --fresh, or set run.folder to a new folder"
    raise data.explain_change(config, earlier, what=what, anew=anew)


def describe_changed_steps(config: RunConfig, checkpoint: Checkpoint) -> str | None:
    """What a changed `train.steps` does to the learning rate, old and new; None where it is as it was."""
    try:
        old = checkpoint.state()["config"]["train"]["steps"]
    except (Unusable, ValueError, KeyError):
        return None
    train, done = config.train, checkpoint.step
    new = train.steps
    if new is None or old is None or new == old:
        return None
    text = f"train.steps: {old:,} -> {new:,}"
    if new == done:
        return f"{text}: no step is left"
    if train.schedule == "constant":
        return f"{text}: the learning rate stays as it was"
    before, after = learning_rate_at(done, old, train), learning_rate_at(done + 1, new, train)
    as_it_was = f", where it would have been {learning_rate_at(done + 1, old, train):.3g}" if done < old else ""
    return (
        f"{text}: the {train.schedule} decay ends there now; the learning rate goes from {before:.3g} in step {done:,}"
        f" to {after:.3g} in step {done + 1:,}{as_it_was}"
    )


def scores_of(config: RunConfig, checkpoint: Checkpoint) -> Scores:
    """The evaluations up to a checkpoint, compared as the run file says now; none where it is of an older coremill."""
    scores = Scores(deciding_metric(config), config.evaluation)
    with contextlib.suppress(Unusable, ValueError):  # the ranks will pass it over by name
        scores.restore(checkpoint.state().get("evaluations", {}), checkpoint.step)
    return scores


def clear_checkpoints(config: RunConfig, run_folder: Path) -> None:
    """Forget the earlier run: it starts anew."""
    Store(checkpoint_folder(config, run_folder), "cleared").clear()


def _with_defaults(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    sections = {
        name: _with_defaults(tree[name], default)
        for name, default in defaults.items()
        if isinstance(default, dict) and isinstance(tree.get(name), dict)
    }
    return {**defaults, **tree, **sections}


def _differing_keys(left: dict[str, Any], right: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two configs."""
    keys: list[str] = []
    for name in sorted({*left, *right}):
        one, other = left.get(name), right.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            keys += _differing_keys(one, other, f"{prefix}{name}.")
        elif one != other:
            keys.append(f"{prefix}{name}")
    return keys
