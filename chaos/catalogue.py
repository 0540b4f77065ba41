"""All experiments, in the order of docs/chaos.md."""

from __future__ import annotations

import shutil

from chaos import mutation, resizing, store_faults
from chaos.campaign import battle
from chaos.experiment import Experiment
from chaos.links import links
from chaos.links import why_not as why_no_hosts
from chaos.mounts import why_no_freezing, why_no_mounts
from chaos.peers import PEER_EXPERIMENTS
from chaos.soak import soak
from chaos.storage import siege


def why_no_strace() -> str | None:
    """X19 looks at system calls."""
    return None if shutil.which("strace") else "strace not installed"


def on_a_run(key: str, fault: str, promise: str, *, short: int, long: int, seconds: float) -> Experiment:
    """One of those that share a run."""
    return Experiment(
        key=key,
        fault=fault,
        promise=promise,
        short_trials=short,
        long_trials=long,
        seconds_per_trial=seconds,
        campaign=battle,
    )


ON_ONE_RUN = (
    on_a_run("X1", "SIGKILL of a random rank at a random step", "recovers by itself", short=2, long=50, seconds=11),
    on_a_run(
        "X3",
        "SIGKILL of the launcher",
        "no process outlives it, the same command goes on",
        short=0,
        long=20,
        seconds=13,
    ),
    on_a_run("X4", "a rank stopped for ever", "named, ended, recovers by itself", short=1, long=20, seconds=22),
    on_a_run("X5", "a rank stopped for 5 s", "no restart", short=1, long=20, seconds=7),
    on_a_run(
        "X6a", "SIGTERM to one rank", "the same step saved by all, none lost, exit 75", short=1, long=20, seconds=12
    ),
    on_a_run(
        "X6b", "SIGTERM to the launcher", "the same step saved by all, none lost, exit 75", short=1, long=20, seconds=12
    ),
    on_a_run(
        "X6c", "SIGTERM to launcher and ranks", "the same step saved by all, none lost, exit 75",
        short=1, long=20, seconds=12,
    ),
    on_a_run(
        "X10", "a rank dies, its child keeps its sockets", "noticed at once, the child is ended",
        short=1, long=10, seconds=12,
    ),
    on_a_run("X11", "a second kill 0 to 5 s after the first", "recovers by itself", short=0, long=30, seconds=16),
    on_a_run(
        "X12",
        "the same step fails on every attempt",
        "ends after 3 restarts without progress, with the cause",
        short=0,
        long=3,
        seconds=45,
    ),
    on_a_run("X14b", "a rank's clock jumps by a minute or an hour", "nothing happens", short=0, long=8, seconds=12),
    on_a_run(
        "X21",
        "NaN or Inf in loss or weights of one rank",
        "all stop before the update, step and rows named, exit 70",
        short=1,
        long=10,
        seconds=12,
    ),
)  # fmt: skip


def on_a_disk(key: str, fault: str, promise: str, *, short: int, long: int, seconds: float) -> Experiment:
    """One of those that share a run whose checkpoints lie on a disk of ours."""
    return Experiment(
        key=key,
        fault=fault,
        promise=promise,
        short_trials=short,
        long_trials=long,
        seconds_per_trial=seconds,
        campaign=siege,
        why_not=why_no_freezing,
    )


WEATHERED = "told on every rank, training goes on, older ones stay whole, the next save works"
ON_A_DISK = (
    on_a_disk("X15", "disk full under a run", WEATHERED, short=1, long=10, seconds=4),
    on_a_disk("X16", "one rank may not write so large a file", WEATHERED, short=1, long=10, seconds=4),
    on_a_disk(
        "X20", "storage hangs for 15 s", "told, training goes on, the next save works", short=0, long=5, seconds=20
    ),
    on_a_disk("X20b", "storage turns read-only", WEATHERED, short=1, long=10, seconds=4),
)


def on_hosts(key: str, fault: str, promise: str, *, long: int, seconds: float) -> Experiment:
    """One of those that need two hosts; too long for `make test`."""
    return Experiment(
        key=key,
        fault=fault,
        promise=promise,
        short_trials=0,
        long_trials=long,
        seconds_per_trial=seconds,
        campaign=links,
        why_not=why_no_hosts,
    )


ON_HOSTS = (
    on_hosts(
        "X7",
        "link between two hosts cut for ever",
        "host named and exit 69, or fewer hosts",
        long=4,
        seconds=60,
    ),
    on_hosts("X8a", "link cut for 2 s", "no restart", long=5, seconds=5),
    on_hosts("X8b", "link cut for 8 s", "no restart", long=5, seconds=15),
    on_hosts("X8c", "link cut for 20 s", "goes on by itself", long=5, seconds=45),
)

EXPERIMENTS: tuple[Experiment, ...] = (
    *ON_ONE_RUN,
    *ON_A_DISK,
    *ON_HOSTS,
    Experiment(
        key="X13",
        fault="the number of ranks changes: 2, 1, 4, 3, 2",
        promise="each row once an epoch, loss within 1e-5 of the uninterrupted run",
        short_trials=0,
        long_trials=3,
        seconds_per_trial=90,
        run=resizing.resized,
    ),
    Experiment(
        key="X18",
        fault="weights change right after a save began",
        promise="what is saved is the state when it began, the optimizer's step included",
        short_trials=10,
        long_trials=50,
        seconds_per_trial=0.05,
        start_seconds=8,
        run=mutation.mutated,
    ),
    Experiment(
        key="X2",
        fault="a rank killed inside a save (bare store)",
        promise="no invalid checkpoint is accepted, two valid ones are always there, leftovers are swept",
        short_trials=20,
        long_trials=200,
        seconds_per_trial=0.15,
        start_seconds=2,
        run=store_faults.killed_in_save,
    ),
    Experiment(
        key="X14",
        fault="modification times of checkpoints scrambled",
        promise="the newest is the highest step, and the newest are kept",
        short_trials=10,
        long_trials=100,
        seconds_per_trial=0.1,
        run=store_faults.scrambled_times,
    ),
    Experiment(
        key="X15s",
        fault="disk full inside a save (bare store)",
        promise="told with bytes needed and free, the one before stays whole, nothing left over, the next save works",
        short_trials=3,
        long_trials=50,
        seconds_per_trial=0.1,
        run=store_faults.full_disk,
        why_not=why_no_mounts,
    ),
    Experiment(
        key="X16s",
        fault="one rank's writes fail: EFBIG, EIO (bare store)",
        promise="the save fails as a whole, nothing is committed",
        short_trials=4,
        long_trials=50,
        seconds_per_trial=0.1,
        run=store_faults.failing_writer,
    ),
    Experiment(
        key="X17",
        fault="bit flips, cuts, swaps, mixes, zeros",
        promise="passed over with the file named, for the one before",
        short_trials=50,
        long_trials=300,
        seconds_per_trial=0.03,
        run=store_faults.altered,
    ),
    Experiment(
        key="X19",
        fault="a save seen by strace",
        promise="every file and the folder synced before the rename, the parent after it",
        short_trials=1,
        long_trials=10,
        seconds_per_trial=1.0,
        run=store_faults.traced_order,
        why_not=why_no_strace,
    ),
    Experiment(
        key="X25",
        fault="soak: random faults, a minute apart on average",
        promise="goodput at least 85 %; memory, handles, temporary files flat; steps done twice have the same bits",
        short_trials=0,
        long_trials=30,
        seconds_per_trial=65,
        start_seconds=60,
        campaign=soak,
    ),
    *PEER_EXPERIMENTS,
)
