"""`coremill export RUN DEST`: any kept step of any run as a plain Hugging Face folder, while it runs too.

One process reads a checkpoint and writes the folder, in pieces; torch is imported once all that could be refused was
looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from coremill.checkpoint.continuation import checkpoint_folder, refuse_other_base, scores_of
from coremill.checkpoint.held import held, verify_held
from coremill.checkpoint.manifest import Checkpoint, PassedOver, Survey, Unusable, refuse_writable_by_others, survey
from coremill.config.load import load_config
from coremill.config.schema import RunConfig
from coremill.errors import InputError, StorageError
from coremill.files import locked
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.model.lora_base import Base, base_of, require_peft
from coremill.model.source import ModelFolder, resolve_model, resolve_tokenizer
from coremill.report.model_card import base_model_of, license_of, model_card
from coremill.report.progress import AmountProgress
from coremill.report.step_figures import figures_at
from coremill.report.summary import read_plan, summarise
from coremill.report.terminal import format_bytes
from coremill.run.folder import RunFolder
from coremill.run.prepare import Orders, say
from coremill.run.push import license_on_hub, push_folder, require_place
from coremill.run.start_from import find_checkpoint
from coremill.tasks.base import make_task

TRIES = 5  # where nobody named a step: a run that goes on may let a checkpoint go while we open it


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    step: str | None  # or best; None: the best where that is kept, else the newest
    dtype: str | None  # None: that of the run
    push: str | None
    private: bool
    merged: bool = False  # of adapters; neither of the two: as the run file says
    adapter: bool = False

    def __post_init__(self) -> None:
        if self.merged and self.adapter:
            raise InputError(
                "--merged and --adapter are both given",
                where="--merged --adapter",
                why="a folder holds the whole model with the adapters added in, or the adapters alone",
                do="keep one of them; a second export makes the other",
            )


def export_run(run: Path, destination: Path, wanted: Wanted, console: Console) -> None:
    """What is wrong is said before anything is written."""
    folder, destination = RunFolder(run.absolute()), destination.absolute()
    read_plan(folder.path)  # refuses what is no run folder
    _refuse_full(destination)
    if wanted.private and wanted.push is None:
        raise InputError("--private says how to push, but --push is not given", where="--private")
    config = load_config(folder.config).config
    _refuse_merging_nothing(config, wanted)
    require_peft(config)
    _candidates(config, folder, wanted.step)
    if wanted.push is not None:
        require_place(wanted.push, private=wanted.private)
    sources = _sources(config, folder, console)
    on_hub = base_model_of(config)
    licensed = license_of(sources.model.folder)
    if licensed is None and wanted.push and on_hub is not None:
        licensed = license_on_hub(on_hub)

    def card_of(step: int, form: str) -> str:
        name = wanted.push or destination.name
        summary, exported = summarise(folder.path), figures_at(folder.path, step)  # now: the run may have gone on
        return model_card(summary, config, name=name, license_name=licensed, exported=exported, form=form)

    step = _export(config, folder, wanted, sources, destination, card_of, console)
    if wanted.push is not None:
        address = push_folder(
            destination, wanted.push, message=f"step {step} of a run of coremill", private=wanted.private
        )
        say(console, f"pushed to {address}{' (private)' if wanted.private else ''}")


def _refuse_merging_nothing(config: RunConfig, wanted: Wanted) -> None:
    if (wanted.merged or wanted.adapter) and config.lora.rank is None:
        raise InputError(
            "this run has no adapters: it trained the weights themselves",
            where="--merged" if wanted.merged else "--adapter",
            do="leave it out: the whole model is exported",
        )


def _refuse_full(destination: Path) -> None:
    """Nothing that lies there is ever written over."""
    try:
        if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
            return
    except OSError as error:
        raise InputError(f"{destination} cannot be written: {error.strerror}", where="DEST") from None
    what = "is not empty" if destination.is_dir() else "is a file"
    raise InputError(f"{destination} {what}", where="DEST", do="name a folder that is not there yet")


@contextlib.contextmanager
def _place_of(destination: Path) -> Iterator[None]:
    """Where the folder is put, and nobody else puts one meanwhile: two exports at once would mix their files."""

    def refuse() -> None:
        raise InputError(
            f"another export is being written to {destination}",
            where="DEST",
            do="let it end, or name another folder",
        )

    lock = destination.with_name(f".{destination.name}.lock")
    with contextlib.ExitStack() as held:
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(lock, refuse))
        except OSError as error:
            raise InputError(f"{destination} cannot be written: {error.strerror}", where="DEST") from None
        held.callback(lock.unlink, missing_ok=True)
        _refuse_full(destination)  # by one that has ended since the first look
        yield


@dataclass(frozen=True)
class Sources:
    """What an export is made of beside a checkpoint."""

    model: ModelFolder
    tokenizer: Path
    dtype: str  # that the run computed in
    base: Base | None  # of adapters, as it is now
    end_ids: tuple[int, ...] = ()  # of answers


def _sources(config: RunConfig, folder: RunFolder, console: Console) -> Sources:
    """As the run found them, or found again where these have moved."""
    try:
        orders = Orders.read(folder.orders)
    except (OSError, ValueError, KeyError, TypeError):
        orders = None
    if orders is not None and (orders.model.folder / "config.json").is_file() and orders.tokenizer.is_dir():
        base = base_of(config, orders.model)
        if base is not None and orders.base is not None:  # where it lay is known only to who began the run
            base = replace(base, name=orders.base.name, revision=orders.base.revision)
        return Sources(orders.model, orders.tokenizer, orders.plan.dtype.value, base, orders.answer_end_ids)
    cache = cache_folder(environment_snapshot())
    model = resolve_model(config.model, make_task(config), cache=cache, progress=lambda text: say(console, text))
    if orders is not None:  # what the data said of the head
        model = replace(model, config_changes=orders.model.config_changes)
    tokenizer = resolve_tokenizer(config, model, cache=cache)
    named = config.parallel.dtype if config.parallel.dtype in ("fp32", "bf16") else "fp32"
    dtype = named if orders is None else orders.plan.dtype.value
    end_ids = () if orders is None else orders.answer_end_ids
    return Sources(model, tokenizer, dtype, base_of(config, model), end_ids)


def _candidates(config: RunConfig, folder: RunFolder, step: str | None) -> list[Checkpoint]:
    """Checkpoints to try in turn: the one that was named, else the best where that is kept, and the newest ones."""
    if step is not None:
        found = [find_checkpoint(config, folder.path, step, "--step")]
    else:
        place = checkpoint_folder(config, folder.path)
        refuse_writable_by_others(place, "checkpoint.folder")
        kept = _survey(place)
        found = list(kept.sound)
        if config.evaluation.keep_best and found:
            best = scores_of(config, found[0]).best_kept([each.step for each in found])
            found.sort(key=lambda each: each.step != best)
        if not found:
            raise _nothing_kept(place, kept, folder)
    whole = [each for each in found if not each.away]
    if not whole:
        away = next(iter(found[0].away.values()))
        raise InputError(
            f"only a part of step {found[0].step} is here",
            where=str(found[0].folder),
            why=f"{away}, and hosts of this run shared no folder",
            do="copy the files of that step from the other hosts into this folder, and try again",
        )
    return whole


def _survey(place: Path) -> Survey:
    """Again where what was to be looked at has gone meanwhile: a run that goes on removes what newer ones replace."""
    for _ in range(TRIES):
        kept = survey(place)
        if kept.sound or all((place / one.name).exists() for one in kept.passed_over):
            break
    return kept


def _nothing_kept(place: Path, kept: Survey, folder: RunFolder) -> InputError:
    why = str(kept.passed_over[0]) if kept.passed_over else "the run has not saved yet, or never does"
    exported = folder.export.is_dir()
    do = f"{folder.export} has what the run exported" if exported else "checkpoint.every says how often a run saves"
    return InputError("there is no checkpoint to export", where=str(place), why=why, do=do)


def _export(
    config: RunConfig,
    folder: RunFolder,
    wanted: Wanted,
    sources: Sources,
    destination: Path,
    card_of: Callable[[int, str], str],
    console: Console,
) -> int:
    """The step that was exported."""
    from coremill.checkpoint.export_adapter import asked_of
    from coremill.checkpoint.export_checkpoint import writer_of
    from coremill.checkpoint.snapshot import CheckpointReader
    from coremill.engines.base import DTYPES

    dtype = wanted.dtype or (sources.dtype if sources.base is None else None)
    adapters = asked_of(
        config,
        sources.base if wanted.push is None else _to_publish(sources.base),
        merged=wanted.merged or (False if wanted.adapter else None),
    )
    with contextlib.ExitStack() as stack:
        files = _readable(config, folder, wanted.step, stack, console)
        refuse_other_base(files, sources.base, anew="")
        reader = stack.enter_context(CheckpointReader(files))
        writer, form = writer_of(
            reader,
            sources.model,
            sources.tokenizer,
            dtype=None if dtype is None else DTYPES[dtype],
            adapters=adapters,
            end_ids=sources.end_ids,
        )
        with _place_of(destination), _bar("exporting", writer.total_bytes, console) as on_bytes:
            writer.write(destination, on_bytes, replaces=False, card=card_of(files.step, form.value))
        scores = scores_of(config, files)
    what = {"model": "", "adapter": "the adapter of ", "merged": "the model with the adapter of "}[form.value]
    if form.value == "adapter" and wanted.push and adapters is not None and sources.base != adapters.base:
        say(
            console,
            f"note: the model beside it is a folder of this machine, {adapters.base.name}: whoever loads the adapter"
            " from the hub gives it their own copy",
        )
    if form.value == "merged" and adapters is not None and not adapters.merged:
        say(console, f"the adapters are merged into the model: {form.reason}")
    scored = f" ({scores.in_words(files.step)})" if scores.metrics_of(files.step) else ""
    size = f"{format_bytes(writer.total_bytes)}{f', {dtype}' if dtype else ''}"
    say(console, f"exported {what}step {files.step}{scored} to {destination}: {size}")
    return files.step


def _to_publish(base: Base | None) -> Base | None:
    """Folders of this machine are nobody else's business: of their names the last is left."""
    return base if base is None or base.is_on_hub else replace(base, name=Path(base.name).name)


