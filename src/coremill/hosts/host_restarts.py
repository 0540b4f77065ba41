"""One coremill launcher per host for `train --hostfile`, kept going: a host that is lost is started on again.

Each host's launcher watches its own ranks and starts them again after a fault; the ranks meet anew at rank 0's store.
What is left for the head, which runs here: a host's launcher, agent or connection that is gone. It is started again
with growing pauses until `wait_seconds` are over; then, where the config allows, on fewer hosts. A launcher that ends
by its own decision says so in a line (`Failure`), and that is the end of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coremill.errors import InputError, PeerLost
from coremill.hosts.across_hosts import (
    POLL_SECONDS,
    HostCommand,
    HostRun,
    HostsOutcome,
    end_all,
    outcome_of,
    running_pids,
)
from coremill.hosts.ssh import Host, Remote
from coremill.supervise.restarts import is_worth_a_restart
from coremill.supervise.waiting import wait_for_end
from coremill.world.stop import StopSignals

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
SETTLED_SECONDS = 60.0  # a host that stayed so long is back; the next loss has the whole time again
BEAT_SECONDS = 5.0
# After so long without a beat a host ends its ranks: longer than an outage that heals (33 s, see ssh.py), and sooner
# than the head's ssh gives the connection up (55 s), so that no rank is left when the head starts others in its place.
SILENCE_SECONDS = 45.0
_LOOK_SECONDS = 0.25  # at what no process's end tells


@dataclass(frozen=True, kw_only=True)
class HostRestarts:
    """What the config says."""

    restart: bool = True
    wait_seconds: float = 600.0
    min_nodes: int | None = None  # None: never with fewer hosts


@dataclass
class HostState:
    """One host's losses; knows of no process."""

    lost_since: float | None = None
    pause_seconds: float = FIRST_PAUSE_SECONDS
    start_at: float | None = None  # None: it runs
    started_at: float = 0.0

    def lose(self, now: float) -> bool:
        """It is gone: start it again after a pause that grows while it keeps going away. Whether it had been back."""
        is_new = self.lost_since is None or now - self.started_at >= SETTLED_SECONDS
        if is_new:
            self.lost_since, self.pause_seconds = now, FIRST_PAUSE_SECONDS
        self.start_at = now + self.pause_seconds
        self.pause_seconds = min(2 * self.pause_seconds, LONGEST_PAUSE_SECONDS)
        return is_new

    def start(self, now: float) -> None:
        self.start_at, self.started_at = None, now

    def is_given_up(self, now: float, wait_seconds: float) -> bool:
        return self.start_at is not None and self.lost_since is not None and now - self.lost_since >= wait_seconds


# The commands for these hosts; False: the run goes on, and nothing that was meant for its first start is said again.
CommandsOf = Callable[[tuple[Host, ...], bool], Sequence[HostCommand]]


def run_nodes(
    hosts: tuple[Host, ...],
    commands_of: CommandsOf,
    remote: Remote,
    policy: HostRestarts,
    say: Callable[[str], None],
) -> HostsOutcome:
    """Start every host's launcher and keep the fleet together until the run ends. Call it from the main thread."""
    is_first = True
    with StopSignals() as stop:
        while True:
            fleet = _Fleet(hosts, commands_of, remote, policy, say, stop, is_first)
            left = None
            try:
                left = fleet.watch()
            finally:
                fleet.end(goes_on=left is not None)
            if left is None:
                return fleet.outcome()
            hosts, is_first = left, False


@dataclass
class _Fleet:
    """The hosts of one formation."""

    hosts: tuple[Host, ...]
    commands_of: CommandsOf
    remote: Remote
    policy: HostRestarts
    say: Callable[[str], None]
    stop: StopSignals
    is_first: bool
    _runs: list[HostRun] = field(default_factory=list)
    _states: list[HostState] = field(default_factory=list)
    _cause: HostsOutcome | None = None

    def watch(self) -> tuple[Host, ...] | None:
        """Until the run ends (None), or until it has to go on with other hosts."""
        now = next_beat = time.monotonic()
        for command in self.commands_of(self.hosts, self.is_first):
            self._runs.append(HostRun(command, self.remote))
            self._states.append(HostState(started_at=now))
        while True:
            now = time.monotonic()
            if self.stop.first is not None:
                return None
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                for run in self._runs:
                    run.beat()
            for index, state in enumerate(self._states):
                if state.start_at is not None and now >= state.start_at:
                    command = self.commands_of(self.hosts, False)[index]
                    self._runs[index] = HostRun(command, self.remote)
                    state.start(now)
            for index, run in enumerate(self._runs):
                if run.process.poll() is not None and self._states[index].start_at is None:
                    if self._has_decided(run):
                        return None
                    if run.process.returncode:
                        self._lose(index, now)
            if all(run.process.poll() == 0 for run in self._runs):
                return None
            wait_seconds = self.policy.wait_seconds if self.policy.restart else 0.0
            gone = [index for index, state in enumerate(self._states) if state.is_given_up(now, wait_seconds)]
            if gone:
                return self._without(gone)
            wait_for_end(running_pids(self._runs), _LOOK_SECONDS)

    def _has_decided(self, run: HostRun) -> bool:
        """Whether the run is over by the word of this host's launcher."""
        run.read_to_the_end()
        code = run.process.returncode
        return bool(run.failures) or (code != 0 and not is_worth_a_restart(code))

    def _lose(self, index: int, now: float) -> None:
        host = self.hosts[index]
        if self._states[index].lose(now) and self.policy.restart:
            code = self._runs[index].process.returncode
            how = "the connection was lost" if code == 255 and not host.is_here else f"its launcher ended with {code}"
            self.say(f"host {host.name}: {how}; trying again for up to {self.policy.wait_seconds:.0f} s")

    def _without(self, gone: Sequence[int]) -> tuple[Host, ...] | None:
        """The hosts to go on with; None where that is not allowed."""
        left = tuple(host for index, host in enumerate(self.hosts) if index not in gone)
        names = ", ".join(self.hosts[index].name for index in gone)
        if self.policy.restart and self.policy.min_nodes is not None and len(left) >= self.policy.min_nodes:
            self.say(f"host {names} is given up; the run goes on with {len(left)} of {len(self.hosts)}")
            return left
        away = f"away for {self.policy.wait_seconds:.0f} s" if self.policy.restart else "lost"
        allowed = "" if self.policy.min_nodes is None else f", and fewer than {self.policy.min_nodes} are left"
        self._cause = HostsOutcome(PeerLost.exit_code, f"host {names} was {away}{allowed}")
        return None

    def end(self, *, goes_on: bool) -> None:
        """Ask all, give them their time, and leave nothing. Where the run goes on, nobody is asked to stop it."""
        for run in self._runs:
            (run.let_go if goes_on else run.ask_to_end)()
        deadline = time.monotonic() + max((run.grace_seconds for run in self._runs), default=0.0)
        while pids := running_pids(self._runs):
            if self.stop.at_once or time.monotonic() > deadline:
                break
            wait_for_end(pids, POLL_SECONDS)
        end_all(self._runs, at_once=self.stop.at_once)

    def outcome(self) -> HostsOutcome:
        return self._cause or outcome_of(self._runs, self.stop)


def check_policy(policy: HostRestarts, hosts: int) -> None:
    """More hosts at least than there are cannot be meant."""
    if policy.min_nodes is not None and policy.min_nodes > hosts:
        raise InputError(
            f"fleet.min_nodes is {policy.min_nodes}, the hostfile has {hosts}",
            where="fleet.min_nodes",
            do=f"set it to {hosts} or less",
        )
