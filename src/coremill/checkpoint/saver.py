"""Saves while training goes on, and stops when asked: the part of a rank that keeps a run safe.

In every step rank 0 says whether a save is due, and every rank whether it was asked to stop; the numbers travel in the
exchange a step makes anyway, so all ranks save and stop after the same step. The copy of the state is taken between two
steps; a thread writes it. Ranks tell rank 0 what they wrote; it becomes a checkpoint, or nobody's part counts
(committing.py).
A failed save is told on every rank and tried again at the next occasion: a full disk does not end a training run.
A save that hangs is given up by rank 0's clock, on all ranks alike; while its thread still hangs, no other is begun.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coremill.checkpoint.committing import Committer
from coremill.checkpoint.in_flight import (
    POLL_SECONDS,
    SLOWEST_POLL_SECONDS,
    WRITTEN_BYTES_KEY,
    GivenUp,
    Save,
    SaveDeadline,
    WrittenBytes,
    choose_save_mode,
    error_text,
    save_deadline_of,
    stopped_after,
    stopped_unsaved,
)
from coremill.checkpoint.resume import ResumePoint
from coremill.checkpoint.snapshot import Training, file_name, progress_of, take_snapshot
from coremill.checkpoint.store import NotSaved, Store, sync_bytes_among
from coremill.config.durations import interval_of
from coremill.config.schema import RunConfig
from coremill.errors import NonFinite, Stopped, StorageError
from coremill.plan.types import MemoryPlan
from coremill.train.numerics import EventSink
from coremill.world.group import World
from coremill.world.heartbeat import HEARTBEAT
from coremill.world.stop import REQUESTS, StopRequests, forget_request, was_asked_to_stop

# Training waits so long for an earlier save when the next is due, once; then it goes on without.
WAIT_FOR_EARLIER_SECONDS = 10.0
# At the end of a run, for the thread of a save that was given up: it hears of it within half a second and takes back
# what it had put in place, unless it is the one that hangs.
TAKING_BACK_SECONDS = 2.0
STILL_HANGS = "the storage still hangs on an earlier save"


class Saver:
    """Use as a context around the training loop, pass as its `agreement`, and call `after_step` for every step."""

    def __init__(
        self,
        config: RunConfig,
        run_folder: Path,
        origin: ResumePoint,
        memory: MemoryPlan,
        steps: int,
        world: World,
        training: Training,
        events: EventSink,
        requests: StopRequests = REQUESTS,
    ) -> None:
        self._config, self._run_folder, self._origin, self._steps = config, run_folder, origin, steps
        self._world, self._training, self._events, self._requests = world, training, events, requests
        self._store: Store = origin.store
        self._interval = interval_of(config.checkpoint.every)
        self._number = 0
        self._save: Save | None = None
        self._thread: threading.Thread | None = None
        self._stuck: threading.Thread | None = None  # of a save that was given up
        self._deadline = save_deadline_of(config)
        self._step = origin.step  # the last one done
        self._last_saved = origin.step  # the newest checkpoint that is whole
        self._equal_after = -1  # the step after which replicas were last compared
        self._last_failure: str | None = None
        self._last_occasion = time.monotonic()
        self.is_stopping = False  # agreed in the step that was just done: `after_step` saves and stops
        self._save_agreed = self._disk_full = self._late = self._hangs = self._slow = False
        self._shortage: str | None = None  # in words, on rank 0
        self._shapes = {piece.name: piece.shape for piece in training.engine.slices()}
        self._state_bytes = training.engine.state_bytes()
        self._bytes_here = math.ceil(self._state_bytes * origin.places.share)  # in this rank's folder
        self._mode = choose_save_mode(memory, self._state_bytes // world.size)
        self._committer = Committer(
            self._store,
            world,
            origin.places,
            keep=config.checkpoint.keep,
            bad=origin.bad,
            engine=training.engine.name,
            shapes=self._shapes,
            best_of=training.scores.best_kept,
        )

    # --- around the loop ---

    def __enter__(self) -> Saver:
        self._requests.between_steps()
        self._events.write("choice", name="checkpoint", value=self._mode.value, reason=self._mode.reason)
        if self._origin.unsaved_because:
            self._tell_failure(self._origin.step, self._origin.unsaved_because)
        asked = self._world.sum(float(self._requests.reason is not None))
        self._origin.remove_fetched()  # all ranks are here: each has read what it needs
        if asked:
            self._raise_stopped(self._origin.step, saved=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the save under way where all ranks are still there to finish it."""
        if kind is None:
            self._wait()
            if self._equal_after != self._step:
                self._training.engine.require_equal("after the last step")
            if self._world.sum(float(self._requests.reason is not None)):
                self._save_and_stop(self._step)
            self._requests.at_once()
        elif issubclass(kind, NonFinite):
            self._wait()
            self._world.barrier()
        if kind is None or issubclass(kind, NonFinite | Stopped):
            if self._stuck is not None:
                self._stuck.join(TAKING_BACK_SECONDS)
            if self._stuck is None or not self._stuck.is_alive():
                self._store.sweep_failed()

    # --- what ranks agree on in every step ---

    def votes(self, step: int) -> Sequence[float]:
        """Asked to stop; a save is due; one is due but the disk is too full; one is given up; one hangs here."""
        asked = self._requests.reason is not None
        due = late = False
        self._shortage = None
        if self._save is not None and self._is_under_way() and self._save.hangs_in_the_end:
            self._leave_hanging(self._save)  # in every step: where saves go by the clock, nobody waits for one
        if self._world.rank == 0:
            asked = asked or was_asked_to_stop(self._run_folder)
            due = self._is_due(step)
            if due or asked:
                self._shortage = self._store.shortage(self._bytes_here)
            late = self._is_under_way() and self._give_up_if_late()
        hangs = self._stuck is not None and self._stuck.is_alive()
        votes = (asked, due and not self._shortage, self._shortage is not None, late, hangs)
        return tuple(float(each) for each in votes)

    def hear(self, totals: Sequence[float]) -> None:
        self.is_stopping, self._save_agreed, self._disk_full, self._late, self._hangs = (total > 0 for total in totals)

    def after_step(self, step: int) -> None:
        """Save where that was agreed, or where an evaluation asks for it; raises Stopped, after saving, where asked."""
        self._step = step
        if self._late and self._save is not None and not self._save.given_up:
            self._give_up(self._save)
        if self.is_stopping:
            self._save_and_stop(step)
        insists = self._insists(step)
        if insists and not self._save_agreed and not self._disk_full:
            self._shortage = self._world.broadcast(
                self._store.shortage(self._bytes_here) if not self._world.rank else ""
            )
            self._save_agreed, self._disk_full = not self._shortage, bool(self._shortage)
        if self._save_agreed and (self._late or self._hangs):
            self._last_occasion = time.monotonic()
            self._tell_failure(step, STILL_HANGS)
        elif self._disk_full:
            self._last_occasion = time.monotonic()
            self._tell_failure(step, self._shortage or "the disk is too full, says rank 0")
        elif self._save_agreed:
            self._last_occasion = time.monotonic()
            self._begin(step, in_background=self._mode.value == "background", insists=insists)

    def _insists(self, step: int) -> bool:
        """Whether this step is to be saved whatever the rhythm: the best so far, and one that turned out the last."""
        scores = self._training.scores
        is_last = bool(self._interval.steps or self._interval.seconds) and (step == self._steps or scores.is_over())
        return not self._origin.unsaved_because and (is_last or scores.must_keep(step))

    def _is_due(self, step: int) -> bool:
        interval = self._interval
        if self._origin.unsaved_because or step == self._last_saved or (not interval.steps and not interval.seconds):
            return False
        if step == self._steps:
            return True
        if interval.steps is not None:
            return step % interval.steps == 0
        return not self._is_under_way() and time.monotonic() - self._last_occasion >= (interval.seconds or 0.0)

    def _save_and_stop(self, step: int) -> None:
        deadline = save_deadline_of(self._config, is_stop=True)
        if self._save is not None and deadline.setting is None:
            self._save.deadline = min(self._save.deadline, deadline, key=lambda each: each.seconds)
        hangs = self._late or self._hangs or not self._wait()
        failure = self._origin.unsaved_because
        if failure is None and self._disk_full:
            failure = str(self._world.broadcast(self._shortage or "the disk is too full"))
        if failure or hangs:
            self._tell_failure(step, failure or STILL_HANGS)
        elif self._last_saved != step:
            self._begin(step, in_background=False, deadline=deadline)
        # Rank 0 serves the store: it leaves only when everybody has heard how the save ended.
        self._world.barrier()
        self._raise_stopped(step, saved=self._last_saved == step)

    def _raise_stopped(self, step: int, *, saved: bool) -> None:
        self._requests.leave()
        if self._world.rank == 0:
            forget_request(self._run_folder)
        folder, origin_step = self._store.folder, self._origin.step
        if saved or step == origin_step:
            error: Stopped | StorageError = stopped_after(step if saved else None, folder)
        else:
            error = stopped_unsaved(step, folder, self._last_failure, self._last_saved)
        error.silent = self._world.rank != 0
        raise error

    # --- one save ---

    def _begin(
        self, step: int, *, in_background: bool, insists: bool = True, deadline: SaveDeadline | None = None
    ) -> None:
        """Take the copy and have it written; at most one save is under way, and who `insists` waits for its end."""
        if in_background and not insists:
            ended = self._wait(0.0 if self._slow else WAIT_FOR_EARLIER_SECONDS) and not self._is_under_way()
            self._slow = self._world.sum(float(not ended)) > 0
            if self._slow:
                self._tell_failure(step, "the save before it has not ended: the storage is slow or hangs")
                return
        elif not self._wait():
            self._tell_failure(step, STILL_HANGS)
            return
        began = time.perf_counter()
        self._training.engine.require_equal(f"after step {step}")
        self._equal_after = step
        self._number += 1
        world = self._world
        snapshot = take_snapshot(self._training, rank=world.rank, world_size=world.size, copy=in_background)
        state = {
            "step": step,
            "steps": self._steps,
            "updates": snapshot.updates,
            "updates_apart": snapshot.updates_apart,
            "seed": self._config.train.seed,
            "config": self._config.model_dump(mode="json"),
            **progress_of(self._training, step),
        }
        deadline, written_bytes = deadline or self._deadline, world.store.add(WRITTEN_BYTES_KEY, 0)
        save = self._save = Save(self._number, step, snapshot, state, began, deadline, written_bytes)
        blocked_seconds = save.seconds if in_background else None
        self._thread = threading.Thread(
            target=self._write, args=(save, blocked_seconds), name="coremill-save", daemon=True
        )
        self._thread.start()
        if not in_background:
            self._wait()

    def _is_under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wait(self, longest_seconds: float = math.inf) -> bool:
        """Until the save under way has ended or was given up; False where it was, the same on every rank.

        Not longer than `longest_seconds`: the save may still be under way then.
        """
        save, thread = self._save, self._thread
        if save is None or thread is None:
            return True
        pause, until = POLL_SECONDS, time.monotonic() + longest_seconds
        with HEARTBEAT.phase("save"):
            while thread.is_alive() and not save.given_up:
                if time.monotonic() >= until:
                    return True
                thread.join(pause)
                pause = min(pause * 1.5, SLOWEST_POLL_SECONDS)
                if not thread.is_alive():
                    break
                if save.hear(self._world.store.add(WRITTEN_BYTES_KEY, 0)):
                    HEARTBEAT.mark()  # some rank's file has grown
                if self._world.rank == 0:
                    self._give_up_if_late()
                elif self._was_given_up(save):
                    self._give_up(save)
                if save.hangs_in_the_end:
                    self._leave_hanging(save)
                    break
        self._thread = None
        return not save.given_up

    def _leave_hanging(self, save: Save) -> None:
        """The thread is past the last moment at which giving up counts, and does not return."""
        if not save.is_told:
            raise StorageError(
                f"the storage does not return from the last move of saving step {save.step}",
                where=str(self._store.folder),
                why="nobody can tell whether it is saved, so training does not go on",
                do="the same command goes on from the newest whole checkpoint",
            )
        self._set_thread_aside()

    def _set_thread_aside(self) -> None:
        self._stuck, self._thread = self._thread, None
        HEARTBEAT.not_saving()

    def _was_given_up(self, save: Save) -> bool:
        """By rank 0, and this rank has not heard it yet."""
        store = self._world.store
        if save.given_up or not store.check([save.outcome_key]):
            return False
        return bool(json.loads(store.get(save.outcome_key))["given_up"])

    def _give_up_if_late(self) -> bool:
        """Rank 0: end the save under way for all where its time is over."""
        save = self._save
        if save is None or save.given_up or not save.is_late:
            return False
        save.hear(self._world.store.add(WRITTEN_BYTES_KEY, 0))
        if not save.is_late or not save.decide("given up"):
            return False
        outcome = {"failure": save.deadline.words, "given_up": True, "kept": None}
        self._world.store.set(save.outcome_key, json.dumps(outcome))
        self._give_up(save)
        return True

    def _give_up(self, save: Save) -> None:
        """As rank 0 decided; the thread takes back what it wrote, once the storage lets it."""
        save.given_up = True
        self._set_thread_aside()
        self._tell_given_up(save)

    def _tell_given_up(self, save: Save) -> None:
        if save.first_to_tell():
            self._tell_failure(save.step, save.deadline.words)

    def _write(self, save: Save, blocked_seconds: float | None) -> None:
        """Write this rank's file, let rank 0 commit, tell how it ended."""
        partial = self._store.partial(save.step, save.number)
        report: dict[str, Any]
        try:
            with HEARTBEAT.saving(save.snapshot.bytes):
                self._store.sweep_failed()
                if self._world.rank and self._origin.places.leads and (full := self._store.shortage(self._bytes_here)):
                    raise NotSaved(full)  # of its own disk; rank 0 looked at its before the save was begun
                self._store.begin(save.step, save.number)
                path = partial / file_name(self._world.rank, self._world.size)
                progress, places = WrittenBytes(self._world.store), self._origin.places

                def on_bytes(count: int) -> None:
                    HEARTBEAT.saved(count)
                    progress.add(count)

                content = (save.snapshot.tensors, save.snapshot.rows)
                sync_bytes = sync_bytes_among(len(places.ranks_of(places.mine)))
                report = asdict(self._store.write_tensors(path, *content, on_bytes, sync_bytes))
        except RuntimeError:  # the store is gone, and with it the run: the main thread says so
            return
        except (OSError, NotSaved) as error:
            report = {"error": f"rank {self._world.rank}: {error_text(error)}"}
        size = save.snapshot.bytes
        try:
            outcome = self._committer.settle(save, partial, report)
        except RuntimeError:  # the store is gone, and with it the run: the main thread says so
            return
        except GivenUp:
            save.given_up = True
            self._tell_given_up(save)
            self._store.abandon(partial)
            return
        seconds = save.seconds
        save.first_to_tell()
        if outcome["failure"] is not None:
            self._tell_failure(save.step, outcome["failure"])
        else:
            self._last_saved = save.step
            self._events.write(
                "save",
                step=save.step,
                saved=True,
                bytes=size,
                seconds=seconds,
                blocked_seconds=seconds if blocked_seconds is None else blocked_seconds,
                folder=str(self._store.folder),
            )
        self._committer.tidy(save, partial, outcome)

    def _tell_failure(self, step: int, reason: str) -> None:
        self._last_failure = reason
        self._events.write("save", step=step, saved=False, reason=reason)
        line = f"coremill: rank {self._world.rank}: step {step} was not saved: {reason}; training goes on"
        print(line, file=sys.stderr, flush=True)
