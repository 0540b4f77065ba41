"""`train --from STEP|best`: a run goes on from a checkpoint that is not its newest. No torch here.

What came later is set aside, never deleted: checkpoints in a folder beside the others, on every host that has a part
(the first one leaves a mark, resume.py follows it); events stay where they are, and the report passes them over.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from coremill.checkpoint.continuation import checkpoint_folder, scores_of
from coremill.checkpoint.manifest import Checkpoint, Survey, Unusable, refuse_writable_by_others, survey
from coremill.checkpoint.store import GO_ON_FROM, SET_ASIDE_PREFIX, Store
from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.files import write_whole
from coremill.report.events import EventWriter
from coremill.run.folder import PREDICTION_FILES

BEST = "best"


def find_checkpoint(config: RunConfig, run_folder: Path, wanted: str, option: str) -> Checkpoint:
    """The kept one that is named by its step, or the best; 78 with the steps that there are."""
    folder = checkpoint_folder(config, run_folder)
    refuse_writable_by_others(folder, "checkpoint.folder")
    found = survey(folder)
    if wanted == BEST:
        return best_of(config, found, folder, option)
    if not wanted.isdecimal():
        raise InputError(f"{option} {wanted} is no step", where=option, do=f"name a step or best: {_kept(found)}")
    by_step = {each.step: each for each in found.sound}
    if int(wanted) in by_step:
        return by_step[int(wanted)]
    unusable = [str(each) for each in found.passed_over if each.name.endswith(f"-{int(wanted):08d}")]
    raise InputError(
        f"step {wanted} was not kept" if not unusable else f"step {wanted} cannot be used",
        where=str(folder),
        why=unusable[0] if unusable else "checkpoint.keep and evaluation.keep_best say which checkpoints stay",
        do=_kept(found),
    )


def best_of(config: RunConfig, found: Survey, folder: Path, option: str) -> Checkpoint:
    """Of those kept, by the evaluations that the newest one knows of."""
    by_step = {each.step: each for each in found.sound}
    scores = scores_of(config, found.sound[0]) if found.sound else None
    best = [] if scores is None else scores.best_first(by_step)
    if not best:
        raise InputError(
            "no checkpoint that is kept was evaluated",
            where=option,
            why="best is told by the evaluations that a checkpoint knows of",
            do=f"{_kept(found)}; evaluation.every_steps with evaluation.keep_best keeps the best of later steps",
        )
    return by_step[best[0]]


def _kept(found: Survey) -> str:
    steps = ", ".join(f"{each.step}" for each in reversed(found.sound))
    return f"kept are: {steps}" if steps else "no checkpoint is kept"


def set_later_aside(config: RunConfig, run_folder: Path, checkpoint: Checkpoint, say: Callable[[str], None]) -> None:
    """Called by the one who leads, once nothing else can be wrong; ranks do the same on other hosts.

    Nothing is moved for a step that cannot be used; of one spread over hosts ranks find that out, and move then.
    """
    try:
        checkpoint.verify(file.name for file in checkpoint.manifest.files if file.name not in checkpoint.away)
    except Unusable as error:
        raise InputError(
            f"step {checkpoint.step} cannot be used",
            where=str(checkpoint.folder),
            why=str(error),
            do="name another one",
        ) from None
    name = f"{SET_ASIDE_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}"
    store = Store(checkpoint_folder(config, run_folder), "set-aside")
    write_whole(store.folder / GO_ON_FROM, json.dumps({"step": checkpoint.step, "aside": name}) + "\n")
    steps = store.steps_after(checkpoint.step)
    newest = next(iter(survey(store.folder).sound), checkpoint)
    best_step = scores_of(config, newest).best_step
    with EventWriter(run_folder, 0) as events:  # before: what is moved is known to the report, whoever is killed
        events.write("set_aside", after_step=checkpoint.step, steps=steps, folder=str(store.folder / name))
    if best_step is not None and best_step > checkpoint.step:  # what it answered would pass for a later one's
        (store.folder / name).mkdir(exist_ok=True)
        for file in PREDICTION_FILES:
            with contextlib.suppress(FileNotFoundError):
                shutil.move(run_folder / file, store.folder / name / file)
    if not checkpoint.away:
        store.set_aside(checkpoint.step, name)
    if steps:
        listed = ", ".join(str(step) for step in steps)
        say(f"set aside: step{'s' if len(steps) > 1 else ''} {listed}, now in {store.folder / name}")
    say(f"the report leaves out what was done after step {checkpoint.step}")


def forget_start(config: RunConfig, run_folder: Path) -> None:
    """What an earlier `--from` left that no rank came to follow."""
    with contextlib.suppress(OSError):
        (checkpoint_folder(config, run_folder) / GO_ON_FROM).unlink(missing_ok=True)