def _readable(
    config: RunConfig, folder: RunFolder, step: str | None, stack: contextlib.ExitStack, console: Console
) -> Checkpoint:
    """The first candidate whose every byte is what was written; it can be read until the stack is left."""
    reason = ""
    for _ in range(TRIES):
        is_gone = False  # let go by a run that goes on, while it was opened
        for checkpoint in _candidates(config, folder, step):
            try:
                files = stack.enter_context(held(checkpoint))
                with _bar(f"checking step {files.step}", files.manifest.total_bytes, console) as on_bytes:
                    verify_held(files, on_bytes)
                return files
            except Unusable as error:
                if is_gone := not checkpoint.folder.exists():
                    break
                reason = str(PassedOver(checkpoint.folder.name, str(error)))
                say(console, reason)
        if not is_gone:
            break
    place = str(checkpoint_folder(config, folder.path))
    raise StorageError("no checkpoint could be read", where=place, why=reason, do="name another one with --step")


@contextlib.contextmanager
def _bar(words: str, total_bytes: int, console: Console) -> Iterator[Callable[[int], None]]:
    """What to call with every piece that is done."""
    bar, done = AmountProgress(words, console), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        bar.show(done, total_bytes)

    try:
        yield on_bytes
    except BaseException:
        bar.close(done=False)
        raise
    bar.close()
