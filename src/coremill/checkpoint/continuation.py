"""Whether a run begins or goes on, told from its folder and its checkpoints before any rank starts. No torch here.

What decides is the checkpoint folder, not the run folder: where that was lost with its machine, the run still goes on.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from coremill.checkpoint.changed_settings import another_config, changes_of, describe_changes
from coremill.checkpoint.manifest import Checkpoint, Unusable, refuse_writable_by_others, survey
from coremill.checkpoint.store import Store
from coremill.config.layers import DEFAULT
from coremill.config.load import LoadedConfig
from coremill.config.schema import RunConfig
from coremill.data.hub_datasets import PREFIX
from coremill.errors import InputError
from coremill.model.lora_base import Base
from coremill.tasks.base import Rows, deciding_metric, evaluated_rows, make_task
from coremill.train.scores import Scores


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
    if fixed := [change for change in changes_of(earlier, config) if not change.is_allowed]:
        raise another_config(
            f"the run in {checkpoint.folder.parent} cannot go on from step {checkpoint.step}: the config has changed",
            fixed,
        )
    if config.train.steps is not None and config.train.steps < checkpoint.step:
        raise InputError(
            f"train.steps is {config.train.steps}, but {checkpoint.step} steps are done already",
            where="train.steps",
            do=f"set train.steps to {checkpoint.step} or more, or start anew with --fresh",
        )


def asks_for_more(config: RunConfig, checkpoint: Checkpoint) -> bool:
    """Whether a finished run has another end now; how many steps epochs are is known with the rows only."""
    if config.train.steps is not None:
        return config.train.steps > checkpoint.step
    try:
        return bool(checkpoint.state()["config"]["train"]["epochs"] != config.train.epochs)
    except (Unusable, ValueError, KeyError):
        return False


def refuse_fewer_steps(config: RunConfig, checkpoint: Checkpoint, steps: int) -> None:
    """The same of `train.epochs`, once the rows are known."""
    if steps < checkpoint.step:
        raise InputError(
            f"train.epochs: {config.train.epochs:g} is {steps:,} steps, but {checkpoint.step:,} steps are done already",
            where="train.epochs",
            do="raise train.epochs, or start anew with --fresh",
        )


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
    section = config.data
    named = [section.source, section.evaluation_source, *(one.source for one in section.sources or ())]
    for source in map(str, named):
        if source.startswith(PREFIX) and "@" not in source:
            anew = f"if the dataset has a newer commit, name the one this run began with: {source}@COMMIT; or {anew}"
            break
    raise data.explain_change(config, earlier, what=what, anew=anew)


def refuse_other_base(checkpoint: Checkpoint, base: Base | None, *, anew: str) -> None:
    """A model that is not the one whose adapters the checkpoint holds: they mean nothing beside another."""
    try:
        earlier = checkpoint.state().get("base")
    except (Unusable, ValueError):
        return  # the ranks will pass it over by name
    if base is None or not isinstance(earlier, dict):
        return
    drawn = earlier.get("digest") is None and base.digest is None  # from the seed, in the shape that the config says
    if earlier.get("digest") == base.digest and (not drawn or earlier.get("name") == base.name):
        return
    revision = f" at {earlier['revision']}" if earlier.get("revision") else ""
    raise InputError(
        f"step {checkpoint.step} holds adapters that were trained beside another model than {base.name} is now",
        where="model",
        why=f"they were trained beside {earlier.get('name')}{revision}, whose weights had the hash"
        f" {earlier.get('digest')}; here it is {base.digest}",
        do=f"bring those weights back{anew}",
    )


def words_of_changes(config: RunConfig, checkpoint: Checkpoint, steps: int) -> list[str]:
    """A line for every setting that is another one from here on, and what it does to the learning rate."""
    try:
        state = checkpoint.state()
        earlier = state["config"]
        return describe_changes(earlier, config, done=checkpoint.step, steps_before=state.get("steps"), steps=steps)
    except (Unusable, ValueError, KeyError):
        return []  # the ranks will pass it over by name


def scores_of(config: RunConfig, checkpoint: Checkpoint) -> Scores:
    """The evaluations up to a checkpoint, compared as the run file says now; none where it is of an older coremill."""
    found: dict[str, Any] = {}
    with contextlib.suppress(Unusable, ValueError):  # the ranks will pass it over by name
        found = checkpoint.state().get("evaluations", {})
    names = {name for each in found.get("scores", ()) for name in each["metrics"]}
    metrics = [metric for metric in make_task(config).metrics if metric.name in names]
    scores = Scores(deciding_metric(config, metrics or None), config.evaluation, rows=evaluated_rows(config))
    scores.restore(found, checkpoint.step)
    return scores


def clear_checkpoints(config: RunConfig, run_folder: Path) -> None:
    """Forget the earlier run: it starts anew."""
    Store(checkpoint_folder(config, run_folder), "cleared").clear()
