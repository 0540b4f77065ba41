"""What surrounds a rank's work: its threads, and how its failure or its progress becomes known."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coremill.config.load import LoadedConfig
from coremill.errors import InputError, Interrupted, KnownEnding, Stopped
from coremill.hardware.probe import affinity_mask, environment_snapshot
from coremill.report.events import EventFollower, EventWriter
from coremill.report.readers.base import Readers
from coremill.run.folder import RunFolder
from coremill.run.prepare import Orders
from coremill.supervise.spot import spot_notices
from coremill.world.group import World
from coremill.world.heartbeat import HEARTBEAT
from coremill.world.lost_peers import as_peer_lost
from coremill.world.run_lock import OWNED

MEETING_SECONDS = 3.0
SHOW_WORK_SECONDS = 1.0


def set_threads(orders: Orders, world: World) -> int:
    """Explicit, whatever the launcher left in the environment (torchrun: 1); inside the mask this rank was given."""
    import torch

    threads = orders.plan.threads_per_rank.value
    if world.identity.launcher != "coremill":
        threads = max(1, min(threads, len(affinity_mask())))
    torch.set_num_threads(threads)
    return threads


@contextmanager
def failures_as_events(events: EventWriter) -> Iterator[None]:
    """A failure is written before the process ends, with this rank's own traceback where it is not the user's input."""
    try:
        yield
    except BaseException as error:
        failure = as_peer_lost(error) or error
        known = isinstance(failure, KnownEnding)
        events.write(
            "error",
            message=str(failure) if known else f"{type(failure).__name__}: {failure}",
            traceback=None if isinstance(failure, InputError | Stopped | Interrupted) else traceback.format_exc(),
            exit_code=failure.exit_code if isinstance(failure, KnownEnding) else 1,
        )
        raise


@contextmanager
def without_launcher(
    world: World, loaded: LoadedConfig, orders: Orders, folder: RunFolder, events: EventWriter, readers: Readers
) -> Iterator[Callable[[], None]]:
    """Under a foreign launcher ranks do what else coremill's launcher does; yields what to call after a step.

    Rank 0 has its readers follow the events; the first rank of each host listens for spot notices.
    """
    foreign = world.identity.launcher != "coremill"
    wanted = loaded.config.checkpoint.spot_notices if foreign and world.local_rank == 0 else "off"
    with spot_notices(wanted, environment_snapshot(), lambda text: events.write("notice", text=text)):
        if not foreign or world.rank != 0:
            yield lambda: None
            return
        # Ranks met a moment ago: what is older than that was said by an earlier attempt.
        follower = EventFollower(folder.path, since=time.time() - MEETING_SECONDS)
        with readers:

            def after_step() -> None:
                readers.take(follower.poll())
                if readers.tally.last_step >= orders.steps or readers.tally.early_stop is not None:
                    OWNED.check_now()  # the export follows
                else:
                    OWNED.check()

            with _showing_own_work(readers):
                yield after_step
            readers.take(follower.poll())


@contextmanager
def _showing_own_work(readers: Readers) -> Iterator[None]:
    """Rank 0 says how far its own long work is, which else its launcher sees: nobody but a thread is free to."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(SHOW_WORK_SECONDS):
            readers.take_work([HEARTBEAT.reading()])

    thread = threading.Thread(target=show, daemon=True, name="coremill-show")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
